#ifndef MS_PROCESS_H
#define MS_PROCESS_H

#include <stdint.h>

#include "process.cdef.h"

#endif
