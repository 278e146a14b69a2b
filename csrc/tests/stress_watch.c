/* Readers that wait for descriptors, and consumers that come and go under a pulse, at full speed: no message is waited for in vain.
 *
 * Threads act as the processes: a reputter notes messages of queues and wakes their readers; one thread of the readers' process
 * beats. Each wait may last TIMEOUT_MS; one that does was a lost wake-up. */

#include "check.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>

#include "../arrivals.h"
#include "../pulse.cdef.h"
#include "../watch.cdef.h"

#define ROUNDS 3000
#define READERS 3
#define SLOTS 4
#define TIMEOUT_MS 20000
#define CONSUMERS 3

static struct ms_control control;
static void *watch;
static void *pulse;
static int64_t put[READERS];      /* the end of the newest message of each reader's queues */
static int64_t found[READERS];
static int is_over;
static char path[] = "/tmp/stress_watch.XXXXXX";

/* Messages for each reader, of which the next comes once the one before was read. */
static void *reputter(void *unused)
{
    (void)unused;
    uint32_t state = (uint32_t)start_seed | 1;
    for (int64_t end = 1, done = 0; done < READERS; end++) {
        done = 0;
        for (int reader = 0; reader < READERS; reader++) {
            done += ms_load_acquire(&found[reader]) < 0;
            if (ms_load_acquire(&found[reader]) != ms_load_relaxed(&put[reader]))
                continue;
            state = state * 1664525 + 1013904223;
            const uint32_t slot = (uint32_t)reader * 32 * 5 + (state >> 16) % SLOTS;
            ms_arrivals_note(&control.arrivals, slot, end);
            ms_store_release(&put[reader], end);
            ms_store_release(&control.reput_from.value, end);
            ms_arrivals_wake(&control, ms_arrivals_bit(slot));
        }
    }
    return NULL;
}

static void *reader(void *argument)
{
    const int me = (int)(intptr_t)argument;
    struct ms_watched watched = {.fd = eventfd(0, EFD_NONBLOCK)};
    struct ms_awaited rows[2][SLOTS];
    ms_watch_add(watch, &watched);
    for (int round = 0; round < ROUNDS; round++) {
        struct ms_awaited *mine = rows[round & 1]; /* the thread may look at those of the round before until it is armed again */
        uint64_t raised;
        ms_watch_disarm(watch, &watched);
        (void)!read(watched.fd, &raised, sizeof raised);
        const int64_t seen = ms_load_acquire(&found[me]);
        for (uint32_t i = 0; i < SLOTS; i++)
            mine[i] = (struct ms_awaited){.level = &control.committed, .looked_end = seen, .slot = (uint32_t)me * 32 * 5 + i};
        ms_watch_arm(watch, &watched, &control, mine, SLOTS);
        struct pollfd wait = {.fd = watched.fd, .events = POLLIN};
        CHECK(poll(&wait, 1, TIMEOUT_MS) == 1);
        while (ms_load_acquire(&put[me]) <= seen) /* the reputter notes it before it publishes where it ends */
            ms_pause();
        ms_store_release(&found[me], ms_load_acquire(&put[me]));
        if (round % 97 == me) {
            ms_watch_remove(watch, &watched);
            ms_watch_add(watch, &watched);
        }
    }
    ms_watch_remove(watch, &watched);
    close(watched.fd);
    ms_store_release(&found[me], -1);
    return NULL;
}

static void *beating(void *unused)
{
    (void)unused;
    while (!ms_load_acquire(&is_over))
        ms_pulse_wait(pulse, 1000, 1000000);
    return NULL;
}

static void *consumer(void *argument)
{
    const uint32_t me = (uint32_t)(intptr_t)argument;
    for (int round = 0; round < ROUNDS / 30; round++) {
        struct ms_member member = {.incarnation = me, .slots_at = 4096, .locks_at = 1ll << 40, .records_at = 1 << 20, .slots = 1024};
        member.slot = me;
        member.fd = open(path, O_RDWR | O_CLOEXEC);
        CHECK(member.fd >= 0);
        void *beat = ms_beat_add(pulse, &member);
        CHECK(beat != NULL && ms_beat_watch(pulse, beat, path, MS_NAME_LENGTH) == 0);
        for (uint32_t wanted = MS_BEAT_CHANGED | MS_BEAT_ROUSED, taken = 0; taken != wanted; taken |= ms_beat_take(beat)) {
            ms_beat_set_records(beat, me);
            ms_beat_rouse(beat);
        }
        ms_beat_forget(pulse, beat);
        ms_beat_remove(pulse, beat);
        close(member.fd);
    }
    return NULL;
}

int main(void)
{
    dice_begin("stress_watch");
    CHECK(close(mkstemp(path)) == 0);
    int error_number = 0;
    control.committed.value = INT64_MAX;
    watch = ms_watch_start(&control, &error_number);
    pulse = ms_pulse_new();
    CHECK(watch != NULL && pulse != NULL);
    pthread_t readers[READERS], consumers[CONSUMERS], others[2];
    pthread_create(&others[0], NULL, beating, NULL);
    for (intptr_t i = 0; i < READERS; i++)
        pthread_create(&readers[i], NULL, reader, (void *)i);
    for (intptr_t i = 0; i < CONSUMERS; i++)
        pthread_create(&consumers[i], NULL, consumer, (void *)i);
    pthread_create(&others[1], NULL, reputter, NULL);
    for (int i = 0; i < READERS; i++)
        pthread_join(readers[i], NULL);
    for (int i = 0; i < CONSUMERS; i++)
        pthread_join(consumers[i], NULL);
    pthread_join(others[1], NULL);
    ms_store_release(&is_over, 1);
    pthread_join(others[0], NULL);
    ms_watch_stop(watch);
    unlink(path);
    return 0;
}
