/* Checks arbitrary bytes as a segment, as queue entries and as an index file (csrc/store_check.cdef.h). */
#include "target.h"
#include "../store_check.cdef.h"

#define HEAD 12
#define BASE 0
#define INDEX_HEADER_BYTES 40

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input input = {data, (int64_t)size};
    if (size < HEAD || size > INPUT_BYTES_MAX)
        return 0;
    struct input numbers = {input.at, HEAD};
    input.at += HEAD;
    input.left -= HEAD;
    const int32_t slots = 1 + (int32_t)take(&numbers, 1) % 16;
    const int64_t limit = BASE + take_near(&numbers, input.left);
    const int64_t start = BASE + take_near(&numbers, limit - BASE);
    const int check_tags = (int)take(&numbers, 1) & 1;
    struct guarded memory = guarded_copy(input.at, input.left);
    const int64_t count = input.left / 20;
    const int64_t row = ms_check_entries(memory.at, BASE, limit, (const uint8_t *)"T", 1, 0, 0, memory.at, count, -1, check_tags, 0);
    CHECK(row >= 0 && row <= count);
    CHECK(ms_check_count_keys(memory.at, BASE, BASE, limit) >= 0);
    CHECK(ms_check_count_keys(memory.at, BASE, start, limit) >= 0);
    const int32_t first = count > 0 ? (int32_t)take_up_to(&numbers, count) : 0;
    const int32_t found = ms_check_keys(memory.at, BASE, limit, memory.at, first, (int32_t)count);
    CHECK(found >= first && found <= count);
    const int64_t entries = (input.left - INDEX_HEADER_BYTES - 4 * slots) / 20;
    if (entries > 0) {
        int32_t heads[16] = {0};
        const int32_t wrong = ms_check_chains(memory.at, slots, (int32_t)(entries - entries / 2), (int32_t)entries, heads);
        CHECK(wrong >= -slots && wrong < entries);
    }
    guarded_free(&memory);
    return 0;
}

void fuzz_seeds(void (*emit)(const uint8_t *data, size_t size))
{
    emit_segments(emit, HEAD, BASE);
}
