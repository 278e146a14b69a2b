#include "base.h"
#include "take_entry.h"

#include "entry.h"
#include "log_tail.h"
#include "raw_append.h"
#include "record.h"
#include "session_guard.cdef.h"
#include "undo.h"

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
    writer->session_seq_seen--; /* so that Python frees the session after the pass: MS_RUN_SESSIONS */
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
              : refuse_puts & MS_REFUSE_PUTS_LOST                         ? MS_REFUSED_LOST
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
            ms_light_copy_text(light, taken->properties, taken->head.properties_bytes, 1);
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
        return ms_refused(detail, MS_REFUSED_QUEUES_FULL, SERVICE_NOT_AVAILABLE);
    case -EMSGSIZE:
        return ms_refused(detail, MS_REFUSED_PROPERTIES_LENGTH, PROPERTIES_SIZE_EXCEEDED);
    case -EDQUOT:
        return ms_refused(detail, MS_REFUSED_LIGHT_QUEUES_FULL, LMQ_CONSUME_QUEUE_NUM_EXCEEDED);
    default:
        return ms_refused(detail, MS_REFUSED_LIGHT_QUEUE_NAME, MESSAGE_ILLEGAL);
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

/* Return whether the log has segments for an entry with which it ends at `end`, and blocks up to there. */
static int has_place(struct ms_writer *writer, uint32_t rolls, int64_t end)
{
    if (rolls > writer->ahead_count)
        return 0;
    if (end > writer->reserved_end)
        writer->reserved_end = ms_load_acquire(&writer->control->allocator.reserved_end);
    return end <= writer->reserved_end;
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
    int64_t room = ms_tail_room(writer);
    struct ms_measure measure = {
        .segment_bytes = writer->segment_bytes,
        .max_message_bytes = writer->max_message_bytes,
        .room = room,
    };
    if (status == PUT_OK) {
        status = taken->head.kind == MS_ENTRY_RAW ? ms_raw_measure(writer, taken, &measure) : ms_entry_measure(taken, &measure);
        detail = measure.detail;
    }
    uint32_t rolls = measure.rolls;
    int64_t end = writer->position + room - measure.room + rolls * measure.segment_bytes;
    uint32_t rolls_max = writer->mode == MS_MODE_POOL ? writer->control->identity.pool_buffers - 1 : MS_AHEAD_MAX;
    if (status == PUT_OK && rolls > rolls_max)
        status = ms_refused(&detail, MS_REFUSED_TOO_MANY_SEGMENTS, MESSAGE_ILLEGAL);
    if (status == PUT_OK && !has_place(writer, rolls, end)) {
        if (!writer->refuse_segment) {
            writer->segments_needed = rolls;
            writer->wanted_end = end;
            return MS_RUN_SEGMENT;
        }
        writer->refuse_segment = 0;
        status = ms_refused(&detail, MS_REFUSED_NO_SEGMENT, CREATE_MAPEDFILE_FAILED);
    }
    if (status != PUT_OK)
        return refuse(writer, own, taken->head.sequence, status, detail);
    if (writer->rolled + rolls > MS_AHEAD_MAX)
        return MS_RUN_ROLLED;
    return taken->head.kind == MS_ENTRY_RAW ? execute_raw(writer, own, taken) : execute(writer, own, taken, measure.sum);
}

int ms_take_entry(struct ms_writer *writer, struct ms_writer_session *own, uint64_t tail)
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
