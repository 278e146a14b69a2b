#include "base.h"
#include "producer.h"

#include <fcntl.h>
#include <sched.h>

#include "latch.cdef.h"

/* Longest sleep of a wait before it checks the engine's state again. */
#define POLL_NS 50000000
/* Sleep of a put before it rings for the writer once more. */
#define RING_AGAIN_NS 2000000
/* Interval of checks, during a wait, whether a process of the engine lives. */
#define ENGINE_CHECK_NS 200000000
#define FULL_RING_POLL_NS 200000
#define SPINS_BETWEEN_CLOCK 64
#define UNANSWERED_NS 1000000 /* how long a put sleeps on `confirm` before it checks for its answer */
#define BUSY_MS_MAX 10000000
#define MILLISECOND_NS 1000000

static void ring(const struct ms_control *control, uint32_t *rung)
{
    ms_latch_ring(&control->latch[MS_WRITER], ms_load_relaxed(&control->workers[MS_WRITER].pid), rung);
}

/* Ring whether or not this producer has rung: a process that sleeps on the writer's futex can pass for the writer. */
static void ring_again(const struct ms_control *control)
{
    uint32_t rung = ms_load_relaxed(&control->latch[MS_WRITER].arms) - 1;
    ring(control, &rung);
}

void ms_producer_attach(struct ms_producer *producer)
{
    producer->ring = ms_session_ring(producer->session);
    producer->ring_bytes = producer->session->ring_bytes;
    producer->tail = ms_load_acquire(&producer->session->tail);
    producer->sequence = 0;
    producer->oldest_unread = 1;
    producer->unclaimed = 0;
    producer->lock_fd = -1;
    producer->rung = ms_load_relaxed(&producer->control->latch[MS_WRITER].arms) - 1;
    producer->spin_us = producer->control->identity.spin_producer_us;
    producer->slave_timeout_ns = producer->control->identity.slave_timeout_ms * 1000000;
}

uint64_t ms_producer_entry_limit(const struct ms_producer *producer)
{
    return producer->ring_bytes / 2;
}

uint64_t ms_entry_layout_bytes(uint32_t topic_bytes, uint32_t properties_bytes, uint64_t payload_bytes)
{
    return ms_align8(ms_entry_payload_at(topic_bytes, properties_bytes) + payload_bytes);
}

void ms_entry_fill(uint8_t *to, const struct ms_entry *header, const uint8_t *topic, const uint8_t *properties,
                   const uint8_t *payload, uint64_t bytes)
{
    memcpy(to, header, sizeof *header);
    memcpy(to + sizeof *header, topic, header->topic_bytes);
    memcpy(to + sizeof *header + header->topic_bytes, properties, header->properties_bytes);
    if (bytes)
        memcpy(to + ms_entry_payload_at(header->topic_bytes, header->properties_bytes), payload, bytes);
}

int ms_producer_is_closed(const struct ms_producer *producer)
{
    const struct ms_session_slot *slot = &producer->control->sessions[producer->slot];
    return ms_load_relaxed(&producer->control->state.retired) != 0 ||
           ms_load_relaxed(&producer->session->closed) != 0 ||
           ms_load_relaxed(&producer->engine_died) != 0 ||
           ms_load_relaxed(&slot->generation) != producer->generation ||
           ms_load_relaxed(&slot->state) != MS_SESSION_OPEN;
}

/* Check after a sleep until the timeout whether the engine is dead: no process holds a lock byte of a worker or of the
 * supervisor. Then no process can say so in the control block, and the next start does not take the session over. */
static void check_engine(struct ms_producer *producer)
{
    int64_t now = ms_monotonic_ns();
    if (producer->lock_fd < 0 || now - ms_load_relaxed(&producer->engine_seen_ns) < ENGINE_CHECK_NS)
        return;
    struct flock held = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = producer->lock_byte, .l_len = MS_WORKER_KINDS};
    if (fcntl(producer->lock_fd, F_OFD_GETLK, &held) == 0 && held.l_type == F_UNLCK)
        ms_store_relaxed(&producer->engine_died, (uint32_t)MS_ENGINE_DIED);
    else
        ms_store_relaxed(&producer->engine_seen_ns, now);
}

