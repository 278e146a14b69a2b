#pragma once

#include <stdint.h>
#include "session_guard.cdef.h"
