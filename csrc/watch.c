#include "base.h"
#include "watch.cdef.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

struct watch {
    const struct ms_control *control;
    struct ms_sleeper sleeper;   /* of the thread */
    pthread_t thread;
    pthread_mutex_t lock;        /* guards the rest */
    struct ms_watched *first;
    uint32_t bits;               /* that the thread sleeps for */
    int is_ending;
};

static void raise_if_arrived(const struct watch *watch, struct ms_watched *watched)
{
    for (uint32_t i = 0; i < watched->count; i++) {
        const struct ms_awaited *row = &watched->rows[i];
        if (ms_arrivals_has(watch->control, row->level, row->looked_end, row->slot)) {
            const uint64_t one = 1;
            watched->count = 0;
            (void)!write(watched->fd, &one, sizeof one); /* it fails only where it is readable already */
            return;
        }
    }
}

static void sleep_until_stirred(struct watch *watch, uint32_t seen)
{
    for (int slept = MS_ARRIVALS_SIGNAL; slept != MS_ARRIVALS_STIRRED;) {
        const uint32_t arrivals = ms_load_acquire(&watch->control->arrival_seq.value);
        pthread_mutex_lock(&watch->lock);
        ms_fence(); /* after the load of the sequence: a reader that was armed before it rose is seen here */
        for (struct ms_watched *each = watch->first; each != NULL; each = each->next)
            raise_if_arrived(watch, each);
        pthread_mutex_unlock(&watch->lock);
        slept = ms_arrivals_sleep(&watch->sleeper, seen, arrivals, MS_ARRIVALS_SLEEP_NS);
    }
}

static void *run(void *argument)
{
    struct watch *watch = argument;
    for (;;) {
        const uint32_t seen = ms_load_acquire(&watch->sleeper.stirs);
        uint32_t bits = 0;
        pthread_mutex_lock(&watch->lock);
        for (const struct ms_watched *each = watch->first; each != NULL; each = each->next)
            bits |= each->bits;
        watch->bits = bits;
        const int is_ending = watch->is_ending;
        pthread_mutex_unlock(&watch->lock);
        if (is_ending)
            return NULL;
        ms_arrivals_sleep_for(&watch->sleeper, watch->control, bits, seen);
        sleep_until_stirred(watch, seen);
    }
}

void *ms_watch_start(const struct ms_control *control, int *error_number)
{
    struct watch *watch = calloc(1, sizeof *watch);
    if (watch == NULL) {
        *error_number = ENOMEM;
        return NULL;
    }
    watch->control = control;
    pthread_mutex_init(&watch->lock, NULL);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    *error_number = pthread_create(&watch->thread, NULL, run, watch);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (*error_number == 0)
        return watch;
    pthread_mutex_destroy(&watch->lock);
    free(watch);
    return NULL;
}

void ms_watch_stop(void *argument)
{
    struct watch *watch = argument;
    pthread_mutex_lock(&watch->lock);
    watch->is_ending = 1;
    pthread_mutex_unlock(&watch->lock);
    ms_arrivals_stir(&watch->sleeper);
    pthread_join(watch->thread, NULL);
    pthread_mutex_destroy(&watch->lock);
    free(watch);
}

void ms_watch_add(void *argument, struct ms_watched *watched)
{
    struct watch *watch = argument;
    pthread_mutex_lock(&watch->lock);
    watched->count = 0;
    watched->next = watch->first;
    watch->first = watched;
    pthread_mutex_unlock(&watch->lock);
}

void ms_watch_remove(void *argument, struct ms_watched *watched)
{
    struct watch *watch = argument;
    pthread_mutex_lock(&watch->lock);
    struct ms_watched **at = &watch->first;
    while (*at != NULL && *at != watched)
        at = &(*at)->next;
    if (*at != NULL)
        *at = watched->next;
    watched->count = 0;
    pthread_mutex_unlock(&watch->lock);
}

void ms_watch_arm(void *argument, struct ms_watched *watched, const struct ms_control *theirs, struct ms_awaited *rows, uint32_t count)
{
    struct watch *watch = argument;
    uint32_t bits = 0;
    for (uint32_t i = 0; i < count; i++) {
        const char *level = (const char *)rows[i].level;
        rows[i].level = (const struct ms_position *)((const char *)watch->control + (level - (const char *)theirs));
        bits |= ms_arrivals_bit(rows[i].slot);
    }
    pthread_mutex_lock(&watch->lock);
    watched->rows = rows;
    watched->count = count;
    watched->bits = bits;
    ms_fence(); /* before the look: a message that it does not find raises the sequence later, and the thread then finds this */
    raise_if_arrived(watch, watched);
    const int is_new = (bits & ~watch->bits) != 0;
    pthread_mutex_unlock(&watch->lock);
    if (is_new)
        ms_arrivals_stir(&watch->sleeper);
}

void ms_watch_disarm(void *argument, struct ms_watched *watched)
{
    struct watch *watch = argument;
    pthread_mutex_lock(&watch->lock);
    watched->count = 0;
    pthread_mutex_unlock(&watch->lock);
}
