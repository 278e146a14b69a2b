#define _GNU_SOURCE
#include "consume_queue_ext.h"

#include "bytes.h"
#include "failpoint.h"
#include "flush.h"

#define WINDOW_BYTES 65536

void ms_ext_drop(struct ms_ext_set *set, int32_t queue, int32_t run)
{
    if (set->runs[run].bytes > 0)
        set->queues[queue].end = -1;
    set->runs[run].bytes = 0;
}

int ms_ext_write(struct ms_ext_set *set, int32_t number, int32_t run_number)
{
    struct ms_ext_run *const run = &set->runs[run_number];
    struct ms_ext_queue *const queue = &set->queues[number];
    if (run->bytes == 0)
        return 0;
    const int64_t at = run->first - queue->file_start;
    int error = ms_flush_allocate_windows(queue->fd, &queue->allocated_bytes, set->file_bytes, WINDOW_BYTES,
                                          at, at + run->bytes);
    if (error == 0)
        error = ms_flush_pwrite_all(queue->fd, run->units, run->bytes, at);
    MS_FAILPOINT("ext_units_written");
    if (error != 0)
        ms_ext_drop(set, number, run_number);
    run->bytes = 0;
    return error;
}

int ms_ext_put(struct ms_ext_set *set, int32_t number, int32_t run_number, int64_t tags_code, int64_t store_timestamp_ms,
               int64_t *address)
{
    struct ms_ext_queue *const queue = &set->queues[number];
    struct ms_ext_run *const run = &set->runs[run_number];
    if (queue->fd < 0 || queue->end < queue->file_start || queue->end >= queue->file_start + set->file_bytes)
        return MS_EXT_NEEDS_FILE;
    if (run->bytes == 0)
        run->first = queue->end;
    uint8_t *const to = run->units + run->bytes;
    if (MS_EXT_UNIT_BYTES > queue->file_start + set->file_bytes - queue->end - MS_EXT_TAIL_BYTES) {
        ms_put_16(to, 0xFFFF); /* the file is full: size -1 */
        run->bytes += 2;
        const int error = ms_ext_write(set, number, run_number);
        if (error != 0)
            return error;
        queue->end = queue->file_start + set->file_bytes;
        return MS_EXT_NEEDS_FILE;
    }
    ms_put_16(to, MS_EXT_UNIT_BYTES);
    ms_put_64(to + 2, (uint64_t)tags_code);
    ms_put_64(to + 10, (uint64_t)store_timestamp_ms);
    ms_put_16(to + 18, 0);
    *address = (int64_t)((uint64_t)queue->end + (uint64_t)INT64_MIN);
    run->bytes += MS_EXT_UNIT_BYTES;
    queue->end += MS_EXT_UNIT_BYTES;
    return 0;
}
