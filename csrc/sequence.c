#define _GNU_SOURCE
#include "sequence.h"

#include "atomics.h"
#include "failpoint.h"
#include "futex.h"

uint32_t ms_sequence_load(const struct ms_sequence *sequence)
{
    return ms_load_acquire(&sequence->value);
}

void ms_sequence_raise(struct ms_sequence *sequence)
{
    ms_add(&sequence->value, 1);
    MS_FAILPOINT("sequence_raised");
    ms_futex_wake_all(&sequence->value);
}

int ms_sequence_wait(const struct ms_sequence *sequence, uint32_t seen, int64_t timeout_ns)
{
    if (ms_load_acquire(&sequence->value) == seen)
        ms_futex_wait(&sequence->value, seen, timeout_ns);
    return ms_load_acquire(&sequence->value) != seen;
}