/* DefaultMessageStore.isOSPageCacheBusy: return whether the writer's pass takes too long. Ten thousand seconds and more mean
 * that the clock was set; and if the engine was killed during a pass, the session is closed. */
static int page_cache_busy(struct ms_producer *producer, int64_t now_ms)
{
    int64_t started_ms = ms_load_relaxed(&producer->control->writer.pass_started_ms);
    int64_t limit_ms = ms_load_relaxed(&producer->control->identity.os_page_cache_busy_timeout_ms);
    if (started_ms == 0 || limit_ms <= 0 || now_ms - started_ms <= limit_ms || now_ms - started_ms >= BUSY_MS_MAX)
        return 0;
    check_engine(producer);
    return !ms_producer_is_closed(producer);
}

/* Read the wall clock into producer->wall_ms, and return page_cache_busy, once a millisecond: another read in the same
 * millisecond has the same result, and would take a cache line from the writer, which stores to it twice a pass. */
static int read_wall_clock(struct ms_producer *producer, int64_t now_ns)
{
    if (now_ns < producer->wall_until_ns)
        return 0;
    struct timespec wall;
    clock_gettime(CLOCK_REALTIME, &wall);
    producer->wall_ms = (int64_t)wall.tv_sec * 1000 + wall.tv_nsec / MILLISECOND_NS;
    producer->wall_until_ns = now_ns + MILLISECOND_NS - wall.tv_nsec % MILLISECOND_NS;
    if (!page_cache_busy(producer, producer->wall_ms))
        return 0;
    producer->wall_until_ns = 0; /* the next put reads it again */
    return 1;
}

int ms_producer_wait_for_room(struct ms_producer *producer, uint64_t need, int64_t deadline_ns)
{
    struct ms_session *session = producer->session;
    for (;;) {
        if (ms_producer_is_closed(producer)) /* checked even if there is room: no answer would come */
            return MS_PRODUCER_CLOSED;
        uint64_t used = producer->tail - ms_load_acquire(&session->head);
        if (used + need <= producer->ring_bytes &&
            producer->sequence + 1 - ms_load_acquire(&producer->oldest_unread) < MS_COMPLETIONS)
            return 0;
        int64_t now = ms_monotonic_ns();
        if (now >= deadline_ns)
            return MS_PRODUCER_AGAIN;
        ring_again(producer->control);
        /* The writer's next answer ends the sleep. */
        uint32_t seen = ms_load_acquire(&session->acked_seq);
        used = producer->tail - ms_load_acquire(&session->head);
        if (used + need <= producer->ring_bytes &&
            producer->sequence + 1 - ms_load_acquire(&producer->oldest_unread) < MS_COMPLETIONS)
            return 0;
        ms_add(&session->waiting, 1u);
        ms_futex_wait(&session->acked_seq, seen, FULL_RING_POLL_NS);
        ms_add(&session->waiting, (uint32_t)-1);
        check_engine(producer);
    }
}

/* Return where an entry of `bytes` goes: at the tail, or after a filler if it does not fit before the ring's end. NULL and
 * *code: AGAIN, CLOSED. */
static uint8_t *take_room(struct ms_producer *producer, uint64_t bytes, int64_t deadline_ns, int *code)
{
    uint64_t place = producer->tail & (producer->ring_bytes - 1);
    uint64_t pad = place + bytes > producer->ring_bytes ? producer->ring_bytes - place : 0;
    *code = ms_producer_wait_for_room(producer, pad + bytes, deadline_ns);
    if (*code != 0)
        return NULL;
    if (pad) {
        struct {
            uint32_t entry_bytes;
            uint16_t kind;
            uint16_t flags;
        } filler = {(uint32_t)pad, MS_ENTRY_PAD, 0};
        memcpy(producer->ring + place, &filler, sizeof filler);
        producer->tail += pad;
        place = 0;
    }
    return producer->ring + place;
}

void ms_producer_finish(struct ms_producer *producer, uint64_t sequence)
{
    while (ms_exchange(&producer->finishing, 1u) != 0)
        sched_yield();
    uint64_t oldest = producer->oldest_unread;
    if (sequence >= oldest) {
        producer->is_finished[sequence % MS_COMPLETIONS] = 1;
        for (; producer->is_finished[oldest % MS_COMPLETIONS]; oldest++)
            producer->is_finished[oldest % MS_COMPLETIONS] = 0;
        ms_store_release(&producer->oldest_unread, oldest);
    }
    ms_store_release(&producer->finishing, 0u);
}

