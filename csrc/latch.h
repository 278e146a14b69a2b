#ifndef MS_LATCH_H
#define MS_LATCH_H

#include "control.h"
#include "latch.cdef.h"

#endif
