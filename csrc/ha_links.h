#ifndef MS_HA_LINKS_H
#define MS_HA_LINKS_H

#include "control.h"
#include "recorder.h"
#include "replication.h"
#include "seal.h"
#include "ha_links.cdef.h"

#endif
