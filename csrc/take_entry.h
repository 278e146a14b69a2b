#pragma once

#include "writer.h"
#include "take_entry.cdef.h"

/* Execute the entry at the session's head, of which the producer has published the bytes up to `tail`: 0, or MS_RUN_*, after
 * which the entry is still there. Closes the session of a producer that broke the protocol, and returns 0. */
int ms_take_entry(struct ms_writer *writer, struct ms_writer_session *own, uint64_t tail);
