/* The writer's pass: drain submission rings, append records, commit, answer.
 *
 * Who: the writer process only, from workers/writer.py, one thread. Blocks on: pwrite of gathered bytes; ms_writer_run
 * sleeps on the writer's latch, at most until its deadline. After a crash: the commit slot says what was done; the next
 * writer calls ms_writer_roll_back, zeroes [wrote, intent_end) and continues, so no record is lost or doubled.
 *
 * An entry for which Python must provide something (segment, side object, larger table) is the first of the next pass;
 * refuse_segment, side_failed, queues_refused and side_loaded apply to it alone. They are dropped if its producer takes it
 * back, that is, moves its tail back.
 *
 * Order of one pass, from which exactly-once follows:
 *   1 undo.pass, intended_pass = the next pass
 *   2 for each entry: copy lengths and routing to private memory, check the copy; undo entry for its queue before the
 *     queue's offset changes; intent_end before the bytes; copy bodies from the ring into the record, with the CRC of the
 *     copy
 *   3 answers into the sessions (not valid until acked moves)
 *   4 if the pass is gathered: pwrite of its bytes
 *   5 fill the other commit slot, then slot_pass with release: the commit point
 *   6 wrote (and committed), heads, acked, wake-ups: all derived from the slot. In sync mode producers sleep on the
 *     flush sequence, which is raised here for answers without a sync
 *
 * If segments are mapped, a small pass is stored into them, and a pass of `gather_bytes_min` or more is gathered and
 * written: a write fills new pages at a third to a tenth of the CPU time of stores.
 *
 * No pass stores or writes at or above allocator.reserved_end, where files have no blocks yet: on a full disk a store into
 * a mapping would raise SIGBUS there. An entry that needs more waits for the allocator, as for a segment.
 *
 * The cost of a pass depends on its entries, not on the number of open sessions: it reads the active sessions only (those
 * that put recently), and fills into its commit slot the accounts of the sessions that this pass and the last one changed,
 * since the slot has all others from the pass before the last.
 */
#define MS_AHEAD_MAX 64
#define MS_SESSION_WORDS 16      /* a bit for each of MS_SESSION_SLOTS */
#define MS_PASS_BYTES 4194304
/* From this size on a write is cheaper than stores and populating their pages (bench/notes/engine.md). */
#define MS_GATHER_BYTES_MIN 16384

/* Why ms_writer_run returned. */
#define MS_RUN_TIME 0            /* the deadline: do the housekeeping, call again */
#define MS_RUN_SEGMENT 1         /* attach `segments_needed` segments ahead, and wait for blocks up to `wanted_end` (or set refuse_segment) */
#define MS_RUN_ROLLED 2          /* a segment was finished: close it, attach the next */
#define MS_RUN_SESSIONS 3        /* the session table changed, or a dead session is drained */
#define MS_RUN_SIDE 4            /* load the side object of side_slot / side_sequence (or set side_failed) */
#define MS_RUN_QUEUES 5          /* the queue table is too full */
#define MS_RUN_FLUSHER 6         /* a new flusher wants the first descriptors synced */
#define MS_RUN_FAILED 7          /* a pwrite failed with error_number: no room (roll the pass back), otherwise the store is frozen */
#define MS_RUN_CUT_SHORT 8       /* a producer truncated its session while a body was copied: roll the pass back, end that session */

struct ms_writer_session {
    struct ms_session *session;  /* NULL: not attached */
    uint8_t *ring;
    uint64_t ring_bytes;
    uint64_t generation;
    uint64_t head;               /* of the current pass */
    uint64_t acked;
    uint32_t broken;             /* a bad entry closed it */
    uint32_t touched;            /* by the current pass */
    uint32_t has_put;            /* since all sessions were last checked */
};

struct ms_segment {
    int64_t base;                /* physical offset of its first byte; -1: none */
    uint8_t *memory;             /* mapping or pool buffer; NULL: every pass is written to `fd` */
    int32_t fd;                  /* -1: every pass is stored into the memory */
};

