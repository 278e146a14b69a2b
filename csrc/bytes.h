/* Big-endian numbers at any address (numbers on disk are big-endian and not aligned), and numbers as text. */
#pragma once

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

/* Write text at `to`; return the position after it. */
static inline uint8_t *ms_put_hex(uint8_t *to, const uint8_t *from, int64_t bytes)
{
    static const char digits[] = "0123456789ABCDEF";
    for (int64_t i = 0; i < bytes; i++) {
        *to++ = (uint8_t)digits[from[i] >> 4];
        *to++ = (uint8_t)digits[from[i] & 15];
    }
    return to;
}

static inline uint8_t *ms_put_decimal(uint8_t *to, int64_t number)
{
    uint8_t digits[20];
    int count = 0;
    uint64_t left = number < 0 ? 0 - (uint64_t)number : (uint64_t)number;
    if (number < 0)
        *to++ = '-';
    do
        digits[count++] = (uint8_t)('0' + left % 10);
    while ((left /= 10) != 0);
    while (count > 0)
        *to++ = digits[--count];
    return to;
}
