#ifndef MS_STORE_CHECK_H
#define MS_STORE_CHECK_H

#include <stdint.h>
#include "store_check.cdef.h"

#endif
