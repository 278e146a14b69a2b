#pragma once

#include "control.h"
#include "latch.cdef.h"
