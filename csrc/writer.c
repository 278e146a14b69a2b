#define _GNU_SOURCE
#include "writer.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "atomics.h"
#include "failpoint.h"
#include "entry.h"
#include "futex.h"
#include "log_tail.h"
#include "raw_append.h"
#include "record.h"
#include "sequence.h"
#include "session_guard.h"
#include "undo.h"

/* Most entries that a pass takes from one session before it goes on to the next. */
#define TURN_ENTRIES 256
#define TURN_BYTES 1048576
#define SPINS_BETWEEN_CLOCK 32
/* Interval of checks of all sessions, per session. Checking one session takes about a sixteenth of it. */
#define SCAN_INTERVAL_NS 64
#define ALWAYS_ACTIVE_MAX 8 /* so few sessions cost nothing: each pass reads all of them */
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

/* Note that the pass changed the session, so that this slot and the next one get its account. */
static void touch(struct ms_writer *writer, struct ms_writer_session *own)
{
    own->has_put = 1;
    if (own->touched)
        return;
    own->touched = 1;
    writer->touched[writer->touched_count++] = (uint16_t)(own - writer->sessions);
}

static void answer(struct ms_writer *writer, struct ms_writer_session *own, const struct ms_completion *what)
{
    struct ms_completion *slot = &own->session->completion[what->sequence % MS_COMPLETIONS];
    uint64_t sequence = what->sequence;
    *slot = *what;
    MS_FAILPOINT("answer_filled");
    ms_store_release(&slot->sequence, sequence);
    own->acked = sequence;
    touch(writer, own);
    writer->entries++;
    MS_FAILPOINT("answer_given");
}

static int refuse(struct ms_writer *writer, struct ms_writer_session *own, uint64_t sequence, uint32_t status, uint32_t detail)
{
    struct ms_completion what = {
        .sequence = sequence,
        .physical_offset = -1,
        .end_offset = -1,
        .queue_offset = -1,
        .status = status,
        .detail = detail,
    };
    answer(writer, own, &what);
    writer->unsynced_answers = 1;
    ms_store_relaxed(&writer->control->writer.refused, writer->control->writer.refused + 1);
    ms_put_meter_refuse(&writer->meter, status);
    return 0;
}

/* Close the session of a producer that broke the protocol; other sessions continue. */
static int close_session(struct ms_writer *writer, struct ms_writer_session *own, uint32_t refusal)
{
    struct ms_session_slot *slot = &writer->control->sessions[own - writer->sessions];
    uint32_t open = MS_SESSION_OPEN;
    own->broken = 1;
    touch(writer, own);
    writer->unsynced_answers = 1;
    ms_store_relaxed(&slot->bad_entry, refusal);
    MS_FAILPOINT("session_accused");
    ms_store_release(&own->session->closed, refusal);
    MS_FAILPOINT("session_closed");
    ms_compare_exchange(&slot->state, &open, MS_SESSION_DEAD);
    return 0;
}

/* Check that the store takes puts, raw records included, then RocketMQ's checks in its order, except those of texts, which
 * the producer makes; 0 or the status, with *detail. */
static uint32_t check_entry(const struct ms_writer *writer, const struct ms_writer_session *own,
                            const struct ms_taken *taken, uint32_t *detail)
{
    const struct ms_control *control = writer->control;
    uint32_t refuse_puts = ms_load_acquire(&control->state.refuse_puts);
    uint32_t state = ms_load_acquire(&control->state.state);
    /* Not `state` alone: a worker may be killed after it froze the store and before it stored the state. */
    int read_only = ms_load_acquire(&control->state.frozen) != 0 || state == MS_STATE_READ_ONLY || state == MS_STATE_DEGRADED;
    int raw = taken->head.kind == MS_ENTRY_RAW;
    *detail = raw && !ms_raw_is_allowed(writer, own)                      ? MS_REFUSED_RAW
              : refuse_puts & MS_REFUSE_PUTS_STOPPING                     ? MS_REFUSED_STOPPING
              : refuse_puts & MS_REFUSE_PUTS_SLAVE && !raw                ? MS_REFUSED_SLAVE
              : refuse_puts & MS_REFUSE_PUTS_FENCED                       ? MS_REFUSED_FENCED
              : read_only                                                 ? MS_REFUSED_READ_ONLY
              : refuse_puts & MS_REFUSE_PUTS_DISK_FULL || writer->no_room ? MS_REFUSED_DISK_FULL
              : refuse_puts & MS_REFUSE_PUTS_UNWRITABLE                   ? MS_REFUSED_UNWRITABLE
                                                                          : MS_REFUSED_NO;
    if (*detail != MS_REFUSED_NO)
        return SERVICE_NOT_AVAILABLE;
    return raw ? PUT_OK : ms_entry_check(taken, detail);
}

