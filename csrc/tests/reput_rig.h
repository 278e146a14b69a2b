/* A reputter's loop over a log of small records in memory, with one queue in an unnamed file. */
#pragma once

#include "check.h"
#include "../record.h"
#include "../reput.cdef.h"

#define RECORDS 4000

static struct ms_control control;
static struct ms_dispatch_stats stats;
static uint8_t log_bytes[RECORDS * 128];
static int64_t starts[RECORDS + 1]; /* offsets of the records and of the end */
static struct ms_reput reput;
static int queue_fd;

static inline void rig_begin(void *semaphore)
{
    static const uint8_t body[20] = {'x'};
    for (int i = 0; i < RECORDS; i++) {
        struct ms_record_template t = {.queue_offset = i, .physical_offset = starts[i], .store_timestamp_ms = 1700000000000};
        t.body = body;
        t.body_bytes = (int32_t)dice(sizeof body);
        t.topic = t.properties = (const uint8_t *)"T";
        t.topic_bytes = 1;
        starts[i + 1] = starts[i] + ms_record_encode(log_bytes + starts[i], &t);
    }
    CHECK(starts[RECORDS] <= (int64_t)sizeof log_bytes);
    char path[] = "/tmp/test_reput.XXXXXX";
    queue_fd = mkstemp(path);
    CHECK(queue_fd >= 0);
    unlink(path);

    static struct ms_queue queue[1];
    static struct ms_queue_chunk chunk[1];
    static struct ms_queue_key key[1];
    static int32_t buckets[4];
    static uint8_t topics[16];
    static struct ms_dispatch dispatch = {.arrivals = &control.arrivals, .last_store_timestamp_ms = -1};
    struct ms_queue_set *const queues = &dispatch.queues;
    queues->queues = queue;
    queues->chunks = chunk;
    queues->chunk_count = 1;
    queues->file_bytes = RECORDS * MS_QUEUE_ENTRY_BYTES;
    queues->keys = (struct ms_queue_keys){.key = key, .buckets = buckets, .topics = topics, .topics_capacity = sizeof topics};
    queues->keys.capacity = 1;
    queues->keys.bucket_mask = 3;
    ms_queue_keys_rehash(&queues->keys);
    CHECK(ms_queue_add(queues, (const uint8_t *)"T", 1, 0) == 0);
    queue[0].fd = queue_fd;
    queue[0].allocated_bytes = queues->file_bytes;

    reput.control = &control;
    reput.dispatch = &dispatch;
    reput.stats = &stats;
    reput.limit = &control.committed;
    reput.semaphore = semaphore;
    reput.view = log_bytes;
    reput.segment_bytes = sizeof log_bytes;
    reput.batch_bytes = 1 << 20;
    reput.incomplete_end = reput.woken_up_to = -1;
    reput.lag_is_known = 1;
    ms_stream_begin(&reput.stream, 20000, 100000);
}

/* Check that the queue has the entry of this record. */
static inline int has_entry(int record)
{
    uint8_t entry[MS_QUEUE_ENTRY_BYTES];
    return pread(queue_fd, entry, sizeof entry, (off_t)record * MS_QUEUE_ENTRY_BYTES) == sizeof entry &&
           ms_get_i64(entry) == starts[record] && ms_get_i32(entry + 8) == starts[record + 1] - starts[record];
}
