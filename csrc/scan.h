#pragma once

#include <stdint.h>
#include "scan.cdef.h"
