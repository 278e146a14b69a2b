#include "base.h"
#include "ha_links.cdef.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include "latch.cdef.h"

#define LOCK_NS 50000000
#define EVENTS 64

void ms_ha_links_lock(struct ms_ha_links *links)
{
    const uint32_t own = ms_add(&links->ticket, 1u) - 1;
    for (uint32_t now = ms_load_acquire(&links->serving); now != own; now = ms_load_acquire(&links->serving))
        ms_futex_wait(&links->serving, now, LOCK_NS);
}

void ms_ha_links_unlock(struct ms_ha_links *links)
{
    const uint32_t next = ms_load_relaxed(&links->serving) + 1;
    ms_store_release(&links->serving, next);
    ms_fence(); /* a thread that takes a ticket after this load is served at once */
    if (ms_load_relaxed(&links->ticket) != next)
        ms_futex_wake_all(&links->serving);
}

static int64_t clock_of(const struct ms_ha_links *links)
{
    return links->now_ns != 0 ? links->now_ns : ms_monotonic_ns();
}

/* ---- out ------------------------------------------------------------------ */

/* Send one frame with all committed bytes; 0, or 1: Python must send it. */
static int send_frame(struct ms_ha_links *links, struct ms_ha_link *link, int64_t end)
{
    const int64_t from = link->next, at = from - links->segment_base, size = end - from;
    if (links->segment_base < 0 || at < 0 || size > links->batch_bytes || at + size > links->segment_bytes)
        return 1;
    const int64_t room = ms_seal_room(link->seal_out);
    uint8_t *const body = link->frame + MS_HA_HEADER_BYTES + room;
    const ssize_t got = pread(links->segment_fd, body, (size_t)size, at);
    MS_FAILPOINT("frame_read");
    if (got != size || ms_load_acquire(&links->control->min_offset.value) > from)
        return 1; /* Python reads again and reports the error */
    ms_put_64(link->frame, (uint64_t)from);
    ms_put_32(link->frame + 8, (uint32_t)size);
    MS_FAILPOINT("frame_made");
    const int32_t bytes = (int32_t)(MS_HA_HEADER_BYTES + room + size + room);
    ms_seal_put(link->seal_out, 0, link->frame, MS_HA_HEADER_BYTES);
    ms_seal_put(link->seal_out, 1, body, size);
    const ssize_t sent = send(link->fd, link->frame, (size_t)bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent <= 0)
        return 1; /* nothing was sent: Python tries again and gets the error */
    ms_seal_count(link->seal_out, 2);
    link->written_ns = clock_of(links);
    link->next = end;
    if (sent < bytes) {
        link->frame_bytes = bytes;
        link->frame_sent = (int32_t)sent;
        link->turn = MS_HA_PYTHON;
        return 1;
    }
    MS_FAILPOINT("frame_sent");
    ms_store_relaxed(&link->row->sent, end);
    ms_store_relaxed(&link->row->bytes, link->row->bytes + (uint64_t)size);
    ms_store_relaxed(&link->row->frames, link->row->frames + 1);
    return 0;
}

static int send_to_all(struct ms_ha_links *links, int64_t end)
{
    int for_python = 0;
    ms_ha_links_lock(links);
    for (uint32_t i = 0; i < links->count; i++) {
        struct ms_ha_link *link = links->link[i];
        if (link->turn == MS_HA_PYTHON || (link->turn == MS_HA_PLAIN && link->next < end && send_frame(links, link, end) != 0))
            for_python = 1;
    }
    if (!for_python)
        ms_store_relaxed(&links->all_sent, end);
    ms_ha_links_unlock(links);
    return for_python;
}

int ms_ha_links_send(struct ms_ha_links *links, int64_t until_ns, int may_sleep)
{
    struct ms_latch *const latch = &links->control->latch[MS_REPLICATOR];
    int is_armed = may_sleep, for_python = 0;
    for (;;) {
        const int64_t end = ms_load_acquire(&links->control->committed.value);
        if (end != ms_load_relaxed(&links->all_sent)) {
            if (is_armed) {
                ms_latch_disarm(latch);
                is_armed = 0;
            }
            for_python = send_to_all(links, end);
            if (for_python)
                break;
        }
        const int64_t left_ns = until_ns - ms_monotonic_ns();
        if (left_ns <= 0 || !may_sleep)
            break;
        if (!is_armed) {
            ms_latch_arm(latch, links->semaphore);
            is_armed = 1; /* and check once more: a wake-up before arming was not posted */
            continue;
        }
        const int woken = ms_latch_wait(latch, links->semaphore, left_ns);
        is_armed = 0;
        if (woken == -EINTR || (woken > 0 && ms_load_relaxed(&links->control->state.refuse_puts) & MS_REFUSE_PUTS_STOPPING))
            break; /* a signal or a stop, which Python handles */
    }
    if (is_armed)
        ms_latch_disarm(latch);
    return for_python;
}

