#ifndef MS_NEW_FILE_H
#define MS_NEW_FILE_H

#include <stdint.h>
#include "new_file.cdef.h"

#endif
