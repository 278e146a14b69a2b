#pragma once

#include "control.h"
#include "recorder.h"
#include "replication.h"
#include "seal.h"
#include "ha_links.cdef.h"
