#include "base.h"
#include "stream.cdef.h"

#include <sys/prctl.h>

#include "cpu.cdef.h"

#define SLACK_NS 1000
#define POLLS_PER_INTERVAL 8
#define GROWTH_MAX 8

void ms_stream_begin(struct ms_stream *stream, int64_t gather_ns, int64_t quiet_ns)
{
    *stream = (struct ms_stream){.gather_ns = gather_ns, .quiet_ns = quiet_ns};
    ms_cpu_schedule(MS_CPU_INTERACTIVE);
}

void ms_stream_worked(struct ms_stream *stream, int64_t now_ns)
{
    if (stream->is_busy)
        return;
    stream->rounds = now_ns - stream->last_ns < MS_STREAM_CLOSE_NS ? stream->rounds + 1 : 0;
    stream->last_ns = now_ns;
    if (stream->rounds >= MS_STREAM_ROUNDS) {
        stream->is_busy = 1;
        ms_cpu_schedule(MS_CPU_BATCH);
    }
}

int ms_poll_until_above(const struct ms_position *position, int64_t value, int64_t timeout_ns, int64_t interval_ns)
{
    int64_t until_ns = ms_monotonic_ns() + timeout_ns;
    struct timespec interval = {.tv_nsec = interval_ns};
    for (int polls = 0; ms_load_acquire(&position->value) <= value; polls++) {
        if (ms_monotonic_ns() >= until_ns)
            return 0;
        if (polls % POLLS_PER_INTERVAL == POLLS_PER_INTERVAL - 1 && interval.tv_nsec < interval_ns * GROWTH_MAX)
            interval.tv_nsec *= 2;
        nanosleep(&interval, NULL);
    }
    return 1;
}

int ms_sleep_precisely(void)
{
    return prctl(PR_SET_TIMERSLACK, SLACK_NS, 0, 0, 0) == 0 ? 0 : -errno;
}

int ms_stream_wait(struct ms_stream *stream, const struct ms_position *position, int64_t value, int has_backlog)
{
    if (!stream->is_busy)
        return 0;
    if (!has_backlog) {
        const struct timespec gather = {.tv_sec = stream->gather_ns / 1000000000, .tv_nsec = stream->gather_ns % 1000000000};
        nanosleep(&gather, NULL);
    }
    if (ms_poll_until_above(position, value, stream->quiet_ns, stream->gather_ns))
        return 1;
    stream->is_busy = 0;
    stream->rounds = 0;
    ms_cpu_schedule(MS_CPU_INTERACTIVE);
    return 0;
}
