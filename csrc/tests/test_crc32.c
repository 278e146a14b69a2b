/* The CRC equals a computation bit by bit: by instructions, by tables and of a copy, at each small size and alignment. */

#include "check.h"
#include "../crc32.c"

#define BYTES_MAX 200

static uint32_t defined_crc(uint32_t crc, const uint8_t *from, int64_t length)
{
    crc = ~crc;
    for (int64_t i = 0; i < length; i++) {
        crc ^= from[i];
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ ((crc & 1) ? 0xEDB88320u : 0);
    }
    return ~crc;
}

int main(void)
{
    dice_begin("test_crc32");
    CHECK(defined_crc(0, (const uint8_t *)"123456789", 9) == 0xCBF43926u);
    struct guarded source = guarded_new(BYTES_MAX + 16), copy = guarded_new(BYTES_MAX);
    for (int64_t length = 0; length <= BYTES_MAX; length++) {
        for (int at = 0; at < 16; at++) {
            const uint8_t *const from = source.at + source.bytes - length - at;
            for (int64_t i = 0; i < source.bytes; i++)
                source.at[i] = (uint8_t)dice(256);
            const uint32_t begin = (uint32_t)dice(UINT32_MAX), wanted = defined_crc(begin, from, length);
            CHECK(~run_tables(~begin, from, length) == wanted);
            CHECK(ms_crc32(begin, from, length) == wanted);
            uint8_t *const to = copy.at + copy.bytes - length;
            CHECK(ms_crc32_copy(to, from, length) == defined_crc(0, from, length));
            CHECK(memcmp(to, from, (size_t)length) == 0);
        }
    }
    guarded_free(&source);
    guarded_free(&copy);
    return 0;
}
