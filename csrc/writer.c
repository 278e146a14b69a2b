#include "base.h"
#include "writer.h"

#include <sched.h>

#include "log_tail.h"
#include "sequence.h"
#include "take_entry.h"

/* Most entries that a pass takes from one session before it continues with the next. */
#define TURN_ENTRIES 256
#define TURN_BYTES 1048576
#define SPINS_BETWEEN_CLOCK 32
/* Interval of checks of all sessions, per session. Checking one session takes about a sixteenth of it. */
#define SCAN_INTERVAL_NS 64
#define ALWAYS_ACTIVE_MAX 8 /* so few sessions cost nothing: each pass reads all of them */
/* A process that rings for nothing costs the writer little: after so many of such rings it pauses before it sleeps again. */
#define USELESS_RINGS_MAX 32
#define USELESS_RINGS_PAUSE_NS 200000
#define SPIN_GAP 4 /* longest gap between two entries for which the next spin is worthwhile, in spins; it covers the writer's wake-up */

/* ---- the committed state ------------------------------------------------- */

void ms_writer_open(struct ms_writer *writer)
{
    struct ms_control *control = writer->control;
    uint64_t pass = (uint64_t)ms_load_acquire(&control->slot_pass.value);
    const struct ms_commit_slot *slot = &control->slots[pass & 1];
    writer->pass = pass;
    writer->position = slot->wrote;
    writer->store_timestamp_ms = slot->store_timestamp_ms;
    writer->put_messages = slot->put_messages;
    writer->put_bytes = slot->put_bytes;
    writer->entries = 0;
    writer->unsynced_answers = 0;
    writer->stage_bytes = 0;
    writer->stage_from = slot->wrote;
    writer->is_gathering = 0;
    writer->side_loaded = 0;
    writer->zeroed_end = slot->wrote;
    writer->reserved_end = ms_load_acquire(&control->allocator.reserved_end);
    if (writer->sessions_high < slot->sessions_high)
        writer->sessions_high = slot->sessions_high;
    writer->touched_count = writer->touched_before_count = 0;
    writer->whole_slots = MS_PASS_SLOTS; /* after a dead pass the other slot is undefined */
    for (uint32_t i = 0; i < MS_SESSION_SLOTS; i++) {
        struct ms_writer_session *own = &writer->sessions[i];
        const struct ms_session_account *account = &slot->sessions[i];
        own->touched = 0;
        if (own->session == NULL)
            own->generation = account->generation;
        /* A session that was in no committed pass yet begins at 0. */
        int known = own->generation == account->generation;
        own->head = known ? account->head : 0;
        own->acked = known ? account->acked : 0;
    }
    MS_FAILPOINT("writer_state_taken");
    /* A writer killed after its commit point has not published these yet. */
    ms_store_release(&control->wrote.value, slot->wrote);
    MS_FAILPOINT("writer_wrote_published");
    if (writer->mode != MS_MODE_POOL)
        ms_store_release(&control->committed.value, slot->wrote);
    ms_store_release(&control->writer.pass_started_ms, 0);
}

int ms_writer_roll_back(struct ms_control *control, struct ms_queue_table *queues)
{
    uint64_t next = (uint64_t)ms_load_acquire(&control->slot_pass.value) + 1;
    struct ms_undo *undo = &control->undo;
    int dead = ms_load_acquire(&control->writer.intended_pass) == next;
    if (ms_load_acquire(&undo->pass) != next)
        return dead;
    uint32_t count = ms_load_acquire(&undo->count);
    if (count > MS_UNDO_MAX)
        count = MS_UNDO_MAX;
    for (uint32_t i = count; i-- > 0;) {
        if (undo->table_slot[i] >= queues->slots) /* the memory is damaged */
            continue;
        struct ms_queue_slot *slot = &queues->slot[undo->table_slot[i]];
        slot->next_offset = undo->old_offset[i];
        slot->pass = 0;
        MS_FAILPOINT("rollback_queue_put_back");
    }
    return 1;
}

