/* The order of the reputter's steps, seen at its failpoints: entries, then `reput_from`, then the wake-up; no sleep
 * while work waits that was published before the latch was armed. */
#define MS_FAILPOINT(name) at_step(name)
static void at_step(const char *name);
#include "reput_rig.h"
#include "../latch.cdef.h"
#define ms_latch_wait ms_latch_really_wait
#include "../latch.c"
#undef ms_latch_wait
#include "../arrivals.c"
#include "../reput.c"
#include "../sequence.c"

static sem_t semaphore;
static int next;          /* the record that is published next */
static int at_arming;     /* number of records that are published while the latch is armed, one each time */
static int visible;       /* records below reput_from */
static int batches, sleeps;

static void publish(int64_t beyond)
{
    ms_store_release(&control.committed.value, starts[++next] + beyond);
    ms_latch_wakeup(&control.latch[MS_REPUTTER], &semaphore);
}

static void at_step(const char *name)
{
    const int64_t reput_from = ms_load_acquire(&control.reput_from.value);
    const uint32_t raised = ms_sequence_load(&control.arrival_seq);
    if (strcmp(name, "latch_arming") == 0 && at_arming > 0) {
        at_arming--;
        publish(0);
    } else if (strcmp(name, "batch_dispatched") == 0) {
        reput.stream.rounds = 0; /* never a stream, which ends by the clock */
        CHECK(reput_from == starts[visible] && raised == (uint32_t)batches);
        while (visible < next)
            CHECK(has_entry(visible++));
    } else if (strcmp(name, "reput_from_moved") == 0) {
        CHECK(reput_from == starts[visible] && raised == (uint32_t)batches);
        batches++;
    } else if (strcmp(name, "arrivals_raised") == 0) {
        CHECK(reput_from == starts[visible] && raised == (uint32_t)batches);
    }
}

/* Return as if a signal arrived, instead of sleeping. */
int ms_latch_wait(struct ms_latch *latch, void *unused, int64_t timeout_ns)
{
    (void)unused;
    CHECK(timeout_ns > 0 && ms_load_relaxed(&latch->has_notified) == 0 && visible == next);
    ms_latch_disarm(latch);
    sleeps++;
    return -EINTR;
}

static int sleepy_run(void)
{
    ms_latch_arm(&control.latch[MS_REPUTTER], &semaphore);
    const int reason = ms_reput_run(&reput, INT64_MAX / 2, 1);
    CHECK(ms_load_relaxed(&control.latch[MS_REPUTTER].has_notified) == 1);
    return reason;
}

int main(void)
{
    dice_begin("test_reput");
    sem_init(&semaphore, 0, 0);
    rig_begin(&semaphore);
    reput.woken_up_to = 0;

    CHECK(ms_reput_run(&reput, INT64_MAX / 2, 0) == MS_REPUT_IDLE && sleeps == 0);
    publish(0);
    CHECK(ms_reput_run(&reput, 0, 0) == MS_REPUT_TIME && visible == 1);
    CHECK(ms_reput_run(&reput, 0, 0) == MS_REPUT_IDLE);
    CHECK(sleepy_run() == MS_REPUT_IDLE && sleeps == 1);

    /* Records are found before the sleep, and while the latch is armed again. */
    publish(0);
    CHECK(sleepy_run() == MS_REPUT_IDLE && sleeps == 2 && visible == 2);
    for (at_arming = 1; next < 40; at_arming = 1 + (int)dice(3))
        CHECK(sleepy_run() == MS_REPUT_IDLE && visible == next);
    at_arming = 0;

    /* It sleeps until the rest of a record is there. */
    publish(20);
    CHECK(sleepy_run() == MS_REPUT_IDLE && visible == next);
    const int before = batches, slept = sleeps;
    CHECK(sleepy_run() == MS_REPUT_IDLE && batches == before && sleeps == slept + 1);
    publish(0);
    CHECK(sleepy_run() == MS_REPUT_IDLE && batches == before + 1 && visible == next);

    /* The allocator is woken once for each piece of log that uses up its window. */
    sem_t allocator;
    sem_init(&allocator, 0, 0);
    reput.allocator_semaphore = &allocator;
    reput.warmed_from = reput.reput_from + 1 - MS_REPUT_WARM_BYTES;
    for (int i = 0; i < 3; i++) {
        publish(0);
        CHECK(sleepy_run() == MS_REPUT_IDLE && visible == next);
        CHECK(sem_trywait(&allocator) == (i == 0 ? 0 : -1));
        ms_latch_arm(&control.latch[MS_ALLOCATOR], &allocator);
    }

    /* Records that a predecessor dispatched beyond the limit wake consumers once, when the limit has passed them. */
    reput.woken_up_to = starts[visible] - 1;
    batches++;
    CHECK(ms_reput_run(&reput, 0, 0) == MS_REPUT_IDLE && ms_sequence_load(&control.arrival_seq) == (uint32_t)batches);
    CHECK(ms_reput_run(&reput, 0, 0) == MS_REPUT_IDLE && ms_sequence_load(&control.arrival_seq) == (uint32_t)batches);

    /* It returns to Python for another segment, and at bytes that are no record. */
    reput.segment_bytes = starts[visible];
    publish(0);
    CHECK(sleepy_run() == MS_REPUT_SEGMENT);
    reput.segment_bytes = sizeof log_bytes;
    memset(log_bytes + starts[visible], 0xff, 30);
    CHECK(sleepy_run() == MS_REPUT_DECIDE && visible == next - 1);

    CHECK(stats.messages == (uint64_t)visible && stats.lag_max_bytes > 0);
    return 0;
}
