#ifndef MS_SEAL_H
#define MS_SEAL_H

#include <stdint.h>
#include "seal.cdef.h"

#endif
