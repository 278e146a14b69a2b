/* Whether work comes singly or in a stream, and how its process waits in each case (docs/decisions/0011).
 *
 * Who: committer and reputter, each with a structure in memory of its own. Blocks on: sleeps in ms_stream_wait, at most
 * nap_ns and quiet_ns. After a crash: nothing is left, the next process begins without a stream.
 *
 * Single pieces of work are done at once: the latch is armed in between, and the process that publishes work wakes this
 * one. In a stream it polls after short sleeps, so that it need not be woken, and runs as SCHED_BATCH: it takes a free
 * CPU but interrupts no other process (docs/decisions/0014).
 */
#define MS_STREAM_CLOSE_NS 500000   /* work that follows the last within this time belongs to a stream */
#define MS_STREAM_ROUNDS 8          /* so many in a row make one */

struct ms_stream {
    int64_t nap_ns;                 /* in a stream: work is gathered for so long */
    int64_t quiet_ns;               /* a stream ends after so long without work */
    int64_t last_ns;                /* when work was done last */
    int32_t rounds;                 /* in a row, each close to the one before */
    int32_t is_busy;                /* 1: in a stream */
};

/* No stream yet; the process is scheduled to be prompt. */
void ms_stream_begin(struct ms_stream *stream, int64_t nap_ns, int64_t quiet_ns);
/* A piece of work was done at `now_ns` (CLOCK_MONOTONIC). */
void ms_stream_worked(struct ms_stream *stream, int64_t now_ns);
/* In a stream: gather for nap_ns unless `has_backlog`, then wait until the position is above `value`: 1.
 * 0: there is no stream, or it ended. */
int ms_stream_wait(struct ms_stream *stream, const struct ms_position *position, int64_t value, int has_backlog);
