#include "base.h"
#include "latch.cdef.h"

#include <fcntl.h>
#include <semaphore.h>
#include <signal.h>

/* A token too many only causes an early wake-up. */
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
        if (semaphore != NULL)
            sem_post(semaphore);
        else
            ms_futex_wake_all(&latch->has_notified);
    }
}

void ms_latch_ring(const struct ms_latch *latch, int32_t owner_pid, uint32_t *rung)
{
    ms_fence();
    if (ms_load_acquire(&latch->has_notified) != 0)
        return;
    uint32_t arms = ms_load_relaxed(&latch->arms);
    if (arms == ms_load_relaxed(rung))
        return; /* already woken: it looks for work before it sleeps again */
    /* If no process slept, the owner is about to, or another process has just woken it. This process cannot change the flag, to
     * keep it awake; the signal's handler does. By default SIGURG is ignored: it harms no process that got the owner's pid. */
    if (ms_futex_wake_all(&latch->has_notified) == 0 && owner_pid > 0)
        kill(owner_pid, SIGURG);
    ms_store_relaxed(rung, arms);
}

static struct ms_latch *rung_by_signal;

static void on_sigurg(int number)
{
    (void)number;
    struct ms_latch *latch = ms_load_acquire(&rung_by_signal);
    if (latch != NULL)
        ms_exchange(&latch->has_notified, 1u);
}

int ms_latch_hear_rings(struct ms_latch *latch)
{
    struct sigaction action = {.sa_handler = latch != NULL ? on_sigurg : SIG_DFL, .sa_flags = SA_RESTART | SA_ONSTACK};
    sigemptyset(&action.sa_mask);
    ms_store_release(&rung_by_signal, latch);
    return sigaction(SIGURG, &action, NULL) == 0 ? 0 : -errno;
}

void ms_latch_arm(struct ms_latch *latch, void *semaphore)
{
    MS_FAILPOINT("latch_arming");
    /* Drain before clearing the flag: the other order would drain a new waker's token. */
    for (int i = 0; semaphore != NULL && i < DRAIN_MAX && sem_trywait(semaphore) == 0; i++)
        ;
    if (semaphore == NULL)
        ms_store_relaxed(&latch->arms, latch->arms + 1);
    ms_exchange(&latch->has_notified, 0u);
    MS_FAILPOINT("latch_armed");
}

void ms_latch_disarm(struct ms_latch *latch)
{
    ms_exchange(&latch->has_notified, 1u);
}

/* For a latch without a semaphore: sleep while the flag is 0. */
static int wait_on_flag(struct ms_latch *latch, int64_t timeout_ns)
{
    int error = ms_futex_wait(&latch->has_notified, 0, timeout_ns);
    if (ms_exchange(&latch->has_notified, 1u) != 0)
        return MS_LATCH_WOKEN;
    if (error == 0)
        return MS_LATCH_RUNG;
    return error == -EINTR ? -EINTR : 0;
}

int ms_latch_wait(struct ms_latch *latch, void *semaphore, int64_t timeout_ns)
{
    MS_FAILPOINT("latch_sleeping");
    if (semaphore == NULL)
        return wait_on_flag(latch, timeout_ns);
    int64_t until_ns = ms_monotonic_ns() + timeout_ns;
    struct timespec until = {.tv_sec = until_ns / 1000000000, .tv_nsec = until_ns % 1000000000};
    int woken = sem_clockwait(semaphore, CLOCK_MONOTONIC, &until);
    int error = woken == 0 ? 0 : errno;
    ms_latch_disarm(latch);
    if (woken == 0)
        return MS_LATCH_WOKEN;
    return error == EINTR ? -EINTR : 0;
}
