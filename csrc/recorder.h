#pragma once

#include <stddef.h>
#include <stdint.h>

#include "atomics.h"
#include "control.h"
#include "recorder.cdef.h"

#define MS_RECORDER_MAGIC 0x4d535245434f5244ULL /* "MSRECORD" */
#define MS_PHASE_NONE (MS_PHASES + 1)

_Static_assert(sizeof(struct ms_stall) == 192 && offsetof(struct ms_stall, crc) == 188, "the checksum is the end of a stall");
_Static_assert(offsetof(struct ms_recorder_ring, by_cause) == 128, "ring: its head on a line of its own");
_Static_assert(sizeof(struct ms_recorder_ring) % 128 == 0, "ring: whole lines");
_Static_assert(offsetof(struct ms_recorder, for_sync) == 128, "what is written each pass has a line of its own");
_Static_assert(offsetof(struct ms_recorder, ring) == 384, "rings after the head");

/* The writer, after its commit point: note that a pass up to `end` waits since `since_ns`, unless an earlier one still waits. */
static inline void ms_recorder_wait(struct ms_waiting *waiting, int64_t reached, int64_t end, int64_t since_ns)
{
    if (reached < waiting->end) /* only this process writes the line */
        return;
    ms_store_relaxed(&waiting->since_ns, since_ns);
    ms_store_release(&waiting->end, end);
}
