#include "base.h"
#include "reput.cdef.h"

#include "arrivals.h"
#include "latch.cdef.h"
#include "record.h"

#define ADVANCED 0

/* Wake the consumers of everything below `readable`; `from`: what is dispatched now begins here. */
static void wake_consumers(struct ms_reput *reput, int64_t from, int64_t readable)
{
    /* A predecessor may have died before it woke those of what lies below. */
    const uint32_t bits = reput->woken_up_to < from ? MS_FUTEX_ALL : reput->dispatch->arrived_bits;
    reput->dispatch->arrived_bits = 0;
    reput->woken_up_to = readable;
    ms_arrivals_wake(reput->control, bits);
}

/* Count after consumers are woken. */
static void count(struct ms_reput *reput, int64_t lag_bytes)
{
    struct ms_dispatch *const d = reput->dispatch;
    struct ms_dispatch_stats *const stats = reput->stats;
    ms_count(stats->batches, 1);
    ms_count(stats->messages, d->messages);
    ms_count(stats->entries, d->queues.written);
    ms_count(stats->keys, d->keys);
    ms_count(stats->out_of_order, d->queues.out_of_order);
    d->messages = d->keys = d->queues.written = d->queues.out_of_order = 0;
    if ((uint64_t)lag_bytes > stats->lag_max_bytes)
        ms_store_relaxed(&stats->lag_max_bytes, (uint64_t)lag_bytes);
    if (reput->lag_is_known && d->last_store_timestamp_ms >= 0)
        ms_latency_add(&stats->lag, (ms_wall_ms() - d->last_store_timestamp_ms) * 1000000);
}

void ms_reput_publish(struct ms_reput *reput, int64_t reached, int64_t lag_bytes)
{
    const int64_t from = reput->reput_from;
    reput->has_backlog = reached - from >= MS_REPUT_BACKLOG_BYTES;
    reput->reput_from = reached;
    MS_FAILPOINT("batch_dispatched");
    ms_store_release(&reput->control->reput_from.value, reached);
    MS_FAILPOINT("reput_from_moved");
    wake_consumers(reput, from, reached);
    if (reput->allocator_semaphore != NULL && reached - reput->warmed_from >= MS_REPUT_WARM_BYTES) {
        reput->warmed_from = reached;
        ms_latch_wakeup(&reput->control->latch[MS_ALLOCATOR], reput->allocator_semaphore);
    }
    ms_stream_worked(&reput->stream, ms_monotonic_ns());
    count(reput, lag_bytes);
}

/* Return whether an incomplete record follows, the rest of which is still to come. It may be a blank: a RocketMQ slave's log,
 * or `confirm`, may end inside one. */
static int is_incomplete(int reason)
{
    return reason == MS_CASE_RANGE_END || reason == MS_CASE_OVERRUN || reason == MS_CASE_BLANK;
}

/* Dispatch one batch: ADVANCED, or MS_REPUT_* except TIME. */
static int advance(struct ms_reput *reput)
{
    struct ms_dispatch *const d = reput->dispatch;
    const int64_t from = reput->reput_from;
    const int64_t end = ms_load_acquire(&reput->limit->value);
    if (end <= from && reput->woken_up_to < end)
        wake_consumers(reput, end, end); /* a stopped predecessor dispatched it before it was confirmed */
    if (end <= from || end <= reput->incomplete_end)
        return MS_REPUT_IDLE;
    const int64_t segment_end = reput->base + reput->segment_bytes;
    if (reput->base < 0 || from < reput->base || from >= segment_end)
        return MS_REPUT_SEGMENT;
    const int64_t stop = end < segment_end ? end : segment_end;
    int64_t to = stop < from + reput->batch_bytes ? stop : from + reput->batch_bytes;
    int reason = ms_dispatch_run(d, reput->view, reput->base, from, to);
    if (d->reached == from && to < stop && is_incomplete(reason)) { /* a record longer than a batch */
        to = stop;
        reason = ms_dispatch_run(d, reput->view, reput->base, from, to);
    }
    const int64_t reached = reason == MS_CASE_BLANK && to == segment_end ? segment_end : d->reached;
    if (reached > from) {
        ms_reput_publish(reput, reached, end - from);
        return ADVANCED;
    }
    if (to < end || !is_incomplete(reason))
        return MS_REPUT_DECIDE;
    reput->incomplete_end = end;
    return MS_REPUT_IDLE;
}

/* Do as ms_reput_run, but return with the latch armed if *is_armed is set. */
static int run(struct ms_reput *reput, int64_t until_ns, int may_sleep, int *is_armed)
{
    struct ms_latch *const latch = &reput->control->latch[MS_REPUTTER];
    const int64_t round_ends_ns = ms_monotonic_ns() + MS_REPUT_ROUND_NS;
    int64_t woken_at = -1; /* `committed` before a wake-up after which nothing was dispatched */
    for (;;) {
        const int reason = advance(reput);
        if (reason != ADVANCED && reason != MS_REPUT_IDLE)
            return reason;
        if (reason == ADVANCED && *is_armed) {
            ms_latch_disarm(latch); /* while there is work, no process need wake this one */
            *is_armed = 0;
        }
        const int64_t now_ns = ms_monotonic_ns();
        if (now_ns >= until_ns || (reput->stream.is_busy && now_ns >= round_ends_ns))
            return reason == ADVANCED ? MS_REPUT_TIME : MS_REPUT_IDLE;
        const int64_t seen = reput->reput_from > reput->incomplete_end ? reput->reput_from : reput->incomplete_end;
        if (ms_stream_wait(&reput->stream, reput->limit, seen, reput->has_backlog) || reason == ADVANCED) {
            woken_at = -1;
            continue;
        }
        const int64_t committed = ms_load_acquire(&reput->control->committed.value);
        if (!may_sleep || committed == woken_at) /* woken for another reason: settings, the end */
            return MS_REPUT_IDLE;
        if (!*is_armed) {
            ms_latch_arm(latch, reput->semaphore);
            *is_armed = 1; /* and check once more: a wake-up before arming was not posted */
            continue;
        }
        const int woken = ms_latch_wait(latch, reput->semaphore, until_ns - now_ns);
        *is_armed = 0;
        if (woken == -EINTR)
            return MS_REPUT_IDLE;
        woken_at = woken > 0 ? committed : -1; /* a commit that is not confirmed yet wakes it too: then it sleeps again */
    }
}

int ms_reput_run(struct ms_reput *reput, int64_t until_ns, int may_sleep)
{
    int is_armed = may_sleep;
    const int reason = run(reput, until_ns, may_sleep, &is_armed);
    if (is_armed)
        ms_latch_disarm(&reput->control->latch[MS_REPUTTER]);
    return reason;
}
