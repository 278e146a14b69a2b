#define _GNU_SOURCE
#include "sequence.h"

#include "atomics.h"
#include "failpoint.h"
#include "futex.h"

#define BLIND_STEP_NS 10000000

uint32_t ms_sequence_load(const struct ms_sequence *sequence)
{
    return ms_load_acquire(&sequence->value);
}

void ms_sequence_raise(struct ms_sequence *sequence, const struct ms_doorbell *sleepers)
{
    ms_add(&sequence->value, 1);
    MS_FAILPOINT("sequence_raised");
    /* A sleeper counts itself, fences, and looks at the number: either it sees
     * the new one or this sees the sleeper. */
    ms_fence();
    if (ms_load_relaxed(&sleepers->has_notified) != 0)
        ms_futex_wake_all(&sequence->value);
}

void ms_sequence_shout(struct ms_sequence *sequence)
{
    ms_add(&sequence->value, 1);
    MS_FAILPOINT("sequence_shouted");
    ms_futex_wake_all(&sequence->value);
}

static int wait_counted(const struct ms_sequence *sequence, uint32_t seen, struct ms_doorbell *sleepers, int64_t timeout_ns)
{
    ms_add(&sleepers->has_notified, 1);
    ms_fence();
    if (ms_load_acquire(&sequence->value) == seen)
        ms_futex_wait(&sequence->value, seen, timeout_ns);
    ms_add(&sleepers->has_notified, (uint32_t)-1);
    return ms_load_acquire(&sequence->value) != seen;
}

int ms_sequence_wait(const struct ms_sequence *sequence, uint32_t seen, struct ms_doorbell *sleepers, int64_t timeout_ns)
{
    if (sleepers != NULL)
        return wait_counted(sequence, seen, sleepers, timeout_ns);
    int64_t until_ns = ms_monotonic_ns() + timeout_ns;
    for (;;) {
        if (ms_load_acquire(&sequence->value) != seen)
            return 1;
        int64_t left_ns = until_ns - ms_monotonic_ns();
        if (left_ns <= 0)
            return 0;
        ms_futex_wait(&sequence->value, seen, left_ns < BLIND_STEP_NS ? left_ns : BLIND_STEP_NS);
    }
}
