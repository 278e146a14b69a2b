#pragma once

#include <stdint.h>
#include "record.h"
#include "columns.cdef.h"