void ms_writer_rolled_back(struct ms_control *control)
{
    ms_store_release(&control->undo.count, 0u);
    MS_FAILPOINT("rollback_undo_emptied");
    ms_store_release(&control->undo.pass, (uint64_t)0);
    MS_FAILPOINT("rollback_undo_closed");
    ms_store_release(&control->writer.intended_pass, (uint64_t)0);
    MS_FAILPOINT("rollback_done");
    ms_store_release(&control->writer.intent_end, control->slots[ms_load_acquire(&control->slot_pass.value) & 1].wrote);
}

/* After a fence: the answer is stored first, then `waiting` is loaded. */
static void wake_session(struct ms_session *session)
{
    if (ms_load_relaxed(&session->waiting) != 0)
        ms_futex_wake_all(&session->acked_seq);
}

static void publish_session(const struct ms_writer_session *own)
{
    struct ms_session *session = own->session;
    ms_store_release(&session->head, own->head);
    MS_FAILPOINT("session_head_published");
    ms_store_release(&session->acked, own->acked);
    MS_FAILPOINT("session_acked_published");
    ms_store_release(&session->acked_seq, (uint32_t)own->acked);
    MS_FAILPOINT("session_answer_published");
}

void ms_writer_attach_session(struct ms_writer *writer, uint32_t slot, struct ms_session *session, uint64_t generation, uint64_t ring_bytes)
{
    struct ms_writer_session *own = &writer->sessions[slot];
    if (own->generation != generation) {
        own->head = 0;
        own->acked = 0;
        own->generation = generation;
    }
    own->session = session;
    own->ring_bytes = ring_bytes;
    own->ring = ms_session_ring(session);
    own->broken = 0;
    /* Not touched: until it puts, a slot with another generation means the same, that it begins at 0. */
    writer->active[slot / 64] |= (uint64_t)1 << (slot % 64);
    if (writer->side_slot == slot)
        writer->side_loaded = 0;
    if (writer->turn == slot) /* a refusal was for an entry of the session before */
        writer->refuse_segment = writer->side_failed = writer->queues_refused = 0;
    if (slot >= writer->sessions_high)
        writer->sessions_high = slot + 1;
    publish_session(own);
    ms_fence();
    wake_session(session);
}

void ms_writer_detach_session(struct ms_writer *writer, uint32_t slot)
{
    writer->sessions[slot].session = NULL;
    writer->sessions[slot].ring = NULL;
}

int ms_writer_session_drained(const struct ms_writer *writer, uint32_t slot)
{
    const struct ms_writer_session *own = &writer->sessions[slot];
    return own->session == NULL || own->broken || ms_load_acquire(&own->session->tail) == own->head;
}

/* ---- the pass ------------------------------------------------------------ */

static void begin_pass(struct ms_writer *writer)
{
    struct ms_control *control = writer->control;
    writer->pass = (uint64_t)ms_load_relaxed(&control->slot_pass.value) + 1;
    ms_store_release(&control->writer.intent_end, writer->position);
    MS_FAILPOINT("pass_intent_reset");
    ms_store_release(&control->undo.count, 0u);
    MS_FAILPOINT("pass_undo_emptied");
    ms_store_release(&control->undo.pass, writer->pass);
    MS_FAILPOINT("pass_undo_opened");
    ms_store_release(&control->writer.intended_pass, writer->pass);
    MS_FAILPOINT("pass_intended");
    ms_compiler_fence();
    writer->wall_ms = 0;
    writer->write_ns = 0;
    ms_put_meter_begin(&writer->meter);
}

static void wake(struct ms_writer *writer, uint32_t kind)
{
    if (writer->semaphores[kind] != NULL)
        ms_latch_wakeup(&writer->control->latch[kind], writer->semaphores[kind]);
}

