/* The producer's end of a session: publish an entry, wait for its answer.
 *
 * Who: called in the producer's process only, through pyengine/native/session.py,
 * by one thread at a time for ms_producer_submit; waits may run in several
 * threads. Blocks on: ring space and answers, always until a deadline. After a
 * crash of the producer: an entry whose tail was not stored yet does not exist;
 * later ones are executed by the writer. After a crash of the writer: the next
 * one answers.
 */
#define MS_PRODUCER_AGAIN -11     /* -EAGAIN: the deadline passed */
#define MS_PRODUCER_CLOSED -32    /* -EPIPE: the session was closed or the engine was replaced */
#define MS_PRODUCER_FROZEN -5     /* -EIO: the store is frozen, durability will not come */
#define MS_PRODUCER_NO_SLAVE -107 /* -ENOTCONN: stored, but too few slaves are connected, or near enough, to confirm it */
#define MS_PRODUCER_UNCONFIRMED -110 /* -ETIMEDOUT: stored, but slaves did not confirm it by the deadline */
#define MS_PRODUCER_BUSY -16      /* -EBUSY: the writer's pass lasts too long; nothing was submitted */
#define MS_PRODUCER_UNFINISHED -115 /* -EINPROGRESS: the slice is over, the put goes on: claim it, wait elsewhere */

/* A put waits no longer in one call: signal handlers and other threads' puts have their turn. */
#define MS_PUT_SLICE_NS 50000000

/* How far a put came. */
#define MS_STAGE_NOT_SUBMITTED 0
#define MS_STAGE_SUBMITTED 1
#define MS_STAGE_ANSWERED 2

#define MS_ENGINE_DIED 1         /* no process of it held a byte of `lock` */
#define MS_ENGINE_REPLACED 2     /* told by the caller: another start has recovered the store */

struct ms_producer {
    const struct ms_control *control;
    struct ms_session *session;
    void *writer_semaphore;
    uint8_t *ring;
    uint64_t ring_bytes;
    uint64_t tail;
    uint64_t sequence;           /* of the last entry submitted */
    uint64_t oldest_unread;      /* answers from here on must not be overwritten */
    uint64_t unclaimed;          /* sequence of the last entry, while no call is responsible for its answer; 0 none */
    int64_t alive_ns;            /* when a process of the engine was last seen to live */
    int32_t lock_fd;             /* the store's `lock`, -1: not to be had, then death is told by the control block only */
    int32_t lock_byte;           /* first byte that a worker holds there */
    uint32_t engine_died;        /* 0, MS_ENGINE_DIED, MS_ENGINE_REPLACED */
    uint32_t finishing;          /* 1 while a thread changes is_finished and oldest_unread */
    uint8_t is_finished[MS_COMPLETIONS]; /* by sequence: its answer was read, or will never be */
    int64_t timeout_ns;          /* until the writer's answer */
    int64_t flush_timeout_ns;    /* from the answer to durability */
    int64_t slave_timeout_ns;    /* from the answer to confirmation */
    int64_t submitted_ns;        /* when the last put began */
    int64_t target_before;       /* flusher.sync_target before the last entry was published */
    uint64_t reserved_bytes;     /* of the entry that is being filled */
    int64_t wall_ms;             /* the wall clock's millisecond, as it was read last, */
    int64_t wall_until_ns;       /* and its end by CLOCK_MONOTONIC */
    int32_t spin_us;
    uint32_t slot;
    uint32_t generation;
    uint32_t stage;              /* of the last put: MS_STAGE_* */
    struct ms_entry header;      /* hosts and sysFlag of the fast path */
    struct ms_completion answer; /* of the last put */
};

/* Takes over an empty, freshly opened session. */
void ms_producer_attach(struct ms_producer *producer);
/* Largest entry that goes through the ring; larger ones go through a side object. */
uint64_t ms_producer_entry_limit(const struct ms_producer *producer);
/* Publish one entry: `header` (sizes and kind filled in; entry_bytes and sequence
 * are set here), topic, properties and up to two pieces of payload. 0 and
 * producer->sequence, or AGAIN (no room until the deadline; nothing submitted), BUSY, CLOSED. */
int ms_producer_submit(struct ms_producer *producer, struct ms_entry *header, const uint8_t *topic,
                       const uint8_t *properties, const uint8_t *first, uint64_t first_bytes,
                       const uint8_t *second, uint64_t second_bytes, int64_t deadline_ns);
/* ms_producer_submit in two steps, for several entries and one wake-up: fill each, never waiting, then publish them. Nothing
 * exists before that, and it must come before any other submission. 0 and producer->sequence, whose answer is the caller's
 * to finish, as if claimed; BUSY, CLOSED, or AGAIN without room or for an entry that is too large for the ring. */
int ms_producer_fill(struct ms_producer *producer, struct ms_entry *header, const uint8_t *topic, const uint8_t *properties,
                     const uint8_t *payload);
