#pragma once

#include "control.h"
#include "polling.cdef.h"