static int64_t store_time(const struct ms_writer *writer, const struct ms_entry *head)
{
    int64_t now = writer->control->identity.replay_clock && head->clock_ms ? head->clock_ms : writer->wall_ms;
    if (now >= writer->store_timestamp_ms)
        return now;
    int64_t back = (int64_t)((uint64_t)writer->store_timestamp_ms - (uint64_t)now); /* negative: beyond 64 bits, and not shown */
    /* The store time does not step back; status shows a large step of the clock. */
    if (back > ms_load_relaxed(&writer->control->writer.clock_back_ms))
        ms_store_relaxed(&writer->control->writer.clock_back_ms, back);
    return writer->store_timestamp_ms;
}

/* Fill in the fields that all records of an entry have in common. */
static void fill_template(struct ms_record_template *record, const struct ms_taken *taken, int64_t store_timestamp_ms)
{
    const struct ms_entry *head = &taken->head;
    *record = (struct ms_record_template){
        .queue_id = head->queue_id,
        .flag = head->flag,
        .sys_flag = head->sys_flag,
        .born_timestamp_ms = head->born_timestamp_ms,
        .store_timestamp_ms = store_timestamp_ms,
        .reconsume_times = head->reconsume_times,
        .prepared_transaction_offset = head->kind == MS_ENTRY_BATCH ? 0 : head->prepared_transaction_offset,
        .topic = taken->topic,
        .topic_bytes = (int32_t)head->topic_bytes,
        .properties = taken->properties,
        .properties_bytes = (int32_t)head->properties_bytes,
    };
    memcpy(record->born_host, head->born_host, sizeof record->born_host);
    memcpy(record->store_host, head->store_host, sizeof record->store_host);
}

/* Append the records of an entry, `sum` bytes together, and answer it. */
static int execute(struct ms_writer *writer, struct ms_writer_session *own, const struct ms_taken *taken, int64_t sum)
{
    const struct ms_entry *head = &taken->head;
    uint32_t transaction = (uint32_t)head->sys_flag & MS_SYS_FLAG_TRANSACTION;
    int counts = transaction != MS_SYS_FLAG_PREPARED && transaction != MS_SYS_FLAG_ROLLBACK;
    struct ms_queue_slot *queue = NULL;
    int64_t queue_offset = 0;
    if (counts) {
        int64_t at = ms_queue_table_find(writer->queues, taken->topic, head->topic_bytes, head->queue_id, 1);
        if (at < 0) {
            if (!writer->queues_refused)
                return MS_RUN_QUEUES;
            writer->queues_refused = 0;
            return refuse(writer, own, head->sequence, SERVICE_NOT_AVAILABLE, MS_REFUSED_QUEUES_FULL);
        }
        queue = &writer->queues->slot[at];
        queue_offset = queue->next_offset;
        ms_undo_remember(writer->control, writer->queues, (uint32_t)at, writer->pass);
        MS_FAILPOINT("pass_queue_remembered");
    }
    struct ms_record_template record;
    fill_template(&record, taken, store_time(writer, head));
    struct ms_completion what = {
        .sequence = head->sequence,
        .physical_offset = -1,
        .queue_offset = queue_offset,
        .store_timestamp_ms = record.store_timestamp_ms,
        .status = PUT_OK,
        .count = head->count,
    };
    /* A batch must be in one segment: roll if the sum does not fit. */
    if (head->kind == MS_ENTRY_BATCH && sum + MS_BLANK_BYTES > ms_tail_room(writer) && ms_tail_roll(writer) != 0)
        return MS_RUN_FAILED;
    struct ms_records records;
    ms_entry_records(taken, &records);
    uint32_t count = 0;
    for (; ms_entry_next(taken, &records, &record); count++) {
        record.queue_offset = counts ? queue_offset + count : 0;
        int64_t bytes = ms_record_bytes(record.sys_flag, record.topic_bytes, record.properties_bytes, record.body_bytes);
        if (ms_tail_append(writer, &record, bytes) != 0)
            return MS_RUN_FAILED;
        MS_FAILPOINT("pass_record_appended");
        if (count == 0) {
            what.physical_offset = writer->position - bytes;
            what.size_bytes = (uint32_t)(head->kind == MS_ENTRY_BATCH ? sum : bytes);
        }
    }
    if (ms_session_guard_broken((uint32_t)(own - writer->sessions))) /* bodies are zeros in part: the pass must not be committed */
        return MS_RUN_CUT_SHORT;
    if (counts) {
        queue->next_offset = queue_offset + count;
        MS_FAILPOINT("pass_queue_advanced");
        ms_light_advance(&writer->light, writer->control, writer->queues, writer->pass);
    }
    what.end_offset = writer->position;
    writer->store_timestamp_ms = record.store_timestamp_ms;
    writer->put_messages += count;
    writer->put_bytes += (uint64_t)(writer->position - what.physical_offset);
    ms_put_meter_take(&writer->meter, head->submitted_ns, (uint64_t)(writer->position - what.physical_offset), count);
    answer(writer, own, &what);
    return 0;
}

