#include "base.h"
#include "ha_follow.cdef.h"

#include <poll.h>
#include <sys/socket.h>

#include "entry.h"
#include "ha_links.cdef.h"
#include "record.h"
#include "scan.cdef.h"

/* Return the bytes of the bodies in `buffer`, which continue each other from the own end on, and their number of frames; 0
 * for an incomplete frame, a heartbeat, or a wrong seal. It does not count the seals, since Python may process the bytes. */
static int64_t measure(const struct ms_ha_follow *follow, uint64_t *frames)
{
    const uint8_t *const data = follow->buffer;
    const int64_t room = ms_seal_room(follow->seal_in);
    int64_t at = 0, sum = 0;
    for (*frames = 0; at < follow->got; ++*frames) {
        if (follow->got - at < MS_HA_HEADER_BYTES)
            return 0;
        const int64_t offset = ms_get_i64(data + at), size = ms_get_i32(data + at + 8);
        const uint8_t *const header = data + at;
        at += MS_HA_HEADER_BYTES + room;
        if (size <= 0 || size > follow->got - at - room || offset != follow->end + sum)
            return 0;
        if (!ms_seal_fits(follow->seal_in, 2 * *frames, header, MS_HA_HEADER_BYTES) ||
            !ms_seal_fits(follow->seal_in, 2 * *frames + 1, data + at, size))
            return 0;
        at += size + room;
        sum += size;
    }
    return sum;
}

static void copy_bodies(const struct ms_ha_follow *follow, uint8_t *to)
{
    const int64_t room = ms_seal_room(follow->seal_in);
    for (int64_t at = 0; at < follow->got;) {
        const int32_t size = ms_get_i32(follow->buffer + at + 8);
        at += MS_HA_HEADER_BYTES + room;
        memcpy(to, follow->buffer + at, (size_t)size);
        to += size;
        at += size + room;
    }
}

/* Return whether these are whole records that the writer can append as they are, without a blank. */
static int is_whole(const struct ms_ha_follow *follow, const uint8_t *records, int64_t bytes)
{
    struct ms_walk walk;
    const int64_t from = follow->end, end = from + bytes;
    ms_scan_walk(records, from, from, end, end, MS_CHECK_CRC | MS_CHECK_OFFSET, &walk);
    return walk.reason == MS_CASE_RANGE_END && walk.end_offset == end;
}

/* Report the own end, if it may be reported; MS_FOLLOW_IDLE, or REPORT. */
static int report(struct ms_ha_follow *follow)
{
    struct ms_control *const control = follow->control;
    const int64_t end = follow->end;
    if (follow->acks_flushed &&
        ms_producer_wait_persisted(follow->producer, end, MS_PUT_DURABLE, ms_monotonic_ns() + MS_HA_ANSWER_NS, 0, INT64_MAX) != 0)
        return MS_FOLLOW_REPORT;
    ms_put_64(follow->report, (uint64_t)end);
    ms_seal_put(follow->seal_out, 0, follow->report, MS_HA_REPORT_BYTES);
    follow->report_bytes = MS_HA_REPORT_BYTES + (int32_t)ms_seal_room(follow->seal_out);
    if (end > ms_load_relaxed(&control->confirm.value)) /* before the report: what a master has acknowledged must be confirmed here too */
        ms_control_publish_confirm(control, end);
    MS_FAILPOINT("run_confirmed");
    const ssize_t sent = send(follow->fd, follow->report, (size_t)follow->report_bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent <= 0)
        return MS_FOLLOW_REPORT;
    ms_seal_count(follow->seal_out, 1);
    MS_FAILPOINT("run_reported");
    follow->acked = end;
    follow->has_reported = 1;
    follow->unsent_bytes = follow->report_bytes - (int32_t)sent;
    ms_store_relaxed(&follow->row->acked, end);
    ms_store_relaxed(&follow->row->acked_ms, ms_wall_ms());
    return follow->unsent_bytes != 0 ? MS_FOLLOW_REPORT : MS_FOLLOW_IDLE;
}

/* Receive and append ordinary frames; MS_FOLLOW_*. */
static int take(struct ms_ha_follow *follow)
{
    struct ms_control *const control = follow->control;
    struct ms_producer *const producer = follow->producer;
    uint64_t frames;
    const int64_t bytes = measure(follow, &frames);
    const int64_t end = follow->end + bytes;
    if (bytes == 0 || follow->end % follow->segment_bytes + bytes > follow->segment_bytes - MS_BLANK_BYTES)
        return MS_FOLLOW_TAKE;
    int error;
    follow->header.prepared_transaction_offset = follow->end;
    uint8_t *const records = ms_producer_reserve(producer, (const uint8_t *)&follow->header, MS_ENTRY_RAW, 0, (uint64_t)bytes, &error);
    if (records == NULL)
        return MS_FOLLOW_TAKE;
    copy_bodies(follow, records);
    if (!is_whole(follow, records, bytes))
        return MS_FOLLOW_TAKE; /* the next entry overwrites it */
    ms_store_release(&control->received.value, end);
    if (end > ms_load_relaxed(&control->replicator.master_end))
        ms_store_relaxed(&control->replicator.master_end, end);
    MS_FAILPOINT("run_received");
    ms_producer_publish(producer);
    MS_FAILPOINT("run_submitted");
    struct ms_completion answer;
    follow->sequence = producer->sequence;
    if (ms_producer_wait_acked(producer, follow->sequence, ms_monotonic_ns() + MS_HA_ANSWER_NS, &answer) != 0 ||
        answer.status != PUT_OK || answer.physical_offset != follow->end || answer.end_offset != end)
        return MS_FOLLOW_SUBMITTED;
    ms_producer_finish(producer, follow->sequence);
    producer->unclaimed = 0;
    MS_FAILPOINT("run_answered");
    ms_seal_count(follow->seal_in, 2 * frames);
    follow->end = end;
    follow->has_appended = 1;
    ms_store_relaxed(&follow->row->sent, end);
    ms_store_relaxed(&follow->row->bytes, follow->row->bytes + (uint64_t)follow->got);
    ms_store_relaxed(&follow->row->frames, follow->row->frames + frames);
    return report(follow);
}

int ms_ha_follow_run(struct ms_ha_follow *follow, int64_t until_ns)
{
    for (;;) {
        const int64_t left_ns = until_ns - ms_monotonic_ns();
        if (left_ns <= 0)
            return MS_FOLLOW_IDLE;
        const struct timespec left = {.tv_sec = left_ns / 1000000000, .tv_nsec = left_ns % 1000000000};
        struct pollfd socket = {.fd = follow->fd, .events = POLLIN};
        if (ppoll(&socket, 1, &left, NULL) <= 0)
            return MS_FOLLOW_IDLE;
        follow->got = recv(follow->fd, follow->buffer, (size_t)follow->buffer_bytes, MSG_DONTWAIT);
        if (follow->got < 0 && (errno == EAGAIN || errno == EINTR))
            continue;
        if (follow->got <= 0) {
            follow->got = follow->got < 0 ? -errno : 0;
            return MS_FOLLOW_LOST;
        }
        follow->has_received = 1;
        const int what = take(follow);
        if (what != MS_FOLLOW_IDLE)
            return what;
    }
}
