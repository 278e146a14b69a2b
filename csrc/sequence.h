#ifndef MS_SEQUENCE_H
#define MS_SEQUENCE_H

#include "control.h"
#include "sequence.cdef.h"

#endif
