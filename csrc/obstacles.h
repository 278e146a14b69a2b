#ifndef MS_OBSTACLES_H
#define MS_OBSTACLES_H

#include <stddef.h>
#include <stdint.h>

#include "control.h"
#include "obstacles.cdef.h"

#define MS_OBSTACLES_MAGIC 0x4d534f4253544143ull /* "MSOBSTAC" */

_Static_assert(offsetof(struct ms_obstacles, worker) == 128, "lines after the head");
_Static_assert(sizeof(struct ms_obstacle) == 512, "a worker has cache lines of its own");

#endif