/* Append raw records and answer them. Their queue offsets are the master's: no producer puts into this store. */
static int execute_raw(struct ms_writer *writer, struct ms_writer_session *own, const struct ms_taken *taken)
{
    struct ms_completion what = {.sequence = taken->head.sequence, .queue_offset = -1, .status = PUT_OK};
    if (ms_raw_append(writer, taken, &what) != 0)
        return MS_RUN_FAILED;
    ms_put_meter_take(&writer->meter, taken->head.submitted_ns, taken->payload_bytes, what.count);
    answer(writer, own, &what);
    return 0;
}

/* Replace the properties by the text that light_queues.c has made of them. */
static void use_light_text(struct ms_taken *taken, const struct ms_light_queues *light)
{
    taken->properties = light->text;
    taken->head.properties_bytes = light->text_bytes;
}

/* Add the offsets in further queues to the entry's properties, or drop those that its producer claims; PUT_OK, or the status that
 * refuses it, with *detail. */
static uint32_t prepare_light_queues(struct ms_writer *writer, struct ms_taken *taken, uint32_t *detail)
{
    struct ms_light_queues *light = &writer->light;
    if (taken->head.kind != MS_ENTRY_PUT)
        return PUT_OK;
    if (!light->enabled) {
        if (ms_light_has_places(taken->properties, taken->head.properties_bytes)) {
            ms_light_drop_places(light, taken->properties, taken->head.properties_bytes);
            use_light_text(taken, light);
        }
        return PUT_OK;
    }
    switch (ms_light_prepare(light, writer->queues, taken->topic, taken->head.topic_bytes, taken->head.queue_id,
                             taken->properties, taken->head.properties_bytes)) {
    case 0:
        return PUT_OK;
    case 1:
        use_light_text(taken, light);
        return PUT_OK;
    case -ENOSPC:
        *detail = MS_REFUSED_QUEUES_FULL;
        return SERVICE_NOT_AVAILABLE;
    case -EMSGSIZE:
        *detail = MS_REFUSED_PROPERTIES_LENGTH;
        return PROPERTIES_SIZE_EXCEEDED;
    case -EDQUOT:
        *detail = MS_REFUSED_LIGHT_QUEUES_FULL;
        return LMQ_CONSUME_QUEUE_NUM_EXCEEDED;
    default:
        *detail = MS_REFUSED_LIGHT_QUEUE_NAME;
        return MESSAGE_ILLEGAL;
    }
}

/* Copy the entry of `bytes` at the session's head, or take its side object, and parse the copy; 0, or MS_REFUSED_* for a producer
 * that broke the protocol. Bodies stay in the ring. */
