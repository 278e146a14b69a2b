/* The shared control block of one engine.
 *
 * Who: the supervisor creates it at start; every worker maps it read-write, producers and readers read-only (without
 * PROT_WRITE, so a hostile one can neither change nor truncate it). Blocks on: nothing. After a crash: positions, commit
 * slots, undo list and session table are as the dead process left them; the comments below say which process reads what
 * from them.
 *
 * Every field has one writing process, which its comment names, unless the comment says otherwise. Positions are
 * physical offsets in the whole commit log and only grow within an epoch. Each hot field has a line of its own (two cache
 * lines, because the prefetcher loads adjacent lines in pairs).
 */
#define MS_LINE_BYTES 128
#define MS_CONTROL_LAYOUT_VERSION 16
#define MS_SESSION_SLOTS 1024
#define MS_UNDO_MAX 4096
#define MS_POOL_BUFFERS_MAX 64
#define MS_REASON_BYTES 256
#define MS_UUID_BYTES 16
#define MS_PASS_SLOTS 2
#define MS_INDEX_PROGRESS_BYTES 256
#define MS_ARRIVAL_SLOTS 1024

/* Kinds of worker; the numbers are in shared memory and in lock bytes. Their names: pyengine/ipc/shared_objects.py. */
#define MS_WORKER_KINDS 12
#define MS_SUPERVISOR 0
#define MS_WRITER 1
#define MS_COMMITTER 2
#define MS_FLUSHER 3
#define MS_REPUTTER 4
#define MS_ALLOCATOR 5
#define MS_CHECKPOINTER 6
#define MS_CLEANER 7
#define MS_SCHEDULER 8
#define MS_REPLICATOR 9
#define MS_GATEWAY 10
#define MS_GRPC 11

/* State of the store. */
#define MS_STATE_STOPPED 0
#define MS_STATE_RECOVERING 1
#define MS_STATE_RUNNING 2
#define MS_STATE_READ_ONLY 3
#define MS_STATE_DEGRADED 4
#define MS_STATE_STOPPING 5

/* Role of the store. */
#define MS_ROLE_ASYNC_MASTER 0
#define MS_ROLE_SYNC_MASTER 1
#define MS_ROLE_SLAVE 2

/* Bits of ms_state.refuse_puts, each set and cleared by one process. */
#define MS_REFUSE_PUTS_STOPPING 1   /* supervisor */
#define MS_REFUSE_PUTS_DISK_FULL 2  /* cleaner */
#define MS_REFUSE_PUTS_SLAVE 4      /* supervisor */
#define MS_REFUSE_PUTS_UNWRITABLE 8 /* cleaner */
#define MS_REFUSE_PUTS_FENCED 16    /* replicator */
#define MS_REFUSE_PUTS_LOST 32      /* supervisor, or a worker without one */

/* How acknowledged bytes reach the file: the write path. */
#define MS_MODE_MAPPED 0
#define MS_MODE_POOL 1
#define MS_MODE_SYNC 2

/* State of a worker. */
#define MS_WORKER_ABSENT 0
#define MS_WORKER_STARTING 1
#define MS_WORKER_READY 2
#define MS_WORKER_STOPPING 3
#define MS_WORKER_FAILED 4

/* State of a session slot, changed by compare-and-swap: FREE->OPEN and OPEN->DEAD by the supervisor, DEAD->FREE by the
 * writer once the ring is drained, OPEN->DEAD also by the writer for a bad entry. */
#define MS_SESSION_FREE 0
#define MS_SESSION_OPEN 1
#define MS_SESSION_DEAD 2

struct ms_position {
    int64_t value;
    int8_t pad[120];
};

/* Written by the supervisor before `magic`; constant afterwards, but for the limits (pyengine/ipc/control_block.py), each one store.
 * The fields up to `engine_id_inode` are the same in each layout. */
