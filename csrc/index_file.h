#pragma once

#include "control.h"
#include "index_file.cdef.h"

_Static_assert(sizeof(struct ms_index_progress) == MS_INDEX_PROGRESS_BYTES, "the area in the control block");
_Static_assert(offsetof(struct ms_index_progress, old_header) == 40, "no hidden pads");
