/* Walks arbitrary bytes as a segment, searches records in it and classifies positions (csrc/scan.cdef.h, csrc/record.h). */
#include "target.h"
#include "../scan.cdef.h"

#define HEAD 14
#define BASE 4096

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input input = {data, (int64_t)size};
    if (size > INPUT_BYTES_MAX)
        return 0;
    const int checks = (int)take(&input, 1) & 7;
    struct input numbers = {input.at, input.left < HEAD - 1 ? input.left : HEAD - 1};
    input.at += numbers.left;
    input.left -= numbers.left;
    struct guarded memory = guarded_copy(input.at, input.left);
    const int64_t length = input.left;
    const int64_t limit = BASE + take_near(&numbers, length);
    const int64_t end = BASE + take_near(&numbers, limit - BASE);
    const int64_t start = BASE + (end - BASE - take_near(&numbers, end - BASE));
    struct ms_walk walk;
    ms_scan_walk(memory.at, BASE, start, end, limit, checks, &walk);
    CHECK(walk.end_offset >= start && walk.end_offset <= limit);
    CHECK(walk.reason > MS_CASE_MESSAGE && walk.reason < MS_CASES);
    CHECK(walk.messages >= 0 && walk.messages <= (walk.end_offset - start) / MS_RECORD_BYTES_MIN);
    const int64_t found = ms_scan_sync(memory.at, BASE, start, end, limit);
    CHECK(found == -1 || (found >= start && found < end));
    if (found >= 0)
        CHECK(ms_record_classify(memory.at + (found - BASE), limit - found, found, MS_CHECK_OFFSET) == MS_CASE_MESSAGE);
    for (int64_t at = 0; at <= length; at += 1 + length / 16) {
        const int found_case = ms_record_classify(memory.at + at, length - at, BASE + at, checks);
        CHECK(found_case >= MS_CASE_MESSAGE && found_case < MS_CASES);
    }
    ms_record_text_is_clean(memory.at, length);
#ifdef PLANTED_BUG
    if (walk.messages > 1 && !(checks & MS_CHECK_CRC))
        CHECK(memory.at[length] == 0); /* after the last byte */
#endif
    guarded_free(&memory);
    return 0;
}

void fuzz_seeds(void (*emit)(const uint8_t *data, size_t size))
{
    emit_segments(emit, HEAD, BASE);
}
