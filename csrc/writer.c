#define _GNU_SOURCE
#include "writer.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "atomics.h"
#include "flush.h"
#include "futex.h"
#include "record.h"
#include "session_guard.h"
#include "topic.h"
#include "undo.h"

/* A pass takes at most this much from one session before the next has its turn. */
#define TURN_ENTRIES 256
#define TURN_BYTES 1048576
#define SPINS_BETWEEN_CLOCK 32
#define SPIN_GAP 4 /* spins long: what may lie between two entries for the next spin to be worth it; covers our waking up */
#define RECORD_ALLOWANCE_BYTES 65536 /* record over body: RocketMQ's 64 KiB */
#define BATCH_MEMBER_BYTES 22 /* total, magic, crc, flag, body length (i32), properties length (i16) */

/* PutMessageStatus, as pyengine/results.py numbers them. */
enum {
    PUT_OK = 0,
    SERVICE_NOT_AVAILABLE = 4,
    CREATE_MAPEDFILE_FAILED = 5,
    MESSAGE_ILLEGAL = 6,
    PROPERTIES_SIZE_EXCEEDED = 7,
    UNKNOWN_ERROR = 9,
    LMQ_CONSUME_QUEUE_NUM_EXCEEDED = 10,
};

/* The entry at hand, all of it in private memory and inside known bounds. */
struct entry {
    struct ms_entry head;
    const uint8_t *topic;
    const uint8_t *properties;
    const uint8_t *payload;
    uint64_t payload_bytes;
};

int64_t ms_writer_bytes(void)
{
    return (int64_t)sizeof(struct ms_writer);
}

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
    writer->stage_bytes = 0;
    writer->stage_from = slot->wrote;
    writer->side_loaded = 0;
    writer->zeroed_end = slot->wrote;
    if (writer->sessions_high < slot->sessions_high)
        writer->sessions_high = slot->sessions_high;
    for (uint32_t i = 0; i < MS_SESSION_SLOTS; i++) {
        struct ms_writer_session *own = &writer->sessions[i];
        const struct ms_session_account *account = &slot->sessions[i];
        own->touched = 0;
        if (own->session == NULL)
            own->generation = account->generation;
        /* An attached session that never was in a committed pass begins at 0. */
        int known = own->generation == account->generation;
        own->head = known ? account->head : 0;
        own->acked = known ? account->acked : 0;
    }
    /* A writer killed behind its commit point has not published these yet. */
    ms_store_release(&control->wrote.value, slot->wrote);
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
    for (uint32_t i = count; i-- > 0;) {
        struct ms_queue_slot *slot = &queues->slot[undo->table_slot[i]];
        slot->next_offset = undo->old_offset[i];
        slot->pass = 0;
    }
    return 1;
}

void ms_writer_rolled_back(struct ms_control *control)
{
    ms_store_release(&control->undo.count, 0u);
    ms_store_release(&control->undo.pass, (uint64_t)0);
    ms_store_release(&control->writer.intended_pass, (uint64_t)0);
}

/* Behind a fence: the answer is stored first, then we look who sleeps for it. */
static void wake_session(struct ms_session *session)
{
    if (ms_load_relaxed(&session->waiting) != 0)
        ms_futex_wake_all(&session->acked_seq);
}

static void publish_session(const struct ms_writer_session *own)
{
    struct ms_session *session = own->session;
    ms_store_release(&session->head, own->head);
    ms_store_release(&session->acked, own->acked);
    ms_store_release(&session->acked_seq, (uint32_t)own->acked);
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
    own->touched = 0;
    if (writer->side_slot == slot)
        writer->side_loaded = 0;
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
    ms_store_release(&control->undo.count, 0u);
    ms_store_release(&control->undo.pass, writer->pass);
    ms_store_release(&control->writer.intended_pass, writer->pass);
    ms_store_relaxed(&control->writer.pass_started_ms, ms_wall_ms());
    ms_compiler_fence();
    ms_put_meter_begin(&writer->meter);
}

/* Allocated blocks that were never written cost a change of the file's map with the sync that
 * follows their first write. So once in a window that change is made for all of it. The zeros
 * stand above everything acknowledged and change no byte that anybody reads. */
static int write_zeros_ahead(struct ms_writer *writer, int64_t end)
{
    int64_t segment_end = writer->current.base + writer->segment_bytes;
    int64_t bytes = writer->zero_ahead_bytes;
    if (bytes == 0 || end <= writer->zeroed_end)
        return 0;
    if (bytes > segment_end - end)
        bytes = segment_end - end;
    writer->zeroed_end = end + bytes;
    return ms_flush_pwrite_all(writer->current.fd, writer->zeros, bytes, end - writer->current.base);
}

