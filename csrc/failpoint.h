#pragma once

#include "failpoint.cdef.h"

/* A step of the table; it is empty in an ordinary build. */
#ifndef MS_FAILPOINT
#ifdef MS_FAILPOINTS
#define MS_FAILPOINT(name) ms_failpoint_reach(name)
#else
#define MS_FAILPOINT(name) ((void)0)
#endif
#endif
