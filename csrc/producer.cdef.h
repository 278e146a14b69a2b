/* The producer's side of a session: publish an entry, wait for its answer.
 *
 * Who: the producer's process only, through pyengine/native/session.py, one thread at a time for ms_producer_submit;
 * several threads may wait. Blocks on: ring space and answers, always until a deadline. After a crash of the producer: an
 * entry exists once its tail is stored, and then the writer executes it. After a crash of the writer: the next one
 * answers.
 */
#define MS_PRODUCER_AGAIN -11     /* -EAGAIN: the deadline passed */
#define MS_PRODUCER_CLOSED -32    /* -EPIPE: the session was closed or the engine was replaced */
#define MS_PRODUCER_FROZEN -5     /* -EIO: the store is frozen, so the record will not become durable */
#define MS_PRODUCER_NO_SLAVE -107 /* -ENOTCONN: stored, but too few slaves are connected and close enough to confirm it */
#define MS_PRODUCER_UNCONFIRMED -110 /* -ETIMEDOUT: stored, but slaves did not confirm it by the deadline */
#define MS_PRODUCER_BUSY -16      /* -EBUSY: the writer's pass lasts too long; nothing was submitted */
#define MS_PRODUCER_UNFINISHED -115 /* -EINPROGRESS: the slice is over, the put continues: wait for its sequence elsewhere */

/* Longest wait of a put in one call, so that signal handlers and other threads' puts can run. */
#define MS_PUT_SLICE_NS 50000000

/* Progress of a put. */
#define MS_STAGE_NOT_SUBMITTED 0
#define MS_STAGE_SUBMITTED 1
#define MS_STAGE_ANSWERED 2

#define MS_ENGINE_DIED 1         /* no process of the engine holds a byte of `lock` */
#define MS_ENGINE_REPLACED 2     /* the caller has found that another start has recovered the store */

struct ms_producer {
    const struct ms_control *control;
    struct ms_session *session;
    uint8_t *ring;
    uint64_t ring_bytes;
    uint64_t tail;
    uint64_t sequence;           /* of the last entry submitted */
    uint64_t oldest_unread;      /* answers from here on must not be overwritten */
    uint64_t unclaimed;          /* sequence of the last entry, while it belongs to no future: its slot is kept until the next submission */
    int64_t engine_seen_ns;            /* when a process of the engine was last found alive */
    int32_t lock_fd;             /* the store's `lock`; -1: not available, then only the control block shows the engine's death */
    int32_t lock_byte;           /* the first byte that a worker locks there */
    uint32_t engine_died;        /* 0, MS_ENGINE_DIED, MS_ENGINE_REPLACED */
    uint32_t finishing;          /* 1 while a thread changes is_finished and oldest_unread */
    uint8_t is_finished[MS_COMPLETIONS]; /* by sequence: its answer was read, or will not be */
    int64_t timeout_ns;          /* until the writer's answer */
    int64_t flush_timeout_ns;    /* from the answer to durability */
    int64_t slave_timeout_ns;    /* from the answer to confirmation */
    int64_t submitted_ns;        /* when the last put began */
    int64_t target_before;       /* flusher.sync_target before the last entry was published */
    uint64_t reserved_bytes;     /* of the entry that is being filled */
    int64_t wall_ms;             /* the wall clock's millisecond at the last read, */
    int64_t wall_until_ns;       /* and its end by CLOCK_MONOTONIC */
    int32_t spin_us;
    uint32_t slot;
    uint32_t generation;
    uint32_t stage;              /* of the last put: MS_STAGE_* */
    uint32_t rung;               /* the writer's `arms` for which this producer has woken it */
    struct ms_entry header;      /* hosts and sysFlag of the fast path */
    struct ms_completion answer; /* of the last put */
};

/* Attach to an empty session that was just opened. */
void ms_producer_attach(struct ms_producer *producer);
/* Return the size of the largest entry for the ring; larger ones need a side object. */
uint64_t ms_producer_entry_limit(const struct ms_producer *producer);
/* Publish one entry: `header` (with sizes and kind; this sets entry_bytes and sequence), topic, properties and `bytes` of payload.
 * 0 and producer->sequence, or AGAIN (no room until the deadline; nothing submitted), BUSY, CLOSED. */
int ms_producer_submit(struct ms_producer *producer, struct ms_entry *header, const uint8_t *topic,
                       const uint8_t *properties, const uint8_t *payload, uint64_t bytes, int64_t deadline_ns);
/* ms_producer_submit in two steps, for several entries and one wake-up: fill each, without waiting, then publish all of them,
 * before any other submission. No entry exists before that. 0 and producer->sequence, whose answer the caller must finish,
 * as if claimed; BUSY, CLOSED, or AGAIN without room or for an entry that is too large for the ring. */
int ms_producer_fill(struct ms_producer *producer, struct ms_entry *header, const uint8_t *topic, const uint8_t *properties,
                     const uint8_t *payload);
