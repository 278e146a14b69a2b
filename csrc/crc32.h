#pragma once

#include <stdint.h>
#include "crc32.cdef.h"
