/* The flight recorder: what made puts wait, as its worker saw it, in memory that outlives every process.
 *
 * Who: created by the supervisor at start beside the control block; each worker writes the ring of its own kind, the
 * writer the ring of slow puts too; `pyengine why` reads a copy of the object, also when all are dead. Blocks on: nothing
 * (two small reads of /proc and getrusage for each recorded stall, none otherwise). After a crash: the stalls stay as they
 * were recorded; one that was being written fails its checksum and is skipped. The next start takes the
 * stalls over. No process decides anything by them.
 *
 * A worker takes its times once a pass or round, where it looks at the clock anyway. What took `threshold_ns` or more becomes a
 * stall, with its phases, what the kernel tells of the process since it was asked last (the window), and a cause.
 */
#define MS_RECORDER_LAYOUT_VERSION 1
#define MS_RECORDER_RINGS 12     /* one a kind of worker, then MS_RECORDER_PUTS */
#define MS_RECORDER_PUTS 11      /* the writer's second ring. Producers say when they submitted, so a liar can fill this one */
#define MS_STALLS 128
#define MS_STALL_MINUTES 60
#define MS_STALL_NS 5000000
#define MS_PHASES 8
#define MS_CAUSES 24

/* Where the time of a stall went. */
#define MS_PHASE_RING 0          /* from the submission of its slowest put to the begin of the pass */
#define MS_PHASE_SEGMENT 1       /* for the next segment, or a buffer of the pool */
#define MS_PHASE_TOUCH 2         /* taking entries: copies into the pages of the log */
#define MS_PHASE_WRITE 3         /* pwrite */
#define MS_PHASE_SYNC 4          /* fdatasync */
#define MS_PHASE_SLAVE 5         /* until enough slaves had it */
#define MS_PHASE_LOCK 6          /* for what another process has to give: a larger queue table */
#define MS_PHASE_OTHER 7

/* What was recorded. */
#define MS_STALL_PASS 1          /* the writer: one pass */
#define MS_STALL_ERRAND 2        /* the writer, between passes; detail: MS_RUN_* */
#define MS_STALL_PUTS 3          /* the writer: `entries` puts waited so long for their answer, the slowest `took_ns` */
#define MS_STALL_SYNC 4          /* the flusher; detail 1: puts waited for it, took_ns from the first of them on */
#define MS_STALL_CONFIRM 5       /* the replicator of a SYNC_MASTER, likewise */
#define MS_STALL_WRITE 6         /* the committer: one piece */
#define MS_STALL_ROUND 7         /* a round of allocator, cleaner, checkpointer: what went on beside, no wait by itself */
#define MS_STALL_BLOCKED 8       /* any: it could not do its work; took_ns 0: this is when that began */
#define MS_STALL_STOPPED 9       /* any: it was stopped by a signal, and resumed; took_ns: no longer than that */
#define MS_STALL_DIED 10         /* the supervisor: a worker has died, detail: which kind */
#define MS_STALL_START 11        /* the supervisor: the engine was started, recovery and all */

#define MS_CAUSE_UNKNOWN 0
#define MS_CAUSE_SYNC 1          /* the device took long to sync */
#define MS_CAUSE_WRITE 2         /* a write to the file took long */
#define MS_CAUSE_SEGMENT 3       /* the next segment was not ready */
#define MS_CAUSE_POOL 4          /* no buffer of the pool was free */
#define MS_CAUSE_FAULT 5         /* pages of the log or of the engine had to be brought in */
#define MS_CAUSE_SLAVE 6         /* slaves were waited for */
#define MS_CAUSE_LOCK 7          /* another process had to give something first */
#define MS_CAUSE_STOPPED 8       /* a signal had stopped the process */
#define MS_CAUSE_NO_ROOM 9       /* the disk is full */
#define MS_CAUSE_CPU 10          /* it was ready to run and had no processor */
#define MS_CAUSE_RESTART 11      /* its predecessor had died */
#define MS_CAUSE_BACKLOG 12      /* more was submitted than is taken at once */
#define MS_CAUSE_LARGE 13        /* it worked all the time: a large pass */
#define MS_CAUSE_BLOCKED 14      /* something else kept the worker from its work; `pyengine status` names it */
#define MS_CAUSE_ROLL 15         /* from a full segment to the next: the old one was unmapped, the new one attached */
#define MS_CAUSE_WOKEN_LATE 16   /* it slept, and none of the others explains why so long */
#define MS_CAUSE_ROUND 17        /* work beside the puts */
#define MS_CAUSE_START 18        /* the engine was not running */
#define MS_CAUSE_FAILED 19       /* the disk failed: the store is frozen */

struct ms_stall {
    uint64_t number;             /* in its ring, from 1 */
    int64_t began_ns;            /* CLOCK_MONOTONIC */
    int64_t took_ns;
    uint32_t what;               /* MS_STALL_* */
    uint32_t cause;              /* MS_CAUSE_* */
    int64_t phase_ns[MS_PHASES];
    int64_t offset;              /* where the log ended; of a sync what it was for */
    int64_t bytes;
    int64_t window_ns;           /* what follows is of the window that ends with the stall */
    int64_t queued_ns;           /* ready to run, without a processor (/proc/self/schedstat) */
    int64_t busy_ns;             /* on a processor */
    uint32_t entries;
    uint32_t detail;
    uint32_t major_faults;
    uint32_t minor_faults;
    uint32_t preempted;          /* involuntary switches */
    uint32_t continued;          /* SIGCONT came so often */
    int32_t error_number;
    int32_t pid;
    uint32_t likely;             /* MS_CAUSE_*: what it is unless the kernel knows of something surer */
    uint32_t reserved[3];
    uint32_t epoch;
    uint32_t crc;                /* of all before it */
};

