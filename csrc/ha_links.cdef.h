/* A master's connections to its slaves: send committed bytes, take reports.
 *
 * Who: the replicator of a master, in two threads. One calls ms_ha_links_send and sleeps on the latch that the writer
 * posts. The other calls ms_ha_links_listen and sleeps in epoll. Neither needs the interpreter for an ordinary put, which
 * is one frame out and one report in. Python (pyengine/services/replication) does the rest, under the same lock: new and
 * closed connections, first reports, frames of more than one batch, a new segment, full sockets, heartbeats, errors.
 * Blocks on: the latch, epoll and the lock; the sockets never block. After a crash: the kernel closes the sockets; slaves
 * repeat reports that `confirm` does not cover.
 *
 * It reads the log through a descriptor, then checks the log's minimum, then sends (docs/design/05-replication.md).
 */
#pragma once

#include "control.h"
#include "recorder.h"
#include "replication.cdef.h"
#include "seal.cdef.h"

#define MS_HA_HEADER_BYTES 12
#define MS_HA_REPORT_BYTES 8
#define MS_HA_INPUT_BYTES 512

/* Which side serves a connection next. */
#define MS_HA_PYTHON 0           /* Python: something is not ordinary */
#define MS_HA_PLAIN 1            /* C: it is positioned, and no frame or report is incomplete */
#define MS_HA_QUIET 2            /* neither: the socket is full, or the connection has no position, or it has ended */

/* The meaning of a report, from ms_ha_take_report. */
#define MS_HA_SAYS_NOTHING 0     /* the offset at which the connection began, or a heartbeat */
#define MS_HA_CONFIRMS 1
#define MS_HA_SHORTER -1         /* less than the previous one */
#define MS_HA_UNSENT -2          /* more than was sent */

struct ms_ha_link {
    struct ms_link *row;
    uint8_t *frame;              /* room for one frame and its seals */
    struct ms_seal *seal_out;    /* NULL: no seals, RocketMQ's own protocol */
    struct ms_seal *seal_in;
    int64_t next;                /* everything below is in the kernel or in `frame` */
    int64_t start;               /* the offset at which this connection began; -1 none yet */
    int64_t reported;            /* the last report, -1 before the first */
    int64_t acked;               /* the last report that confirms, -1 none */
    int64_t read_ns;             /* when the last whole report arrived */
    int64_t written_ns;
    int32_t fd;
    int32_t turn;                /* MS_HA_PYTHON, PLAIN, QUIET */
    int32_t frame_bytes;         /* of a frame of which `frame_sent` bytes are sent and Python sends the rest; 0 none */
    int32_t frame_sent;
    int32_t has_input;           /* `input` was received and is for Python */
    int32_t input_bytes;         /* 0 the connection ended, below 0 -errno */
    uint8_t input[MS_HA_INPUT_BYTES];
};

struct ms_ha_links {
    struct ms_control *control;
    void *semaphore;             /* of the replicator's latch */
    void *reputter_semaphore;    /* NULL: the reputter does not wait for `confirm` */
    struct ms_recorder_handle *recorder; /* NULL: nothing is recorded */
    int64_t segment_bytes;
    int64_t batch_bytes;         /* most bytes of one frame */
    int64_t segment_base;        /* of the segment that is open; -1 none */
    int64_t all_sent;            /* everything below is sent to every slave that can take bytes; -1 unknown */
    int64_t now_ns;              /* a clock of a test; 0: CLOCK_MONOTONIC */
    int32_t segment_fd;
    int32_t epoll_fd;
    int32_t counts_one;          /* 1: any one slave confirms; 0: Python counts them */
    uint32_t count;
    uint32_t ticket;             /* the lock, a ticket lock */
    uint32_t serving;
    int32_t event_fd[MS_LINKS_MAX];  /* ms_ha_links_listen: for Python */
    uint32_t event_mask[MS_LINKS_MAX];
    struct ms_ha_link *link[MS_LINKS_MAX];
};

/* Take the lock of this object. It is fair: threads get it in the order in which they asked. */
void ms_ha_links_lock(struct ms_ha_links *links);
void ms_ha_links_unlock(struct ms_ha_links *links);
/* Send committed bytes to every plain connection until CLOCK_MONOTONIC `until_ns`. 0: all is sent and the time is over, or
 * a signal arrived; 1: Python must send. With `may_sleep` it sleeps on the latch, which the caller has armed and which is
 * disarmed when it returns. */
int ms_ha_links_send(struct ms_ha_links *links, int64_t until_ns, int may_sleep);
/* Take reports until CLOCK_MONOTONIC `until_ns` or until Python must act; return the number of its events, in event_fd and
 * event_mask. */
int ms_ha_links_listen(struct ms_ha_links *links, int64_t until_ns);
/* Take one report of a positioned connection, to which everything below `sent` was sent: MS_HA_*. Under the lock. */
int ms_ha_take_report(struct ms_ha_link *link, int64_t report, int64_t sent);
/* Move `confirm`, and wake the processes that wait for it. */
void ms_ha_confirm(struct ms_ha_links *links, int64_t confirmed);
