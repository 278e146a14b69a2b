#pragma once

#include "control.h"
#include "cpu.cdef.h"
#include "latch.cdef.h"
#include "light_queues.h"
#include "queue_table.h"
#include "recorder.h"
#include "session.h"
#include "store_stats.h"
#include "writer.cdef.h"

_Static_assert(MS_SESSION_WORDS * 64 == MS_SESSION_SLOTS, "a bit for each session");
