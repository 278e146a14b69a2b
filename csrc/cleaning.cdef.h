/* The cleaner's shared object: segments that readers hold, disk usage, requests of `pyengine clean`.
 *
 * Who: the supervisor creates it at start beside the control block; readers take and release holds, and the cleaner
 * checks them before it deletes a segment; `pyengine clean` writes a request (one at a time, under a lock on byte 0 of the
 * object), which the cleaner answers; `status` reads the rest. Blocks on: nothing. After a crash: a dead reader's hold
 * stays until the cleaner finds its owner dead and clears it; a dead cleaner's successor continues from `removing_end` and
 * `removing_since_ns`; a request stays until a cleaner answers it.
 *
 * Readers can write to this object, so its content has bounded effects: a false hold delays a deletion by
 * destroy_mapped_file_interval_forcibly_ms at most, and the owner of an overwritten hold gets MESSAGE_WAS_REMOVING.
 */
#define MS_CLEANING_LAYOUT_VERSION 1
#define MS_HOLDS_MAX 1024
#define MS_CLEANING_REASON_BYTES 256

/* One process holds one segment. */
struct ms_hold {
    uint64_t owner;              /* 0 free, else pid << 32 | low half of its start time; by compare-and-swap */
    int64_t segment;             /* first byte of the held segment, -1 none; the owner */
    int8_t pad[112];
};

struct ms_cleaning {
    uint64_t magic;              /* stored last, with release: "MSCLEANS" */
    uint32_t layout_version;
    uint32_t holds_max;
    uint64_t epoch;
    int8_t pad0[104];
    /* cleaner */
    int64_t removing_end;        /* segments below are being deleted: no new holds on them */
    int64_t removing_since_ns;   /* CLOCK_MONOTONIC of the first try on the oldest one, 0: none is delayed */
    uint64_t removed_segments;   /* since the engine started */
    uint64_t removed_queue_files;
    uint64_t removed_index_files;
    uint64_t removed_bytes;
    uint64_t waited_for_holds;   /* tries that found the oldest segment held */
    uint64_t forced_holds;       /* segments deleted although they were held */
    uint64_t rounds;
    uint64_t answered;           /* the last request that is done */
    uint64_t answer_segments;    /* what it deleted */
    uint64_t answer_bytes;
    int64_t answer_errno;        /* 0: all of it was done */
    int8_t pad1[24];
    /* the cleaner's probe */
    uint64_t probes;
    int64_t usable_bytes;        /* on the file system of the commit log */
    int32_t used_percent;        /* as RocketMQ counts, -1 cannot be told */
    int32_t queue_used_percent;  /* of the file system of the consume queues */
    uint32_t refusing;           /* bits it has set in refuse_puts */
    int32_t reserved;
    int8_t pad2[96];
    int8_t reason[MS_CLEANING_REASON_BYTES]; /* why puts are refused, and what to do; UTF-8, NUL-terminated */
    /* `pyengine clean` */
    uint64_t asked;              /* raised last, with release */
    int64_t asked_reserved_ms;   /* age at which a segment is deleted; -1: file_reserved_time_hours */
    int64_t asked_used_percent;  /* 1..100: delete segments of any age until at most this is used; 0: not asked */
    int8_t pad3[104];
    struct ms_hold holds[MS_HOLDS_MAX];
};

/* The supervisor: initialize a zeroed object without holds and requests; store the magic last. */
void ms_cleaning_format(struct ms_cleaning *cleaning, uint64_t epoch);
/* 0, or -EPROTO wrong magic, -EBADMSG other layout, -EMSGSIZE too short. */
int ms_cleaning_check(const struct ms_cleaning *cleaning, int64_t mapped_bytes);
/* A reader: take a hold; return its slot, -ENOENT if the segment is being deleted, -EAGAIN if no slot is free. */
int32_t ms_hold_take(struct ms_cleaning *cleaning, uint64_t owner, int64_t segment);
/* A reader: release its hold, unless the hold has another owner by now. */
void ms_hold_release(struct ms_cleaning *cleaning, int32_t slot, uint64_t owner);
/* The cleaner: refuse new holds below `end`, which never decreases. */
void ms_cleaning_refuse_holds(struct ms_cleaning *cleaning, int64_t end);
/* The cleaner: return the first owned slot from `from` on, with a segment below `end` unless that is negative; -1: none. */
int32_t ms_hold_find(const struct ms_cleaning *cleaning, int32_t from, int64_t end);
/* The cleaner: clear the hold of a dead owner; 1 cleared, 0 it was released meanwhile. */
int ms_hold_reap(struct ms_cleaning *cleaning, int32_t slot, uint64_t owner);
