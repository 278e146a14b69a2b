#pragma once

#include "queue_keys.cdef.h"

/* The hash of a queue in every table. */
static inline uint64_t ms_queue_hash(const uint8_t *topic, int32_t bytes, int32_t queue_id)
{
    uint64_t hash = 0x9E3779B97F4A7C15ULL ^ (uint32_t)queue_id;
    uint64_t word;
    for (; bytes >= 8; bytes -= 8, topic += 8) {
        memcpy(&word, topic, 8);
        hash = (hash ^ word) * 0xFF51AFD7ED558CCDULL;
        hash ^= hash >> 32;
    }
    word = 0;
    memcpy(&word, topic, (size_t)bytes);
    hash = (hash ^ word ^ ((uint64_t)bytes << 56)) * 0xC4CEB9FE1A85EC53ULL;
    return hash ^ hash >> 32;
}
