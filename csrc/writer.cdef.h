/* The writer's pass: drain submission rings, append records, commit, answer.
 *
 * Who: the writer process only, from workers/writer.py, one thread. Blocks on:
 * pwrite of what is gathered; ms_writer_run sleeps on the writer's latch, at most
 * until its deadline. After a crash anywhere in here: the commit slot says what
 * happened; the next writer calls ms_writer_roll_back, zeroes
 * [wrote, intent_end) and goes on, so no record is lost or doubled.
 *
 * An entry that asked for an errand (segment, side object, larger table) goes first in
 * the next pass; what Python answers by refuse_segment, side_failed or queues_refused is
 * for it alone.
 *
 * Order of one pass, the whole of the exactly-once argument:
 *   1 undo.pass, intended_pass = the next pass
 *   2 for each entry: copy what decides lengths and routing to private memory, check
 *     the copy; undo entry for its queue before the queue's offset changes; intent_end
 *     before the bytes; bodies go from the ring into the record, their CRC is of the copy
 *   3 answers into the sessions (not valid until acked moves)
 *   4 where the pass is written: pwrite of the gathered bytes
 *   5 fill the other commit slot, then slot_pass with release: the commit point
 *   6 wrote (and committed), heads, acked, wake-ups: all derived from the slot. In sync mode producers sleep on the
 *     flush sequence, which is raised here for answers that no sync follows
 *
 * Where segments are mapped, a pass over little is stored into them, and a pass over `gather_bytes_min` or more is
 * gathered and written: a write makes and fills fresh pages at a third to a tenth of the CPU of storing to them.
 *
 * A pass costs what came, not what is open: it looks at the active sessions only (those that
 * put lately), and fills into its commit slot the accounts of the sessions that this pass and
 * the last one changed: the slot has all earlier ones since the pass before the last.
 */
#define MS_AHEAD_MAX 64
#define MS_SESSION_WORDS 16      /* a bit for each of MS_SESSION_SLOTS */
#define MS_PASS_BYTES 4194304
/* Where a write becomes cheaper than stores and the populating of their pages (docs/performance.md). */
#define MS_GATHER_BYTES_MIN 16384

/* Why ms_writer_run returned. */
#define MS_RUN_TIME 0            /* the deadline: do the housekeeping, call again */
#define MS_RUN_SEGMENT 1         /* attach `segments_needed` segments ahead (or set refuse_segment) */
#define MS_RUN_ROLLED 2          /* a segment was finished: close it, attach the next */
#define MS_RUN_SESSIONS 3        /* the session table changed, or a dead session is drained */
#define MS_RUN_SIDE 4            /* load the side object of side_slot / side_sequence (or set side_failed) */
#define MS_RUN_QUEUES 5          /* the queue table is too full */
#define MS_RUN_FLUSHER 6         /* a new flusher wants the first descriptors synced */
#define MS_RUN_FAILED 7          /* a pwrite failed, error_number says how: no room (take the pass back), else the store is frozen */
#define MS_RUN_CUT_SHORT 8       /* a producer truncated its session while a body was copied: take the pass back, end that session */

struct ms_writer_session {
    struct ms_session *session;  /* NULL: not attached */
    uint8_t *ring;
    uint64_t ring_bytes;
    uint64_t generation;
    uint64_t head;               /* of the pass being made */
    uint64_t acked;
    uint32_t broken;             /* a bad entry closed it */
    uint32_t touched;            /* by the pass being made */
    uint32_t has_put;            /* since all sessions were looked at */
};

struct ms_segment {
    int64_t base;                /* physical offset of its first byte; -1: none */
    uint8_t *memory;             /* mapping or pool buffer; NULL: every pass is written, none stored into it */
    int32_t fd;                  /* to write to; -1: every pass is stored into the memory */
    int32_t pool_buffer;         /* -1 without a pool */
};

