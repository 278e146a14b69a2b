#pragma once

#include "control.h"
#include "dispatch.h"
#include "store_stats.h"
#include "stream.h"
#include "reput.cdef.h"
