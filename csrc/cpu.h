#pragma once

#include <stdint.h>

#include "cpu.cdef.h"
