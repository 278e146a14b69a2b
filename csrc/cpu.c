#include "base.h"
#include "cpu.cdef.h"

#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#define INTERACTIVE_SLICE_NS 100000 /* the kernel's minimum */

/* The kernel's struct sched_attr, in its first size. */
struct attributes {
    uint32_t size;
    uint32_t policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime;
    uint64_t deadline;
    uint64_t period;
};

int ms_cpu_schedule(int how)
{
    struct attributes attributes = {.size = sizeof attributes, .nice = getpriority(PRIO_PROCESS, 0)};
    attributes.policy = how == MS_CPU_BATCH ? SCHED_BATCH : SCHED_OTHER;
    attributes.runtime = how == MS_CPU_BATCH ? 0 : INTERACTIVE_SLICE_NS;
    return syscall(SYS_sched_setattr, 0, &attributes, 0) == 0 ? 0 : -errno;
}

/* Restore the mask at once, so that the scheduler may choose again later. */
static void leave_cpu(int cpu)
{
    cpu_set_t allowed, others;
    if (cpu < 0 || sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) < 2)
        return;
    others = allowed;
    CPU_CLR(cpu, &others);
    if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0)
        return;
    sched_setaffinity(0, sizeof allowed, &allowed);
}

void ms_mover_note(struct ms_mover *mover, int same_cpu, int64_t now_ns)
{
    if (!same_cpu) {
        mover->passes = 0;
        mover->pause_ns = MS_MOVE_PAUSE_NS;
        return;
    }
    if (++mover->passes < MS_MOVE_AFTER_PASSES || now_ns < mover->next_ns)
        return;
    leave_cpu(sched_getcpu());
    mover->passes = 0;
    mover->next_ns = now_ns + mover->pause_ns;
    if (mover->pause_ns < MS_MOVE_PAUSE_NS_MAX)
        mover->pause_ns *= 2;
}

_Static_assert(sizeof(cpu_set_t) == sizeof(((struct ms_affinity *)0)->allowed), "as many CPUs as sched_setaffinity knows");

void ms_affinity_begin(struct ms_affinity *affinity)
{
    affinity->cpu = -1;
    affinity->is_enabled = 1;
}

/* Return whether the mask is still the one that was set here. */
static int is_own_mask(const struct ms_affinity *affinity, const cpu_set_t *mask)
{
    return affinity->is_bound && CPU_COUNT(mask) == 1 && CPU_ISSET((size_t)affinity->cpu, mask);
}

static void bind(struct ms_affinity *affinity, int cpu)
{
    cpu_set_t mask, only;
    if (sched_getaffinity(0, sizeof mask, &mask) != 0)
        return;
    if (is_own_mask(affinity, &mask))
        memcpy(&mask, affinity->allowed, sizeof mask);
    affinity->is_bound = 0;
    affinity->cpu = cpu;
    if (cpu < 0 || cpu >= CPU_SETSIZE || CPU_COUNT(&mask) < 2 || !CPU_ISSET((size_t)cpu, &mask))
        return;
    CPU_ZERO(&only);
    CPU_SET((size_t)cpu, &only);
    memcpy(affinity->allowed, &mask, sizeof mask);
    affinity->is_bound = sched_setaffinity(0, sizeof only, &only) == 0;
}

static void leave(struct ms_affinity *affinity)
{
    cpu_set_t mask;
    if (sched_getaffinity(0, sizeof mask, &mask) == 0 && is_own_mask(affinity, &mask)) {
        memcpy(&mask, affinity->allowed, sizeof mask);
        sched_setaffinity(0, sizeof mask, &mask);
    }
    affinity->is_bound = 0;
    affinity->cpu = -1;
}

void ms_affinity_note(struct ms_affinity *affinity, int cpu, int64_t now_ns)
{
    if (!affinity->is_enabled)
        return;
    if (affinity->cpu < 0) {
        bind(affinity, cpu);
        affinity->until_ns = now_ns + MS_AFFINITY_NS;
    } else if (now_ns >= affinity->until_ns) {
        leave(affinity);
    }
}

void ms_affinity_follow(struct ms_affinity *affinity, int cpu)
{
    if (affinity->is_enabled && cpu != affinity->cpu)
        bind(affinity, cpu);
}

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
