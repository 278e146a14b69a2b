/* A master's connections to its slaves: what is committed goes out, reports come in.
 *
 * Who: the replicator of a master, in two threads. One calls ms_ha_links_send: it sleeps on the latch that the writer
 * posts. The other calls ms_ha_links_listen: it sleeps in epoll. Neither needs the interpreter for an ordinary put: one
 * frame out, one report in. Python (pyengine/services/replication) does all else, under the same lock: connections that
 * come and go, first reports, frames of more than one batch, a new segment, sockets that are full, heartbeats, errors.
 * Blocks on: the latch, epoll and the lock; the sockets never block. After a crash: the sockets are closed by the kernel;
 * what a slave had reported and `confirm` does not have is reported again by that slave.
 *
 * The log is read through a descriptor, and its minimum is looked at after that, before anything is sent
 * (docs/decisions/0106).
 */
#define MS_HA_HEADER_BYTES 12
#define MS_HA_REPORT_BYTES 8
#define MS_HA_INPUT_BYTES 512

/* Whose turn a connection is. */
#define MS_HA_PYTHON 0           /* Python's: something is not ordinary */
#define MS_HA_PLAIN 1            /* positioned, nothing half sent or half received */
#define MS_HA_QUIET 2            /* nothing can be sent now: it is full, has no position, or is over */

/* What a report says: ms_ha_take_report. */
#define MS_HA_SAYS_NOTHING 0     /* where the connection began, or a heartbeat of it */
#define MS_HA_CONFIRMS 1
#define MS_HA_SHORTER -1         /* less than the one before */
#define MS_HA_UNSENT -2          /* more than was sent */

struct ms_ha_link {
    struct ms_link *row;
    uint8_t *frame;              /* room for one frame and its seals */
    struct ms_seal *seal_out;    /* NULL: no seals, RocketMQ's own protocol */
    struct ms_seal *seal_in;
    int64_t next;                /* everything below was given to the kernel, or to `frame` */
    int64_t start;               /* where the transfer on this connection began; -1 nowhere yet */
    int64_t reported;            /* the last report of all, -1 before the first */
    int64_t acked;               /* the last one that confirms, -1 none */
    int64_t read_ns;             /* when the last whole report came */
    int64_t written_ns;
    int32_t fd;
    int32_t turn;                /* MS_HA_PYTHON, PLAIN, QUIET */
    int32_t frame_bytes;         /* of a frame of which `frame_sent` bytes went; 0 none: Python sends the rest */
    int32_t frame_sent;
    int32_t has_input;           /* `input` was received and is for Python */
    int32_t input_bytes;         /* 0 the connection ended, below 0 -errno */
    uint8_t input[MS_HA_INPUT_BYTES];
};

struct ms_ha_links {
    struct ms_control *control;
    void *semaphore;             /* of the replicator's latch */
    void *reputter_semaphore;    /* NULL: the reputter does not wait for `confirm` */
    struct ms_recorder_hand *recorder; /* NULL: nothing is recorded */
    int64_t segment_bytes;
    int64_t batch_bytes;         /* most bytes of one frame */
    int64_t segment_base;        /* of the segment that is open; -1 none */
    int64_t all_sent;            /* every slave that can take bytes has been given all below; -1 not all */
    int64_t now_ns;              /* a clock of a test; 0: CLOCK_MONOTONIC */
    int32_t segment_fd;
    int32_t epoll_fd;
    int32_t counts_one;          /* 1: any one slave confirms; 0: Python counts them */
    uint32_t count;
    uint32_t ticket;             /* the lock: taken in the order of the tickets */
    uint32_t serving;
    int32_t event_fd[MS_LINKS_MAX];  /* ms_ha_links_listen: for Python */
    uint32_t event_mask[MS_LINKS_MAX];
    struct ms_ha_link *link[MS_LINKS_MAX];
};

/* The lock around everything here. Who releases it cannot take it again before one that waits. */
void ms_ha_links_lock(struct ms_ha_links *links);
void ms_ha_links_unlock(struct ms_ha_links *links);
/* Send what is committed to every plain connection, and what comes meanwhile, until CLOCK_MONOTONIC `until_ns`. 0: all was
 * sent and the time is over, or a signal came; 1: Python sends. With `may_sleep` it sleeps on the latch, which the
 * caller has armed; the latch is disarmed then. */
int ms_ha_links_send(struct ms_ha_links *links, int64_t until_ns, int may_sleep);
/* Take reports until CLOCK_MONOTONIC `until_ns`, or until something is for Python: so many in event_fd and event_mask. */
int ms_ha_links_listen(struct ms_ha_links *links, int64_t until_ns);
/* One report of a positioned connection, of which everything below `sent` was sent: MS_HA_*. Under the lock. */
int ms_ha_take_report(struct ms_ha_link *link, int64_t report, int64_t sent);
/* Move `confirm`, and wake those who wait for it. */
void ms_ha_confirm(struct ms_ha_links *links, int64_t confirmed);
