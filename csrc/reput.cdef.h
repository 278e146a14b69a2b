/* The reputter's rounds over one mapped segment: wait, dispatch, publish, wake the consumers, sleep again.
 *
 * Who: the reputter; one process, one thread. Blocks on: its latch and short sleeps, at most until `until_ns`, and on what
 * ms_dispatch_run blocks on. It returns to Python for everything that is decided there: another segment, a new queue,
 * a new file, damage, an error.
 *
 * Order: queue entries and keys first, then `reput_from` with release, then the arrival sequence. After a crash all from
 * `reput_from` on is dispatched again, which changes nothing that is right; the next reputter wakes the consumers once,
 * for what a dead one published without waking them.
 */
#define MS_REPUT_IDLE 1          /* nothing is left to dispatch, or the time is over */
#define MS_REPUT_TIME 2          /* the time is over, there may be more */
#define MS_REPUT_SEGMENT 3       /* the segment that holds `reput_from` is not the one in `view` */
#define MS_REPUT_DECIDE 4        /* ms_dispatch_run needs something or failed: Python dispatches the next piece */

#define MS_REPUT_BACKLOG_BYTES 1048576  /* after a batch as long as this nothing is gathered */
#define MS_REPUT_WARM_BYTES 16777216    /* the allocator is woken after so much log: pages ahead of the writer are used up */
#define MS_REPUT_ROUND_NS 50000000      /* in a stream: back to Python after so long */

struct ms_reput {
    struct ms_control *control;
    struct ms_dispatch *dispatch;
    struct ms_dispatch_stats *stats;
    const struct ms_position *limit; /* nothing at or above is dispatched: `committed` or `confirm` */
    void *semaphore;                 /* of the reputter's latch */
    void *allocator_semaphore;       /* of the allocator's latch; NULL: it need not be woken */
    const uint8_t *view;             /* the segment that begins at `base`, mapped read-only */
    int64_t base;                    /* -1: none */
    int64_t segment_bytes;
    int64_t batch_bytes;             /* `reput_from` moves at least this often */

    int64_t reput_from;              /* as published */
    int64_t incomplete_end;          /* between reput_from and here lies part of a record: nothing to do before `limit` is above */
    int64_t woken_up_to;             /* consumers were woken for what is readable below; -1: what a predecessor did is not known */
    int64_t warmed_from;             /* where `reput_from` was when the allocator was woken last */
    int32_t lag_is_known;            /* 0: store times are no wall clock (replay) */
    int32_t has_backlog;             /* the last batch was long */
    int64_t counted_messages;        /* of the dispatch loop's totals: what the statistics have */
    int64_t counted_entries;
    int64_t counted_keys;
    int64_t counted_out_of_order;
    struct ms_stream stream;
};

/* Dispatch what lies below `limit`, batch by batch, and what comes meanwhile, until CLOCK_MONOTONIC `until_ns`; in a
 * stream for MS_REPUT_ROUND_NS at the most. Where nothing is left and there is no stream it returns, or, with `may_sleep`,
 * sleeps on the latch, which the caller has armed. MS_REPUT_*; IDLE also where a signal came, or a
 * wake-up without records. The latch is disarmed then. */
int ms_reput_run(struct ms_reput *reput, int64_t until_ns, int may_sleep);
/* What was dispatched up to `reached` becomes visible. `behind_bytes` (statistics): what was to be dispatched before. */
void ms_reput_publish(struct ms_reput *reput, int64_t reached, int64_t behind_bytes);
