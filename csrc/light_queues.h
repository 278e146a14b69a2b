#pragma once

#include "control.h"
#include "queue_table.h"
#include "record.h"
#include "light_queues.cdef.h"

_Static_assert(MS_LIGHT_TEXT_BYTES_MAX >= MS_PROPERTIES_BYTES_MAX + 26 + MS_LIGHT_QUEUES_MAX * 21,
               "room for the longest text and all offsets");
