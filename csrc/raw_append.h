#ifndef MS_RAW_APPEND_H
#define MS_RAW_APPEND_H

#include "entry.h"
#include "writer.h"
#include "raw_append.cdef.h"

/* 1 when the session is that of the replicator, and this store a slave. */
int ms_raw_is_allowed(const struct ms_writer *writer, const struct ms_writer_session *own);
/* PUT_OK, or the status that refuses the entry whole, with measure->detail; measure as for ms_entry_measure. */
uint32_t ms_raw_measure(const struct ms_writer *writer, const struct ms_taken *taken, struct ms_measure *measure);
/* A measured entry goes into the log, and *what is its answer; 0 or -EIO, then the store is frozen. */
int ms_raw_append(struct ms_writer *writer, const struct ms_taken *taken, struct ms_completion *what);

#endif
