#define _GNU_SOURCE
#include "latch.cdef.h"

#include <errno.h>
#include <fcntl.h>
#include <semaphore.h>
#include <time.h>

#include "atomics.h"
#include "failpoint.h"
#include "futex.h"

/* More tokens than wakers come from a hostile process; the rest only causes early wake-ups. */
#define DRAIN_MAX 64

void *ms_latch_open(const char *name, int *error_number)
{
    sem_t *semaphore = sem_open(name, 0);
    *error_number = semaphore == SEM_FAILED ? errno : 0;
    return semaphore == SEM_FAILED ? NULL : semaphore;
}

void ms_latch_close(void *semaphore)
{
    sem_close(semaphore);
}

void ms_latch_wakeup(struct ms_latch *latch, void *semaphore)
{
    /* Between the waker's store of its position and this load: the owner clears the flag, then loads positions, so one of the
     * two sees the other's store. */
    ms_fence();
    ms_latch_wakeup_fenced(latch, semaphore);
}

void ms_latch_wakeup_fenced(struct ms_latch *latch, void *semaphore)
{
    if (ms_load_relaxed(&latch->has_notified) != 0)
        return;
    if (ms_exchange(&latch->has_notified, 1u) == 0) {
        MS_FAILPOINT("latch_taken");
        sem_post(semaphore);
    }
}

void ms_latch_wakeup_unmarked(const struct ms_latch *latch, void *semaphore)
{
    ms_fence();
    if (ms_load_relaxed(&latch->has_notified) == 0)
        sem_post(semaphore);
}

void ms_latch_arm(struct ms_latch *latch, void *semaphore)
{
    MS_FAILPOINT("latch_arming");
    /* Drain before clearing the flag: the other order would drain a new waker's token. */
    for (int i = 0; i < DRAIN_MAX && sem_trywait(semaphore) == 0; i++)
        ;
    ms_exchange(&latch->has_notified, 0u);
    MS_FAILPOINT("latch_armed");
}

void ms_latch_disarm(struct ms_latch *latch)
{
    ms_exchange(&latch->has_notified, 1u);
}

int ms_latch_wait(struct ms_latch *latch, void *semaphore, int64_t timeout_ns)
{
    int64_t until_ns = ms_monotonic_ns() + timeout_ns;
    struct timespec until = {.tv_sec = until_ns / 1000000000, .tv_nsec = until_ns % 1000000000};
    int woken = sem_clockwait(semaphore, CLOCK_MONOTONIC, &until);
    int error = woken == 0 ? 0 : errno;
    ms_latch_disarm(latch);
    if (woken == 0)
        return 1;
    return error == EINTR ? -EINTR : 0;
}