/* Sync mode: write what is gathered. Its first byte goes to stage_from. */
static int write_stage(struct ms_writer *writer)
{
    if (writer->stage_bytes == 0)
        return 0;
    int why = ms_flush_pwrite_all(writer->current.fd, writer->stage, writer->stage_bytes,
                                  writer->stage_from - writer->current.base);
    if (why == 0)
        why = write_zeros_ahead(writer, writer->stage_from + writer->stage_bytes);
    if (why != 0) {
        char reason[200];
        snprintf(reason, sizeof reason, "writing the commit log at offset %lld failed: %s",
                 (long long)writer->stage_from, strerror(-why));
        ms_control_freeze(writer->control, MS_WRITER, -why, reason);
        writer->error_number = -why;
        return why;
    }
    writer->stage_from += writer->stage_bytes;
    writer->stage_bytes = 0;
    return 0;
}

/* Where `bytes` more bytes at the write position are to be put; NULL when sync mode's write failed. */
static uint8_t *take_place(struct ms_writer *writer, int64_t bytes)
{
    if (writer->current.memory != NULL) {
        ms_store_release(&writer->control->writer.intent_end, writer->position + bytes);
        ms_compiler_fence(); /* intent first, bytes after */
        return writer->current.memory + (writer->position - writer->current.base);
    }
    if (writer->stage_bytes + bytes > writer->stage_bytes_max && write_stage(writer) != 0)
        return NULL;
    if (writer->stage_bytes == 0)
        writer->stage_from = writer->position;
    ms_store_release(&writer->control->writer.intent_end, writer->position + bytes);
    uint8_t *place = writer->stage + writer->stage_bytes;
    writer->stage_bytes += bytes;
    return place;
}

static int64_t room_in_current(const struct ms_writer *writer)
{
    if (writer->current.base < 0)
        return 0;
    return writer->current.base + writer->segment_bytes - writer->position;
}

/* Finish the current segment with a blank record and go to the next. */
static int roll(struct ms_writer *writer)
{
    int64_t room = room_in_current(writer);
    if (room > 0) {
        uint8_t *place = take_place(writer, MS_BLANK_BYTES);
        if (place == NULL)
            return -EIO;
        ms_record_encode_blank(place, (int32_t)room);
        if (writer->current.memory == NULL && write_stage(writer) != 0)
            return -EIO;
        writer->position += room;
        writer->stage_from = writer->position;
    } else if (writer->current.memory == NULL && write_stage(writer) != 0) {
        return -EIO;
    }
    if (writer->current.base >= 0)
        writer->finished[writer->rolled++] = writer->current;
    writer->current = writer->ahead[0];
    writer->ahead_count--;
    memmove(&writer->ahead[0], &writer->ahead[1], writer->ahead_count * sizeof writer->ahead[0]);
    return 0;
}

/* One more record (or batch) of `bytes` behind the others: 1 when it needs a segment of its own. */
static uint32_t plan(const struct ms_writer *writer, int64_t *room, int64_t bytes)
{
    if (bytes + MS_BLANK_BYTES <= *room) {
        *room -= bytes;
        return 0;
    }
    *room = writer->segment_bytes - bytes;
    return 1;
}

static void answer(struct ms_writer *writer, struct ms_writer_session *own, const struct ms_completion *what)
{
    struct ms_completion *slot = &own->session->completion[what->sequence % MS_COMPLETIONS];
    uint64_t sequence = what->sequence;
    *slot = *what;
    ms_store_release(&slot->sequence, sequence);
    own->acked = sequence;
    own->touched = 1;
    writer->entries++;
}

static int refuse(struct ms_writer *writer, struct ms_writer_session *own, uint64_t sequence, uint32_t status, uint32_t detail)
{
    struct ms_completion what = {.sequence = sequence, .physical_offset = -1, .end_offset = -1, .queue_offset = -1,
                                 .status = status, .detail = detail};
    answer(writer, own, &what);
    ms_store_relaxed(&writer->control->writer.refused, writer->control->writer.refused + 1);
    ms_put_meter_refuse(&writer->meter, status);
    return 0;
}

/* The producer broke the protocol: its session ends here, nobody else notices. */
static int close_session(struct ms_writer *writer, struct ms_writer_session *own, uint32_t why)
{
    struct ms_session_slot *slot = &writer->control->sessions[own - writer->sessions];
    uint32_t open = MS_SESSION_OPEN;
    own->broken = 1;
    own->touched = 1;
    ms_store_relaxed(&slot->bad_entry, why);
    ms_store_release(&own->session->closed, why);
    ms_compare_exchange(&slot->state, &open, MS_SESSION_DEAD);
    return 0;
}

/* RocketMQ's checks in its order, as far as they need no text arithmetic (that
 * is the producer's); 0 or the status, with *detail. */