static void wake_fenced(struct ms_writer *writer, uint32_t kind)
{
    if (writer->semaphores[kind] != NULL)
        ms_latch_wakeup_fenced(&writer->control->latch[kind], writer->semaphores[kind]);
}

/* Wake the allocator when less than a step is reserved ahead. While it cannot reserve it tries again by itself. */
static void ask_for_blocks(struct ms_writer *writer)
{
    const struct ms_allocator_line *allocator = &writer->control->allocator;
    if (writer->reserved_end - writer->position >= writer->reserve_step_bytes)
        return;
    writer->reserved_end = ms_load_acquire(&allocator->reserved_end);
    if (writer->reserved_end - writer->position < writer->reserve_step_bytes && ms_load_relaxed(&allocator->error_number) == 0)
        wake_fenced(writer, MS_ALLOCATOR);
}

static void fill_account(struct ms_commit_slot *slot, const struct ms_writer *writer, uint32_t i)
{
    slot->sessions[i].head = writer->sessions[i].head;
    MS_FAILPOINT("commit_slot_head");
    slot->sessions[i].acked = writer->sessions[i].acked;
    slot->sessions[i].generation = writer->sessions[i].generation;
}

/* Update the slot, which has the accounts after the pass before the last: the last pass or this one touched those that have
 * changed since. */
static void fill_accounts(struct ms_commit_slot *slot, struct ms_writer *writer)
{
    if (writer->whole_slots > 0) {
        writer->whole_slots--;
        for (uint32_t i = 0; i < writer->sessions_high; i++)
            fill_account(slot, writer, i);
        return;
    }
    for (uint32_t n = 0; n < writer->touched_before_count; n++)
        fill_account(slot, writer, writer->touched_before[n]);
    for (uint32_t n = 0; n < writer->touched_count; n++)
        fill_account(slot, writer, writer->touched[n]);
}

/* Tell the recorder that producers wait for this pass since its begin. */
static void record_wait(struct ms_writer *writer)
{
    const struct ms_recorder_handle *recorder = &writer->recorder;
    const struct ms_control *control = writer->control;
    if (recorder->shared == NULL)
        return;
    if (writer->mode == MS_MODE_SYNC)
        ms_recorder_wait(&recorder->shared->for_sync, ms_load_relaxed(&control->flushed.value), writer->position, writer->clock_ns);
    if (control->identity.role == MS_ROLE_SYNC_MASTER && ms_load_relaxed(&control->replicator.slaves_connected) != 0)
        ms_recorder_wait(&recorder->shared->for_slave, ms_load_relaxed(&control->confirm.value), writer->position, writer->clock_ns);
}