/* Advance the tail over a complete entry. */
static void note_submitted(struct ms_producer *producer, uint64_t bytes)
{
    /* Relaxed: a thread that reads it without the producer's lock (csrc/front/session.c) uses it as a bound, and sees its
     * own puts in program order. */
    ms_store_relaxed(&producer->sequence, producer->sequence + 1);
    producer->tail += bytes;
}

/* Fill in one entry at the tail; 0, AGAIN or CLOSED. The writer does not have it before publish(). */
static int fill(struct ms_producer *producer, struct ms_entry *header, const uint8_t *topic, const uint8_t *properties,
                const uint8_t *payload, uint64_t payload_bytes, int64_t deadline_ns)
{
    uint64_t bytes = ms_entry_layout_bytes(header->topic_bytes, header->properties_bytes, payload_bytes);
    int code;
    uint8_t *to = take_room(producer, bytes, deadline_ns, &code);
    if (to == NULL)
        return code;
    header->entry_bytes = (uint32_t)bytes;
    header->sequence = producer->sequence + 1;
    ms_entry_fill(to, header, topic, properties, payload, payload_bytes);
    note_submitted(producer, bytes);
    return 0;
}

/* Publish the entries before the tail to the writer. `unclaimed`: the one that a future may claim; 0 none. */
static void publish(struct ms_producer *producer, uint64_t unclaimed)
{
    if (producer->unclaimed != 0) /* an exception occurred between its submission and its claim */
        ms_producer_finish(producer, producer->unclaimed);
    producer->unclaimed = unclaimed;
    ms_store_changed(&producer->session->producer_cpu, sched_getcpu()); /* the writer reads that line in each pass */
    producer->target_before = ms_load_acquire(&producer->control->flusher.sync_target);
    MS_FAILPOINT("producer_entry_filled");
    ms_store_release(&producer->session->tail, producer->tail);
    MS_FAILPOINT("producer_entry_published");
    ring(producer->control, &producer->rung);
    /* While the writer works, fetch the lines of the next entry, which the writer read one round of the ring ago. */
    uint64_t at = producer->tail & (producer->ring_bytes - 1);
    ms_prefetch_range(producer->ring, producer->ring_bytes, at, MS_ENTRY_AHEAD_BYTES, 1);
}

int ms_producer_submit(struct ms_producer *producer, struct ms_entry *header, const uint8_t *topic,
                       const uint8_t *properties, const uint8_t *payload, uint64_t bytes, int64_t deadline_ns)
{
    if (page_cache_busy(producer, ms_wall_ms()))
        return MS_PRODUCER_BUSY;
    if (header->submitted_ns == 0)
        header->submitted_ns = ms_monotonic_ns();
    int code = fill(producer, header, topic, properties, payload, bytes, deadline_ns);
    if (code == 0)
        publish(producer, producer->sequence);
    return code;
}

int ms_producer_fill(struct ms_producer *producer, struct ms_entry *header, const uint8_t *topic, const uint8_t *properties,
                     const uint8_t *payload)
{
    if (page_cache_busy(producer, ms_wall_ms()))
        return MS_PRODUCER_BUSY;
    if (ms_entry_layout_bytes(header->topic_bytes, header->properties_bytes, header->payload_bytes) > ms_producer_entry_limit(producer))
        return MS_PRODUCER_AGAIN;
    return fill(producer, header, topic, properties, payload, header->payload_bytes, 0);
}

void ms_producer_publish_filled(struct ms_producer *producer)
{
    publish(producer, 0);
}

static int take_answer(const struct ms_producer *producer, uint64_t sequence, struct ms_completion *answer)
{
    const struct ms_completion *slot = &producer->session->completion[sequence % MS_COMPLETIONS];
    *answer = *slot;
    return answer->sequence == sequence ? 0 : MS_PRODUCER_CLOSED;
}

