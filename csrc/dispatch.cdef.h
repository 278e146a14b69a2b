/* Dispatches the records of one segment into consume queues and the index file.
 *
 * Who: the process that dispatches (reputter, or recovery before it); one process, one thread. Blocks on: writes of queue
 * files, page faults. After a crash: the caller publishes `reached` after the call, so the next dispatcher dispatches
 * everything from the published position again, to the same places.
 *
 * Rules (docs/formats.md sections 8 and 10): plain and committed messages get a queue entry, prepared and rolled back ones
 * do not; all but rolled back ones are indexed, UNIQ_KEY first, then the words of KEYS. An incomplete record ends the
 * range: the caller waits for the rest and does not skip it.
 */
#pragma once

#include "consume_queue.h"
#include "control.h"
#include "index_file.h"

#define MS_DISPATCH_NEEDS_QUEUE 16
#define MS_DISPATCH_NEEDS_FILE 17
#define MS_DISPATCH_NEEDS_INDEX 18
#define MS_DISPATCH_FAILED 19
#define MS_DISPATCH_NEEDS_EXT 20

struct ms_dispatch {
    struct ms_queue_set queues;
    struct ms_index_file index;
    struct ms_index_progress *progress;
    struct ms_arrivals *arrivals;   /* where the ends of messages are noted; NULL: nowhere */
    uint32_t arrived_bits;          /* of the readers to wake: since the caller cleared it */
    const int64_t *delays_ms;       /* by level - 1 */
    int32_t delay_levels;
    int32_t index_enabled;
    int32_t multi_dispatch;         /* entries for the queues of INNER_MULTI_DISPATCH too */
    int32_t error_number;           /* of the last call, with MS_DISPATCH_FAILED */

    int64_t indexed_offset;         /* the newest record that has keys in the index; -1 none */
    int64_t indexed_keys;           /* how many of its keys are in the index */

    int64_t reached;                /* last call: everything before is dispatched */
    const uint8_t *wanted_topic;    /* last call, NEEDS_QUEUE: the topic of that queue; inside the view */
    int32_t wanted_topic_bytes;
    int32_t wanted_queue_id;
    int64_t wanted_queue_offset;    /* NEEDS_QUEUE: of its first message here; NEEDS_FILE: the entry's position */
    int32_t wanted_queue;           /* NEEDS_FILE, NEEDS_EXT */
    int64_t last_store_timestamp_ms; /* of the newest record that was dispatched; -1 none */
    int64_t messages;               /* records passed: since the reputter counted them */
    int64_t keys;                   /* keys put, likewise */
};

/* Dispatch the records of [start, end) in the segment whose byte `base_offset` is view[0]. Returns MS_CASE_RANGE_END at the
 * end or before an incomplete header, MS_CASE_BLANK at the segment's final blank, another MS_CASE_* for anything but a
 * whole record (OVERRUN: only a part of it lies below `end`), or MS_DISPATCH_*. Everything before `reached` has been
 * written when this returns; with MS_DISPATCH_FAILED `reached` is `start`. */
int ms_dispatch_run(struct ms_dispatch *dispatch, const uint8_t *view, int64_t base_offset, int64_t start, int64_t end);

/* Whether the queues of INNER_MULTI_DISPATCH are ignored, counted like the record's own queue, or counted in `further`. */
#define MS_TOUCHED_OWN 0
#define MS_TOUCHED_ALL 1
#define MS_TOUCHED_APART 2

/* One queue in which the records of a range have entries. Offsets and `count` are those of its own records; with
 * MS_TOUCHED_ALL also of those that INNER_MULTI_DISPATCH adds to it. */
struct ms_touched_queue {
    uint64_t hash;
    const uint8_t *topic;           /* inside the view; NULL: a free place */
    int32_t topic_bytes;
    int32_t queue_id;
    int64_t min_queue_offset;
    int64_t max_queue_offset;       /* as min_queue_offset: -1 where count is 0 */
    int64_t count;
    int64_t further;                /* MS_TOUCHED_APART: records of other queues with an entry here, each counted once */
    int64_t newest;                 /* the record that was counted last */
    int64_t newest_ms;              /* the store time of the one of them that `count` has */
};

/* Find the queues in which the records of [start, end) have entries; `how` is MS_TOUCHED_*. `places` (a power of two, all
 * zero) becomes an open-addressed table. Returns MS_CASE_*, or -ENOSPC if more than half of the places would be used: call
 * again with a larger table. `reached` is the first byte after the last read record. */
int ms_dispatch_touched(struct ms_touched_queue *places, int64_t place_count, int how, const uint8_t *view,
                        int64_t base_offset, int64_t start, int64_t end, int64_t *reached,
                        int64_t *last_store_timestamp_ms);
