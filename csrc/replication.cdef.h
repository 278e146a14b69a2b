/* The replicator's links, for `status`, `top` and metrics: which slave is connected, since when, at which position.
 *
 * Who: the supervisor creates it at start beside the control block; only the replicator writes it, in either role (a
 * master has one link for each slave, a slave has link 0 to its master); status, top and metrics read it, and no process
 * depends on it. Blocks on: nothing. After a crash: the links of a dead replicator stay until the next one clears them,
 * with a text that may be incomplete (text_seq is odd).
 */
#pragma once

#define MS_REPLICATION_LAYOUT_VERSION 4
#define MS_LINKS_MAX 256
#define MS_LINK_ADDRESS_BYTES 64
#define MS_LINK_DETAIL_BYTES 192

/* State of a link. */
#define MS_LINK_NONE 0
#define MS_LINK_CONNECTING 1    /* slave: trying, or waiting before the next try */
#define MS_LINK_READY 2         /* connected; the slave has not reported a position */
#define MS_LINK_HANDSHAKE 3     /* slave: it compares its log with the bytes from the master */
#define MS_LINK_TRANSFER 4      /* bytes are sent as they are written */
#define MS_LINK_SHUTDOWN 5      /* closing, for the reason in `detail` */

struct ms_link {
    uint32_t state;              /* MS_LINK_*; stored last when a link begins, first when it ends */
    uint32_t text_seq;           /* of address and detail, which are one text (shared_text.cdef.h) */
    int64_t since_ms;            /* wall clock at which it was connected */
    int64_t start;               /* the offset at which the transfer on this connection began, -1 not yet */
    int64_t sent;                /* master: sent up to here; slave: received up to here */
    int64_t acked;               /* the last report, -1 none */
    int64_t acked_ms;            /* wall clock of it */
    uint64_t bytes;              /* sent or received on this connection */
    uint64_t frames;
    int64_t caught_up_ns;        /* master: the slave has everything that was committed here at that time; 0 unknown */
    int8_t pad[56];
    int8_t address[MS_LINK_ADDRESS_BYTES]; /* host:port of the other side; UTF-8, NUL-terminated */
    int8_t detail[MS_LINK_DETAIL_BYTES]; /* the problem, or what it does; UTF-8, NUL-terminated */
};

struct ms_replication {
    uint64_t magic;              /* stored last, with release: "MSREPLIC" */
    uint32_t layout_version;
    uint32_t reserved2;
    uint64_t connections;        /* taken (master) or made (slave) since the engine started */
    uint64_t refused;            /* master: closed because there were too many; slave: tries that failed */
    uint64_t closed;             /* ended for the reason in `detail`, not by a stop of this engine */
    int64_t detail_ms;           /* wall clock of it */
    uint32_t text_seq;
    uint32_t reserved;
    int64_t listening_port;      /* master: where slaves may connect, 0 not yet */
    int8_t pad[64];
    int8_t address[MS_LINK_ADDRESS_BYTES]; /* address and detail: of the link that ended last */
    int8_t detail[MS_LINK_DETAIL_BYTES];
    struct ms_link links[MS_LINKS_MAX];
};