int ms_producer_wait_acked(struct ms_producer *producer, uint64_t sequence, int64_t deadline_ns, struct ms_completion *answer)
{
    struct ms_session *session = producer->session;
    if (ms_load_acquire(&session->acked) >= sequence)
        return take_answer(producer, sequence, answer);
    /* Spin only if the writer runs on another CPU: on the same CPU the spin would keep it from running. */
    if (producer->spin_us > 0 && ms_load_relaxed(&producer->control->workers[MS_WRITER].cpu) != sched_getcpu()) {
        int64_t until = 0; /* most answers arrive before the clock is read */
        do {
            for (int i = 0; i < SPINS_BETWEEN_CLOCK; i++) {
                if (ms_load_acquire(&session->acked) >= sequence)
                    return take_answer(producer, sequence, answer);
                ms_pause();
            }
            if (until == 0)
                until = ms_monotonic_ns() + (int64_t)producer->spin_us * 1000;
        } while (ms_monotonic_ns() < until);
    }
    for (int64_t nap_ns = RING_AGAIN_NS;; nap_ns = POLL_NS) {
        /* Raise `waiting`, then load acked: the writer stores acked, then loads `waiting`. */
        ms_add(&session->waiting, 1u);
        uint32_t seen = ms_load_acquire(&session->acked_seq);
        int64_t left = deadline_ns - ms_monotonic_ns();
        int answered = ms_load_acquire(&session->acked) >= sequence;
        if (!answered && left > 0)
            ms_futex_wait(&session->acked_seq, seen, left < nap_ns ? left : nap_ns);
        ms_add(&session->waiting, (uint32_t)-1);
        if (ms_load_acquire(&session->acked) >= sequence)
            return take_answer(producer, sequence, answer);
        if (ms_producer_is_closed(producer))
            return MS_PRODUCER_CLOSED;
        if (left <= 0)
            return MS_PRODUCER_AGAIN;
        check_engine(producer);
        ring_again(producer->control);
    }
}

/* Sleep until `flushed` (MS_PUT_DURABLE) or `confirm` (MS_PUT_CONFIRMED) reaches end_offset; 0, AGAIN, CLOSED, and FROZEN before a sync. */
static int wait_for(struct ms_producer *producer, int how, int64_t end_offset, int64_t deadline_ns)
{
    const struct ms_control *control = producer->control;
    const int is_flush = how == MS_PUT_DURABLE;
    const uint32_t *const sequence = is_flush ? &control->flush_seq.value : &control->confirm_seq.value;
    const int64_t *const position = is_flush ? &control->flushed.value : &control->confirm.value;
    for (;;) {
        uint32_t seen = ms_load_acquire(sequence);
        int64_t sync_target = is_flush ? ms_load_acquire(&control->flusher.sync_target) : 0;
        if (ms_load_acquire(position) >= end_offset)
            return 0;
        if (is_flush && ms_load_acquire(&control->state.frozen) != 0)
            return MS_PRODUCER_FROZEN;
        if (ms_producer_is_closed(producer))
            return MS_PRODUCER_CLOSED;
        int64_t left = deadline_ns - ms_monotonic_ns();
        if (left <= 0)
            return MS_PRODUCER_AGAIN;
        if (is_flush)
            ms_control_wait_synced(control, seen, sync_target, sync_target < end_offset, ms_earlier(left, POLL_NS));
        else
            ms_futex_wait(sequence, seen, ms_earlier(left, POLL_NS));
        check_engine(producer);
    }
}

/* HAService.isSlaveOK */
static int slaves_may_confirm(const struct ms_control *control, int64_t end_offset)
{
    return ms_load_acquire(&control->replicator.slaves_connected) >= control->identity.min_in_sync_replicas &&
           end_offset - ms_load_acquire(&control->confirm.value) <
               ms_load_relaxed(&control->identity.ha_slave_fallbehind_max_bytes);
}

static int wait_for_both(struct ms_producer *producer, int64_t end_offset, int how, int64_t flush_deadline_ns,
                         int64_t slave_deadline_ns)
{
    const struct ms_control *control = producer->control;
    int no_slave = (how & MS_PUT_CONFIRMED) != 0 && ms_load_acquire(&control->confirm.value) < end_offset &&
                   !slaves_may_confirm(control, end_offset);
    int late = 0;
    if (how & MS_PUT_DURABLE) {
        late = wait_for(producer, MS_PUT_DURABLE, end_offset, flush_deadline_ns);
        if (late != 0 && late != MS_PRODUCER_AGAIN)
            return late;
    }
    if (no_slave)
        return MS_PRODUCER_NO_SLAVE;
    if (how & MS_PUT_CONFIRMED) {
        int code = wait_for(producer, MS_PUT_CONFIRMED, end_offset, slave_deadline_ns);
        if (code != 0)
            return code == MS_PRODUCER_AGAIN ? MS_PRODUCER_UNCONFIRMED : code;
    }
    return late;
}

