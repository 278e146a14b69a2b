#pragma once

#include <stdint.h>
#include "consume_queue.h"
#include "index_file.h"
#include "dispatch.cdef.h"
