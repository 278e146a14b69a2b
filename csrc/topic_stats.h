#ifndef MS_TOPIC_STATS_H
#define MS_TOPIC_STATS_H

#include <stddef.h>
#include <stdint.h>

#include "topic_stats.cdef.h"

#define MS_TOPIC_STATS_MAGIC 0x4d53544f50494353ULL /* "MSTOPICS" */

_Static_assert(offsetof(struct ms_topic_stats, others) == 128, "topic stats header: one line");
_Static_assert(sizeof(struct ms_topic_count) == 288, "topic count");

#endif
