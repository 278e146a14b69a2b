#pragma once

#include <stdint.h>
#include "store_check.cdef.h"
