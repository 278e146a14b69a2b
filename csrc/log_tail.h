#ifndef MS_LOG_TAIL_H
#define MS_LOG_TAIL_H

#include <stdint.h>

#include "record.h"
#include "writer.h"
#include "log_tail.cdef.h"

/* Bytes left in the current segment. */
int64_t ms_tail_room(const struct ms_writer *writer);
/* Finish the current segment with a blank record and go to the next; 0 or -EIO. */
int ms_tail_roll(struct ms_writer *writer);
/* The record of `bytes` goes to the write position; 0 or -EIO (a write failed: error_number, as of ms_tail_write). */
int ms_tail_append(struct ms_writer *writer, struct ms_record_template *record, int64_t bytes);
/* `bytes` of one record as they are, to the write position in a segment that has room; 0 or -EIO as ms_tail_append. */
int ms_tail_copy(struct ms_writer *writer, const uint8_t *from, int64_t bytes);
/* Write what is gathered, and zeros ahead of it; 0 or -errno, also as error_number: no room (-ENOSPC, -EDQUOT), or the
 * store is frozen now. */
int ms_tail_write(struct ms_writer *writer);

#endif