/* Steps 4 to 6 of the pass. */
static int commit_pass(struct ms_writer *writer)
{
    struct ms_control *control = writer->control;
    if (ms_tail_write(writer) != 0)
        return MS_RUN_FAILED;
    struct ms_commit_slot *slot = &control->slots[writer->pass & 1];
    int grew = writer->position != ms_load_relaxed(&control->wrote.value);
    MS_FAILPOINT("pass_ready");
    /* Relaxed, not plain: another process may read it meanwhile, and then reads again. */
    ms_store_relaxed(&slot->wrote, writer->position);
    MS_FAILPOINT("commit_slot_wrote");
    ms_store_relaxed(&slot->store_timestamp_ms, writer->store_timestamp_ms);
    MS_FAILPOINT("commit_slot_begun");
    slot->queue_table_generation = writer->queues->generation;
    ms_store_relaxed(&slot->put_messages, writer->put_messages);
    ms_store_relaxed(&slot->put_bytes, writer->put_bytes);
    fill_accounts(slot, writer);
    slot->sessions_high = writer->sessions_high;
    MS_FAILPOINT("commit_slot_filled");
    ms_store_release(&control->slot_pass.value, (int64_t)writer->pass); /* the commit point */
    MS_FAILPOINT("commit_point");
    if (grew)
        record_wait(writer); /* before the process that ends the wait can see the commit */
    ms_store_release(&control->wrote.value, writer->position);
    MS_FAILPOINT("wrote_published");
    if (writer->mode != MS_MODE_POOL)
        ms_store_release(&control->committed.value, writer->position);
    MS_FAILPOINT("committed_published");
    ms_store_relaxed(&control->writer.pass_started_ms, 0);
    if (grew && writer->mode == MS_MODE_SYNC)
        wake(writer, MS_FLUSHER); /* first, since producers wait for the disk */
    MS_FAILPOINT("pass_published");
    for (uint32_t n = 0; n < writer->touched_count; n++)
        if (writer->sessions[writer->touched[n]].session != NULL)
            publish_session(&writer->sessions[writer->touched[n]]);
    MS_FAILPOINT("answers_published");
    ms_fence(); /* one fence between all positions and answers, and the loads of sleepers */
    for (uint32_t n = 0; n < writer->touched_count; n++) {
        struct ms_writer_session *own = &writer->sessions[writer->touched[n]];
        if (own->session != NULL)
            wake_session(own->session);
        own->touched = 0;
    }
    if (writer->mode == MS_MODE_SYNC && (writer->unsynced_answers || ms_load_acquire(&control->state.frozen) != 0))
        ms_sequence_raise(&control->flush_seq); /* their producers sleep there; in a frozen store no sync follows either */
    writer->unsynced_answers = 0;
    memcpy(writer->touched_before, writer->touched, writer->touched_count * sizeof writer->touched[0]);
    writer->touched_before_count = writer->touched_count;
    writer->touched_count = 0;
    MS_FAILPOINT("producers_woken");
    if (grew) {
        wake_fenced(writer, MS_REPLICATOR); /* on a master without a pool; first, since producers wait for slaves */
        if (writer->mode == MS_MODE_POOL)
            wake_fenced(writer, MS_COMMITTER);
        else
            wake_fenced(writer, MS_REPUTTER);
        ask_for_blocks(writer);
    }
    MS_FAILPOINT("pass_done");
    writer->entries = 0;
    return MS_RUN_TIME;
}

/* ---- sessions with entries ------------------------------------------------ */

static int has_work(const struct ms_writer_session *own)
{
    return own->session != NULL && !own->broken && ms_load_acquire(&own->session->tail) != own->head;
}

/* Return the first active session from `from` on; sessions_high if there is none. */
static uint32_t next_active(const struct ms_writer *writer, uint32_t from)
{
    uint32_t high = writer->sessions_high;
    uint64_t mask = ~(uint64_t)0 << (from % 64);
    for (uint32_t n = from / 64; n * 64 < high; n++, mask = ~(uint64_t)0) {
        uint64_t word = writer->active[n] & mask;
        if (word != 0)
            return n * 64 + (uint32_t)__builtin_ctzll(word);
    }
    return high;
}

static int work_waits(const struct ms_writer *writer)
{
    uint32_t high = writer->sessions_high;
    for (uint32_t i = next_active(writer, 0); i < high; i = next_active(writer, i + 1))
        if (has_work(&writer->sessions[i]))
            return 1;
    return 0;
}

/* Check all sessions: active ones are then those with entries, and those that have put since the last check. Return whether
 * there is work. */
static int scan_sessions(struct ms_writer *writer, int64_t now)
{
    uint32_t high = writer->sessions_high;
    int found = 0;
    for (uint32_t n = 0; n * 64 < high; n++) {
        uint64_t active = 0;
        for (uint32_t i = n * 64; i < high && i < n * 64 + 64; i++) {
            struct ms_writer_session *own = &writer->sessions[i];
            int waits = has_work(own);
            found |= waits;
            active |= (uint64_t)(waits || own->has_put || high <= ALWAYS_ACTIVE_MAX) << (i % 64);
            own->has_put = 0;
        }
        writer->active[n] = active;
    }
    writer->scanned_ns = now;
    return found;
}

