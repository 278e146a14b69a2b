#pragma once

#include "record.h"
#include "tally.cdef.h"

_Static_assert(sizeof((struct ms_tally_group *)0)->topic > MS_TOPIC_BYTES_MAX, "any topic fits");
