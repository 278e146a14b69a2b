#pragma once

#include "control.h"
#include "cpu.h"
#include "recorder.h"
#include "store_stats.h"
#include "group_commit.cdef.h"