/* Return whether the interval has passed after which an inactive session is checked, while others keep the writer awake.
 * Before it sleeps, the writer arms its latch and checks all: a producer that publishes after that check rings. */
static int is_scan_due(const struct ms_writer *writer, int64_t now)
{
    return now - writer->scanned_ns >= (int64_t)writer->sessions_high * SCAN_INTERVAL_NS;
}

/* Return what Python must do before the next pass, MS_RUN_TIME for nothing. */
static int pending_request(const struct ms_writer *writer)
{
    const struct ms_control *control = writer->control;
    if (ms_load_acquire(&control->session_seq.value) != writer->session_seq_seen)
        return MS_RUN_SESSIONS;
    if (ms_load_acquire(&control->flusher.incarnation) != ms_load_relaxed(&control->writer.verified_flusher) &&
        ms_load_acquire(&control->state.frozen) == 0)
        return MS_RUN_FLUSHER;
    return MS_RUN_TIME;
}

/* Read the clock once for the entries of a turn, which were all put before: it is their store time and the pass's begin. */
static void begin_turn(struct ms_writer *writer)
{
    int is_first = writer->wall_ms == 0;
    writer->wall_ms = ms_wall_ms();
    if (is_first)
        ms_store_relaxed(&writer->control->writer.pass_started_ms, writer->wall_ms);
}

/* Prefetch the lines of the next entry from its producer's CPU together, instead of one after another. */
static void prefetch_entry(const struct ms_writer_session *own, uint64_t tail)
{
    uint64_t bytes = tail - own->head < MS_ENTRY_AHEAD_BYTES ? tail - own->head : MS_ENTRY_AHEAD_BYTES;
    ms_prefetch_range(own->ring, own->ring_bytes, own->head & (own->ring_bytes - 1), bytes, 0);
}

/* Prefetch, while the producer reads the answer, the lines to which the next small pass stores. */
static void prefetch_places(const struct ms_writer *writer)
{
    if (writer->current.memory == NULL || writer->is_gathering || writer->current.base < 0)
        return;
    uint64_t at = (uint64_t)(writer->position - writer->current.base);
    ms_prefetch_range(writer->current.memory, (uint64_t)writer->segment_bytes, at, MS_ENTRY_AHEAD_BYTES, 1);
    const struct ms_writer_session *own = writer->touched_before_count == 1 ? &writer->sessions[writer->touched_before[0]] : NULL;
    if (own != NULL && own->session != NULL)
        ms_prefetch_to_store(&own->session->completion[(own->acked + 1) % MS_COMPLETIONS]);
}

/* Execute the entries of session `i` for one turn of a pass that began at the position `from`. */
static int take_turn(struct ms_writer *writer, uint32_t i, int64_t from)
{
    struct ms_writer_session *own = &writer->sessions[i];
    if (!has_work(own))
        return MS_RUN_TIME;
    uint64_t tail = ms_load_acquire(&own->session->tail);
    prefetch_entry(own, tail);
    begin_turn(writer);
    writer->last_producer_same_cpu = ms_load_relaxed(&own->session->producer_cpu) == ms_load_relaxed(&writer->control->workers[MS_WRITER].cpu);
    int64_t turn_from = writer->position;
    for (int k = 0; k < TURN_ENTRIES && own->head != tail && !own->broken; k++) {
        if (writer->control->undo.count >= MS_UNDO_MAX - MS_LIGHT_QUEUES_MAX || writer->position - from >= MS_PASS_BYTES ||
            writer->position - turn_from >= TURN_BYTES)
            break;
        int reason = ms_take_entry(writer, own, tail);
        if (reason != MS_RUN_TIME)
            return reason;
    }
    return MS_RUN_TIME;
}

