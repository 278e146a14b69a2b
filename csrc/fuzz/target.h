/* Shared by the fuzz targets: parsing of the input, and memory that ends at a guard page.
 *
 * A target is libFuzzer's LLVMFuzzerTestOneInput. It must succeed for any bytes, and CHECKs the promises in the header of the
 * called functions. fuzz_seeds() provides valid inputs to begin with.
 */
#pragma once

#include "../tests/segments.h"

#define INPUT_BYTES_MAX 16384

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
void fuzz_seeds(void (*emit)(const uint8_t *data, size_t size));

struct input {
    const uint8_t *at;
    int64_t left;
};

/* Take the next number of the input, 0 at its end. */
static inline uint32_t take(struct input *input, int bytes)
{
    uint32_t value = 0;
    for (; bytes > 0; bytes--) {
        value = value << 8 | (input->left > 0 ? *input->at : 0);
        input->at += input->left > 0;
        input->left -= input->left > 0;
    }
    return value;
}

/* Take a number from 0 to `most`. */
static inline int64_t take_up_to(struct input *input, int64_t most)
{
    return most <= 0 ? 0 : (int64_t)(take(input, 4) % ((uint64_t)most + 1));
}

/* Take mostly `most` itself, sometimes a number below. */
static inline int64_t take_near(struct input *input, int64_t most)
{
    return take(input, 1) & 3 ? most : take_up_to(input, most);
}

/* Emit common seeds: `head` bytes of parameters, then a segment of a few records. */
static inline void emit_segments(void (*emit)(const uint8_t *, size_t), int head, int64_t base)
{
    static struct segment s;
    static uint8_t input[INPUT_BYTES_MAX];
    dice_state = 88172645463325252ull;
    for (int round = 0; round < 16; round++) {
        segment_build(&s, 1 + (int)dice(4), base);
        if (round & 1)
            segment_damage(&s);
        if (head + s.total > INPUT_BYTES_MAX)
            continue;
        memset(input, round & 2 ? 0xFF : 0x07, (size_t)head);
        memcpy(input + head, s.bytes, (size_t)s.total);
        emit(input, (size_t)(head + s.total));
    }
}
