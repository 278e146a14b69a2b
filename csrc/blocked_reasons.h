#pragma once

#include <stddef.h>
#include <stdint.h>

#include "control.h"
#include "blocked_reasons.cdef.h"

#define MS_BLOCKED_REASONS_MAGIC 0x4d53424c4f434b44ull /* "MSBLOCKD" */

_Static_assert(offsetof(struct ms_blocked_reasons, worker) == 128, "lines after the head");
_Static_assert(sizeof(struct ms_blocked_reason) == 512, "a worker has cache lines of its own");