/* Return the bytes that wait in the rings of active sessions and in the current side object. */
static int64_t waiting_bytes(const struct ms_writer *writer)
{
    uint32_t high = writer->sessions_high;
    uint64_t bytes = writer->side_loaded != 0 ? writer->side_bytes : 0;
    for (uint32_t i = next_active(writer, 0); i < high; i = next_active(writer, i + 1))
        if (has_work(&writer->sessions[i]))
            bytes += ms_load_relaxed(&writer->sessions[i].session->tail) - writer->sessions[i].head;
    return (int64_t)bytes;
}

/* Record the finished pass if it, or its puts, took long. */
static void record_pass(struct ms_writer *writer, int64_t from)
{
    int64_t now = writer->last_work_ns;
    int64_t took = now - writer->clock_ns;
    struct ms_stall pass = {.what = MS_STALL_PASS, .began_ns = writer->clock_ns, .took_ns = took, .offset = writer->position};
    pass.bytes = writer->position - from;
    pass.phase_ns[MS_PHASE_WRITE] = writer->write_ns;
    pass.phase_ns[MS_PHASE_TOUCH] = took - writer->write_ns;
    struct ms_stall puts = pass;
    int is_slow = took >= writer->recorder.threshold_ns;
    if (is_slow)
        ms_recorder_note(&writer->recorder, &pass);
    if (writer->meter.slow == 0)
        return;
    puts.what = MS_STALL_PUTS;
    puts.took_ns = writer->meter.slowest_ns;
    puts.began_ns = now - puts.took_ns;
    puts.phase_ns[MS_PHASE_RING] = writer->clock_ns - puts.began_ns;
    puts.entries = writer->meter.slow;
    ms_recorder_note_puts(&writer->recorder, &puts, is_slow ? &pass : NULL);
}

static uint32_t phase_of(uint32_t reason)
{
    return reason == MS_RUN_SEGMENT   ? MS_PHASE_SEGMENT
           : reason == MS_RUN_QUEUES  ? MS_PHASE_LOCK
           : reason == MS_RUN_FLUSHER ? MS_PHASE_SYNC
                                      : MS_PHASE_OTHER;
}

/* Record the time between two runs, when Python worked or the process could not run. */
static void record_request(struct ms_writer *writer)
{
    struct ms_stall stall = {.what = MS_STALL_REQUEST, .began_ns = writer->returned_ns, .took_ns = writer->clock_ns - writer->returned_ns, .detail = writer->return_reason, .offset = writer->position};
    uint32_t phase = phase_of(writer->return_reason);
    stall.phase_ns[phase] = stall.took_ns;
    stall.likely = writer->return_reason == MS_RUN_ROLLED ? MS_CAUSE_ROLL
                   : writer->waited_for_pool              ? MS_CAUSE_POOL
                                                          : MS_CAUSE_UNKNOWN;
    if (writer->return_reason == MS_RUN_FAILED)
        stall.error_number = writer->error_number;
    ms_recorder_note(&writer->recorder, &stall);
}

/* Record a sleep that was too long or in which a signal stopped the process. Perhaps no put waited; if one did, it has a stall
 * of its own. */
static void record_sleep(struct ms_writer *writer, int64_t from_ns, int64_t to_ns)
{
    struct ms_stall sleep = {.what = MS_STALL_REQUEST, .began_ns = from_ns, .took_ns = to_ns - from_ns, .offset = writer->position};
    sleep.phase_ns[MS_PHASE_OTHER] = sleep.took_ns;
    ms_recorder_note(&writer->recorder, &sleep);
}

