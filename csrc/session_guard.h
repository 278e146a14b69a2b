#ifndef MS_SESSION_GUARD_H
#define MS_SESSION_GUARD_H

#include <stdint.h>
#include "session_guard.cdef.h"

#endif
