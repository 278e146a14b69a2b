#pragma once

#include "control.cdef.h"

#define MS_CONTROL_MAGIC 0x4d53434f4e54524cULL  /* "MSCONTRL" */

_Static_assert(MS_GRPC == MS_WORKER_KINDS - 1, "the last kind of worker: both are raised with a new one");