struct ms_writer {
    struct ms_control *control;
    struct ms_queue_table *queues;
    void *semaphores[MS_WORKER_KINDS]; /* by kind of worker */
    struct ms_writer_session sessions[MS_SESSION_SLOTS];
    uint32_t sessions_high;      /* attached ones are below */
    uint32_t turn;               /* session that the next pass looks at first */
    uint64_t active[MS_SESSION_WORDS]; /* bits: sessions that passes look at */
    int64_t looked_ns;           /* when all were looked at last */
    uint32_t touched_count;
    uint32_t touched_before_count;
    uint16_t touched[MS_SESSION_SLOTS]; /* sessions that the pass being made changed */
    uint16_t touched_before[MS_SESSION_SLOTS]; /* that the last pass changed: the slot to be filled lacks them */
    uint32_t whole_slots;        /* so many passes still fill in the accounts of all sessions */
    uint32_t session_seq_seen;
    uint32_t mode;
    int64_t segment_bytes;
    int64_t max_message_bytes;
    struct ms_segment current;
    struct ms_segment ahead[MS_AHEAD_MAX];
    uint32_t ahead_count;
    uint32_t segments_needed;    /* out: with MS_RUN_SEGMENT */
    uint32_t refuse_segment;     /* in: answer the entry at hand CREATE_MAPEDFILE_FAILED */
    uint32_t rolled;             /* segments finished since Python looked */
    struct ms_segment finished[MS_AHEAD_MAX]; /* out: with MS_RUN_ROLLED, `rolled` of them */
    int64_t gather_bytes_min;    /* in: a pass over so much is written where segments are mapped, too; 0: none */
    uint32_t is_gathering;       /* the pass being made is gathered and written, whatever memory its segments have */
    uint8_t *stage;              /* gathers the pass that is written; a page longer than stage_bytes_max */
    int64_t stage_bytes_max;
    int64_t stage_bytes;
    int64_t stage_from;          /* physical offset of stage[0] */
    uint8_t *zeros;              /* sync mode: the allocated bytes after the written ones are overwritten with these */
    int64_t zero_ahead_bytes;    /* that far; 0 not at all */
    int64_t zeroed_end;          /* up to here zeros or records were written, not only allocated */
    uint8_t *scratch;            /* private copy of the entry at hand */
    uint64_t scratch_bytes;
    uint32_t side_slot;          /* out: with MS_RUN_SIDE */
    uint32_t side_bytes;
    uint64_t side_sequence;
    uint64_t side_loaded;        /* in: sequence now standing in scratch; 0 none */
    uint32_t side_failed;        /* in: answer it MS_REFUSED_SIDE */
    uint32_t queues_refused;     /* in: no larger table came; answer MS_REFUSED_QUEUES_FULL */
    uint64_t pass;               /* number of the pass being made */
    int64_t position;            /* where its next record goes */
    int64_t store_timestamp_ms;
    uint64_t put_messages;
    uint64_t put_bytes;
    uint32_t entries;            /* in the pass being made */
    uint32_t unsynced_answers;   /* it gave one that no sync follows */
    int32_t spin_us;
    int32_t error_number;        /* out: with MS_RUN_FAILED */
    uint32_t last_producer_same_cpu;
    int64_t last_work_ns;
    uint32_t spinning;           /* entries come so close that spinning for the next one pays */
    uint32_t no_room;            /* in: the disk takes no bytes of the log: refuse each put */
    struct ms_mover mover;
    struct ms_home home;         /* sync mode */
    uint64_t skip_verify_incarnation; /* flusher incarnation already reported to Python */
    struct ms_light_queues light; /* places in further queues; off until Python sets light.enabled */
    struct ms_put_meter meter;   /* counts into shared memory once Python has set meter.stats */
    struct ms_recorder_hand recorder; /* records into shared memory once Python has taken it */
    int64_t wall_ms;             /* store time of the entries of the turn at hand; 0: the pass had no turn yet */
    int64_t clock_ns;            /* the last look at the clock before the pass being made */
    int64_t write_ns;            /* so much of the pass was spent in pwrite */
    int64_t left_ns;             /* when ms_writer_run returned, */
    uint32_t left_why;           /* and why */
    uint32_t waited_for_pool;    /* in: what kept a segment away was a buffer of the pool */
};

/* After all pointers are set: takes the committed slot as the truth. */
void ms_writer_open(struct ms_writer *writer);
/* Put back what an uncommitted pass of a dead writer changed in the queue table.
 * Returns 1 when there was such a pass: then [wrote, intent_end) must be zeroed
 * before anything is appended. Idempotent. */
int ms_writer_roll_back(struct ms_control *control, struct ms_queue_table *queues);
/* After the zeroing: forget the dead pass. */
void ms_writer_rolled_back(struct ms_control *control);
/* Take a mapped session in; its head and acked come from the committed slot, ring_bytes
 * from the session table (nothing is believed from the object itself). */
void ms_writer_attach_session(struct ms_writer *writer, uint32_t slot, struct ms_session *session,
                              uint64_t generation, uint64_t ring_bytes);
void ms_writer_detach_session(struct ms_writer *writer, uint32_t slot);
/* 1 when everything published in the session is executed (or it is broken). */
int ms_writer_session_drained(const struct ms_writer *writer, uint32_t slot);
/* Go over to a larger queue table that already holds everything of the old one. */
int ms_writer_use_table(struct ms_writer *writer, struct ms_queue_table *queues);
/* Passes until the deadline or until Python has something to do; MS_RUN_*. */
int ms_writer_run(struct ms_writer *writer, int64_t deadline_ns);
