#pragma once

#include "control.h"
#include "sequence.cdef.h"

/* The bit of sleepers that wait until the sequence is raised to `value` (ms_futex_wait_for). */
static inline uint32_t ms_sequence_bit(uint32_t value)
{
    return (uint32_t)1 << (value & 31);
}
