#pragma once

#include <stddef.h>
#include <stdint.h>
#include "control.h"
#include "index_file.cdef.h"

_Static_assert(sizeof(struct ms_index_progress) == MS_INDEX_PROGRESS_BYTES, "the area in the control block");
_Static_assert(offsetof(struct ms_index_progress, old_header) == 40, "no hidden pads");

static inline int ms_index_is_full(const struct ms_index_file *file)
{
    struct ms_index_header header;
    ms_index_read_header(file, &header);
    return header.index_count >= file->entries;
}
