#ifndef MS_GROUP_COMMIT_H
#define MS_GROUP_COMMIT_H

#include "control.h"
#include "store_stats.h"
#include "group_commit.cdef.h"

_Static_assert(sizeof(((struct ms_group_commit *)0)->base) / sizeof(int64_t) == MS_GROUP_SEGMENTS_MAX, "bases");
_Static_assert(sizeof(((struct ms_group_commit *)0)->fd) / sizeof(int32_t) == MS_GROUP_SEGMENTS_MAX, "descriptors");

#endif
