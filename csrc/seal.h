#pragma once

#include <stdint.h>
#include "seal.cdef.h"