/* Make one round over the active sessions; MS_RUN_TIME if it is complete. */
static int make_pass(struct ms_writer *writer)
{
    int reason = MS_RUN_TIME;
    uint32_t high = writer->sessions_high;
    uint32_t turn = writer->turn;
    uint32_t next_turn = 0;
    int64_t from = writer->position;
    begin_pass(writer);
    writer->is_gathering = writer->gather_bytes_min > 0 && waiting_bytes(writer) >= writer->gather_bytes_min;
    for (uint32_t n = 0, i = turn; n < 2 && reason == MS_RUN_TIME; n++, i = 0) { /* the sessions from `turn` on, then those before it */
        uint32_t end = n == 0 ? high : turn;
        for (i = next_active(writer, i); i < end && reason == MS_RUN_TIME; i = next_active(writer, i + 1)) {
            if (i != turn) /* its producer took the entry back that Python has answered: no other entry may use the answer */
                writer->refuse_segment = writer->side_failed = writer->queues_refused = writer->side_loaded = 0;
            reason = take_turn(writer, i, from);
            if (next_turn == 0)
                next_turn = i + 1;
            if (reason != MS_RUN_TIME)
                writer->turn = i; /* it is the first one after Python has done its part */
        }
    }
    /* A refusal is for the entry whose request failed, which came first; no other entry may use it. */
    writer->refuse_segment = writer->side_failed = writer->queues_refused = 0;
    if (reason == MS_RUN_TIME)
        writer->turn = next_turn < high ? next_turn : 0;
    if (reason == MS_RUN_FAILED || reason == MS_RUN_CUT_SHORT)
        return reason;
    int committed = commit_pass(writer);
    writer->last_work_ns = ms_monotonic_ns();
    if (committed == MS_RUN_TIME)
        ms_put_meter_commit(&writer->meter, writer->last_work_ns);
    if (writer->recorder.shared != NULL &&
        (writer->last_work_ns - writer->clock_ns >= writer->recorder.threshold_ns || writer->meter.slow != 0))
        record_pass(writer, from);
    writer->clock_ns = writer->last_work_ns;
    prefetch_places(writer);
    return committed != MS_RUN_TIME ? committed : reason;
}

int ms_writer_use_table(struct ms_writer *writer, struct ms_queue_table *queues)
{
    /* An empty pass commits the change, so that no undo list refers to two tables. */
    writer->queues = queues;
    begin_pass(writer);
    return commit_pass(writer);
}

/* Make a pass and set what the next one depends on: MS_RUN_*. */
static int work(struct ms_writer *writer)
{
    struct ms_control *control = writer->control;
    ms_store_changed(&control->workers[MS_WRITER].cpu, sched_getcpu()); /* producers read that line with each put */
    int reason = make_pass(writer);
    writer->useless_rings /= 2;
    if (reason != MS_RUN_TIME)
        return reason;
    if (writer->rolled)
        return MS_RUN_ROLLED;
    if (writer->mode == MS_MODE_SYNC) {
        writer->spinning = 0; /* the next one comes after the sync */
        ms_store_changed(&control->writer.is_beside_producer, writer->last_producer_same_cpu); /* the flusher reads it after each sync */
        ms_affinity_note(&writer->affinity, ms_load_relaxed(&control->workers[MS_WRITER].cpu), writer->last_work_ns);
    } else if (writer->spin_us > 0)
        ms_mover_note(&writer->mover, writer->last_producer_same_cpu, writer->last_work_ns);
    return MS_RUN_TIME;
}

#define AWAKE -1 /* there was something to do */
#define SLEPT -2

