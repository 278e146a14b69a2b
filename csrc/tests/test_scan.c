/* Walks over whole, damaged and cut segments end inside their range; ms_scan_sync finds only the begins of records. */
#include "segments.h"
#include "../scan.cdef.h"

static void walk_all_ranges(const struct segment *s, int whole)
{
    for (int round = 0; round < 200; round++) {
        const int64_t length = whole ? s->total : (int64_t)dice((uint64_t)s->total + 1);
        struct guarded memory = guarded_copy(s->bytes, length);
        const int64_t start = s->base + (dice(2) ? 0 : (int64_t)dice((uint64_t)length + 1));
        const int64_t end = start + (int64_t)dice((uint64_t)(s->base + length - start + 1));
        const int64_t limit = end + (int64_t)dice((uint64_t)(s->base + length - end + 1));
        struct ms_walk result;
        ms_scan_walk(memory.at, s->base, start, end, limit, (int)dice(8), &result);
        CHECK(result.end_offset >= start && result.end_offset <= limit);
        CHECK(result.reason > MS_CASE_MESSAGE && result.reason < MS_CASES);
        CHECK(result.messages <= (result.end_offset - start) / MS_RECORD_BYTES_MIN);
        const int64_t found = ms_scan_sync(memory.at, s->base, start, end, limit);
        CHECK(found == -1 || (found >= start && found < end));
        if (found >= 0)
            CHECK(ms_record_classify(memory.at + (found - s->base), limit - found, found, MS_CHECK_OFFSET) == MS_CASE_MESSAGE);
        guarded_free(&memory);
    }
}

int main(void)
{
    static struct segment s;
    dice_begin("scan");
    for (int round = 0; round < 20; round++) {
        struct ms_walk result;
        segment_build(&s, 20, (int64_t)dice(1 << 30));
        ms_scan_walk(s.bytes, s.base, s.base, s.base + s.total, s.base + s.total, MS_CHECK_CRC | MS_CHECK_OFFSET, &result);
        CHECK(result.reason == MS_CASE_BLANK && result.messages == 20 && result.end_offset == s.starts[20]);
        walk_all_ranges(&s, 0);
        segment_damage(&s);
        walk_all_ranges(&s, 1);
    }
    return 0;
}
