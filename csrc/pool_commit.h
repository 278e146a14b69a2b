#pragma once

#include "control.h"
#include "recorder.h"
#include "stream.h"
#include "pool_commit.cdef.h"
