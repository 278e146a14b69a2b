#pragma once

#include <stdint.h>

#include "process.cdef.h"