static uint32_t check_entry(const struct ms_writer *writer, const struct entry *entry, uint32_t *detail)
{
    const struct ms_control *control = writer->control;
    uint32_t refuse_puts = ms_load_acquire(&control->state.refuse_puts);
    uint32_t state = ms_load_acquire(&control->state.state);
    /* Not `state` alone: who freezes may be killed before it says so there. */
    int read_only = ms_load_acquire(&control->state.frozen) != 0 || state == MS_STATE_READ_ONLY || state == MS_STATE_DEGRADED;
    *detail = refuse_puts & 1 ? MS_REFUSED_STOPPING
            : refuse_puts & 4 ? MS_REFUSED_SLAVE
            : read_only ? MS_REFUSED_READ_ONLY
            : refuse_puts & 2 ? MS_REFUSED_DISK_FULL
            : refuse_puts & 8 ? MS_REFUSED_UNWRITABLE
                              : MS_REFUSED_NO;
    if (*detail != MS_REFUSED_NO)
        return SERVICE_NOT_AVAILABLE;
    if (entry->head.topic_bytes == 0 || entry->head.topic_bytes > MS_TOPIC_BYTES_MAX)
        *detail = MS_REFUSED_TOPIC_LENGTH;
    else if (!ms_topic_is_legal(entry->topic, entry->head.topic_bytes))
        *detail = MS_REFUSED_TOPIC_BYTES;
    else if (entry->head.queue_id < 0)
        *detail = MS_REFUSED_QUEUE_ID;
    if (*detail != MS_REFUSED_NO)
        return MESSAGE_ILLEGAL;
    if (entry->head.properties_bytes > MS_PROPERTIES_BYTES_MAX) {
        *detail = MS_REFUSED_PROPERTIES_LENGTH;
        return PROPERTIES_SIZE_EXCEEDED;
    }
    if (!ms_record_text_is_clean(entry->properties, entry->head.properties_bytes)) {
        *detail = MS_REFUSED_PROPERTIES_BYTES;
        return MESSAGE_ILLEGAL;
    }
    return PUT_OK;
}

static uint32_t check_size(const struct ms_writer *writer, int64_t body_bytes, int64_t record_bytes, uint32_t *detail)
{
    if (body_bytes > writer->max_message_bytes || record_bytes > writer->max_message_bytes + RECORD_ALLOWANCE_BYTES) {
        *detail = MS_REFUSED_BODY_LENGTH;
        return MESSAGE_ILLEGAL;
    }
    if (record_bytes + MS_BLANK_BYTES > writer->segment_bytes) {
        *detail = MS_REFUSED_SEGMENT;
        return MESSAGE_ILLEGAL;
    }
    return PUT_OK;
}

