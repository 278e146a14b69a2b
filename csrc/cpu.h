#ifndef MS_CPU_H
#define MS_CPU_H

#include <stdint.h>

#include "cpu.cdef.h"

#endif
