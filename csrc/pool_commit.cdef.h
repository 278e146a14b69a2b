/* The committer's rounds over one segment of the pool: wait, write, publish, wake other workers, sleep again.
 *
 * Who: the committer; one process, one thread. Blocks on: its latch and short sleeps, at most until `until_ns`, and
 * pwrite. It returns to Python for another segment, a complete segment, a failed write and a damaged record.
 *
 * A piece ends at a record boundary, found by a walk. Of the blank record that ends a segment it writes only the header:
 * the filler after it is stale bytes of the buffer's previous segment, and the file has zeros there. It stores `committed`
 * with release after the bytes are in the file. After a crash: the next committer starts at `committed` and writes the
 * same bytes again.
 */
#pragma once

#include "control.h"
#include "recorder.h"
#include "stream.cdef.h"

#define MS_COMMIT_IDLE 1          /* nothing is left to commit, or the store is frozen */
#define MS_COMMIT_TIME 2          /* the time is over, there may be more */
#define MS_COMMIT_SEGMENT 3       /* the segment that holds `committed` is not the one in `view` */
#define MS_COMMIT_FAILED 4        /* a write failed: `error_number` */
#define MS_COMMIT_BROKEN 5        /* no record at `committed`, although `wrote` is above: `reason` of the walk */

#define MS_COMMIT_SMALL_BYTES 65536     /* in a stream: wait for more if there is less than this */
#define MS_COMMIT_ROUND_NS 50000000     /* in a stream: back to Python after so long */

struct ms_pool_commit {
    struct ms_control *control;
    void *semaphore;                 /* of the committer's latch */
    void *reputter_semaphore;
    void *replicator_semaphore;      /* NULL: no replicator runs */
    const uint8_t *view;             /* the pool buffer of the segment that begins at `base` */
    int64_t base;                    /* -1: none */
    int64_t segment_bytes;
    int64_t piece_bytes;             /* `committed` moves at least this often */
    int64_t committed;               /* as published */
    int32_t fd;                      /* the segment's file */
    int32_t error_number;            /* FAILED */
    int32_t reason;                  /* BROKEN: MS_CASE_* */
    int32_t reserved;
    struct ms_stream stream;
    struct ms_recorder_handle *recorder; /* NULL: nothing is recorded */
};

/* Commit the bytes below `wrote`, piece by piece, until CLOCK_MONOTONIC `until_ns`; in a stream for MS_COMMIT_ROUND_NS at
 * most. If nothing is left and there is no stream it returns, or with `may_sleep` sleeps on the latch, which the caller
 * has armed. Return MS_COMMIT_*; IDLE also after a signal, or a wake-up without bytes to commit. Afterwards the latch is
 * disarmed. */
int ms_pool_commit_run(struct ms_pool_commit *pool, int64_t until_ns, int may_sleep);
