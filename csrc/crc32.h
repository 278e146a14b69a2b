#ifndef MS_CRC32_H
#define MS_CRC32_H

#include <stdint.h>
#include "crc32.cdef.h"

#endif