/* One minute of a ring: CLOCK_MONOTONIC / 60 s, at `minute` % MS_STALL_MINUTES. */
struct ms_stall_minute {
    int64_t minute;
    uint64_t stalls;
    uint64_t stalled_ns;
    uint64_t reserved;
    struct ms_stall longest;
};

struct ms_recorder_ring {
    uint64_t stalls;             /* ever recorded; the last MS_STALLS are in `stall`, number n at n % MS_STALLS */
    uint64_t stalled_ns;
    int64_t doing_since_ns;      /* 0: nothing that takes long */
    uint32_t doing;              /* MS_PHASE_*, or MS_PHASES: what blocks it says `obstacles` */
    uint32_t reserved;
    int8_t pad[96];
    uint64_t by_cause[MS_CAUSES];
    struct ms_stall longest;
    struct ms_stall_minute minute[MS_STALL_MINUTES];
    struct ms_stall stall[MS_STALLS];
};

/* The writer: a pass for which producers wait, until the process that lets them go on has moved its position to `end`. */
struct ms_waiting {
    int64_t since_ns;
    int64_t end;                 /* stored last, with release */
};

struct ms_recorder {
    uint64_t magic;              /* stored last, with release: "MSRECORD" */
    uint32_t layout_version;
    uint32_t reserved;
    int64_t recorder_bytes;
    int64_t threshold_ns;
    uint8_t boot_id[16];         /* the clock of the stalls is of this boot */
    int8_t pad[80];
    struct ms_waiting for_sync;  /* sync mode */
    int8_t pad1[112];
    struct ms_waiting for_slave; /* of a SYNC_MASTER */
    int8_t pad2[112];
    struct ms_recorder_ring ring[MS_RECORDER_RINGS];
};

/* One process's hand on the recorder; private memory. */
struct ms_recorder_hand {
    struct ms_recorder *shared;  /* NULL: nothing is recorded */
    struct ms_recorder_ring *ring;
    int64_t threshold_ns;
    int64_t attached_ns;         /* what began before waited for a predecessor */
    int32_t schedstat_fd;        /* -1: cannot be had */
    int32_t pid;
    uint32_t epoch;
    uint32_t is_sync_master;
    uint32_t is_sync_mode;
    uint32_t last_cause;         /* of the last stall of its ring, */
    int64_t last_began_ns;       /* which lasted from here */
    int64_t last_ended_ns;       /* to here */
    int64_t puts_noted_ns;       /* when slow puts were recorded last */
    struct ms_stall puts_held;   /* slow ones since; entries 0: none */
    uint32_t reserved;
    uint32_t continued;          /* the kernel's figures as they were when it was asked last */
    int64_t looked_ns;
    int64_t seen_ns;             /* ms_recorder_seen */
    int64_t queued_ns;
    int64_t busy_ns;
    int64_t major_faults;
    int64_t minor_faults;
    int64_t preempted;
};

/* For the supervisor: over zeros, or over the recorder of a dead engine of this boot, whose stalls stay. */
void ms_recorder_format(struct ms_recorder *recorder, const uint8_t *boot_id);
/* 0, or -EPROTO wrong magic, -EBADMSG other layout, -EMSGSIZE too short. */
int ms_recorder_check(const struct ms_recorder *recorder, int64_t mapped_bytes);
/* 1 where the stall was recorded whole and says nothing impossible. */
int ms_stall_is_whole(const struct ms_stall *stall);

/* A worker takes its ring. `hand` is zeros; `shared` NULL: the others below do nothing. */
void ms_recorder_take(struct ms_recorder_hand *hand, struct ms_recorder *shared, uint32_t kind, uint32_t epoch);
void ms_recorder_leave(struct ms_recorder_hand *hand);
/* Count the SIGCONTs of this process from here on: who is resumed knows that it was stopped. */
void ms_recorder_count_resumes(void);
/* How often that was, and when last (CLOCK_MONOTONIC). */
uint32_t ms_recorder_resumes(int64_t *last_ns);
/* A new window begins. */
void ms_recorder_look(struct ms_recorder_hand *hand, int64_t now_ns);
/* Once a round: was this process stopped and resumed since it was seen last, and no stall tells of it, it is recorded. */
void ms_recorder_seen(struct ms_recorder_hand *hand, int64_t now_ns);
/* Record it. In: what, began_ns, took_ns, phases, and what else is known; a cause that is MS_CAUSE_UNKNOWN is found here. */
void ms_recorder_note(struct ms_recorder_hand *hand, struct ms_stall *stall);
/* The writer: puts of one pass were slow. In: as above; `pass` is the stall that the pass itself was, NULL if it was none. In a
 * backlog every pass has some: then they are gathered, and recorded once in MS_STALL_NS. */
void ms_recorder_note_puts(struct ms_recorder_hand *hand, struct ms_stall *puts, const struct ms_stall *pass);
/* Record what is gathered. */
void ms_recorder_note_held(struct ms_recorder_hand *hand);
/* What takes long just now, for who looks while it does; `phase` MS_PHASES + 1: it is over. */
void ms_recorder_doing(struct ms_recorder_hand *hand, uint32_t phase, int64_t since_ns);
/* The flusher, the replicator: when the first pass below `reached` began to wait, 0 for none. Before the position moves. */
int64_t ms_recorder_waiting_since(const struct ms_waiting *waiting, int64_t reached);
