#pragma once

#include "queue_keys.h"
#include "store_stats.h"
#include "consume_queue.cdef.h"

#define MS_EXT_ADDRESS_MAX INT64_C(-2147483649) /* a tags code at or below is an address in the extension */

_Static_assert(MS_QUEUE_WINDOW_BYTES % 4096 == 0, "windows are whole blocks");
_Static_assert(MS_EXT_RUN_BYTES >= MS_QUEUE_CHUNK_ENTRIES * MS_EXT_UNIT_BYTES + 2, "a chunk's units and the mark");
