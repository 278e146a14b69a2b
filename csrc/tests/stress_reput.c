/* The reputter's rounds at full speed beside a writer and a consumer: the consumer sees every record.
 *
 * Threads act as the processes. The writer publishes record after record, singly and in streams, and wakes the reputter; the
 * consumer follows the arrival sequence and finds a queue entry for all that `reput_from` covers. Each wait may last
 * TIMEOUT_NS; one that does was a lost wake-up. */
#include "reput_rig.h"
#include <pthread.h>
#include <semaphore.h>

#include "../latch.cdef.h"
#include "../sequence.h"

#define TIMEOUT_NS 20000000000

static sem_t semaphore;
static int done;

static void *reputter(void *unused)
{
    (void)unused;
    while (!__atomic_load_n(&done, __ATOMIC_ACQUIRE)) {
        ms_latch_arm(&control.latch[MS_REPUTTER], &semaphore);
        /* Longer than the consumer's timeout, so that a lost wake-up fails the test. */
        const int reason = ms_reput_run(&reput, ms_monotonic_ns() + 2 * TIMEOUT_NS, 1);
        CHECK(reason == MS_REPUT_TIME || reason == MS_REPUT_IDLE);
    }
    return NULL;
}

static void wait_for_dispatched(int64_t target)
{
    const int64_t deadline_ns = ms_monotonic_ns() + TIMEOUT_NS;
    for (;;) {
        const uint32_t seen = ms_sequence_load(&control.arrival_seq);
        if (ms_load_acquire(&control.reput_from.value) >= target)
            return;
        CHECK(ms_sequence_wait(&control.arrival_seq, seen, TIMEOUT_NS) || ms_monotonic_ns() < deadline_ns);
    }
}

static void *consumer(void *unused)
{
    (void)unused;
    for (int i = 0; i < RECORDS; i++) {
        wait_for_dispatched(starts[i + 1]);
        CHECK(has_entry(i));
    }
    return NULL;
}

int main(void)
{
    dice_begin("stress_reput");
    sem_init(&semaphore, 0, 0);
    rig_begin(&semaphore);
    pthread_t threads[2];
    pthread_create(&threads[0], NULL, reputter, NULL);
    pthread_create(&threads[1], NULL, consumer, NULL);
    for (int i = 0; i < RECORDS; i++) {
        const int single = i / 100 % 2; /* streams and single puts in turns */
        ms_store_release(&control.committed.value, dice(8) ? starts[i + 1] : starts[i + 1] - 1 - (int64_t)dice(40));
        ms_latch_wakeup(&control.latch[MS_REPUTTER], &semaphore);
        ms_store_release(&control.committed.value, starts[i + 1]);
        ms_latch_wakeup(&control.latch[MS_REPUTTER], &semaphore);
        if (single)
            wait_for_dispatched(starts[i + 1]);
        for (int64_t spins = (int64_t)dice(single ? 4000 : 200); spins > 0; spins--)
            ms_pause();
    }
    wait_for_dispatched(starts[RECORDS]);
    pthread_join(threads[1], NULL);
    CHECK(ms_load_acquire(&control.reput_from.value) == starts[RECORDS]);
    __atomic_store_n(&done, 1, __ATOMIC_RELEASE);
    pthread_cancel(threads[0]); /* it sleeps in sem_clockwait, a cancellation point */
    pthread_join(threads[0], NULL);
    CHECK(stats.messages == RECORDS && stats.entries == RECORDS);
    return 0;
}
