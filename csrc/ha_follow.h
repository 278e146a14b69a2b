#ifndef MS_HA_FOLLOW_H
#define MS_HA_FOLLOW_H

#include "control.h"
#include "producer.h"
#include "replication.h"
#include "ha_links.h"
#include "ha_follow.cdef.h"

#endif
