#define _GNU_SOURCE
#include "nap.h"

#include <errno.h>
#include <sys/prctl.h>
#include <time.h>

#include "atomics.h"
#include "futex.h"

#define SLACK_NS 1000
#define NAPS_ALIKE 8
#define GROWTH_MAX 8

int ms_nap_until_above(const struct ms_position *position, int64_t value, int64_t timeout_ns, int64_t nap_ns)
{
    int64_t until_ns = ms_monotonic_ns() + timeout_ns;
    struct timespec nap = {.tv_nsec = nap_ns};
    for (int taken = 0; ms_load_acquire(&position->value) <= value; taken++) {
        if (ms_monotonic_ns() >= until_ns)
            return 0;
        if (taken % NAPS_ALIKE == NAPS_ALIKE - 1 && nap.tv_nsec < nap_ns * GROWTH_MAX)
            nap.tv_nsec *= 2;
        nanosleep(&nap, NULL);
    }
    return 1;
}

int ms_nap_precisely(void)
{
    return prctl(PR_SET_TIMERSLACK, SLACK_NS, 0, 0, 0) == 0 ? 0 : -errno;
}
