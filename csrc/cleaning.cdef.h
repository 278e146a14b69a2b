/* The cleaner's shared object: what is being deleted, disk usage, requests of `pyengine clean`.
 *
 * Who: the supervisor creates it at start beside the control block; readers have it read-only and hold segments by locks on
 * its bytes (pyengine/ipc/cleaning.py); `pyengine clean` writes a request (one at a time, under a lock on byte 0), which the
 * cleaner answers; `status` reads the rest. Blocks on: nothing. After a crash: a dead cleaner's successor continues from
 * `removing_end` and `removing_since_ns`; a request stays until a cleaner answers it.
 */
#define MS_CLEANING_LAYOUT_VERSION 3
#define MS_CLEANING_REASON_BYTES 256

struct ms_cleaning {
    uint64_t magic;              /* stored last, with release: "MSCLEANS" */
    uint32_t layout_version;
    uint32_t reserved1;
    int8_t pad0[112];
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
    int64_t answer_errno;        /* 0: all of it was done */
    int8_t pad1[40];
    /* the cleaner's probe */
    int64_t usable_bytes;        /* on the file system of the commit log */
    int32_t used_percent;        /* as RocketMQ counts, -1 cannot be told */
    int32_t queue_used_percent;  /* of the file system of the consume queues */
    int8_t pad2[112];
    int8_t reason[MS_CLEANING_REASON_BYTES]; /* why puts are refused, and what to do; UTF-8, NUL-terminated */
    /* `pyengine clean` */
    uint64_t asked;              /* raised last, with release */
    int64_t asked_reserved_ms;   /* age at which a segment is deleted; -1: file_reserved_time_hours */
    int64_t asked_used_percent;  /* 1..100: delete segments of any age until at most this is used; 0: not asked */
    int8_t pad3[104];
};
