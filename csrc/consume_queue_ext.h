#pragma once

#include <stdint.h>
#include "consume_queue_ext.cdef.h"

_Static_assert(sizeof(((struct ms_ext_run *)0)->units) >= 64 * MS_EXT_UNIT_BYTES + 2, "a chunk's units and the mark");
