#pragma once

#include "control.h"
#include "recorder.cdef.h"

#define MS_RECORDER_MAGIC 0x4d535245434f5244ULL /* "MSRECORD" */
#define MS_PHASE_NONE (MS_PHASES + 1)

_Static_assert(sizeof(struct ms_stall) == 192 && offsetof(struct ms_stall, crc) == 188, "the checksum is the end of a stall");

/* The writer, after its commit point: note that a pass up to `end` waits since `since_ns`, unless an earlier one still waits. */
static inline void ms_recorder_wait(struct ms_waiting *waiting, int64_t reached, int64_t end, int64_t since_ns)
{
    if (reached < waiting->end) /* only this process writes the line */
        return;
    ms_store_relaxed(&waiting->since_ns, since_ns);
    ms_store_release(&waiting->end, end);
}
