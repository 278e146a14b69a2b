#pragma once

#include "attach_count.cdef.h"
