#include "base.h"
#include "pool_commit.cdef.h"

#include "flush.cdef.h"
#include "latch.cdef.h"
#include "record.h"
#include "scan.cdef.h"

#define ADVANCED 0

static int write_piece(struct ms_pool_commit *pool, int64_t from, int64_t to)
{
    const int64_t began_ns = ms_monotonic_ns();
    const int error = ms_flush_pwrite_all(pool->fd, pool->view + (from - pool->base), to - from, from - pool->base);
    pool->error_number = -error;
    if (pool->recorder != NULL && error == 0)
        ms_recorder_note_if_long(pool->recorder, MS_STALL_WRITE, MS_PHASE_WRITE, began_ns, to, to - from);
    return error;
}

static void publish(struct ms_pool_commit *pool, int64_t end)
{
    struct ms_control *const control = pool->control;
    ms_store_release(&control->committed.value, end);
    MS_FAILPOINT("pool_committed");
    pool->committed = end;
    ms_latch_wakeup(&control->latch[MS_REPUTTER], pool->reputter_semaphore);
    if (pool->replicator_semaphore != NULL)
        ms_latch_wakeup(&control->latch[MS_REPLICATOR], pool->replicator_semaphore);
}

/* Commit one piece of [committed, wrote): ADVANCED, or MS_COMMIT_SEGMENT, FAILED or BROKEN. */
static int commit_piece(struct ms_pool_commit *pool, int64_t wrote)
{
    const int64_t start = pool->committed, segment_end = pool->base + pool->segment_bytes;
    if (pool->base < 0 || start < pool->base || start >= segment_end)
        return MS_COMMIT_SEGMENT;
    const int64_t limit = wrote < segment_end ? wrote : segment_end;
    struct ms_walk walk;
    ms_scan_walk(pool->view, pool->base, start, limit < start + pool->piece_bytes ? limit : start + pool->piece_bytes, limit,
                 MS_CHECK_OFFSET, &walk);
    int64_t end = walk.end_offset;
    if (end > start) {
        if (write_piece(pool, start, end) != 0)
            return MS_COMMIT_FAILED;
        MS_FAILPOINT("pool_piece_written");
    }
    if (walk.reason == MS_CASE_BLANK) {
        if (write_piece(pool, end, end + MS_BLANK_BYTES) != 0)
            return MS_COMMIT_FAILED;
        MS_FAILPOINT("pool_blank_written");
        end = segment_end;
    }
    pool->reason = walk.reason;
    if (end <= start)
        return MS_COMMIT_BROKEN;
    publish(pool, end);
    return ADVANCED;
}

/* Do as ms_pool_commit_run, but return with the latch armed if *is_armed is set. */
static int run(struct ms_pool_commit *pool, int64_t until_ns, int may_sleep, int *is_armed)
{
    struct ms_control *const control = pool->control;
    struct ms_latch *const latch = &control->latch[MS_COMMITTER];
    const int64_t round_ends_ns = ms_monotonic_ns() + MS_COMMIT_ROUND_NS;
    int woken = 0;
    for (;;) {
        if (ms_load_acquire(&control->state.frozen) != 0)
            return MS_COMMIT_IDLE;
        int64_t left = ms_load_acquire(&control->wrote.value) - pool->committed;
        if (left < MS_COMMIT_SMALL_BYTES && ms_stream_wait(&pool->stream, &control->wrote, pool->committed, 0))
            left = ms_load_acquire(&control->wrote.value) - pool->committed;
        int moved = 0;
        if (left > 0) {
            if (*is_armed) {
                ms_latch_disarm(latch); /* while there is work, no process need wake this one */
                *is_armed = 0;
            }
            const int reason = commit_piece(pool, pool->committed + left);
            if (reason != ADVANCED)
                return reason;
            moved = 1;
        }
        const int64_t now_ns = ms_monotonic_ns();
        if (moved)
            ms_stream_worked(&pool->stream, now_ns);
        if (now_ns >= until_ns || (pool->stream.is_busy && now_ns >= round_ends_ns))
            return moved ? MS_COMMIT_TIME : MS_COMMIT_IDLE;
        if (moved && pool->committed == pool->base + pool->segment_bytes)
            return MS_COMMIT_SEGMENT; /* its buffer is free now */
        if (moved) {
            woken = 0;
            continue;
        }
        if (!may_sleep || woken > 0) /* woken for another reason: settings, the end */
            return MS_COMMIT_IDLE;
        if (!*is_armed) {
            ms_latch_arm(latch, pool->semaphore);
            *is_armed = 1; /* and check once more: a wake-up before arming was not posted */
            continue;
        }
        woken = ms_latch_wait(latch, pool->semaphore, until_ns - now_ns);
        *is_armed = 0;
        if (woken == -EINTR)
            return MS_COMMIT_IDLE;
    }
}

int ms_pool_commit_run(struct ms_pool_commit *pool, int64_t until_ns, int may_sleep)
{
    int is_armed = may_sleep;
    const int reason = run(pool, until_ns, may_sleep, &is_armed);
    if (is_armed)
        ms_latch_disarm(&pool->control->latch[MS_COMMITTER]);
    return reason;
}
