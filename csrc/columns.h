#ifndef MS_COLUMNS_H
#define MS_COLUMNS_H

#include <stdint.h>
#include "record.h"
#include "columns.cdef.h"

#endif
