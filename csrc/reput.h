#ifndef MS_REPUT_H
#define MS_REPUT_H

#include "control.h"
#include "dispatch.h"
#include "store_stats.h"
#include "stream.h"
#include "reput.cdef.h"

#endif
