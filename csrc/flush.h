#pragma once

#include <stdint.h>
#include "flush.cdef.h"
