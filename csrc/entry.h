#pragma once

#include "record.h"
#include "session.h"
#include "entry.cdef.h"

/* The numbers of PutStatus in pyengine/results.py. */
enum {
    PUT_OK = 0,
    SERVICE_NOT_AVAILABLE = 4,
    CREATE_MAPEDFILE_FAILED = 5,
    MESSAGE_ILLEGAL = 6,
    PROPERTIES_SIZE_EXCEEDED = 7,
    UNKNOWN_ERROR = 9,
    LMQ_CONSUME_QUEUE_NUM_EXCEEDED = 10,
};

/* One ring entry with checked lengths. It is in private memory, except for `bodies`, which may be in the ring. */
struct ms_taken {
    struct ms_entry head;
    const uint8_t *topic;
    const uint8_t *properties;
    const uint8_t *payload;
    uint64_t payload_bytes;
    const uint8_t *bodies;      /* of PUT and MANY, joined: their producer may still change them */
};

/* The space that the records of an entry need in the log. */
struct ms_measure {
    int64_t segment_bytes;      /* in */
    int64_t max_message_bytes;  /* in */
    int64_t room;               /* in: left in the current segment; out: left in the last one after the entry */
    int64_t sum;                /* out: all records together */
    uint32_t rolls;             /* out: segments to begin */
    uint32_t detail;            /* out: MS_REFUSED_* */
};

/* A cursor over the records of a measured entry. */
struct ms_records {
    const uint8_t *at;
    const uint8_t *end;
    const uint32_t *lengths;    /* of MANY */
    uint32_t left;
};

/* Return the status of a refusal, whose reason goes to *detail. */
static inline uint32_t ms_refused(uint32_t *detail, uint32_t reason, uint32_t status)
{
    *detail = reason;
    return status;
}

/* Return how many of an entry's `bytes` determine lengths and routing: all but the bodies of PUT and MANY; 0 if its lengths
 * contradict each other. */
uint64_t ms_entry_decisive_bytes(const struct ms_entry *head, uint64_t bytes);
/* Parse an entry: 1 if its lengths agree. `copy` has at least its decisive bytes; `bytes` counts all. */
int ms_entry_parse(const uint8_t *copy, uint64_t bytes, struct ms_taken *taken);
/* Make RocketMQ's checks of topic, queue and properties, in its order; PUT_OK or the status, with *detail. */
uint32_t ms_entry_check(const struct ms_taken *taken, uint32_t *detail);
/* Measure an entry: PUT_OK, or the status that refuses all of it, with measure->detail. */
uint32_t ms_entry_measure(const struct ms_taken *taken, struct ms_measure *measure);
void ms_entry_records(const struct ms_taken *taken, struct ms_records *records);
/* Set body, flag and properties of the next record; the rest of `record` is the same for all. 0 after the last. */
int ms_entry_next(const struct ms_taken *taken, struct ms_records *records, struct ms_record_template *record);
