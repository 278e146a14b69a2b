/* The producer's end of a session: publish an entry, wait for its answer.
 *
 * Who: called in the producer's process only, through pyengine/native/producer.py,
 * by one thread at a time for ms_producer_submit; waits may run in several
 * threads. Blocks on: ring space and answers, always until a deadline. After a
 * crash of the producer: an entry whose tail was not stored yet does not exist;
 * later ones are executed by the writer. After a crash of the writer: the next
 * one answers.
 */
#define MS_PRODUCER_AGAIN -11     /* -EAGAIN: the deadline passed */
#define MS_PRODUCER_CLOSED -32    /* -EPIPE: the session was closed or the engine was replaced */
#define MS_PRODUCER_FROZEN -5     /* -EIO: the store is frozen, durability will not come */

struct ms_producer {
    const struct ms_control *control;
    struct ms_doorbells *bells;
    struct ms_session *session;
    void *writer_semaphore;
    uint8_t *ring;
    uint64_t ring_bytes;
    uint64_t tail;
    uint64_t sequence;           /* of the last entry submitted */
    uint64_t oldest_unread;      /* answers from here on must not be overwritten */
    int32_t spin_us;
    uint32_t slot;
    uint32_t generation;
    uint32_t reserved;
};

/* Takes over an empty, freshly opened session. */
void ms_producer_attach(struct ms_producer *producer);
/* Largest entry that goes through the ring; larger ones go through a side object. */
uint64_t ms_producer_entry_limit(const struct ms_producer *producer);
/* Publish one entry: `header` (sizes and kind filled in; entry_bytes and sequence
 * are set here), topic, properties and up to two pieces of payload. 0 and
 * producer->sequence, or AGAIN (no room until the deadline; nothing submitted), CLOSED. */
int ms_producer_submit(struct ms_producer *producer, struct ms_entry *header, const uint8_t *topic,
                       const uint8_t *properties, const uint8_t *first, uint64_t first_bytes,
                       const uint8_t *second, uint64_t second_bytes, int64_t deadline_ns);
/* The layout of an entry as it stands in the ring or in a side object: bytes needed. */
uint64_t ms_entry_layout_bytes(uint32_t topic_bytes, uint32_t properties_bytes, uint64_t payload_bytes);
/* Write an entry outside the ring (side object). `to` has ms_entry_layout_bytes. */
void ms_entry_fill(uint8_t *to, const struct ms_entry *header, const uint8_t *topic, const uint8_t *properties,
                   const uint8_t *first, uint64_t first_bytes, const uint8_t *second, uint64_t second_bytes);
/* 0 and *answer once `sequence` is answered; AGAIN, CLOSED. */
int ms_producer_wait_acked(struct ms_producer *producer, uint64_t sequence, int64_t deadline_ns, struct ms_completion *answer);
/* 0 once `flushed` reached end_offset; AGAIN, CLOSED, FROZEN. */
int ms_producer_wait_flushed(struct ms_producer *producer, int64_t end_offset, int64_t deadline_ns);
/* Submit and wait in one call: the answer, then durability if `durable`.
 * 0; AGAIN before submission: *submitted stays 0. */
int ms_producer_put(struct ms_producer *producer, struct ms_entry *header, const uint8_t *topic, const uint8_t *properties,
                    const uint8_t *first, uint64_t first_bytes, const uint8_t *second, uint64_t second_bytes,
                    int64_t timeout_ns, int64_t flush_timeout_ns, int durable, int *submitted, struct ms_completion *answer);
