/* Sleepers and wakers at full speed: no wake-up is lost.
 *
 * Threads act as the processes: a writer commits and wakes, a flusher runs group commit, others wait for durability on the
 * flush sequence. Each wait may last TIMEOUT_NS; one that does was a lost wake-up. */

#include "check.h"
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>

#include "../group_commit.cdef.h"
#include "../latch.cdef.h"
#include "../sequence.h"
#include "../stream.cdef.h"

#define ROUNDS 2000
#define WAITERS 3
#define TIMEOUT_NS 20000000000
#define SEGMENT (1 << 20)

static struct ms_control control;
static sem_t semaphore;
static int fd;
static int done;

static void *flusher(void *unused)
{
    (void)unused;
    static struct ms_group_commit group;
    group = (struct ms_group_commit){.control = &control, .semaphore = &semaphore, .segment_bytes = SEGMENT, .count = 1};
    group.fd[0] = fd;
    while (!__atomic_load_n(&done, __ATOMIC_ACQUIRE))
        /* Longer than a waiter's timeout, so that a lost wake-up fails the test. */
        CHECK(ms_group_commit_run(&group, ms_monotonic_ns() + 2 * TIMEOUT_NS, 2 * TIMEOUT_NS) == MS_GROUP_TIME);
    return NULL;
}

static void wait_for_flushed(int64_t target)
{
    int64_t deadline_ns = ms_monotonic_ns() + TIMEOUT_NS;
    for (;;) {
        uint32_t seen = ms_sequence_load(&control.flush_seq);
        if (ms_load_acquire(&control.flushed.value) >= target)
            return;
        /* A wake-up for the number before this one may come late and end the wait without cause; what must not
         * happen is that none comes. */
        int moved = ms_sequence_wait(&control.flush_seq, seen, TIMEOUT_NS);
        CHECK(moved || ms_monotonic_ns() < deadline_ns);
        if (moved)
            deadline_ns = ms_monotonic_ns() + TIMEOUT_NS;
    }
}

/* The same, but only the sync that it waits for wakes it. */
static void wait_for_synced(int64_t target)
{
    int64_t deadline_ns = ms_monotonic_ns() + TIMEOUT_NS;
    for (;;) {
        uint32_t seen = ms_sequence_load(&control.flush_seq);
        int64_t sync_target = ms_load_acquire(&control.flusher.sync_target);
        if (ms_load_acquire(&control.flushed.value) >= target)
            return;
        CHECK(ms_monotonic_ns() < deadline_ns);
        ms_control_wait_synced(&control, seen, sync_target, sync_target < target, TIMEOUT_NS);
    }
}

static void *sync_waiter(void *unused)
{
    (void)unused;
    for (int64_t target = 1; target <= ROUNDS; target++)
        wait_for_synced(target);
    return NULL;
}

static void *waiter(void *unused)
{
    (void)unused;
    for (int64_t target = 1; target <= ROUNDS; target++)
        wait_for_flushed(target);
    return NULL;
}

static void *poller(void *unused)
{
    (void)unused;
    for (int64_t target = 0; target < ROUNDS; target += 100)
        CHECK(ms_poll_until_above(&control.flushed, target, TIMEOUT_NS, 20000) == 1);
    return NULL;
}

int main(void)
{
    dice_begin("stress_waiting");
    sem_init(&semaphore, 0, 0);
    char path[] = "/tmp/stress_waiting.XXXXXX";
    fd = mkstemp(path);
    CHECK(fd >= 0);
    unlink(path);
    pthread_t threads[2 * WAITERS + 2];
    pthread_create(&threads[0], NULL, flusher, NULL);
    for (int i = 0; i < WAITERS; i++)
        pthread_create(&threads[i + 1], NULL, waiter, NULL);
    pthread_create(&threads[WAITERS + 1], NULL, poller, NULL);
    for (int i = 0; i < WAITERS; i++)
        pthread_create(&threads[i + WAITERS + 2], NULL, sync_waiter, NULL);
    for (int64_t wrote = 1; wrote <= ROUNDS; wrote++) {
        int64_t pass = ms_load_relaxed(&control.slot_pass.value) + 1;
        ms_store_relaxed(&control.slots[pass & 1].wrote, wrote);
        ms_store_relaxed(&control.slots[pass & 1].store_timestamp_ms, wrote);
        ms_store_release(&control.slot_pass.value, pass);
        ms_store_release(&control.committed.value, wrote);
        if (dice(8) == 0) /* as a writer that refused a put: the number is one ahead of the syncs */
            ms_sequence_raise(&control.flush_seq);
        ms_latch_wakeup(&control.latch[MS_FLUSHER], &semaphore);
        if (dice(4) == 0)
            wait_for_flushed(wrote);
        else if (dice(4) == 0)
            wait_for_synced(wrote);
    }
    wait_for_flushed(ROUNDS);
    for (int i = 1; i < 2 * WAITERS + 2; i++)
        pthread_join(threads[i], NULL);
    __atomic_store_n(&done, 1, __ATOMIC_RELEASE);
    pthread_cancel(threads[0]); /* it sleeps in sem_clockwait, a cancellation point */
    pthread_join(threads[0], NULL);
    return 0;
}
