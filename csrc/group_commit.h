#ifndef MS_GROUP_COMMIT_H
#define MS_GROUP_COMMIT_H

#include "control.h"
#include "cpu.h"
#include "recorder.h"
#include "store_stats.h"
#include "group_commit.cdef.h"

#endif