static uint32_t copy_entry(struct ms_writer *writer, const struct ms_writer_session *own, uint64_t bytes, struct ms_taken *taken)
{
    const uint8_t *from = own->ring + (own->head & (own->ring_bytes - 1));
    if (bytes < sizeof taken->head || bytes > writer->scratch_bytes)
        return MS_REFUSED_MALFORMED;
    uint64_t sequence = own->acked + 1;
    int from_side = writer->side_loaded == sequence && &writer->sessions[writer->side_slot] == own;
    uint64_t decisive = bytes;
    if (!from_side) {
        memcpy(&taken->head, from, sizeof taken->head);
        decisive = ms_entry_decisive_bytes(&taken->head, bytes);
        if (decisive == 0)
            return MS_REFUSED_MALFORMED;
        memcpy(writer->scratch, &taken->head, sizeof taken->head);
        memcpy(writer->scratch + sizeof taken->head, from + sizeof taken->head, decisive - sizeof taken->head);
    }
    if (ms_session_guard_broken((uint32_t)(own - writer->sessions))) /* the copy is zeros in part */
        return MS_REFUSED_MALFORMED;
    if (!ms_entry_parse(writer->scratch, from_side ? writer->side_bytes : bytes, taken) || (from_side && taken->head.kind == MS_ENTRY_SIDE))
        return MS_REFUSED_MALFORMED;
    if (decisive < bytes)
        taken->bodies = from + decisive;
    return taken->head.sequence == sequence ? MS_REFUSED_NO : MS_REFUSED_SEQUENCE;
}

/* Request the side object of an entry, or refuse the entry if the object could not be loaded. */
static int take_side(struct ms_writer *writer, struct ms_writer_session *own, const struct ms_taken *taken)
{
    if (writer->side_failed) {
        writer->side_failed = 0;
        return refuse(writer, own, taken->head.sequence, UNKNOWN_ERROR, MS_REFUSED_SIDE);
    }
    writer->side_slot = (uint32_t)(own - writer->sessions);
    writer->side_sequence = taken->head.sequence;
    writer->side_bytes = taken->head.payload_bytes;
    return MS_RUN_SIDE;
}

/* Check the entry, then execute or refuse it: 0, or MS_RUN_*. */
static int take_records(struct ms_writer *writer, struct ms_writer_session *own, struct ms_taken *taken)
{
    uint32_t detail = MS_REFUSED_NO;
    uint32_t status = check_entry(writer, own, taken, &detail);
    writer->light.count = 0;
    if (status == PUT_OK) {
        status = prepare_light_queues(writer, taken, &detail);
        if (detail == MS_REFUSED_QUEUES_FULL) {
            if (!writer->queues_refused)
                return MS_RUN_QUEUES;
            writer->queues_refused = 0;
        }
    }
    struct ms_measure measure = {
        .segment_bytes = writer->segment_bytes,
        .max_message_bytes = writer->max_message_bytes,
        .room = ms_tail_room(writer),
    };
    if (status == PUT_OK) {
        status = taken->head.kind == MS_ENTRY_RAW ? ms_raw_measure(writer, taken, &measure) : ms_entry_measure(taken, &measure);
        detail = measure.detail;
    }
    uint32_t rolls = measure.rolls;
    uint32_t rolls_max = writer->mode == MS_MODE_POOL ? writer->control->identity.pool_buffers - 1 : MS_AHEAD_MAX;
    if (status == PUT_OK && rolls > rolls_max) {
        status = MESSAGE_ILLEGAL;
        detail = MS_REFUSED_TOO_MANY_SEGMENTS;
    }
    if (status == PUT_OK && rolls > writer->ahead_count) {
        if (!writer->refuse_segment) {
            writer->segments_needed = rolls;
            return MS_RUN_SEGMENT;
        }
        writer->refuse_segment = 0;
        status = CREATE_MAPEDFILE_FAILED;
        detail = MS_REFUSED_NO_SEGMENT;
    }
    if (status != PUT_OK)
        return refuse(writer, own, taken->head.sequence, status, detail);
    if (writer->rolled + rolls > MS_AHEAD_MAX)
        return MS_RUN_ROLLED;
    return taken->head.kind == MS_ENTRY_RAW ? execute_raw(writer, own, taken) : execute(writer, own, taken, measure.sum);
}

