#ifndef MS_NEW_FILE_H
#define MS_NEW_FILE_H

#include "new_file.cdef.h"

#endif