/* Sleep on the latch until an entry comes, or until the deadline: AWAKE, SLEPT, or MS_RUN_TIME if Python must look. */
static int sleep_on_latch(struct ms_writer *writer, int64_t now, int64_t deadline_ns)
{
    struct ms_control *control = writer->control;
    struct ms_latch *latch = &control->latch[MS_WRITER];
    if (writer->useless_rings >= USELESS_RINGS_MAX) {
        struct timespec pause = {.tv_nsec = USELESS_RINGS_PAUSE_NS};
        nanosleep(&pause, NULL);
    }
    ms_latch_arm(latch, NULL);
    if (scan_sessions(writer, now) || pending_request(writer) != MS_RUN_TIME) {
        ms_latch_disarm(latch);
        return AWAKE;
    }
    int woken = ms_latch_wait(latch, NULL, deadline_ns - now);
    if (woken == 0)
        writer->useless_rings = 0;
    else if (woken == MS_LATCH_RUNG && writer->useless_rings < USELESS_RINGS_MAX)
        writer->useless_rings++; /* until it turns out to be useful */
    if (woken > 0 && ms_load_relaxed(&control->state.refuse_puts) & MS_REFUSE_PUTS_STOPPING)
        return MS_RUN_TIME; /* a stop, whose signal may have arrived before the sleep */
    if (woken == MS_LATCH_WOKEN && writer->mode == MS_MODE_SYNC && writer->spin_us > 0) {
        /* The flusher posts when it has woken producers, whose next entries come soon. */
        writer->spinning = 1;
        writer->last_work_ns = ms_monotonic_ns();
    }
    if (woken < 0) {
        int64_t resumed_ns;
        if (ms_recorder_resumes(&resumed_ns) != writer->recorder.continued)
            record_sleep(writer, writer->clock_ns, resumed_ns);
        return MS_RUN_TIME; /* a signal, whose handler Python runs */
    }
    return SLEPT;
}

static int run(struct ms_writer *writer, int64_t deadline_ns)
{
    int slept = 0;
    for (;;) {
        int reason = pending_request(writer);
        if (reason != MS_RUN_TIME)
            return reason;
        if (is_scan_due(writer, writer->last_work_ns))
            scan_sessions(writer, writer->last_work_ns);
        if (work_waits(writer)) {
            if (slept) {
                /* Spinning is worthwhile only if the next entry comes soon after the last one. */
                writer->clock_ns = ms_monotonic_ns();
                writer->spinning = writer->clock_ns - writer->last_work_ns < (int64_t)writer->spin_us * 1000 * SPIN_GAP;
                slept = 0;
            }
            reason = work(writer);
            if (reason != MS_RUN_TIME || writer->last_work_ns >= deadline_ns)
                return reason;
            continue;
        }
        int64_t now = ms_monotonic_ns();
        if (slept && now - deadline_ns >= MS_STALL_NS)
            record_sleep(writer, deadline_ns, now);
        writer->clock_ns = now;
        if (is_scan_due(writer, now) && scan_sessions(writer, now))
            continue;
        if (now >= deadline_ns)
            return MS_RUN_TIME;
        if (writer->spinning && !writer->last_producer_same_cpu &&
            now - writer->last_work_ns < (int64_t)writer->spin_us * 1000) {
            for (int i = 0; i < SPINS_BETWEEN_CLOCK && !work_waits(writer); i++)
                ms_pause();
            continue;
        }
        int waited = sleep_on_latch(writer, now, deadline_ns);
        if (waited == MS_RUN_TIME)
            return MS_RUN_TIME;
        slept |= waited == SLEPT;
    }
}

int ms_writer_run(struct ms_writer *writer, int64_t deadline_ns)
{
    struct ms_recorder_handle *recorder = &writer->recorder;
    writer->clock_ns = ms_monotonic_ns();
    if (recorder->shared != NULL) {
        if (writer->returned_ns > 0 && writer->clock_ns - writer->returned_ns >= recorder->threshold_ns)
            record_request(writer);
        ms_recorder_set_phase(recorder, MS_PHASE_NONE, 0);
        ms_recorder_note_held(recorder);
        ms_recorder_begin_window(recorder, writer->clock_ns);
        writer->waited_for_pool = 0;
        writer->meter.slow_ns = recorder->threshold_ns;
    }
    int reason = run(writer, deadline_ns);
    writer->returned_ns = ms_monotonic_ns();
    writer->return_reason = (uint32_t)reason;
    if (reason != MS_RUN_TIME)
        ms_recorder_set_phase(recorder, phase_of(writer->return_reason), writer->returned_ns);
    return reason;
}