/* Execute the entry at the session's head: 0, or MS_RUN_*, after which it is still there. */
static int take_entry(struct ms_writer *writer, struct ms_writer_session *own, uint64_t tail)
{
    uint64_t place = own->head & (own->ring_bytes - 1);
    uint64_t available = tail - own->head;
    /* Read once, because the producer may change it meanwhile. */
    uint32_t bytes = ms_load_relaxed((uint32_t *)(own->ring + place));
    if (available > own->ring_bytes || bytes < 8 || (bytes & 7) != 0 || bytes > available || bytes > own->ring_bytes - place)
        return close_session(writer, own, MS_REFUSED_MALFORMED);
    uint16_t kind = ms_load_relaxed((uint16_t *)(own->ring + place + 4));
    if (kind == MS_ENTRY_PAD) {
        own->head += bytes;
        touch(writer, own);
        return 0;
    }
    struct ms_taken taken;
    uint32_t refused = copy_entry(writer, own, bytes, &taken);
    if (refused != MS_REFUSED_NO)
        return close_session(writer, own, refused);
    int reason = taken.head.kind == MS_ENTRY_SIDE ? take_side(writer, own, &taken) : take_records(writer, own, &taken);
    if (reason != 0)
        return reason;
    own->head += bytes;
    writer->side_loaded = 0;
    return 0;
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
    if (recorder->is_sync_mode)
        ms_recorder_wait(&recorder->shared->for_sync, ms_load_relaxed(&control->flushed.value), writer->position, writer->clock_ns);
    if (recorder->is_sync_master && ms_load_relaxed(&control->replicator.slaves_connected) != 0)
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
    /* Relaxed, not plain: ms_control_committed_slot may read it meanwhile, and then reads again. */
    ms_store_relaxed(&slot->wrote, writer->position);
    MS_FAILPOINT("commit_slot_wrote");
    ms_store_relaxed(&slot->store_timestamp_ms, writer->store_timestamp_ms);
    MS_FAILPOINT("commit_slot_begun");
    slot->queue_table_generation = writer->queues->generation;
    slot->put_messages = writer->put_messages;
    slot->put_bytes = writer->put_bytes;
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
 * Before it sleeps, the writer arms its latch and checks all: a producer that publishes after that check posts. */
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
        ms_load_relaxed(&control->flusher.incarnation) != writer->skip_verify_incarnation)
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
        int reason = take_entry(writer, own, tail);
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

/* Store the CPU only if it has changed: producers read that line with each put. */
static void publish_cpu(struct ms_control *control)
{
    int32_t cpu = sched_getcpu();
    if (ms_load_relaxed(&control->workers[MS_WRITER].cpu) != cpu)
        ms_store_relaxed(&control->workers[MS_WRITER].cpu, cpu);
}

/* Publish whether the writer shares its producer's CPU; the flusher reads it after each sync. */
static void publish_beside_producer(const struct ms_writer *writer)
{
    struct ms_writer_lines *lines = &writer->control->writer;
    if (ms_load_relaxed(&lines->is_beside_producer) != writer->last_producer_same_cpu)
        ms_store_relaxed(&lines->is_beside_producer, writer->last_producer_same_cpu);
}

/* Make a pass and set what the next one depends on: MS_RUN_*. */
static int work(struct ms_writer *writer)
{
    struct ms_control *control = writer->control;
    publish_cpu(control);
    int reason = make_pass(writer);
    if (reason != MS_RUN_TIME)
        return reason;
    if (writer->rolled)
        return MS_RUN_ROLLED;
    if (writer->mode == MS_MODE_SYNC) {
        writer->spinning = 0; /* the next one comes after the sync */
        publish_beside_producer(writer);
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
    void *semaphore = writer->semaphores[MS_WRITER];
    ms_latch_arm(latch, semaphore);
    if (scan_sessions(writer, now) || pending_request(writer) != MS_RUN_TIME) {
        ms_latch_disarm(latch);
        return AWAKE;
    }
    int woken = ms_latch_wait(latch, semaphore, deadline_ns - now);
    if (woken > 0 && ms_load_relaxed(&control->state.refuse_puts) & MS_REFUSE_PUTS_STOPPING)
        return MS_RUN_TIME; /* a stop, whose signal may have arrived before the sleep */
    if (woken > 0 && writer->mode == MS_MODE_SYNC && writer->spin_us > 0) {
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
