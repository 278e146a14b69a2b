#ifndef MS_PRODUCER_H
#define MS_PRODUCER_H

#include "control.h"
#include "session.h"
#include "producer.cdef.h"

#endif
