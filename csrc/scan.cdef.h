/* Walks over the records of one segment.
 *
 * Who: recovery, check, salvage, readers, Spark workers; always over a read-only mapping of their own. Blocks on: page
 * faults only, for the length of the range; cffi releases the GIL. Crash states: none, it writes nothing.
 */
#pragma once

struct ms_walk {
    int64_t end_offset;              /* first byte after the walked records; a blank's own start */
    int64_t messages;
    int64_t first_store_timestamp_ms; /* -1 without messages */
    int64_t last_store_timestamp_ms;
    int32_t reason;                  /* MS_CASE_*; RANGE_END also when `end` was reached */
};

/* Walk the records that begin in [start, end), reading nothing at or above `limit` (>= end). All are physical offsets in the
 * segment whose byte `base_offset` is view[0]; the caller has checked base <= start <= end <= limit <= base + length of the
 * view. */
void ms_scan_walk(const uint8_t *view, int64_t base_offset, int64_t start, int64_t end, int64_t limit,
                  int checks, struct ms_walk *result);
/* Find the first record that begins in [from, end), without a known record before it: its lengths agree, it has its own
 * offset, and a record, a blank, zeros or `limit` follows it. -1 if there is none. Reads nothing at or above `limit`. */
int64_t ms_scan_sync(const uint8_t *view, int64_t base_offset, int64_t from, int64_t end, int64_t limit);
