/* The reputter's rounds over one mapped segment: wait, dispatch, publish, wake the consumers, sleep again.
 *
 * Who: the reputter; one process, one thread. Blocks on: its latch and short sleeps, at most until `until_ns`, and on what
 * ms_dispatch_run blocks on. It returns to Python for another segment, a new queue, a new file, damage, or an error.
 *
 * Order: queue entries and keys first, then `reput_from` with release, then the arrival sequence. After a crash: the next
 * reputter dispatches everything from `reput_from` on again, which does not change right entries, and wakes the consumers
 * once, because the dead one may have published without waking them.
 */
#pragma once

#include "control.h"
#include "dispatch.cdef.h"
#include "store_stats.h"
#include "stream.cdef.h"

#define MS_REPUT_IDLE 1          /* nothing is left to dispatch, or the time is over */
#define MS_REPUT_TIME 2          /* the time is over, there may be more */
#define MS_REPUT_SEGMENT 3       /* the segment that holds `reput_from` is not the one in `view` */
#define MS_REPUT_DECIDE 4        /* ms_dispatch_run needs something or failed: Python dispatches the next piece */

#define MS_REPUT_BACKLOG_BYTES 1048576  /* after a batch of this length do not wait for more */
#define MS_REPUT_WARM_BYTES 16777216    /* wake the allocator after so many bytes, when the writer has used up the populated pages */
#define MS_REPUT_ROUND_NS 50000000      /* in a stream: back to Python after so long */

struct ms_reput {
    struct ms_control *control;
    struct ms_dispatch *dispatch;
    struct ms_dispatch_stats *stats;
    const struct ms_position *limit; /* dispatch nothing at or above it: `committed` or `confirm` */
    void *semaphore;                 /* of the reputter's latch */
    void *allocator_semaphore;       /* of the allocator's latch; NULL: it need not be woken */
    const uint8_t *view;             /* the segment that begins at `base`, mapped read-only */
    int64_t base;                    /* -1: none */
    int64_t segment_bytes;
    int64_t batch_bytes;             /* `reput_from` moves at least this often */

    int64_t reput_from;              /* as published */
    int64_t incomplete_end;          /* [reput_from, here) is an incomplete record: wait until `limit` is above */
    int64_t woken_up_to;             /* consumers were woken for everything below; -1: unknown, after a predecessor */
    int64_t warmed_from;             /* `reput_from` when the allocator was last woken */
    int32_t lag_is_known;            /* 0: store times are not the wall clock's (replay) */
    int32_t has_backlog;             /* the last batch was long */
    struct ms_stream stream;
};

/* Dispatch the records below `limit`, batch by batch, until CLOCK_MONOTONIC `until_ns`; in a stream for MS_REPUT_ROUND_NS
 * at most. If nothing is left and there is no stream it returns, or with `may_sleep` sleeps on the latch, which the caller
 * has armed. MS_REPUT_*; IDLE also after a signal, or a wake-up without records. Afterwards the latch is disarmed. */
int ms_reput_run(struct ms_reput *reput, int64_t until_ns, int may_sleep);
/* Make everything up to `reached` visible. `lag_bytes`, for the statistics: the bytes that were to be dispatched before. */
void ms_reput_publish(struct ms_reput *reput, int64_t reached, int64_t lag_bytes);