void ms_producer_publish_filled(struct ms_producer *producer);
/* 1 when the session was closed, or its engine died or was replaced: nothing submitted would be answered. */
int ms_producer_is_closed(const struct ms_producer *producer);
/* 0 once `need` bytes are free at the tail and the next answer has a place; AGAIN, CLOSED. */
int ms_producer_wait_for_room(struct ms_producer *producer, uint64_t need, int64_t deadline_ns);
/* The bytes that an entry takes in the ring or in a side object. */
uint64_t ms_entry_layout_bytes(uint32_t topic_bytes, uint32_t properties_bytes, uint64_t payload_bytes);
/* Write an entry outside the ring (side object). `to` has ms_entry_layout_bytes. */
void ms_entry_fill(uint8_t *to, const struct ms_entry *header, const uint8_t *topic, const uint8_t *properties,
                   const uint8_t *first, uint64_t first_bytes, const uint8_t *second, uint64_t second_bytes);
/* 0 and *answer once `sequence` is answered; AGAIN, CLOSED. */
int ms_producer_wait_acked(struct ms_producer *producer, uint64_t sequence, int64_t deadline_ns, struct ms_completion *answer);
#define MS_PUT_DURABLE 1         /* wait for `flushed` too */
#define MS_PUT_CONFIRMED 4       /* wait for `confirm` too */
/* When the writer stored what it answered, on the monotonic clock, for a caller that may see the answer long after. Not before
 * the submission, nor after now, however the wall clock was set meanwhile. */
int64_t ms_producer_stored_ns(int64_t submitted_ns, int64_t store_timestamp_ms);
/* 0 once `flushed` (DURABLE) and `confirm` (CONFIRMED) reached end_offset, each by its own deadline. FROZEN,
 * CLOSED; NO_SLAVE, UNCONFIRMED; AGAIN: only the disk was late. As in CommitLog.putMessage, where the slaves'
 * outcome replaces the disk's. */
int ms_producer_wait_kept(struct ms_producer *producer, int64_t end_offset, int how, int64_t flush_deadline_ns,
                          int64_t slave_deadline_ns);
/* What all messages of one topic, queue, flag and properties share: the head
 * of their entries: header (hosts and sysFlag of producer->header), topic, properties, padding.
 * Returns its bytes; `to` has ms_entry_layout_bytes(topic_bytes, properties_bytes, 0). */
uint64_t ms_producer_prefix(const struct ms_producer *producer, uint8_t *to, const uint8_t *topic, uint32_t topic_bytes,
                            const uint8_t *properties, uint32_t properties_bytes, int32_t queue_id, int32_t flag);
/* A place in the ring for an entry with such a prefix: where its payload belongs. Nothing exists before
 * ms_producer_publish, which may be left out. NULL and *why: AGAIN (no room within room_ns), BUSY, CLOSED. */
uint8_t *ms_producer_reserve(struct ms_producer *producer, const uint8_t *prefix, int kind, uint32_t count,
                             uint64_t payload_bytes, int64_t room_ns, int *why);
/* The payload is there: the writer may have the entry. */
void ms_producer_publish(struct ms_producer *producer);
/* Looks so often for the answer to the last entry: once only where the writer runs on this CPU. */
int ms_producer_is_answered(const struct ms_producer *producer, int spins);
/* Waits for the last entry's answer, and for what `how` asks, within producer->timeout_ns of its submission. The outcome
 * is in producer->stage and producer->answer. 0 or AGAIN, CLOSED, FROZEN, NO_SLAVE, UNCONFIRMED; after MS_PUT_SLICE_NS
 * UNFINISHED. */
int ms_producer_await(struct ms_producer *producer, int how);
/* For pyengine._front, which is linked with none of this. */
struct ms_producer_calls {
    uint32_t bytes;              /* of this struct: tells one build from another */
    uint32_t completions;
    uint8_t *(*reserve)(struct ms_producer *producer, const uint8_t *prefix, int kind, uint32_t count,
                        uint64_t payload_bytes, int64_t room_ns, int *why);
    void (*publish)(struct ms_producer *producer);
    int (*is_answered)(const struct ms_producer *producer, int spins);
    int (*await)(struct ms_producer *producer, int how);
    int (*wait_acked)(struct ms_producer *producer, uint64_t sequence, int64_t deadline_ns, struct ms_completion *answer);
    int64_t (*stored_ns)(int64_t submitted_ns, int64_t store_timestamp_ms);
    int (*wait_kept)(struct ms_producer *producer, int64_t end_offset, int how, int64_t flush_deadline_ns,
                     int64_t slave_deadline_ns);
    void (*finish)(struct ms_producer *producer, uint64_t sequence);
    int (*is_closed)(const struct ms_producer *producer);
};
const struct ms_producer_calls *ms_producer_calls(void);
/* An entry of any kind, header given whole but for entry_bytes and sequence, submitted and waited for until a deadline:
 * outcome as for ms_producer_await, or AGAIN, BUSY, CLOSED where nothing is submitted. */
int ms_producer_put_entry(struct ms_producer *producer, struct ms_entry *header, const uint8_t *topic,
                          const uint8_t *properties, const uint8_t *first, uint64_t first_bytes,
                          const uint8_t *second, uint64_t second_bytes, int how, int64_t deadline_ns);
/* Become responsible for the answer of the last entry: *sequence, 0 if another call is. Until
 * ms_producer_finish its place is kept; that of an entry that was not claimed, until the next submission. */
void ms_producer_claim(struct ms_producer *producer, uint64_t *sequence);
/* The answer was read, or will never be: its place may be used again. Any thread, any order, also twice. */
void ms_producer_finish(struct ms_producer *producer, uint64_t sequence);
