#pragma once

#include "control.h"
#include "arrivals.cdef.h"
#include "atomics.h"

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
