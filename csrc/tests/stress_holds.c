/* Readers and the cleaner at full speed: the cleaner sees every hold that a reader has.
 *
 * Threads act as the processes. A reader holds the newest segment that it can and checks that it is not "deleted"; the
 * cleaner refuses holds on the oldest segment and deletes it once it finds no hold on it. */
#include "check.h"

#include <errno.h>
#include <pthread.h>

#include "../atomics.h"
#include "../cleaning.h"

#define SEGMENTS 20000
#define READERS 3

static struct ms_cleaning cleaning;
static uint32_t deleted[SEGMENTS];
static int64_t oldest;

static uint32_t started; /* readers that have held a segment */

static void *reader(void *number)
{
    uint64_t owner = ((uint64_t)(uintptr_t)number + 1) << 32 | 1;
    uint64_t held = 0;
    int64_t segment;
    while ((segment = ms_load_acquire(&oldest)) < SEGMENTS) {
        int32_t slot = ms_hold_take(&cleaning, owner, segment);
        if (slot < 0) {
            CHECK(slot == -ENOENT);
            continue;
        }
        for (int i = 0; i < 20; i++)
            CHECK(ms_load_acquire(&deleted[segment]) == 0);
        if (held++ == 0)
            ms_add(&started, 1u);
        ms_hold_release(&cleaning, slot, owner);
    }
    return (void *)(uintptr_t)held;
}

int main(void)
{
    dice_begin("stress_holds");
    ms_cleaning_format(&cleaning, 1);
    pthread_t readers[READERS];
    for (uintptr_t i = 0; i < READERS; i++)
        CHECK(pthread_create(&readers[i], NULL, reader, (void *)i) == 0);
    while (ms_load_acquire(&started) < READERS) /* on a busy machine the cleaner could delete all of them first */
        ms_pause();
    for (int64_t segment = 0; segment < SEGMENTS; segment++) {
        ms_cleaning_refuse_holds(&cleaning, segment + 1);
        while (ms_hold_find(&cleaning, 0, segment + 1) >= 0)
            ms_pause();
        ms_store_release(&deleted[segment], 1u);
        ms_store_release(&oldest, segment + 1);
    }
    uint64_t held = 0;
    for (int i = 0; i < READERS; i++) {
        void *count;
        CHECK(pthread_join(readers[i], &count) == 0);
        held += (uintptr_t)count;
    }
    CHECK(held > 0);
    return 0;
}
