#ifndef MS_DISPATCH_H
#define MS_DISPATCH_H

#include <stdint.h>
#include "consume_queue.h"
#include "index_file.h"
#include "dispatch.cdef.h"

#endif
