/* The flusher's rounds. Group commit: one fdatasync makes durable all bytes that were committed during the previous one.
 *
 * Who: the flusher, one thread; without sync mode single rounds. Blocks on: fdatasync, and its latch until the deadline. Bytes that arrive
 * during one fdatasync share the next, without a delay timer. The target is read before the sync, so it does not cover
 * bytes that arrive meanwhile. After a crash: `flushed` is at or below what is durable; the next flusher syncs again from
 * there. After a failed fdatasync it publishes nothing and does not retry: the caller freezes the store.
 */
#pragma once

#include "control.h"
#include "cpu.cdef.h"
#include "recorder.h"
#include "store_stats.h"

#define MS_GROUP_SEGMENTS_MAX 256
#define MS_GROUP_STREAM_NS 1000000  /* flushes within this time of each other form a stream */

/* Why ms_group_commit_run returned. */
#define MS_GROUP_TIME 0          /* the deadline, a signal, or woken without a commit: do the housekeeping, call again */
#define MS_GROUP_SEGMENT 1       /* a segment of [flushed, committed) is not among `base` */
#define MS_GROUP_FAILED 2        /* fdatasync failed: error_number, failed_base */

struct ms_group_commit {
    struct ms_control *control;
    void *semaphore;             /* of the flusher's latch */
    int64_t segment_bytes;
    uint32_t has_published;      /* 0: the first round wakes all waiters, which a dead flusher may not have woken */
    uint64_t incarnation;        /* `flushed` moves only once the writer has verified this one */
    int32_t count;               /* open segments */
    int32_t error_number;
    int64_t failed_base;
    int64_t last_ns;             /* when `flushed` moved last */
    struct ms_affinity affinity;         /* beside the writer */
    struct ms_latency *latency;  /* where each fdatasync is counted; NULL: nowhere */
    struct ms_recorder_handle *recorder; /* NULL: nothing is recorded */
    int64_t sync_ns;             /* time in fdatasync in the current round */
    int64_t base[MS_GROUP_SEGMENTS_MAX];
    int32_t fd[MS_GROUP_SEGMENTS_MAX];
};

/* Run rounds until the deadline, and at most `busy_ns` after the first that moved `flushed`: an idle flusher sleeps long, a
 * busy one returns soon to open segments. */
int ms_group_commit_run(struct ms_group_commit *group, int64_t deadline_ns, int64_t busy_ns);
/* Sync [flushed, committed) and publish, without waiting. 1: `flushed` moved; 0: nothing to do, or not verified yet; or
 * -MS_GROUP_SEGMENT, -MS_GROUP_FAILED. */
int ms_group_commit_once(struct ms_group_commit *group);
