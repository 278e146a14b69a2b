#ifndef MS_SCAN_H
#define MS_SCAN_H

#include <stdint.h>
#include "scan.cdef.h"

#endif
