#pragma once

#include "control.h"
#include "arrivals.cdef.h"

#define MS_ARRIVALS_SLEEP_NS 1000000000 /* the longest: a process that is killed before it wakes the others loses their wake-up */

_Static_assert(MS_ARRIVAL_SLOTS == 32 * 32, "32 sets of queues for each bit of a futex");

/* The bit of the sleepers that wait for queues of this set. */
static inline uint32_t ms_arrivals_bit(uint32_t slot)
{
    return (uint32_t)1 << (slot / 32 & 31);
}

/* The reputter: a message that ends at `end` goes to a queue of this set. */
static inline void ms_arrivals_note(struct ms_arrivals *arrivals, uint32_t slot, int64_t end)
{
    ms_store_relaxed(&arrivals->end[slot], end);
}

/* Before a thread looks and sleeps: what it sleeps for, and `stirs` as it has seen it. */
void ms_arrivals_sleep_for(struct ms_sleeper *sleeper, const struct ms_control *control, uint32_t bits, uint32_t seen);
/* Sleep until a message may have arrived after `arrivals` was loaded, or the timeout: ARRIVED; or SIGNAL or STIRRED. */
int ms_arrivals_sleep(struct ms_sleeper *sleeper, uint32_t seen, uint32_t arrivals, int64_t timeout_ns);