static uint32_t read_be32(const uint8_t *at)
{
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

/* One member of RocketMQ's client batch encoding. */
struct member {
    int32_t flag;
    const uint8_t *body;
    uint32_t body_bytes;
    const uint8_t *properties;
    uint32_t properties_bytes;
};

/* Bytes taken by the member at `at`, 0 when it is malformed. */
static uint64_t read_member(const uint8_t *at, uint64_t room, struct member *member)
{
    if (room < BATCH_MEMBER_BYTES)
        return 0;
    uint64_t total = read_be32(at);
    uint64_t body_bytes = read_be32(at + 16);
    if (total > room || body_bytes > total - BATCH_MEMBER_BYTES || total < BATCH_MEMBER_BYTES)
        return 0;
    const uint8_t *tail = at + 20 + body_bytes;
    uint32_t properties_bytes = (uint32_t)tail[0] << 8 | tail[1];
    if (total != BATCH_MEMBER_BYTES + body_bytes + properties_bytes)
        return 0;
    member->flag = (int32_t)read_be32(at + 12);
    member->body = at + 20;
    member->body_bytes = (uint32_t)body_bytes;
    member->properties = tail + 2;
    member->properties_bytes = properties_bytes;
    return total;
}

/* Member text, 0x02 where needed, batch text (docs/formats.md section 7). Returns the length. */
static uint32_t join_properties(uint8_t *to, const struct member *member, const struct entry *entry)
{
    uint32_t bytes = member->properties_bytes;
    memcpy(to, member->properties, bytes);
    if (entry->head.properties_bytes == 0)
        return bytes;
    if (bytes > 0 && to[bytes - 1] != 2)
        to[bytes++] = 2;
    memcpy(to + bytes, entry->properties, entry->head.properties_bytes);
    return bytes + entry->head.properties_bytes;
}

static uint32_t joined_bytes(const struct member *member, const struct entry *entry)
{
    uint32_t bytes = member->properties_bytes;
    if (entry->head.properties_bytes == 0)
        return bytes;
    if (bytes > 0 && member->properties[bytes - 1] != 2)
        bytes++;
    return bytes + entry->head.properties_bytes;
}

static const uint32_t *many_lengths(const struct entry *entry, const uint8_t **bodies)
{
    *bodies = entry->payload + ms_align8((uint64_t)entry->head.count * 4);
    return (const uint32_t *)entry->payload;
}

/* Sizes of everything the entry will append. Fills rolls (segments to be
 * started); 0 or the status that refuses the entry whole. */
static uint32_t measure(const struct ms_writer *writer, const struct entry *entry, uint32_t *rolls, uint32_t *detail)
{
    const struct ms_entry *head = &entry->head;
    int64_t room = room_in_current(writer);
    *rolls = 0;
    if (head->kind == MS_ENTRY_PUT) {
        int64_t bytes = ms_record_bytes(head->sys_flag, head->topic_bytes, head->properties_bytes, (uint32_t)entry->payload_bytes);
        uint32_t status = check_size(writer, (int64_t)entry->payload_bytes, bytes, detail);
        if (status == PUT_OK)
            *rolls = plan(writer, &room, bytes);
        return status;
    }
    if (head->kind == MS_ENTRY_MANY) {
        const uint8_t *bodies;
        const uint32_t *lengths = many_lengths(entry, &bodies);
        int64_t sum = 0;
        for (uint32_t i = 0; i < head->count; i++) {
            int64_t bytes = ms_record_bytes(head->sys_flag, head->topic_bytes, head->properties_bytes, lengths[i]);
            uint32_t status = check_size(writer, lengths[i], bytes, detail);
            if (status != PUT_OK)
                return status;
            /* Topic and properties stand in every record: a small entry can become a large pass. */
            sum += bytes;
            if (sum > MS_SIDE_BYTES_MAX) {
                *detail = MS_REFUSED_TOO_LARGE;
                return MESSAGE_ILLEGAL;
            }
            *rolls += plan(writer, &room, bytes);
        }
        return PUT_OK;
    }
    /* BATCH: all members in one segment; no transaction types (RocketMQ). */
    *detail = MS_REFUSED_BATCH;
    if ((head->sys_flag & MS_SYS_FLAG_TRANSACTION) != 0)
        return MESSAGE_ILLEGAL;
    if ((int64_t)entry->payload_bytes > writer->max_message_bytes) {
        *detail = MS_REFUSED_BODY_LENGTH;
        return MESSAGE_ILLEGAL;
    }
    struct member member;
    int64_t sum = 0;
    uint64_t at = 0;
    uint32_t count = 0;
    while (at < entry->payload_bytes) {
        uint64_t bytes = read_member(entry->payload + at, entry->payload_bytes - at, &member);
        if (bytes == 0)
            return MESSAGE_ILLEGAL;
        uint32_t joined = joined_bytes(&member, entry);
        if (joined > MS_PROPERTIES_BYTES_MAX) {
            *detail = MS_REFUSED_PROPERTIES_LENGTH;
            return PROPERTIES_SIZE_EXCEEDED;
        }
        if (!ms_record_text_is_clean(member.properties, member.properties_bytes)) {
            *detail = MS_REFUSED_PROPERTIES_BYTES;
            return MESSAGE_ILLEGAL;
        }
        int64_t record = ms_record_bytes(head->sys_flag, head->topic_bytes, joined, member.body_bytes);
        uint32_t status = check_size(writer, member.body_bytes, record, detail);
        if (status != PUT_OK)
            return status;
        sum += record;
        at += bytes;
        count++;
        *detail = MS_REFUSED_BATCH;
    }
    if (count == 0 || count != head->count)
        return MESSAGE_ILLEGAL;
    if (sum + MS_BLANK_BYTES > writer->segment_bytes) {
        *detail = MS_REFUSED_SEGMENT;
        return MESSAGE_ILLEGAL;
    }
    *detail = MS_REFUSED_NO;
    *rolls = plan(writer, &room, sum);
    return PUT_OK;
}

/* The record goes to the write position; 0 or -EIO (sync mode's write failed). */
static int append(struct ms_writer *writer, struct ms_record_template *record, int64_t bytes)
{
    if (bytes + MS_BLANK_BYTES > room_in_current(writer) && roll(writer) != 0)
        return -EIO;
    uint8_t *place = take_place(writer, bytes);
    if (place == NULL)
        return -EIO;
    record->physical_offset = writer->position;
    ms_record_encode(place, record);
    writer->position += bytes;
    return 0;
}

static int64_t store_time(const struct ms_writer *writer, const struct ms_entry *head)
{
    int64_t now = writer->control->identity.replay_clock && head->clock_ms ? head->clock_ms : ms_wall_ms();
    int64_t back = writer->store_timestamp_ms - now;
    if (back <= 0)
        return now;
    /* The store's clock never steps back; status shows a large step. */
    if (back > ms_load_relaxed(&writer->control->writer.clock_back_ms))
        ms_store_relaxed(&writer->control->writer.clock_back_ms, back);
    return writer->store_timestamp_ms;
}

/* Append everything of a measured entry and answer it. */
static int execute(struct ms_writer *writer, struct ms_writer_session *own, const struct entry *entry)
{
    static uint8_t joined[2 * MS_PROPERTIES_BYTES_MAX + 2];
    const struct ms_entry *head = &entry->head;
    uint32_t transaction = (uint32_t)head->sys_flag & MS_SYS_FLAG_TRANSACTION;
    int counts = transaction != MS_SYS_FLAG_PREPARED && transaction != MS_SYS_FLAG_ROLLBACK;
    struct ms_queue_slot *queue = NULL;
    int64_t queue_offset = 0;
    if (counts) {
        int64_t at = ms_queue_table_find(writer->queues, entry->topic, head->topic_bytes, head->queue_id, 1);
        if (at < 0) {
            if (!writer->queues_refused)
                return MS_RUN_QUEUES;
            writer->queues_refused = 0;
            return refuse(writer, own, head->sequence, SERVICE_NOT_AVAILABLE, MS_REFUSED_QUEUES_FULL);
        }
        queue = &writer->queues->slot[at];
        queue_offset = queue->next_offset;
        ms_undo_remember(writer->control, writer->queues, (uint32_t)at, writer->pass);
    }
    struct ms_record_template record = {
        .queue_id = head->queue_id, .flag = head->flag, .sys_flag = head->sys_flag,
        .born_timestamp_ms = head->born_timestamp_ms, .store_timestamp_ms = store_time(writer, head),
        .reconsume_times = head->reconsume_times,
        .prepared_transaction_offset = head->kind == MS_ENTRY_BATCH ? 0 : head->prepared_transaction_offset,
        .topic = entry->topic, .topic_bytes = (int32_t)head->topic_bytes,
        .properties = entry->properties, .properties_bytes = (int32_t)head->properties_bytes,
    };
    memcpy(record.born_host, head->born_host, sizeof record.born_host);
    memcpy(record.store_host, head->store_host, sizeof record.store_host);
    struct ms_completion what = {.sequence = head->sequence, .physical_offset = -1, .queue_offset = queue_offset,
                                 .store_timestamp_ms = record.store_timestamp_ms, .status = PUT_OK, .count = head->count};
    const uint8_t *at = entry->payload, *end = entry->payload + entry->payload_bytes;
    const uint32_t *lengths = NULL;
    uint32_t count = head->kind == MS_ENTRY_PUT ? 1 : head->count;
    if (head->kind == MS_ENTRY_MANY)
        lengths = many_lengths(entry, &at);
    if (head->kind == MS_ENTRY_BATCH) {
        /* One segment for all: decide the roll for the sum. */
        struct member member;
        int64_t sum = 0;
        for (const uint8_t *p = at; p < end;) {
            uint64_t bytes = read_member(p, (uint64_t)(end - p), &member);
            sum += ms_record_bytes(head->sys_flag, head->topic_bytes, joined_bytes(&member, entry), member.body_bytes);
            p += bytes;
        }
        if (sum + MS_BLANK_BYTES > room_in_current(writer) && roll(writer) != 0)
            return MS_RUN_FROZEN;
    }
    int64_t started_at = writer->position;
    for (uint32_t i = 0; i < count; i++) {
        if (head->kind == MS_ENTRY_PUT) {
            record.body = at;
            record.body_bytes = (int32_t)entry->payload_bytes;
        } else if (head->kind == MS_ENTRY_MANY) {
            record.body = at;
            record.body_bytes = (int32_t)lengths[i];
            at += lengths[i];
        } else {
            struct member member;
            at += read_member(at, (uint64_t)(end - at), &member);
            record.flag = member.flag;
            record.body = member.body;
            record.body_bytes = (int32_t)member.body_bytes;
            record.properties = joined;
            record.properties_bytes = (int32_t)join_properties(joined, &member, entry);
        }
        record.queue_offset = counts ? queue_offset + i : 0;
        int64_t bytes = ms_record_bytes(record.sys_flag, record.topic_bytes, record.properties_bytes, record.body_bytes);
        if (append(writer, &record, bytes) != 0)
            return MS_RUN_FROZEN;
        if (i == 0) {
            what.physical_offset = writer->position - bytes;
            what.size_bytes = (uint32_t)bytes;
        }
    }
    if (counts) {
        queue->next_offset = queue_offset + count;
        ms_light_advance(&writer->light, writer->control, writer->queues, writer->pass);
    }
    if (head->kind == MS_ENTRY_BATCH)
        what.size_bytes = (uint32_t)(writer->position - started_at);
    what.end_offset = writer->position;
    writer->store_timestamp_ms = record.store_timestamp_ms;
    writer->put_messages += count;
    writer->put_bytes += (uint64_t)(writer->position - what.physical_offset);
    ms_put_meter_take(&writer->meter, head->submitted_ns, (uint64_t)(writer->position - what.physical_offset), count);
    answer(writer, own, &what);
    return 0;
}

/* Do the lengths of the copied entry agree with each other? */
static int dissect(const uint8_t *copy, uint64_t bytes, struct entry *entry)
{
    memcpy(&entry->head, copy, sizeof entry->head);
    const struct ms_entry *head = &entry->head;
    uint64_t payload_at = ms_align8(sizeof *head + (uint64_t)head->topic_bytes + head->properties_bytes);
    if (payload_at > bytes)
        return 0;
    entry->topic = copy + sizeof *head;
    entry->properties = entry->topic + head->topic_bytes;
    entry->payload = copy + payload_at;
    entry->payload_bytes = head->payload_bytes;
    if (head->kind == MS_ENTRY_SIDE)
        return head->payload_bytes > sizeof *head && head->payload_bytes <= MS_SIDE_BYTES_MAX;
    if (head->payload_bytes > bytes - payload_at)
        return 0;
    if (head->kind == MS_ENTRY_PUT || head->kind == MS_ENTRY_BATCH)
        return 1;
    if (head->kind != MS_ENTRY_MANY || head->count == 0)
        return 0;
    uint64_t sum = ms_align8((uint64_t)head->count * 4);
    if (sum > head->payload_bytes)
        return 0;
    const uint32_t *lengths = (const uint32_t *)entry->payload;
    for (uint32_t i = 0; i < head->count; i++)
        sum += lengths[i];
    return sum == head->payload_bytes;
}

/* The entry's text gets its places in further queues; 0 or the status that refuses it, with *detail. */
static uint32_t prepare_light_queues(struct ms_writer *writer, struct entry *entry, uint32_t *detail)
{
    struct ms_light_queues *light = &writer->light;
    switch (ms_light_prepare(light, writer->queues, entry->topic, entry->head.topic_bytes, entry->head.queue_id,
                             entry->properties, entry->head.properties_bytes)) {
    case 0:
        return PUT_OK;
    case 1:
        entry->properties = light->text;
        entry->head.properties_bytes = light->text_bytes;
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

/* The entry at the session's head: 0 done, or MS_RUN_*, then it stays where it is. */
static int take_entry(struct ms_writer *writer, struct ms_writer_session *own, uint64_t tail)
{
    uint64_t place = own->head & (own->ring_bytes - 1);
    uint64_t available = tail - own->head;
    /* Read once: the producer may change it while we look. */
    uint32_t bytes = ms_load_relaxed((uint32_t *)(own->ring + place));
    if (available > own->ring_bytes || bytes < 8 || (bytes & 7) != 0 || bytes > available || bytes > own->ring_bytes - place)
        return close_session(writer, own, MS_REFUSED_MALFORMED);
    uint16_t kind = ms_load_relaxed((uint16_t *)(own->ring + place + 4));
    if (kind == MS_ENTRY_PAD) {
        own->head += bytes;
        own->touched = 1;
        return 0;
    }
    struct entry entry;
    if (bytes < sizeof entry.head || bytes > writer->scratch_bytes)
        return close_session(writer, own, MS_REFUSED_MALFORMED);
    uint64_t sequence = own->acked + 1;
    int from_side = writer->side_loaded == sequence && &writer->sessions[writer->side_slot] == own;
    if (!from_side)
        memcpy(writer->scratch, own->ring + place, bytes);
    if (ms_session_guard_broken((uint32_t)(own - writer->sessions))) /* what was copied is zeros in part */
        return close_session(writer, own, MS_REFUSED_MALFORMED);
    if (!dissect(writer->scratch, from_side ? writer->side_bytes : bytes, &entry))
        return close_session(writer, own, MS_REFUSED_MALFORMED);
    if (entry.head.kind == MS_ENTRY_SIDE) {
        if (from_side)
            return close_session(writer, own, MS_REFUSED_MALFORMED);
        if (entry.head.sequence != sequence)
            return close_session(writer, own, MS_REFUSED_SEQUENCE);
        if (writer->side_failed) {
            writer->side_failed = 0;
            refuse(writer, own, sequence, UNKNOWN_ERROR, MS_REFUSED_SIDE);
            own->head += bytes;
            return 0;
        }
        writer->side_slot = (uint32_t)(own - writer->sessions);
        writer->side_sequence = sequence;
        writer->side_bytes = entry.head.payload_bytes;
        return MS_RUN_SIDE;
    }
    if (entry.head.sequence != sequence)
        return close_session(writer, own, MS_REFUSED_SEQUENCE);
    uint32_t detail = MS_REFUSED_NO, rolls = 0;
    uint32_t status = check_entry(writer, &entry, &detail);
    writer->light.count = 0;
    if (status == PUT_OK && writer->light.enabled && entry.head.kind == MS_ENTRY_PUT) {
        status = prepare_light_queues(writer, &entry, &detail);
        if (detail == MS_REFUSED_QUEUES_FULL && !writer->queues_refused)
            return MS_RUN_QUEUES;
    }
    if (status == PUT_OK)
        status = measure(writer, &entry, &rolls, &detail);
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
    if (status == PUT_OK && writer->rolled + rolls > MS_AHEAD_MAX)
        return MS_RUN_ROLLED;
    int why = status == PUT_OK ? execute(writer, own, &entry) : refuse(writer, own, sequence, status, detail);
    if (why != 0)
        return why;
    own->head += bytes;
    writer->side_loaded = 0;
    return 0;
}

static void wake(struct ms_writer *writer, uint32_t kind)
{
    if (writer->semaphores[kind] != NULL)
        ms_latch_wakeup(&writer->bells->latch[kind], writer->semaphores[kind]);
}

static void wake_fenced(struct ms_writer *writer, uint32_t kind)
{
    if (writer->semaphores[kind] != NULL)
        ms_latch_wakeup_fenced(&writer->bells->latch[kind], writer->semaphores[kind]);
}

/* Steps 4 to 6 of the pass. */
static int commit_pass(struct ms_writer *writer)
{
    struct ms_control *control = writer->control;
    if (writer->mode == MS_MODE_SYNC && write_stage(writer) != 0)
        return MS_RUN_FROZEN;
    struct ms_commit_slot *slot = &control->slots[writer->pass & 1];
    int grew = writer->position != ms_load_relaxed(&control->wrote.value);
    /* Relaxed, not plain: ms_control_committed_slot may look on, and look again. */
    ms_store_relaxed(&slot->wrote, writer->position);
    ms_store_relaxed(&slot->store_timestamp_ms, writer->store_timestamp_ms);
    slot->queue_table_generation = writer->queues->generation;
    slot->put_messages = writer->put_messages;
    slot->put_bytes = writer->put_bytes;
    for (uint32_t i = 0; i < writer->sessions_high; i++) {
        slot->sessions[i].head = writer->sessions[i].head;
        slot->sessions[i].acked = writer->sessions[i].acked;
        slot->sessions[i].generation = writer->sessions[i].generation;
    }
    slot->sessions_high = writer->sessions_high;
    ms_store_release(&control->slot_pass.value, (int64_t)writer->pass); /* the commit point */
    ms_store_release(&control->wrote.value, writer->position);
    if (writer->mode != MS_MODE_POOL)
        ms_store_release(&control->committed.value, writer->position);
    ms_store_relaxed(&control->writer.pass_started_ms, 0);
    if (grew && writer->mode == MS_MODE_SYNC)
        wake(writer, MS_FLUSHER); /* first: a producer waits for the disk, not for us */
    for (uint32_t i = 0; i < writer->sessions_high; i++)
        if (writer->sessions[i].touched && writer->sessions[i].session != NULL)
            publish_session(&writer->sessions[i]);
    ms_fence(); /* one for all: positions and answers first, then who sleeps */
    for (uint32_t i = 0; i < writer->sessions_high; i++) {
        struct ms_writer_session *own = &writer->sessions[i];
        if (own->touched && own->session != NULL)
            wake_session(own->session);
        own->touched = 0;
    }
    if (grew) {
        if (writer->mode == MS_MODE_POOL)
            wake_fenced(writer, MS_COMMITTER);
        else
            wake_fenced(writer, MS_REPUTTER);
    }
    writer->entries = 0;
    return MS_RUN_TIME;
}

static int work_waits(const struct ms_writer *writer)
{
    for (uint32_t i = 0; i < writer->sessions_high; i++) {
        const struct ms_writer_session *own = &writer->sessions[i];
        if (own->session != NULL && !own->broken && ms_load_acquire(&own->session->tail) != own->head)
            return 1;
    }
    return 0;
}

/* Something that Python must see to before the next pass, MS_RUN_TIME if nothing. */
static int errand(const struct ms_writer *writer)
{
    const struct ms_control *control = writer->control;
    if (ms_load_acquire(&control->session_seq.value) != writer->session_seq_seen)
        return MS_RUN_SESSIONS;
    if (ms_load_acquire(&control->flusher.incarnation) != ms_load_relaxed(&control->writer.verified_flusher) &&
        ms_load_relaxed(&control->flusher.incarnation) != writer->skip_verify_incarnation)
        return MS_RUN_FLUSHER;
    return MS_RUN_TIME;
}

/* One round over all sessions. MS_RUN_TIME when it went through. */
static int make_pass(struct ms_writer *writer)
{
    int why = MS_RUN_TIME;
    uint32_t high = writer->sessions_high;
    int64_t from = writer->position;
    begin_pass(writer);
    for (uint32_t n = 0; n < high && why == MS_RUN_TIME; n++) {
        uint32_t i = (writer->turn + n) % high;
        struct ms_writer_session *own = &writer->sessions[i];
        if (own->session == NULL || own->broken)
            continue;
        uint64_t tail = ms_load_acquire(&own->session->tail);
        if (tail != own->head)
            writer->last_producer_same_cpu = ms_load_relaxed(&own->session->producer_cpu) == ms_load_relaxed(&writer->control->workers[MS_WRITER].cpu);
        int64_t turn_from = writer->position;
        for (int k = 0; k < TURN_ENTRIES && own->head != tail && !own->broken; k++) {
            if (writer->control->undo.count >= MS_UNDO_MAX - MS_LIGHT_QUEUES_MAX || writer->position - from >= MS_PASS_BYTES ||
                writer->position - turn_from >= TURN_BYTES)
                break;
            why = take_entry(writer, own, tail);
            if (why != MS_RUN_TIME) {
                writer->turn = i; /* it goes first when Python has done its part */
                break;
            }
        }
    }
    /* A refusal is for the entry whose errand failed. That entry went first; if it did not use it up, nobody may. */
    writer->refuse_segment = writer->side_failed = writer->queues_refused = 0;
    if (why == MS_RUN_TIME)
        writer->turn = high ? (writer->turn + 1) % high : 0;
    if (why == MS_RUN_FROZEN)
        return why;
    int committed = commit_pass(writer);
    writer->last_work_ns = ms_monotonic_ns();
    if (committed == MS_RUN_TIME)
        ms_put_meter_commit(&writer->meter, writer->last_work_ns);
    return committed != MS_RUN_TIME ? committed : why;
}

int ms_writer_use_table(struct ms_writer *writer, struct ms_queue_table *queues)
{
    /* An empty pass commits the change, so that no undo list ever speaks of two tables. */
    writer->queues = queues;
    begin_pass(writer);
    return commit_pass(writer);
}

/* Stored only when it changed: producers read that line with each put. */
static void publish_cpu(struct ms_control *control)
{
    int32_t cpu = sched_getcpu();
    if (ms_load_relaxed(&control->workers[MS_WRITER].cpu) != cpu)
        ms_store_relaxed(&control->workers[MS_WRITER].cpu, cpu);
}

int ms_writer_run(struct ms_writer *writer, int64_t deadline_ns)
{
    struct ms_control *control = writer->control;
    struct ms_doorbell *bell = &writer->bells->latch[MS_WRITER];
    void *semaphore = writer->semaphores[MS_WRITER];
    int slept = 0;
    for (;;) {
        int why = errand(writer);
        if (why != MS_RUN_TIME)
            return why;
        if (work_waits(writer)) {
            publish_cpu(control);
            if (slept) {
                /* Spinning pays only if the next entry came soon after the last one. */
                writer->spinning = ms_monotonic_ns() - writer->last_work_ns < (int64_t)writer->spin_us * 1000 * SPIN_GAP;
                slept = 0;
            }
            why = make_pass(writer);
            if (why != MS_RUN_TIME)
                return why;
            if (writer->rolled)
                return MS_RUN_ROLLED;
            if (writer->mode == MS_MODE_SYNC)
                writer->spinning = 0; /* the next one comes behind the disk */
            if (writer->spin_us > 0)
                ms_mover_note(&writer->mover, writer->last_producer_same_cpu, writer->last_work_ns);
            if (writer->last_work_ns >= deadline_ns)
                return MS_RUN_TIME;
            continue;
        }
        int64_t now = ms_monotonic_ns();
        if (now >= deadline_ns)
            return MS_RUN_TIME;
        if (writer->spinning && !writer->last_producer_same_cpu &&
            now - writer->last_work_ns < (int64_t)writer->spin_us * 1000) {
            for (int i = 0; i < SPINS_BETWEEN_CLOCK && !work_waits(writer); i++)
                ms_pause();
            continue;
        }
        ms_latch_arm(bell, semaphore);
        if (work_waits(writer) || errand(writer) != MS_RUN_TIME) {
            ms_latch_disarm(bell);
            continue;
        }
        int woken = ms_latch_wait(bell, semaphore, deadline_ns - now);
        slept = 1;
        if (woken > 0 && writer->mode == MS_MODE_SYNC && writer->spin_us > 0) {
            /* The flusher rings when it has let producers go: their next entries are near. */
            writer->spinning = 1;
            writer->last_work_ns = ms_monotonic_ns();
        }
        if (woken < 0)
            return MS_RUN_TIME; /* a signal: let Python run its handler */
    }
}
