#pragma once

#include <stddef.h>
#include <stdint.h>
#include "queue_table.cdef.h"

#define MS_QUEUE_TABLE_MAGIC 0x4d53515545554553ULL /* "MSQUEUES" */

_Static_assert(sizeof(struct ms_queue_slot) == 160, "queue slot");
_Static_assert(offsetof(struct ms_queue_table, slot) == 128, "queue table header: one line");
