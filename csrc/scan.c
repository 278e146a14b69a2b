#include "base.h"
#include "scan.cdef.h"

#include "record.h"

void ms_scan_walk(const uint8_t *view, int64_t base_offset, int64_t start, int64_t end, int64_t limit,
                  int checks, struct ms_walk *result)
{
    int64_t offset = start, messages = 0, first_ms = -1, last_ms = -1;
    int found = MS_CASE_RANGE_END;
    struct ms_record record;
    while (offset < end) {
        found = ms_record_parse(view + (offset - base_offset), limit - offset, &record);
        if (found != MS_CASE_MESSAGE)
            break;
        ms_record_prefetch(&record);
        if (checks != 0) {
            found = ms_record_verify(&record, offset, checks);
            if (found != MS_CASE_MESSAGE)
                break;
        }
        last_ms = record.store_timestamp_ms;
        if (messages++ == 0)
            first_ms = last_ms;
        offset += record.size_bytes;
        found = MS_CASE_RANGE_END;
    }
    result->end_offset = offset;
    result->messages = messages;
    result->first_store_timestamp_ms = first_ms;
    result->last_store_timestamp_ms = last_ms;
    result->reason = found;
}

/* Return whether the bytes at `at` can follow a record: another record, a blank, or the end of the log. */
static int can_follow(const uint8_t *at, int64_t room, int64_t physical_offset)
{
    struct ms_record next;
    if (room < MS_BLANK_BYTES)
        return 1;
    switch (ms_record_parse(at, room, &next)) {
    case MS_CASE_MESSAGE:
        return ms_record_physical_offset(&next) == physical_offset;
    case MS_CASE_BLANK:
    case MS_CASE_ZEROES:
    case MS_CASE_OVERRUN: /* it may reach beyond the limit */
        return 1;
    default:
        return 0;
    }
}

int64_t ms_scan_sync(const uint8_t *view, int64_t base_offset, int64_t from, int64_t end, int64_t limit)
{
    uint8_t magic[4];
    ms_put_32(magic, MS_RECORD_MAGIC);
    int64_t offset = from;
    while (offset < end && limit - offset >= MS_RECORD_BYTES_MIN) {
        const uint8_t *const at = view + (offset - base_offset);
        int64_t bytes = limit - offset - MS_AT_MAGIC;
        if (bytes > end - offset + (int64_t)sizeof magic - 1) /* a later magic belongs to a record beyond `end` */
            bytes = end - offset + (int64_t)sizeof magic - 1;
        const uint8_t *const hit = memmem(at + MS_AT_MAGIC, (size_t)bytes, magic, sizeof magic);
        if (hit == NULL)
            return -1;
        const int64_t candidate = offset + (hit - MS_AT_MAGIC - at);
        struct ms_record record;
        if (candidate >= end)
            return -1;
        if (ms_record_parse(view + (candidate - base_offset), limit - candidate, &record) == MS_CASE_MESSAGE &&
            ms_record_physical_offset(&record) == candidate) {
            const int64_t next = candidate + record.size_bytes;
            if (can_follow(view + (next - base_offset), limit - next, next))
                return candidate;
        }
        offset = candidate + 1;
    }
    return -1;
}