struct ms_identity {
    uint64_t magic;              /* stored last, with release: "MSCONTRL" */
    uint32_t layout_version;
    uint32_t control_bytes;      /* size of the whole block */
    uint8_t store_uuid[MS_UUID_BYTES]; /* of config/engine-id */
    uint8_t boot_id[MS_UUID_BYTES];
    uint64_t epoch;              /* raised at each recovery */
    uint64_t engine_id_device;   /* of config/engine-id: a copied folder differs */
    uint64_t engine_id_inode;
    int64_t segment_bytes;
    int64_t session_ring_bytes_default;
    int64_t max_message_bytes;
    int64_t put_timeout_ms;
    int64_t sync_flush_timeout_ms;
    int64_t os_page_cache_busy_timeout_ms; /* a pass that takes longer: producers refuse */
    int32_t spin_writer_us;      /* 0: never spin */
    int32_t spin_producer_us;
    uint32_t mode;               /* MS_MODE_* */
    uint32_t sessions_max;
    uint32_t pool_buffers;
    uint32_t replay_clock;       /* 1: the writer takes the store time from the entry */
    uint32_t dispatch_at;        /* 0: committed (as 4.9), 1: confirm */
    uint32_t role;               /* MS_ROLE_* */
    int64_t created_ms;
    int32_t sysv_semaphore_id;   /* SEM_UNDO count of living producers; -1 none */
    uint32_t gateway;            /* 1: a gateway runs */
    int64_t lock_modified_ns;    /* mtime of `lock` as pyengine wrote it: RocketMQ rewrites the file at each start */
    int64_t slave_timeout_ms;    /* longest wait of a put for `confirm` */
    int64_t ha_slave_fallbehind_max_bytes; /* a put farther ahead of `confirm` does not wait for it */
    uint32_t min_in_sync_replicas; /* slaves that must have a byte before it is confirmed */
    uint32_t replicates;         /* 1: a replicator runs */
    int64_t created_boot_ns;     /* CLOCK_BOOTTIME at created_ms: shows whether the wall clock was set since */
    uint32_t grpc;               /* 1: a gRPC worker runs */
    int8_t pad[44];
};

struct ms_state {
    uint32_t state;              /* MS_STATE_*; supervisor, and the worker that freezes the store */
    uint32_t retired;            /* 1: another control block has taken over; supervisor */
    uint32_t frozen;             /* 0, 1 being written, 2 reason readable; first failing worker, by CAS */
    int32_t frozen_errno;
    uint32_t frozen_kind;        /* MS_FLUSHER ... */
    uint32_t refuse_puts;        /* MS_REFUSE_PUTS_*, by CAS */
    uint64_t queue_table_generation_offered; /* supervisor: a larger table is ready */
    int8_t pad[96];
    int8_t reason[MS_REASON_BYTES]; /* UTF-8, NUL-terminated; of `frozen` or of read_only/degraded */
};

/* Two lines a worker: the first is the worker's own, the second the supervisor's. */
struct ms_worker {
    int64_t heartbeat_ns;        /* CLOCK_MONOTONIC; fed by progress, not by a timer */
    int64_t start_time_ms;       /* process start in ms since boot (ipc/heartbeat.py): pid reuse */
    int32_t pid;
    uint32_t state;              /* MS_WORKER_* */
    int32_t cpu;                 /* the writer's: where its last pass ran, for the spin rule */
    uint32_t incarnation;        /* +1 at each attach */
    uint64_t passes;             /* rounds with work */
    int64_t error_count;
    int64_t position;            /* for the worker's next incarnation; checkpointer: queues are durable up to here */
    int32_t error_number;        /* committer: why it cannot write at present, 0: it can */
    uint32_t settings_seq;       /* of the run settings that this worker uses; the writer uses none */
    uint64_t build_id;           /* of the code that this worker runs (ipc/heartbeat.py) */
    int8_t pad[56];
    uint32_t restarts;           /* supervisor */
    int8_t pad2[124];
};

/* The writer's account of one pass. It fills slot `pass % 2`, then stores `slot_pass` with release: that store is the
 * commit point. The account of a session that has not put yet may be that of the slot's previous generation. */
struct ms_session_account {
    uint64_t head;               /* ring bytes consumed */
    uint64_t acked;              /* entries completed: the sequence number of the last one */
    uint64_t generation;         /* the session's, to which head and acked belong; another session starts at 0 */
};

struct ms_commit_slot {
    int64_t wrote;
    int64_t store_timestamp_ms;  /* of the last record below wrote */
    uint64_t queue_table_generation;
    uint32_t sessions_high;      /* slots above were never used */
    uint32_t reserved;
    uint64_t put_messages;       /* since the epoch began */
    uint64_t put_bytes;
    int8_t pad[80];
    struct ms_session_account sessions[MS_SESSION_SLOTS];
};

