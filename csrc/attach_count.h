#ifndef MS_ATTACH_COUNT_H
#define MS_ATTACH_COUNT_H

#include "attach_count.cdef.h"

#endif
