#include "base.h"
#include "sequence.h"

uint32_t ms_sequence_load(const struct ms_sequence *sequence)
{
    return ms_load_acquire(&sequence->value);
}

static uint32_t raise_to(struct ms_sequence *sequence)
{
    uint32_t value = ms_add(&sequence->value, 1);
    MS_FAILPOINT("sequence_raised");
    return value;
}

void ms_sequence_raise(struct ms_sequence *sequence)
{
    raise_to(sequence);
    ms_futex_wake_all(&sequence->value);
}

void ms_sequence_raise_for_next(struct ms_sequence *sequence)
{
    ms_futex_wake(&sequence->value, ms_sequence_bit(raise_to(sequence)));
}

int ms_sequence_wait(const struct ms_sequence *sequence, uint32_t seen, int64_t timeout_ns)
{
    if (ms_load_acquire(&sequence->value) == seen)
        ms_futex_wait(&sequence->value, seen, timeout_ns);
    return ms_load_acquire(&sequence->value) != seen;
}
