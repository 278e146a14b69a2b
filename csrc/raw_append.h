#pragma once

#include "entry.h"
#include "writer.h"
#include "raw_append.cdef.h"

/* Return 1 if the session is the replicator's, and this store is a slave. */
int ms_raw_is_allowed(const struct ms_writer *writer, const struct ms_writer_session *own);
/* Measure an entry: PUT_OK, or the status that refuses all of it, with measure->detail; measure as for ms_entry_measure. */
uint32_t ms_raw_measure(const struct ms_writer *writer, const struct ms_taken *taken, struct ms_measure *measure);
/* Append a measured entry and set its answer *what; 0, or -EIO, after which the store is frozen. */
int ms_raw_append(struct ms_writer *writer, const struct ms_taken *taken, struct ms_completion *what);
