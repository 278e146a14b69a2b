/* Big-endian numbers at any address: numbers on disk are big-endian and not aligned. */
#pragma once

#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define MS_BIG16(value) __builtin_bswap16(value)
#define MS_BIG32(value) __builtin_bswap32(value)
#define MS_BIG64(value) __builtin_bswap64(value)
#else
#define MS_BIG16(value) (value)
#define MS_BIG32(value) (value)
#define MS_BIG64(value) (value)
#endif

static inline uint16_t ms_get_u16(const uint8_t *at)
{
    uint16_t value;
    memcpy(&value, at, sizeof value);
    return MS_BIG16(value);
}

static inline uint32_t ms_get_u32(const uint8_t *at)
{
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return MS_BIG32(value);
}

static inline int16_t ms_get_i16(const uint8_t *at)
{
    return (int16_t)ms_get_u16(at);
}

static inline int32_t ms_get_i32(const uint8_t *at)
{
    return (int32_t)ms_get_u32(at);
}

static inline int64_t ms_get_i64(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return (int64_t)MS_BIG64(value);
}

static inline void ms_put_16(uint8_t *at, uint16_t value)
{
    value = MS_BIG16(value);
    memcpy(at, &value, sizeof value);
}

static inline void ms_put_32(uint8_t *at, uint32_t value)
{
    value = MS_BIG32(value);
    memcpy(at, &value, sizeof value);
}

static inline void ms_put_64(uint8_t *at, uint64_t value)
{
    value = MS_BIG64(value);
    memcpy(at, &value, sizeof value);
}
