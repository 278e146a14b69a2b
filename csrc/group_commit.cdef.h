/* Group commit: make durable what was committed during the last sync, as long as there is some.
 *
 * Who: the flusher in sync mode, one thread. Blocks on: fdatasync, and its latch
 * until the deadline. Whatever arrives during one fdatasync shares the next: no
 * delay timer, natural groups. The target is read before the sync, so bytes that
 * arrive during it are not claimed. After a crash anywhere in here: `flushed`
 * is at or below what is durable; the next flusher syncs again from there.
 * After a failed fdatasync nothing is published and nothing is tried again: the
 * caller freezes the store.
 */
#define MS_GROUP_SEGMENTS_MAX 256
#define MS_GROUP_STREAM_NS 1000000  /* flushes that follow each other within this time are a stream */

/* Why ms_group_commit_run returned. */
#define MS_GROUP_TIME 0          /* the deadline, a signal, or woken without a commit: do the housekeeping, call again */
#define MS_GROUP_SEGMENT 1       /* a segment of [flushed, committed) is not among `base` */
#define MS_GROUP_FAILED 2        /* fdatasync failed: error_number, failed_base */

struct ms_group_commit {
    struct ms_control *control;
    void *semaphore;             /* of the flusher's latch */
    void *writer_semaphore;      /* posted after a flush in a stream of them: the next put is near. NULL: none */
    int64_t segment_bytes;
    uint32_t has_published;      /* its first round wakes all: a dead flusher may have woken none of its own */
    uint64_t incarnation;        /* `flushed` moves only once the writer has verified this one */
    int32_t count;               /* open segments */
    int32_t error_number;
    int64_t failed_base;
    int64_t last_ns;             /* when `flushed` moved last */
    struct ms_home home;         /* beside the writer */
    struct ms_latency *latency;  /* where each fdatasync is counted; NULL: nowhere */
    struct ms_recorder_hand *recorder; /* NULL: nothing is recorded */
    int64_t sync_ns;             /* what the round under way spent in fdatasync */
    int64_t base[MS_GROUP_SEGMENTS_MAX];
    int32_t fd[MS_GROUP_SEGMENTS_MAX];
};

/* Rounds until the deadline, and at most `busy_ns` longer than the first that moved `flushed`: an idle flusher sleeps long,
 * one that works is back soon to open segments. */
int ms_group_commit_run(struct ms_group_commit *group, int64_t deadline_ns, int64_t busy_ns);
/* One round without waiting: sync [flushed, committed) and publish. 1 moved, 0 nothing to do or not verified
 * yet, or -MS_GROUP_SEGMENT, -MS_GROUP_FAILED. */
int ms_group_commit_once(struct ms_group_commit *group);
