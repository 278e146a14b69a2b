#pragma once

#include <stdint.h>
#include "new_file.cdef.h"
