/* layout.cdef.h, as inline functions for the checks that look at more. */
#pragma once

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

static inline void ms_layout_publish(void *object, uint64_t magic, uint32_t version)
{
    uint64_t *const first = object;
    *(uint32_t *)(first + 1) = version;
    ms_store_release(first, magic);
}
