/* The check of a shared object. Each begins with a magic, which its maker stores last, and the version of its layout. */
#pragma once

#include <errno.h>
#include <stdint.h>

#include "atomics.h"

/* 0, or -EPROTO wrong magic, -EBADMSG other layout, -EMSGSIZE fewer than `bytes` are mapped. */
static inline int ms_layout_check(const void *object, int64_t mapped_bytes, uint64_t magic, uint32_t version, int64_t bytes)
{
    const uint64_t *const first = object;
    if (mapped_bytes < (int64_t)(sizeof magic + sizeof version))
        return -EMSGSIZE;
    if (ms_load_acquire(first) != magic)
        return -EPROTO;
    if (*(const uint32_t *)(first + 1) != version)
        return -EBADMSG;
    return mapped_bytes < bytes ? -EMSGSIZE : 0;
}
