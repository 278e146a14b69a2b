/* A dispatch loop with queues in unnamed files and an index in memory, for the test and the fuzz target. */
#pragma once

#include "segments.h"
#include "../dispatch.cdef.h"

#define FILE_BYTES 400
#define QUEUES 64
#define INDEX_SLOTS 16
#define INDEX_ENTRIES 2000
#define INDEX_BYTES (40 + 4 * INDEX_SLOTS + 20 * INDEX_ENTRIES)

static struct ms_queue queues[QUEUES];
static struct ms_queue_key keys[QUEUES];
static int32_t buckets[2 * QUEUES];
static uint8_t topics[QUEUES * 256];
static struct ms_queue_chunk chunks[3]; /* few, so that the loop needs more */
static const int64_t delays[] = {1000, 5000, 10000};
static struct ms_index_progress progress;
static int files[QUEUES];

static inline void rig_begin(struct ms_dispatch *d, uint8_t *index, int multi_dispatch)
{
    memset(d, 0, sizeof *d);
    memset(&progress, 0, sizeof progress);
    d->queues.queues = queues;
    d->queues.chunks = chunks;
    d->queues.chunk_count = sizeof chunks / sizeof *chunks;
    d->queues.file_bytes = FILE_BYTES;
    d->queues.keys = (struct ms_queue_keys){.key = keys, .buckets = buckets, .topics = topics, .topics_capacity = sizeof topics};
    d->queues.keys.capacity = QUEUES;
    d->queues.keys.bucket_mask = 2 * QUEUES - 1;
    ms_queue_keys_rehash(&d->queues.keys);
    d->index = (struct ms_index_file){.base = index, .number = 1, .slots = INDEX_SLOTS, .entries = INDEX_ENTRIES, .allocated_bytes = INT64_MAX};
    d->progress = &progress;
    d->delays_ms = delays;
    d->delay_levels = 3;
    d->index_enabled = 1;
    d->multi_dispatch = multi_dispatch;
    d->indexed_offset = -1;
}

/* Return a file, which is created once and reused. */
static inline int file_of(int number)
{
    if (files[number] == 0)
        files[number] = memfd_create("queue", 0);
    CHECK(files[number] > 0 && ftruncate(files[number], 0) == 0 && ftruncate(files[number], FILE_BYTES) == 0);
    return files[number];
}

/* Dispatch, with queues and files as they are needed; `allocated_bytes`: what the loop is told of a file, -1: it allocates. */
static inline int rig_run(struct ms_dispatch *d, const uint8_t *view, int64_t base, int64_t from, int64_t to, int64_t allocated_bytes)
{
    for (int turn = 0; turn < 100000; turn++) {
        const int found = ms_dispatch_run(d, view, base, from, to);
        CHECK(d->reached >= from && d->reached <= to);
        from = d->reached;
        if (found == MS_DISPATCH_NEEDS_QUEUE) {
            const int number = ms_queue_add(&d->queues, d->wanted_topic, d->wanted_topic_bytes, d->wanted_queue_id);
            if (number == -ENOSPC)
                return found;
            CHECK(number >= 0);
            queues[number].next_offset = d->wanted_queue_offset;
            queues[number].refused = d->wanted_queue_offset < 0 || d->wanted_queue_offset > INT64_MAX / 40;
        } else if (found == MS_DISPATCH_NEEDS_FILE) {
            struct ms_queue *queue = &queues[d->wanted_queue];
            queue->fd = file_of(d->wanted_queue);
            queue->file_start = d->wanted_queue_offset * 20 - d->wanted_queue_offset * 20 % FILE_BYTES;
            queue->allocated_bytes = allocated_bytes;
        } else {
            CHECK(found != MS_DISPATCH_FAILED);
            return found;
        }
    }
    CHECK(0); /* it requests something for ever */
    return 0;
}

/* Check that the files have only whole entries of records in [base, end). */
static inline void check_files(const struct ms_dispatch *d, int64_t base, int64_t end)
{
    for (int i = 0; i < d->queues.keys.count; i++) {
        uint8_t bytes[FILE_BYTES];
        if (queues[i].fd < 0)
            continue;
        CHECK(lseek(queues[i].fd, 0, SEEK_END) == FILE_BYTES && pread(queues[i].fd, bytes, FILE_BYTES, 0) == FILE_BYTES);
        for (int at = 0; at < FILE_BYTES; at += 20) {
            const int64_t offset = ms_get_i64(bytes + at);
            const int32_t size = ms_get_i32(bytes + at + 8);
            CHECK((offset == 0 && size == 0) || (offset >= base && size >= MS_RECORD_BYTES_MIN && offset + size <= end));
        }
    }
}
