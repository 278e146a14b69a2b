/* The flight recorder: what made puts wait, recorded by each worker in shared memory that survives every process.
 *
 * Who: the supervisor creates it at start beside the control block; each worker writes the ring of its own kind, and the
 * writer also the ring of slow puts; `pyengine why` reads a copy, also when all processes are dead. Blocks on: nothing (two
 * small reads of /proc and getrusage for each recorded stall, none otherwise). After a crash: recorded stalls stay; readers
 * skip a stall that was being written, by its checksum. The next start keeps the stalls. No process depends on them.
 *
 * A worker takes its times once a pass or round, when it reads the clock anyway. What takes `threshold_ns` or more becomes
 * a stall, with its phases, the kernel's counters of the process since they were last read (the window), and a cause.
 */
#define MS_RECORDER_LAYOUT_VERSION 3
#define MS_STALLS 128
#define MS_STALL_MINUTES 60
#define MS_STALL_NS 5000000
#define MS_PHASES 8
#define MS_CAUSES 24

/* The phases of a stall. */
#define MS_PHASE_RING 0          /* from the submission of its slowest put to the begin of the pass */
#define MS_PHASE_SEGMENT 1       /* for the next segment, or a buffer of the pool */
#define MS_PHASE_TOUCH 2         /* taking entries: copies into the pages of the log */
#define MS_PHASE_WRITE 3         /* pwrite */
#define MS_PHASE_SYNC 4          /* fdatasync */
#define MS_PHASE_SLAVE 5         /* until enough slaves had it */
#define MS_PHASE_LOCK 6          /* for another process to provide something: a larger queue table */
#define MS_PHASE_OTHER 7

/* Kinds of stalls. */
#define MS_STALL_PASS 1          /* the writer: one pass */
#define MS_STALL_REQUEST 2        /* the writer, between passes; detail: MS_RUN_* */
#define MS_STALL_PUTS 3          /* the writer: `entries` puts waited so long for their answer, the slowest `took_ns` */
#define MS_STALL_SYNC 4          /* the flusher; detail 1: puts waited for it, took_ns from the first of them on */
#define MS_STALL_CONFIRM 5       /* the replicator of a SYNC_MASTER, likewise */
#define MS_STALL_WRITE 6         /* the committer: one piece */
#define MS_STALL_ROUND 7         /* a round of allocator, cleaner, checkpointer: concurrent work, not itself a wait */
#define MS_STALL_BLOCKED 8       /* any: it was blocked; took_ns 0: the begin of that */
#define MS_STALL_STOPPED 9       /* any: it was stopped by a signal, and resumed; took_ns: an upper bound */
#define MS_STALL_DIED 10         /* the supervisor: a worker of kind `detail` has died */
#define MS_STALL_START 11        /* the supervisor: the engine was started, with recovery */

#define MS_CAUSE_UNKNOWN 0
#define MS_CAUSE_SYNC 1          /* the device took long to sync */
#define MS_CAUSE_WRITE 2         /* a write to the file took long */
#define MS_CAUSE_SEGMENT 3       /* the next segment was not ready */
#define MS_CAUSE_POOL 4          /* no buffer of the pool was free */
#define MS_CAUSE_FAULT 5         /* page faults in the log or in the engine */
#define MS_CAUSE_SLAVE 6         /* slaves took long to confirm */
#define MS_CAUSE_LOCK 7          /* another process had to provide something first */
#define MS_CAUSE_STOPPED 8       /* a signal had stopped the process */
#define MS_CAUSE_NO_ROOM 9       /* the disk is full */
#define MS_CAUSE_CPU 10          /* the process was ready to run and had no processor */
#define MS_CAUSE_RESTART 11      /* its predecessor had died */
#define MS_CAUSE_BACKLOG 12      /* more was submitted than one pass takes */
#define MS_CAUSE_LARGE 13        /* a large pass that worked all the time */
#define MS_CAUSE_BLOCKED 14      /* the worker was blocked for another reason, which `pyengine status` names */
#define MS_CAUSE_ROLL 15         /* from a full segment to the next: the old one was unmapped, the new one attached */
#define MS_CAUSE_WOKEN_LATE 16   /* it slept, and no other cause explains for so long */
#define MS_CAUSE_ROUND 17        /* other work of the worker */
#define MS_CAUSE_START 18        /* the engine was not running */
#define MS_CAUSE_FAILED 19       /* the disk failed: the store is frozen */

struct ms_stall {
    uint64_t number;             /* in its ring, from 1 */
    int64_t began_ns;            /* CLOCK_MONOTONIC */
    int64_t took_ns;
    uint32_t what;               /* MS_STALL_* */
    uint32_t cause;              /* MS_CAUSE_* */
    int64_t phase_ns[MS_PHASES];
    int64_t offset;              /* the log's end; of a sync the end of its target */
    int64_t bytes;
    int64_t window_ns;           /* the fields below are of the window that ends with the stall */
    int64_t queued_ns;           /* ready to run, without a processor (/proc/self/schedstat) */
    int64_t busy_ns;             /* on a processor */
    uint32_t entries;
    uint32_t detail;
    uint32_t major_faults;
    uint32_t minor_faults;
    uint32_t continued;          /* number of SIGCONT signals */
    int32_t error_number;
    int32_t pid;
    uint32_t likely;             /* MS_CAUSE_*: the cause unless the kernel's counters show another */
    uint32_t reserved[5];
    uint32_t crc;                /* of all fields above */
};

