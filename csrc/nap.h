#ifndef MS_NAP_H
#define MS_NAP_H

#include "control.h"
#include "nap.cdef.h"

#endif