int ms_producer_wait_persisted(struct ms_producer *producer, int64_t end_offset, int how, int64_t flush_deadline_ns,
                               int64_t slave_deadline_ns, int64_t slice_end_ns)
{
    const int code = wait_for_both(producer, end_offset, how, ms_earlier(slice_end_ns, flush_deadline_ns),
                                   ms_earlier(slice_end_ns, slave_deadline_ns));
    /* Without the slaves that it needs the code is theirs, but the disk still has until its own deadline. */
    const int flush_is_open = code == MS_PRODUCER_AGAIN ||
                              (code == MS_PRODUCER_NO_SLAVE && (how & MS_PUT_DURABLE) &&
                               ms_load_acquire(&producer->control->flushed.value) < end_offset);
    const int is_unfinished = (flush_is_open && slice_end_ns < flush_deadline_ns) ||
                              (code == MS_PRODUCER_UNCONFIRMED && slice_end_ns < slave_deadline_ns);
    return is_unfinished ? MS_PRODUCER_UNFINISHED : code;
}

int64_t ms_producer_stored_ns(int64_t submitted_ns, int64_t store_timestamp_ms)
{
    const int64_t age_ms = ms_wall_ms() - store_timestamp_ms, now_ns = ms_monotonic_ns();
    const int64_t stored_ns = age_ms > 0 ? now_ns - age_ms * 1000000 : now_ns;
    return stored_ns > submitted_ns ? stored_ns : submitted_ns;
}

/* Sleep on the flush sequence, which serves for answer and sync: in sync mode a put is answered long before its sync is
 * over, and the writer raises the sequence after an answer without a sync. If woken without an answer, or too late to
 * sleep, the caller waits for the answer. */
static void sleep_until_flush(const struct ms_producer *producer, uint64_t sequence, int64_t target_before, int64_t deadline_ns)
{
    const struct ms_control *control = producer->control;
    if (control->identity.mode != MS_MODE_SYNC)
        return;
    uint32_t seen = ms_load_acquire(&control->flush_seq.value);
    int64_t sync_target = ms_load_acquire(&control->flusher.sync_target);
    if (sync_target != target_before && sync_target <= ms_load_acquire(&control->flushed.value))
        return; /* the sync of this entry may be over already: no raise would follow */
    int64_t left = deadline_ns - ms_monotonic_ns();
    if (left > 0 && ms_load_acquire(&producer->session->acked) < sequence)
        ms_control_wait_synced(control, seen, sync_target, sync_target == target_before, ms_earlier(left, POLL_NS));
}

/* Sleep once on `confirm`, for a put that waits for slaves only: its answer comes first, and waking for it would be useless.
 * If the put is refused or not confirmed by then, it waits like any other. */
static void sleep_until_confirmed(const struct ms_producer *producer, uint64_t sequence, int64_t deadline_ns)
{
    const struct ms_control *control = producer->control;
    const int64_t left_ns = deadline_ns - ms_monotonic_ns();
    const uint32_t seen = ms_load_acquire(&control->confirm_seq.value);
    if (left_ns > 0 && slaves_may_confirm(control, ms_load_acquire(&control->wrote.value)) &&
        ms_load_acquire(&producer->session->acked) < sequence)
        ms_futex_wait(&control->confirm_seq.value, seen, ms_earlier(UNANSWERED_NS, left_ns));
}

int ms_producer_wait_answer(struct ms_producer *producer, uint64_t sequence, int64_t target_before, int how, int64_t deadline_ns,
                            struct ms_completion *answer)
{
    if (how & MS_PUT_DURABLE)
        sleep_until_flush(producer, sequence, target_before, deadline_ns);
    else if (how & MS_PUT_CONFIRMED)
        sleep_until_confirmed(producer, sequence, deadline_ns);
    return ms_producer_wait_acked(producer, sequence, deadline_ns, answer);
}

