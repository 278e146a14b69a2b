#ifndef MS_CALIBRATE_H
#define MS_CALIBRATE_H

#include <stdint.h>
#include "calibrate.cdef.h"

#endif
