#ifndef MS_STREAM_H
#define MS_STREAM_H

#include "control.h"
#include "stream.cdef.h"

#endif
