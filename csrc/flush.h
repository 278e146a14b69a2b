#ifndef MS_FLUSH_H
#define MS_FLUSH_H

#include <stdint.h>
#include "flush.cdef.h"

#endif