/* Queue offsets that the uncommitted pass has changed. A new writer restores them if `pass` is the one after the
 * committed slot's. */
struct ms_undo {
    uint64_t pass;
    uint32_t count;              /* stored with release after the entry */
    uint32_t reserved;
    int8_t pad[112];
    int64_t old_offset[MS_UNDO_MAX];
    uint32_t table_slot[MS_UNDO_MAX];
};

struct ms_writer_lines {
    int64_t intent_end;          /* the pass has written nothing at or above; release before each copy */
    int64_t wanted_end;          /* the log's end after the entry that waits: the allocator should have segments and blocks up to here */
    int64_t pass_started_ms;     /* 0: no pass is running (RocketMQ's beginTimeInLock) */
    int64_t clock_back_ms;       /* largest step back of the clock seen */
    uint64_t refused;            /* entries answered with a status other than PUT_OK */
    uint64_t verified_flusher;   /* flusher incarnation for which the first descriptors synced without error */
    uint64_t queue_table_wanted; /* slots requested from the supervisor; 0 none */
    uint64_t pool_waits;         /* rolls that had to wait for a pool buffer */
    uint64_t intended_pass;      /* pass that intent_end belongs to */
    uint64_t bus_errors;         /* stores into a mapped segment that failed: unless 0 the writer uses pwrite instead */
    uint32_t is_beside_producer; /* 1: the last pass ran on its producer's CPU */
    int64_t ordered_from;        /* of a master's records: the last one that has a lower store time than one before it */
    int8_t pad[32];
};

struct ms_allocator_line {
    int64_t ready_end;           /* segments are ready up to this offset, with their full length */
    int32_t error_number;        /* errno of the last failed allocation, 0 none */
    int64_t populated_end;
    int64_t reserved_end;        /* the bytes from the log's end to here have blocks: the writer stores nothing beyond */
    int8_t pad[96];
};

struct ms_flusher_lines {
    uint64_t incarnation;        /* a new flusher asks the writer to sync its first descriptors */
    uint64_t syncs;
    uint64_t sync_ns_total;
    uint64_t sync_ns_max;
    int64_t sync_target;         /* end of what the running sync makes durable; at or below `flushed`: none is running */
    int8_t pad[88];
};

/* The state of the replicator; its links are in an object of their own (replication.cdef.h). */
struct ms_replicator_lines {
    uint32_t slaves_connected;   /* master: links whose slave has reported its position */
    uint32_t linked;             /* slave: 1 while its master's bytes arrive and agree with its own */
    int64_t master_end;          /* slave: last known end of its master's log; 0 none */
    int8_t pad[112];
};

/* A number that waiters sleep on (futex); read-only for them. */
struct ms_sequence {
    uint32_t value;
    int8_t pad[124];
};

struct ms_session_slot {
    uint32_t state;              /* MS_SESSION_* */
    uint32_t generation;         /* +1 at each opening; part of the object's name; supervisor */
    int32_t pid;                 /* supervisor, from peer credentials */
    uint32_t uid;
    int64_t start_time_ms;
    int64_t ring_bytes;
    uint32_t bad_entry;          /* writer: why it closed the session, 0 fine */
    uint32_t reserved;
    int8_t pad[88];
};

/* segment_base -1: free. free->base by the writer, base->free by the committer. */
struct ms_pool_buffer {
    int64_t segment_base;
    int8_t pad[120];
};

/* Of each worker. has_notified 1: the owner is awake or being woken, so do not wake it. 0: the owner has armed its latch and
 * may sleep. */
struct ms_latch {
    uint32_t has_notified;       /* the owner clears it, the worker that wakes it sets it; the writer sleeps on it (futex) */
    uint32_t arms;               /* writer: how often it has armed its latch */
    int8_t pad[120];
};

/* Which queues have new messages (csrc/arrivals.cdef.h). */
struct ms_arrivals {
    int64_t end[MS_ARRIVAL_SLOTS]; /* physical end of the newest message dispatched to a queue of this set */
};

