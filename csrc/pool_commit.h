#ifndef MS_POOL_COMMIT_H
#define MS_POOL_COMMIT_H

#include "control.h"
#include "recorder.h"
#include "stream.h"
#include "pool_commit.cdef.h"

#endif