/* How many slow puts one minute had, CLOCK_MONOTONIC / 60 s, at `minute` % MS_STALL_MINUTES. */
struct ms_stall_minute {
    int64_t minute;
    uint64_t stalls;
};

struct ms_recorder_ring {
    uint64_t stalls;             /* ever recorded; the last MS_STALLS are in `stall`, number n at n % MS_STALLS */
    int64_t phase_since_ns;      /* 0: no long operation */
    uint32_t phase;              /* MS_PHASE_*, or MS_PHASES: blocked, for the reason in blocked_reasons.cdef.h */
    uint32_t reserved;
    int8_t pad[104];
    struct ms_stall stall[MS_STALLS];
};

/* The writer: a pass for which producers wait until the flusher's or replicator's position reaches `end`. */
struct ms_waiting {
    int64_t since_ns;
    int64_t end;                 /* stored last, with release */
};

struct ms_recorder {
    uint64_t magic;              /* stored last, with release: "MSRECORD" */
    uint32_t layout_version;
    uint32_t reserved;
    uint8_t boot_id[16];         /* the boot whose clock the stalls use */
    int8_t pad[96];
    struct ms_waiting for_sync;  /* sync mode */
    int8_t pad1[112];
    struct ms_waiting for_slave; /* of a SYNC_MASTER */
    int8_t pad2[112];
    struct ms_recorder_ring ring[MS_WORKER_KINDS + 1]; /* by kind of worker, then slow puts: the writer writes those too. Their
                                    times come from producers, so a hostile one can fill it */
    struct ms_stall_minute puts_minute[MS_STALL_MINUTES]; /* what that ring forgets is counted here */
    int8_t pad3[64];
};

/* One process's state of recording, in private memory. */
struct ms_recorder_handle {
    struct ms_recorder *shared;  /* NULL: nothing is recorded */
    struct ms_recorder_ring *ring;
    int64_t threshold_ns;
    int64_t attached_ns;         /* a wait that began before was for a dead predecessor */
    int32_t schedstat_fd;        /* -1: not available */
    int32_t pid;
    uint32_t last_cause;         /* of the last stall of its ring, */
    int64_t last_began_ns;       /* which began here */
    int64_t last_ended_ns;       /* and ended here */
    int64_t puts_noted_ns;       /* when slow puts were recorded last */
    struct ms_stall puts_held;   /* slow puts since then; entries 0: none */
    uint32_t reserved;
    uint32_t continued;          /* from here on: the kernel's counters when they were last read */
    int64_t window_began_ns;
    int64_t checked_ns;             /* ms_recorder_check_stopped */
    int64_t queued_ns;
    int64_t busy_ns;
    int64_t major_faults;
    int64_t minor_faults;
};

/* The supervisor: initialize zeros, or keep the recorder of a dead engine of this boot. */
void ms_recorder_format(struct ms_recorder *recorder, const uint8_t *boot_id);
/* Return 1 if the stall is complete and has no impossible value. */
int ms_stall_is_whole(const struct ms_stall *stall);

/* Begin recording in a worker's ring. `handle` is zeros; with `shared` NULL the functions below do nothing. */
void ms_recorder_open(struct ms_recorder_handle *handle, struct ms_recorder *shared, uint32_t kind);
void ms_recorder_close(struct ms_recorder_handle *handle);
/* Count the SIGCONT signals of this process from now on, each of which means that it was stopped. */
void ms_recorder_count_resumes(void);
/* Return the number of those signals, and the time of the last one (CLOCK_MONOTONIC). */
uint32_t ms_recorder_resumes(int64_t *last_ns);
/* Begin a new window. */
void ms_recorder_begin_window(struct ms_recorder_handle *handle, int64_t now_ns);
/* Called once a round: record that this process was stopped and resumed since the last call, unless a stall shows it. */
void ms_recorder_check_stopped(struct ms_recorder_handle *handle, int64_t now_ns);
/* Record a stall. In: what, began_ns, took_ns, phases, and what else is known; this finds the cause if it is
 * MS_CAUSE_UNKNOWN. */
void ms_recorder_note(struct ms_recorder_handle *handle, struct ms_stall *stall);
/* Record what began at `began_ns` and is over, in one phase, if it took the threshold or more. */
void ms_recorder_note_if_long(struct ms_recorder_handle *handle, uint32_t what, uint32_t phase, int64_t began_ns, int64_t offset, int64_t bytes);
/* The writer: record slow puts of one pass. In: as above; `pass` is the stall of the pass itself, NULL if it was none. In a
 * backlog every pass has slow puts: then they are combined and recorded once in MS_STALL_NS. */
void ms_recorder_note_puts(struct ms_recorder_handle *handle, struct ms_stall *puts, const struct ms_stall *pass);
/* Record the combined slow puts. */
void ms_recorder_note_held(struct ms_recorder_handle *handle);
/* Publish the phase that takes long at this moment; `phase` MS_PHASES + 1: it is over. */
void ms_recorder_set_phase(struct ms_recorder_handle *handle, uint32_t phase, int64_t since_ns);
/* The flusher or replicator, before it moves its position: return when the first pass below `reached` began to wait; 0: none. */
int64_t ms_recorder_waiting_since(const struct ms_waiting *waiting, int64_t reached);
