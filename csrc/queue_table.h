#pragma once

#include "queue_table.cdef.h"

#define MS_QUEUE_TABLE_MAGIC 0x4d53515545554553ULL /* "MSQUEUES" */
