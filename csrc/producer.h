#pragma once

#include "control.h"
#include "session.h"
#include "producer.cdef.h"

/* What the two modules of a process must have in common: they use one struct ms_producer and one mapping of shared memory. */
#define MS_PRODUCER_CALLS_BUILD \
    ((uint64_t)MS_PRODUCER_CALLS_VERSION << 32 | MS_CONTROL_LAYOUT_VERSION << 16 | MS_SESSION_LAYOUT_VERSION)
