#pragma once

#include <stddef.h>
#include <stdint.h>

#include "cleaning.cdef.h"

#define MS_CLEANING_MAGIC 0x4d53434c45414e53ull /* "MSCLEANS" */

_Static_assert(sizeof(struct ms_hold) == 128, "a hold has cache lines of its own");
_Static_assert(offsetof(struct ms_cleaning, removing_end) == 128, "cleaner's lines");
_Static_assert(offsetof(struct ms_cleaning, probes) == 256, "the probe's line");
_Static_assert(offsetof(struct ms_cleaning, reason) == 384, "reason");
_Static_assert(offsetof(struct ms_cleaning, asked) == 640, "request's line");
_Static_assert(offsetof(struct ms_cleaning, holds) == 768, "holds");