/* ---- in ------------------------------------------------------------------- */

int ms_ha_take_report(struct ms_ha_link *link, int64_t report, int64_t sent)
{
    if (report < link->reported)
        return MS_HA_SHORTER;
    if (report > sent)
        return MS_HA_UNSENT;
    link->reported = report;
    if (report <= link->start)
        return MS_HA_SAYS_NOTHING;
    link->acked = report;
    ms_store_relaxed(&link->row->acked, report);
    ms_store_relaxed(&link->row->acked_ms, ms_wall_ms());
    MS_FAILPOINT("report_taken");
    return MS_HA_CONFIRMS;
}

void ms_ha_confirm(struct ms_ha_links *links, int64_t confirmed)
{
    int64_t since_ns = 0; /* read before `confirm` moves, after which the writer may store it for a later pass */
    if (links->recorder != NULL && links->recorder->shared != NULL)
        since_ns = ms_recorder_waiting_since(&links->recorder->shared->for_slave, confirmed);
    ms_control_publish_confirm(links->control, confirmed);
    MS_FAILPOINT("confirm_published");
    if (links->reputter_semaphore != NULL)
        ms_latch_wakeup(&links->control->latch[MS_REPUTTER], links->reputter_semaphore);
    if (since_ns > 0)
        ms_recorder_note_if_long(links->recorder, MS_STALL_CONFIRM, MS_PHASE_SLAVE, since_ns, confirmed, 0);
}

/* Take the reports of one connection; 1: Python must read the rest, in `input` or the socket. */
static int take_reports(struct ms_ha_links *links, struct ms_ha_link *link)
{
    if (link->turn != MS_HA_PLAIN || !links->counts_one)
        return 1;
    const ssize_t got = recv(link->fd, link->input, sizeof link->input, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return 0;
    const ssize_t step = MS_HA_REPORT_BYTES + ms_seal_room(link->seal_in);
    ssize_t at = 0;
    if (got > 0 && got % step == 0) {
        int64_t acked = -1;
        link->read_ns = clock_of(links);
        for (; at < got; at += step) {
            if (!ms_seal_fits(link->seal_in, 0, link->input + at, MS_HA_REPORT_BYTES))
                break;
            const int what = ms_ha_take_report(link, ms_get_i64(link->input + at), link->next);
            if (what < 0)
                break;
            ms_seal_count(link->seal_in, 1);
            if (what == MS_HA_CONFIRMS)
                acked = link->acked;
        }
        if (acked > ms_load_relaxed(&links->control->confirm.value))
            ms_ha_confirm(links, acked);
        if (at == got)
            return 0;
    }
    link->input_bytes = got < 0 ? -errno : (int32_t)(got - at);
    memmove(link->input, link->input + at, got > at ? (size_t)(got - at) : 0);
    link->has_input = 1;
    link->turn = MS_HA_PYTHON;
    return 1;
}

static struct ms_ha_link *link_of(const struct ms_ha_links *links, int fd)
{
    for (uint32_t i = 0; i < links->count; i++)
        if (links->link[i]->fd == fd)
            return links->link[i];
    return NULL;
}

int ms_ha_links_listen(struct ms_ha_links *links, int64_t until_ns)
{
    struct epoll_event events[EVENTS];
    for (;;) {
        const int64_t left_ns = until_ns - ms_monotonic_ns();
        const int found = epoll_wait(links->epoll_fd, events, EVENTS, left_ns <= 0 ? 0 : (int)((left_ns + 999999) / 1000000));
        int kept = 0;
        if (found > 0) {
            ms_ha_links_lock(links);
            for (int i = 0; i < found; i++) {
                struct ms_ha_link *link = events[i].events == EPOLLIN ? link_of(links, events[i].data.fd) : NULL;
                if (link != NULL && take_reports(links, link) == 0)
                    continue;
                links->event_fd[kept] = events[i].data.fd;
                links->event_mask[kept++] = events[i].events;
            }
            ms_ha_links_unlock(links);
        }
        if (kept > 0 || found < 0 || left_ns <= 0)
            return kept;
    }
}
