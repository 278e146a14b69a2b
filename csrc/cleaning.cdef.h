/* What the cleaner shares: which segments readers hold, how full the disk is, what `pyengine clean` asked for.
 *
 * Who: created by the supervisor at start beside the control block; readers take and
 * give back holds, the cleaner looks at them before it deletes a segment; `pyengine clean`
 * writes the request (one at a time, under a lock on byte 0 of the object), the cleaner
 * answers it; `status` reads the rest. Blocks on: nothing. After a crash: a dead reader's
 * hold stays until the cleaner, which looks whether its owner lives, clears it; a dead
 * cleaner's successor goes on from `removing_end` and `removing_since_ns`; a request stays
 * asked until a cleaner answers it.
 *
 * Readers write in here, so nothing in it is believed further than this: a false hold
 * delays a deletion by destroy_mapped_file_interval_forcibly_ms at most, and a hold that
 * another process scribbled over costs its owner MESSAGE_WAS_REMOVING.
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
    int64_t removing_since_ns;   /* CLOCK_MONOTONIC of the first try on the oldest one, 0 none is hanging */
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
    int64_t asked_reserved_ms;   /* age at which a segment goes; -1: file_reserved_time_hours */
    int64_t asked_used_percent;  /* 1..100: delete whatever the age until no more is used; 0: not asked */
    int8_t pad3[104];
    struct ms_hold holds[MS_HOLDS_MAX];
};

/* For the supervisor, over zeros: nothing held, nothing asked; the magic last. */
void ms_cleaning_format(struct ms_cleaning *cleaning, uint64_t epoch);
/* 0, or -EPROTO wrong magic, -EBADMSG other layout, -EMSGSIZE too short. */
int ms_cleaning_check(const struct ms_cleaning *cleaning, int64_t mapped_bytes);
/* A reader: slot of a new hold, -ENOENT when the segment is being deleted, -EAGAIN without a free slot. */
int32_t ms_hold_take(struct ms_cleaning *cleaning, uint64_t owner, int64_t segment);
/* A reader: give its hold back; nothing happens if it is not its any more. */
void ms_hold_release(struct ms_cleaning *cleaning, int32_t slot, uint64_t owner);
/* The cleaner: from now on no reader gets a hold below `end`; never moves back. */
void ms_cleaning_shut(struct ms_cleaning *cleaning, int64_t end);
/* The cleaner: the first slot from `from` on that is owned, and if `end` is not negative holds a segment below it; -1 none. */
int32_t ms_hold_find(const struct ms_cleaning *cleaning, int32_t from, int64_t end);
/* The cleaner: clear the hold of an owner that is dead; 1 done, 0 it was given back meanwhile. */
int ms_hold_reap(struct ms_cleaning *cleaning, int32_t slot, uint64_t owner);
