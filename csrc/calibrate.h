#pragma once

#include <stdint.h>
#include "calibrate.cdef.h"
