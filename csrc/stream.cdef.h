/* Detects whether work arrives singly or in a stream, and waits accordingly (docs/design/10-fast-path.md).
 *
 * Who: committer and reputter, each with a structure in private memory. Blocks on: sleeps in ms_stream_wait, at most gather_ns
 * and quiet_ns. After a crash: nothing remains, the next process begins without a stream.
 *
 * The process does single work at once: its latch is armed in between, and the process that publishes work wakes it. In a
 * stream it polls with short sleeps, so that no process need wake it, and runs as SCHED_BATCH: it takes a free CPU but
 * preempts no other process (docs/design/10-fast-path.md).
 */
#pragma once

#include "control.h"

#define MS_STREAM_CLOSE_NS 500000   /* work within this time after the previous one belongs to a stream */
#define MS_STREAM_ROUNDS 8          /* so many in a row are a stream */

struct ms_stream {
    int64_t gather_ns;                 /* in a stream: how long to wait for more work */
    int64_t quiet_ns;               /* a stream ends after so long without work */
    int64_t last_ns;                /* when work was last done */
    int32_t rounds;                 /* in a row, each close to the previous one */
    int32_t is_busy;                /* 1: in a stream */
};

/* Begin without a stream; schedule the process as MS_CPU_INTERACTIVE. */
void ms_stream_begin(struct ms_stream *stream, int64_t gather_ns, int64_t quiet_ns);
/* Note that work was done at `now_ns` (CLOCK_MONOTONIC). */
void ms_stream_worked(struct ms_stream *stream, int64_t now_ns);
/* Wait until the position is above `value`, by sleeps of interval_ns, growing to eight times that: 1, or 0 after the timeout. A
 * sleep costs a few microseconds of CPU, so this is for waits of milliseconds; for longer ones use the latch. */
int ms_poll_until_above(const struct ms_position *position, int64_t value, int64_t timeout_ns, int64_t interval_ns);
/* Let this process's sleeps end within a microsecond of the requested time (the kernel's default slack is 50). */
int ms_sleep_precisely(void);
/* In a stream: sleep for gather_ns unless `has_backlog`, then wait until the position is above `value`: 1. 0: there is no
 * stream, or it ended. */
int ms_stream_wait(struct ms_stream *stream, const struct ms_position *position, int64_t value, int has_backlog);
