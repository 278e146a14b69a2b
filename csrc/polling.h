#ifndef MS_POLLING_H
#define MS_POLLING_H

#include "control.h"
#include "polling.cdef.h"

#endif
