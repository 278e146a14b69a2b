#pragma once

#include <stddef.h>
#include <stdint.h>
#include "control.cdef.h"

#define MS_CONTROL_MAGIC 0x4d53434f4e54524cULL  /* "MSCONTRL" */

_Static_assert(sizeof(struct ms_position) == MS_LINE_BYTES, "one position a line");
_Static_assert(sizeof(struct ms_identity) == 2 * MS_LINE_BYTES, "identity: two lines");
_Static_assert(sizeof(struct ms_state) == 3 * MS_LINE_BYTES, "state: a line and the reason");
_Static_assert(sizeof(struct ms_worker) == 2 * MS_LINE_BYTES, "worker: two lines");
_Static_assert(sizeof(struct ms_writer_lines) == MS_LINE_BYTES, "writer: one line");
_Static_assert(sizeof(struct ms_allocator_line) == MS_LINE_BYTES, "allocator: one line");
_Static_assert(sizeof(struct ms_flusher_lines) == MS_LINE_BYTES, "flusher: one line");
_Static_assert(sizeof(struct ms_session_slot) == MS_LINE_BYTES, "session slot: one line");
_Static_assert(sizeof(struct ms_pool_buffer) == MS_LINE_BYTES, "pool buffer: one line");
_Static_assert(sizeof(struct ms_latch) == MS_LINE_BYTES, "latch: one line");
_Static_assert(offsetof(struct ms_commit_slot, sessions) == MS_LINE_BYTES, "slot header: one line");
_Static_assert(offsetof(struct ms_undo, old_offset) == MS_LINE_BYTES, "undo header: one line");
_Static_assert(MS_GRPC == MS_WORKER_KINDS - 1, "the last kind of worker: both are raised with a new one");
