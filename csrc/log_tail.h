#pragma once

#include "record.h"
#include "writer.h"
#include "log_tail.cdef.h"

/* Return the bytes left in the current segment. */
int64_t ms_tail_room(const struct ms_writer *writer);
/* Finish the current segment with a blank record and go to the next; 0 or -EIO. */
int ms_tail_roll(struct ms_writer *writer);
/* Append a record of `bytes`; 0 or -EIO (a write failed: error_number, as of ms_tail_write). */
int ms_tail_append(struct ms_writer *writer, struct ms_record_template *record, int64_t bytes);
/* Append `bytes` of one record as they are, to a segment that has room; 0 or -EIO as ms_tail_append. */
int ms_tail_copy(struct ms_writer *writer, const uint8_t *from, int64_t bytes);
/* Write the gathered bytes, and zeros after them; 0 or -errno, also in error_number: no room (-ENOSPC, -EDQUOT), otherwise
 * the store is frozen. */
int ms_tail_write(struct ms_writer *writer);
