#pragma once

#include "control.h"
#include "stream.cdef.h"
