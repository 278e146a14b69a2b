#define _GNU_SOURCE
#include "polling.h"

#include <errno.h>
#include <sys/prctl.h>
#include <time.h>

#include "atomics.h"
#include "futex.h"

#define SLACK_NS 1000
#define POLLS_PER_INTERVAL 8
#define GROWTH_MAX 8

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