void ms_producer_publish_filled(struct ms_producer *producer);
/* Return 1 if the session was closed, or its engine died or was replaced, so that no submission would be answered. */
int ms_producer_is_closed(const struct ms_producer *producer);
/* Wait until `need` bytes are free at the tail and the next answer has a slot: 0, AGAIN or CLOSED. */
int ms_producer_wait_for_room(struct ms_producer *producer, uint64_t need, int64_t deadline_ns);
/* Return the bytes that an entry takes in the ring or in a side object. */
uint64_t ms_entry_layout_bytes(uint32_t topic_bytes, uint32_t properties_bytes, uint64_t payload_bytes);
/* Write an entry outside the ring (side object). `to` has ms_entry_layout_bytes. */
void ms_entry_fill(uint8_t *to, const struct ms_entry *header, const uint8_t *topic, const uint8_t *properties,
                   const uint8_t *payload, uint64_t bytes);
/* Wait until `sequence` is answered: 0 and *answer, or AGAIN, CLOSED. */
int ms_producer_wait_acked(struct ms_producer *producer, uint64_t sequence, int64_t deadline_ns, struct ms_completion *answer);
/* As ms_producer_wait_acked, for a put that then waits for what `how` says: it sleeps once on that where it comes last. `target_before`:
 * flusher.sync_target before the entry was published. */
int ms_producer_wait_answer(struct ms_producer *producer, uint64_t sequence, int64_t target_before, int how, int64_t deadline_ns,
                            struct ms_completion *answer);
#define MS_PUT_DURABLE 1         /* wait for `flushed` too */
#define MS_PUT_CONFIRMED 4       /* wait for `confirm` too */
/* Return on the monotonic clock when the writer stored the answered records, for a caller that sees the answer late. The
 * time is between the submission and now, however the wall clock was set. */
int64_t ms_producer_stored_ns(int64_t submitted_ns, int64_t store_timestamp_ms);
/* Wait until `flushed` (DURABLE) and `confirm` (CONFIRMED) reach end_offset, each until its deadline: 0, FROZEN, CLOSED,
 * NO_SLAVE, UNCONFIRMED, or AGAIN if only the disk was late. As in CommitLog.putMessage the slaves' outcome replaces the
 * disk's. UNFINISHED at slice_end_ns, if a deadline that matters is later. */
int ms_producer_wait_persisted(struct ms_producer *producer, int64_t end_offset, int how, int64_t flush_deadline_ns,
                               int64_t slave_deadline_ns, int64_t slice_end_ns);
/* Reserve room in the ring for an entry that begins like `prefix` (ms_entry_fill without payload), without waiting; return where its payload belongs. The entry does
 * not exist before ms_producer_publish, which may be omitted. NULL and *code: AGAIN (no room), BUSY, CLOSED. */
uint8_t *ms_producer_reserve(struct ms_producer *producer, const uint8_t *prefix, int kind, uint32_t count,
                             uint64_t payload_bytes, int *code);
/* Publish the reserved entry to the writer, when its payload is written. */
void ms_producer_publish(struct ms_producer *producer);
/* Poll `spins` times for the answer to the last entry, but once only if the writer runs on this CPU. */
int ms_producer_is_answered(const struct ms_producer *producer, int spins);
/* Wait for the last entry's answer, and for what `how` says, until producer->timeout_ns after its submission. The outcome
 * is in producer->stage and producer->answer. 0 or AGAIN, CLOSED, FROZEN, NO_SLAVE, UNCONFIRMED; UNFINISHED after
 * MS_PUT_SLICE_NS. */
int ms_producer_await(struct ms_producer *producer, int how);
/* Raise it with every change of struct ms_producer or ms_producer_calls, also of a signature (tests/native/test_layout.py). */
#define MS_PRODUCER_CALLS_VERSION 4
/* The functions for pyengine._front, which is not linked with this module. */
struct ms_producer_calls {
    uint64_t version;            /* MS_PRODUCER_CALLS_BUILD; another one shows a different build */
    uint8_t *(*reserve)(struct ms_producer *producer, const uint8_t *prefix, int kind, uint32_t count,
                        uint64_t payload_bytes, int *code);
    void (*publish)(struct ms_producer *producer);
    int (*is_answered)(const struct ms_producer *producer, int spins);
    int (*await)(struct ms_producer *producer, int how);
    int (*wait_answer)(struct ms_producer *producer, uint64_t sequence, int64_t target_before, int how, int64_t deadline_ns,
                       struct ms_completion *answer);
    int64_t (*stored_ns)(int64_t submitted_ns, int64_t store_timestamp_ms);
    int (*wait_persisted)(struct ms_producer *producer, int64_t end_offset, int how, int64_t flush_deadline_ns,
                          int64_t slave_deadline_ns, int64_t slice_end_ns);
    void (*finish)(struct ms_producer *producer, uint64_t sequence);
    int (*is_closed)(const struct ms_producer *producer);
};
const struct ms_producer_calls *ms_producer_calls(void);
/* Free an answer's slot: the answer was read, or will not be. Any thread, in any order, also twice. */
void ms_producer_finish(struct ms_producer *producer, uint64_t sequence);
