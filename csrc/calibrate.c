#define _GNU_SOURCE
#include "calibrate.h"

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <time.h>

#include "futex.h"

#define ROUNDS_MAX 1000

struct sleeper {
    sem_t go, done;
    int rounds;
    int64_t posted_ns;
    int64_t woke_ns[ROUNDS_MAX];
};

static void *sleep_and_wake(void *argument)
{
    struct sleeper *sleeper = argument;
    for (int round = 0; round < sleeper->rounds; round++) {
        while (sem_wait(&sleeper->go) != 0)
            ;
        sleeper->woke_ns[round] = ms_monotonic_ns() - sleeper->posted_ns;
        sem_post(&sleeper->done);
    }
    return NULL;
}

static int by_size(const void *left, const void *right)
{
    int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return (a > b) - (a < b);
}

int64_t ms_calibrate_wake_ns(int rounds, int percent)
{
    if (rounds < 1 || rounds > ROUNDS_MAX || percent < 0 || percent > 100)
        return -EINVAL;
    struct sleeper *sleeper = calloc(1, sizeof *sleeper);
    if (sleeper == NULL)
        return -ENOMEM;
    sleeper->rounds = rounds;
    sem_init(&sleeper->go, 0, 0);
    sem_init(&sleeper->done, 0, 0);
    pthread_t thread;
    int failed = pthread_create(&thread, NULL, sleep_and_wake, sleeper);
    if (failed == 0) {
        struct timespec settle = {.tv_nsec = 50000}; /* until the thread sleeps and its CPU is idle */
        for (int round = 0; round < rounds; round++) {
            nanosleep(&settle, NULL);
            sleeper->posted_ns = ms_monotonic_ns();
            sem_post(&sleeper->go);
            while (sem_wait(&sleeper->done) != 0)
                ;
        }
        pthread_join(thread, NULL);
        qsort(sleeper->woke_ns, (size_t)rounds, sizeof sleeper->woke_ns[0], by_size);
    }
    int64_t answer = failed != 0 ? -failed : sleeper->woke_ns[(int64_t)(rounds - 1) * percent / 100];
    sem_destroy(&sleeper->go);
    sem_destroy(&sleeper->done);
    free(sleeper);
    return answer;
}
