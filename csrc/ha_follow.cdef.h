/* A slave's rounds over one connection: receive bytes, have the writer append them, report.
 *
 * Who: the replicator of a slave; one process, one thread, while the connection is linked and no frame, record or entry is
 * incomplete. Blocks on: the socket, at most until `until_ns`; the writer's answer and the flusher, MS_HA_ANSWER_NS each.
 * It returns to Python (pyengine/services/replication) for everything else: an incomplete frame or record, a heartbeat, a
 * blank, a damaged record, a refused entry. The unprocessed bytes are then in `buffer`.
 *
 * It copies bodies of frames once, from `buffer` into the ring, and checks them there (lengths, own offset, CRC) before it
 * publishes them. After a crash: published records are appended or not; the next connection begins below the own end.
 */
#pragma once

#include "control.h"
#include "producer.h"
#include "replication.cdef.h"
#include "ha_links.cdef.h"

#define MS_HA_ANSWER_NS 5000000

#define MS_FOLLOW_IDLE 0         /* the time is over, or a signal came; nothing is left in `buffer` */
#define MS_FOLLOW_TAKE 1         /* `got` bytes in `buffer` are for Python */
#define MS_FOLLOW_SUBMITTED 2    /* the same, and the writer has them already, as the entry `sequence` */
#define MS_FOLLOW_LOST 3         /* the connection ended (`got` 0) or broke (`got` -errno) */
#define MS_FOLLOW_REPORT 4       /* appended; Python reports it, or the rest of its report */

struct ms_ha_follow {
    struct ms_control *control;
    struct ms_producer *producer;
    struct ms_link *row;
    struct ms_seal *seal_in;     /* NULL: no seals, RocketMQ's own protocol */
    struct ms_seal *seal_out;
    uint8_t *buffer;
    int64_t buffer_bytes;
    int64_t segment_bytes;
    int64_t end;                 /* the own log's end, and the offset of the next byte from the master */
    int64_t acked;               /* the last report */
    int64_t got;
    uint64_t sequence;
    int32_t fd;
    int32_t acks_flushed;
    int32_t has_received;        /* 1: bytes have arrived */
    int32_t has_appended;
    int32_t has_reported;
    int32_t unsent_bytes;        /* bytes at the end of `report` that the socket did not take */
    int32_t report_bytes;
    uint8_t report[MS_HA_REPORT_BYTES + MS_SEAL_BYTES]; /* the last one, with its seal */
    struct ms_entry header;
};

/* Follow the master until CLOCK_MONOTONIC `until_ns`; MS_FOLLOW_*. */
int ms_ha_follow_run(struct ms_ha_follow *follow, int64_t until_ns);
