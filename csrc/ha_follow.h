#pragma once

#include "control.h"
#include "producer.h"
#include "replication.h"
#include "ha_links.h"
#include "ha_follow.cdef.h"