/* Wait for the answer, then for durability and confirmation as `how` says. */
static int wait_for_put(struct ms_producer *producer, int64_t slice_end_ns, int64_t deadline_ns, int how)
{
    producer->stage = MS_STAGE_SUBMITTED;
    int code = ms_producer_wait_answer(producer, producer->sequence, producer->target_before, how, ms_earlier(slice_end_ns, deadline_ns),
                                       &producer->answer);
    if (code == MS_PRODUCER_AGAIN && slice_end_ns < deadline_ns)
        return MS_PRODUCER_UNFINISHED;
    if (code == 0) {
        producer->stage = MS_STAGE_ANSWERED;
        if ((how & (MS_PUT_DURABLE | MS_PUT_CONFIRMED)) && producer->answer.status == 0) {
            int64_t now_ns = ms_monotonic_ns();
            int64_t flush_ns = now_ns + producer->flush_timeout_ns, slave_ns = now_ns + producer->slave_timeout_ns;
            code = ms_producer_wait_persisted(producer, producer->answer.end_offset, how, flush_ns, slave_ns, slice_end_ns);
            if (code == MS_PRODUCER_UNFINISHED)
                return code;
        }
    }
    ms_producer_finish(producer, producer->sequence); /* also without an answer: it will not be read any more */
    producer->unclaimed = 0;
    return code;
}

uint8_t *ms_producer_reserve(struct ms_producer *producer, const uint8_t *prefix, int kind, uint32_t count,
                             uint64_t payload_bytes, int *code)
{
    struct ms_entry header;
    memcpy(&header, prefix, sizeof header);
    header.submitted_ns = ms_monotonic_ns();
    int is_busy = read_wall_clock(producer, header.submitted_ns);
    header.born_timestamp_ms = producer->wall_ms;
    header.kind = (uint16_t)kind;
    header.count = count;
    header.payload_bytes = (uint32_t)payload_bytes;
    uint64_t prefix_bytes = ms_entry_payload_at(header.topic_bytes, header.properties_bytes);
    uint64_t bytes = ms_align8(prefix_bytes + payload_bytes);
    producer->stage = MS_STAGE_NOT_SUBMITTED;
    producer->submitted_ns = header.submitted_ns;
    *code = is_busy ? MS_PRODUCER_BUSY : 0;
    uint8_t *to = *code == 0 ? take_room(producer, bytes, 0, code) : NULL;
    if (to == NULL)
        return NULL;
    header.entry_bytes = (uint32_t)bytes;
    header.sequence = producer->sequence + 1;
    memcpy(to, &header, sizeof header);
    memcpy(to + sizeof header, prefix + sizeof header, prefix_bytes - sizeof header);
    producer->reserved_bytes = bytes;
    return to + prefix_bytes;
}

void ms_producer_publish(struct ms_producer *producer)
{
    note_submitted(producer, producer->reserved_bytes);
    publish(producer, producer->sequence);
    producer->stage = MS_STAGE_SUBMITTED;
}

int ms_producer_is_answered(const struct ms_producer *producer, int spins)
{
    const struct ms_session *session = producer->session;
    if (producer->spin_us <= 0 || ms_load_relaxed(&producer->control->workers[MS_WRITER].cpu) == sched_getcpu())
        spins = 1;
    for (int i = 0; i < spins; i++) {
        if (ms_load_acquire(&session->acked) >= producer->sequence)
            return 1;
        ms_pause();
    }
    return 0;
}

int ms_producer_await(struct ms_producer *producer, int how)
{
    /* A put that waits for its answer only is done with it, and need not read the clock. */
    int is_over = how == 0 && ms_load_acquire(&producer->session->acked) >= producer->sequence;
    int64_t began_ns = is_over ? producer->submitted_ns : ms_monotonic_ns();
    return wait_for_put(producer, began_ns + MS_PUT_SLICE_NS, producer->submitted_ns + producer->timeout_ns, how);
}

const struct ms_producer_calls *ms_producer_calls(void)
{
    static const struct ms_producer_calls calls = {
        MS_PRODUCER_CALLS_BUILD,
        ms_producer_reserve,
        ms_producer_publish,
        ms_producer_is_answered,
        ms_producer_await,
        ms_producer_wait_answer,
        ms_producer_stored_ns,
        ms_producer_wait_persisted,
        ms_producer_finish,
        ms_producer_is_closed,
    };
    return &calls;
}
