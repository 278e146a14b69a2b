#pragma once

#include "producer.h"
#include "sends.cdef.h"

/* The longest answer: its pieces, an id of 56 digits, and three numbers. */
_Static_assert(MS_SEND_ANSWER_PIECES *MS_SEND_PIECE_BYTES_MAX + 8 + 56 + 60 <= 1024, "an answer has its room");