struct ms_control {
    struct ms_identity identity;
    struct ms_state state;
    struct ms_position min_offset;   /* cleaner (supervisor at start) */
    struct ms_position wrote;        /* writer */
    struct ms_position committed;    /* committer (writer without pool) */
    struct ms_position flushed;      /* flusher */
    struct ms_position reput_from;   /* reputter */
    struct ms_position confirm;      /* replicator: enough slaves have it; on a slave, what it has reported */
    struct ms_position received;     /* replicator, slave role: received from the master, perhaps part of a record */
    struct ms_sequence flush_seq;    /* flusher after flushed moved; the worker that freezes; in sync mode the writer after answers without a sync */
    struct ms_sequence arrival_seq;  /* reputter, flusher and replicator after their positions moved */
    struct ms_sequence session_seq;  /* supervisor after the session table changed */
    struct ms_sequence confirm_seq;  /* replicator after confirm moved */
    struct ms_sequence settings_seq; /* supervisor after the run settings have changed */
    struct ms_writer_lines writer;
    struct ms_position slot_pass;    /* writer: number of the committed pass */
    struct ms_allocator_line allocator;
    struct ms_flusher_lines flusher;
    struct ms_replicator_lines replicator;
    uint8_t index_progress[MS_INDEX_PROGRESS_BYTES]; /* reputter: struct ms_index_progress */
    struct ms_worker workers[MS_WORKER_KINDS];
    struct ms_latch latch[MS_WORKER_KINDS]; /* by kind of worker */
    struct ms_pool_buffer pool[MS_POOL_BUFFERS_MAX];
    struct ms_session_slot sessions[MS_SESSION_SLOTS];
    struct ms_commit_slot slots[MS_PASS_SLOTS];
    struct ms_undo undo;
    struct ms_arrivals arrivals;     /* reputter */
};

/* 0, or -EPROTO wrong magic, -EBADMSG other layout, -EMSGSIZE too short. */
int ms_control_check(const struct ms_control *control, int64_t mapped_bytes);
/* Store the magic last: from then on readers accept the block. */
void ms_control_publish(struct ms_control *control);
/* Access a field by address: loads acquire, stores release. */
int64_t ms_load_i64(const int64_t *address);
uint32_t ms_load_u32(const uint32_t *address);
void ms_store_i64(int64_t *address, int64_t value);
void ms_store_u32(uint32_t *address, uint32_t value);
uint32_t ms_add_u32(uint32_t *address, int32_t by);
/* 1 when `address` held `expected` and now holds `value`. */
int ms_cas_u32(uint32_t *address, uint32_t expected, uint32_t value);
int ms_cas_i64(int64_t *address, int64_t expected, int64_t value);
/* Write the numbers of the used ones of the first `slots` sessions to `used`, in order; return how many. The supervisor calls
 * it each second. */
int ms_control_used_sessions(const struct ms_control *control, uint32_t slots, uint32_t *used);
/* Freeze the store with errno and a reason, raise flush_seq and wake all processes that wait for durability. The first
 * failure wins: 1 this call froze the store, 0 it was frozen before. */
int ms_control_freeze(struct ms_control *control, uint32_t kind, int32_t error_number, const char *reason);
struct ms_commit_totals {
    int64_t wrote;
    int64_t store_timestamp_ms;
    uint64_t put_messages;
    uint64_t put_bytes;
};
/* Any process: a copy of the committed slot's first fields, all of one pass. It is read again only if the writer commits
 * within these few loads. */
void ms_control_committed_slot(const struct ms_control *control, struct ms_commit_totals *found);
/* The flusher: publish `flushed`, then raise flush_seq and wake: `to_all` that sleep on it, or, after a sync that was
 * announced in flusher.sync_target, not the processes that wait for the sync after this one. */
void ms_control_publish_flushed(struct ms_control *control, int64_t flushed, int to_all);
/* Sleep until a sync may have made something durable, flush_seq is raised for another reason, or the timeout. The caller
 * has read `seen` from flush_seq, then `sync_target` from flusher.sync_target. `is_later`: it waits for more than that sync. */
void ms_control_wait_synced(const struct ms_control *control, uint32_t seen, int64_t sync_target, int is_later, int64_t timeout_ns);
/* The replicator: publish `confirm`, then raise confirm_seq and wake. */
void ms_control_publish_confirm(struct ms_control *control, int64_t confirm);