struct ms_writer {
    struct ms_control *control;
    struct ms_queue_table *queues;
    void *semaphores[MS_WORKER_KINDS]; /* by kind of worker that it wakes */
    struct ms_writer_session sessions[MS_SESSION_SLOTS];
    uint32_t sessions_high;      /* attached ones are below */
    uint32_t turn;               /* the first session of the next pass */
    uint64_t active[MS_SESSION_WORDS]; /* bits: sessions that passes read */
    int64_t scanned_ns;           /* when all were last checked */
    uint32_t touched_count;
    uint32_t touched_before_count;
    uint16_t touched[MS_SESSION_SLOTS]; /* sessions that the current pass has changed */
    uint16_t touched_before[MS_SESSION_SLOTS]; /* that the last pass changed: the other slot lacks them */
    uint32_t whole_slots;        /* passes that still fill in the accounts of all sessions */
    uint32_t session_seq_seen;
    uint32_t mode;
    int64_t segment_bytes;
    int64_t max_message_bytes;
    struct ms_segment current;
    struct ms_segment ahead[MS_AHEAD_MAX];
    uint32_t ahead_count;
    uint32_t segments_needed;    /* out: with MS_RUN_SEGMENT */
    int64_t wanted_end;          /* out: with MS_RUN_SEGMENT: the log's end after the entry */
    uint32_t refuse_segment;     /* in: answer the current entry with CREATE_MAPEDFILE_FAILED */
    uint32_t rolled;             /* segments finished since Python last took them */
    struct ms_segment finished[MS_AHEAD_MAX]; /* out: with MS_RUN_ROLLED, `rolled` of them */
    int64_t gather_bytes_min;    /* in: a pass of at least this size is written even if segments are mapped; 0: none */
    uint32_t is_gathering;       /* 1: the current pass is gathered and written, even if its segments have memory */
    uint8_t *stage;              /* gathers a pass; a page longer than stage_bytes_max */
    int64_t stage_bytes_max;
    int64_t stage_bytes;
    int64_t stage_from;          /* physical offset of stage[0] */
    uint8_t *zeros;              /* sync mode: overwrite the allocated bytes after the log's end with these */
    int64_t zero_ahead_bytes;    /* so many of them; 0 none */
    int64_t zeroed_end;          /* below here zeros or records were written, not only blocks allocated */
    uint8_t *scratch;            /* private copy of the current entry */
    uint64_t scratch_bytes;
    uint32_t side_slot;          /* out: with MS_RUN_SIDE */
    uint32_t side_bytes;
    uint64_t side_sequence;
    uint64_t side_loaded;        /* in: sequence of the entry in scratch; 0 none */
    uint32_t side_failed;        /* in: answer it with MS_REFUSED_SIDE */
    uint32_t queues_refused;     /* in: no larger table is available; answer with MS_REFUSED_QUEUES_FULL */
    uint64_t pass;               /* number of the current pass */
    int64_t position;            /* physical offset of its next record */
    int64_t reserved_end;        /* allocator.reserved_end as last read */
    int64_t reserve_step_bytes;  /* in: wake the allocator when fewer bytes are reserved ahead */
    int64_t store_timestamp_ms;
    uint64_t put_messages;
    uint64_t put_bytes;
    uint32_t entries;            /* in the current pass */
    uint32_t unsynced_answers;   /* it has an answer without a sync */
    int32_t spin_us;
    int32_t error_number;        /* out: with MS_RUN_FAILED */
    uint32_t last_producer_same_cpu;
    int64_t last_work_ns;
    uint32_t spinning;           /* 1: entries arrive so fast that spinning for the next one is worthwhile */
    uint32_t no_room;            /* in: the disk has no room for the log: refuse each put */
    struct ms_mover mover;
    struct ms_affinity affinity;         /* sync mode */
    struct ms_light_queues light; /* offsets in further queues; off until Python sets light.enabled */
    struct ms_put_meter meter;   /* counts into shared memory once Python has set meter.stats */
    struct ms_recorder_handle recorder; /* records into shared memory once Python has taken it */
    int64_t wall_ms;             /* store time of the entries of the current turn; 0: the pass has had no turn yet */
    int64_t clock_ns;            /* the last read of the clock before the current pass */
    int64_t write_ns;            /* time of the pass in pwrite */
    int64_t returned_ns;             /* when ms_writer_run returned, */
    uint32_t return_reason;           /* and why */
    uint32_t useless_rings;      /* wake-ups by producers that found no entry, less those that did */
    uint32_t waited_for_pool;    /* in: the segment was late because no pool buffer was free */
};

/* Read the state from the committed slot, after all pointers are set. */
void ms_writer_open(struct ms_writer *writer);
/* Undo what an uncommitted pass of a dead writer changed in the queue table; idempotent. Returns 1 if there was such a pass:
 * then the caller must zero [wrote, intent_end) before it appends. */
int ms_writer_roll_back(struct ms_control *control, struct ms_queue_table *queues);
/* Close the dead pass, after the zeroing. */
void ms_writer_rolled_back(struct ms_control *control);
/* Serve a mapped session; its head and acked come from the committed slot, ring_bytes from the session table, nothing from
 * the object itself. */
void ms_writer_attach_session(struct ms_writer *writer, uint32_t slot, struct ms_session *session,
                              uint64_t generation, uint64_t ring_bytes);
void ms_writer_detach_session(struct ms_writer *writer, uint32_t slot);
/* Return 1 if everything published in the session is executed, or the session is broken. */
int ms_writer_session_drained(const struct ms_writer *writer, uint32_t slot);
/* Use a larger queue table, into which the old one was copied. */
int ms_writer_use_table(struct ms_writer *writer, struct ms_queue_table *queues);
/* Run passes until the deadline or until Python must act; MS_RUN_*. */
int ms_writer_run(struct ms_writer *writer, int64_t deadline_ns);
