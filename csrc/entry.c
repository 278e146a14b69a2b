#include "base.h"
#include "entry.h"

#include "light_queues.h"
#include "topic.h"

#define BATCH_MEMBER_BYTES 22 /* total, magic, crc, flag, body length (i32), properties length (i16) */

/* Return the size of the table of body lengths before the bodies. */
static uint64_t lengths_bytes(const struct ms_entry *head)
{
    return head->kind == MS_ENTRY_MANY ? ms_align8((uint64_t)head->count * 4) : 0;
}

uint64_t ms_entry_decisive_bytes(const struct ms_entry *head, uint64_t bytes)
{
    if (head->kind != MS_ENTRY_PUT && head->kind != MS_ENTRY_MANY)
        return bytes;
    uint64_t decisive = ms_entry_payload_at(head->topic_bytes, head->properties_bytes) + lengths_bytes(head);
    return decisive <= bytes ? decisive : 0;
}

int ms_entry_parse(const uint8_t *copy, uint64_t bytes, struct ms_taken *taken)
{
    memcpy(&taken->head, copy, sizeof taken->head);
    const struct ms_entry *head = &taken->head;
    uint64_t payload_at = ms_entry_payload_at(head->topic_bytes, head->properties_bytes);
    if (payload_at > bytes)
        return 0;
    taken->topic = copy + sizeof *head;
    taken->properties = taken->topic + head->topic_bytes;
    taken->payload = copy + payload_at;
    taken->payload_bytes = head->payload_bytes;
    taken->bodies = taken->payload + lengths_bytes(head);
    if (head->kind == MS_ENTRY_SIDE)
        return head->payload_bytes > sizeof *head && head->payload_bytes <= MS_SIDE_BYTES_MAX;
    if (head->payload_bytes > bytes - payload_at)
        return 0;
    if (head->kind == MS_ENTRY_PUT || head->kind == MS_ENTRY_BATCH || head->kind == MS_ENTRY_RAW)
        return 1;
    if (head->kind != MS_ENTRY_MANY || head->count == 0)
        return 0;
    uint64_t sum = lengths_bytes(head);
    if (sum > head->payload_bytes)
        return 0;
    const uint32_t *lengths = (const uint32_t *)taken->payload;
    for (uint32_t i = 0; i < head->count; i++)
        sum += lengths[i];
    return sum == head->payload_bytes;
}

uint32_t ms_entry_check(const struct ms_taken *taken, uint32_t *detail)
{
    *detail = MS_REFUSED_NO;
    if (taken->head.topic_bytes == 0 || taken->head.topic_bytes > MS_TOPIC_BYTES_MAX)
        return ms_refused(detail, MS_REFUSED_TOPIC_LENGTH, MESSAGE_ILLEGAL);
    if (!ms_topic_is_legal(taken->topic, taken->head.topic_bytes))
        return ms_refused(detail, MS_REFUSED_TOPIC_BYTES, MESSAGE_ILLEGAL);
    if (taken->head.queue_id < 0)
        return ms_refused(detail, MS_REFUSED_QUEUE_ID, MESSAGE_ILLEGAL);
    if (taken->head.properties_bytes > MS_PROPERTIES_BYTES_MAX)
        return ms_refused(detail, MS_REFUSED_PROPERTIES_LENGTH, PROPERTIES_SIZE_EXCEEDED);
    if (!ms_record_text_is_clean(taken->properties, taken->head.properties_bytes))
        return ms_refused(detail, MS_REFUSED_PROPERTIES_BYTES, MESSAGE_ILLEGAL);
    /* For one message the writer assigns new offsets or drops them. */
    if (taken->head.kind != MS_ENTRY_PUT && ms_light_has_places(taken->properties, taken->head.properties_bytes))
        return ms_refused(detail, MS_REFUSED_LIGHT_QUEUE_PLACE, MESSAGE_ILLEGAL);
    return PUT_OK;
}

static uint32_t check_size(struct ms_measure *measure, int64_t body_bytes, int64_t record_bytes)
{
    if (body_bytes > measure->max_message_bytes || record_bytes > measure->max_message_bytes + MS_RECORD_ALLOWANCE_BYTES)
        return ms_refused(&measure->detail, MS_REFUSED_BODY_LENGTH, MESSAGE_ILLEGAL);
    if (record_bytes + MS_BLANK_BYTES > measure->segment_bytes)
        return ms_refused(&measure->detail, MS_REFUSED_SEGMENT, MESSAGE_ILLEGAL);
    return PUT_OK;
}

/* Add one more record (or batch) of `bytes`. */
static void plan(struct ms_measure *measure, int64_t bytes)
{
    if (bytes + MS_BLANK_BYTES <= measure->room) {
        measure->room -= bytes;
        return;
    }
    measure->room = measure->segment_bytes - bytes;
    measure->rolls++;
}

/* One member of RocketMQ's client batch encoding. */
struct member {
    int32_t flag;
    const uint8_t *body;
    uint32_t body_bytes;
    const uint8_t *properties;
    uint32_t properties_bytes;
};

/* Decode the member at `at`; return its bytes, 0 if it is malformed. */
static uint64_t read_member(const uint8_t *at, uint64_t room, struct member *member)
{
    if (room < BATCH_MEMBER_BYTES)
        return 0;
    uint64_t total = ms_get_u32(at);
    uint64_t body_bytes = ms_get_u32(at + 16);
    if (total > room || body_bytes > total - BATCH_MEMBER_BYTES || total < BATCH_MEMBER_BYTES)
        return 0;
    const uint8_t *tail = at + 20 + body_bytes;
    uint32_t properties_bytes = ms_get_u16(tail);
    if (total != BATCH_MEMBER_BYTES + body_bytes + properties_bytes)
        return 0;
    member->flag = (int32_t)ms_get_u32(at + 12);
    member->body = at + 20;
    member->body_bytes = (uint32_t)body_bytes;
    member->properties = tail + 2;
    member->properties_bytes = properties_bytes;
    return total;
}

/* Join the member's properties and the batch's, with 0x02 if needed (docs/formats.md section 7), and return the length; to NULL: only
 * count it. */
static uint32_t join_properties(uint8_t *to, const struct member *member, const struct ms_taken *taken)
{
    const uint32_t own_bytes = member->properties_bytes, more_bytes = taken->head.properties_bytes;
    const uint32_t needs_mark = own_bytes > 0 && more_bytes > 0 && member->properties[own_bytes - 1] != 2;
    if (to != NULL) {
        memcpy(to, member->properties, own_bytes);
        if (needs_mark)
            to[own_bytes] = 2;
        memcpy(to + own_bytes + needs_mark, taken->properties, more_bytes);
    }
    return own_bytes + needs_mark + more_bytes;
}

static const uint32_t *many_lengths(const struct ms_taken *taken)
{
    return (const uint32_t *)taken->payload;
}

static uint32_t measure_many(const struct ms_taken *taken, struct ms_measure *measure)
{
    const struct ms_entry *head = &taken->head;
    const uint32_t *lengths = many_lengths(taken);
    for (uint32_t i = 0; i < head->count; i++) {
        int64_t bytes = ms_record_bytes(head->sys_flag, head->topic_bytes, head->properties_bytes, lengths[i]);
        uint32_t status = check_size(measure, lengths[i], bytes);
        if (status != PUT_OK)
            return status;
        /* Every record repeats topic and properties, so a small entry can need much of the log. */
        measure->sum += bytes;
        if (measure->sum > MS_SIDE_BYTES_MAX)
            return ms_refused(&measure->detail, MS_REFUSED_TOO_LARGE, MESSAGE_ILLEGAL);
        plan(measure, bytes);
    }
    return PUT_OK;
}

/* Measure a batch: all members in one segment, no transaction types, as in RocketMQ. */
static uint32_t measure_batch(const struct ms_taken *taken, struct ms_measure *measure)
{
    const struct ms_entry *head = &taken->head;
    measure->detail = MS_REFUSED_BATCH;
    if ((head->sys_flag & MS_SYS_FLAG_TRANSACTION) != 0)
        return MESSAGE_ILLEGAL;
    if ((int64_t)taken->payload_bytes > measure->max_message_bytes)
        return ms_refused(&measure->detail, MS_REFUSED_BODY_LENGTH, MESSAGE_ILLEGAL);
    struct member member;
    uint64_t at = 0;
    uint32_t count = 0;
    while (at < taken->payload_bytes) {
        uint64_t bytes = read_member(taken->payload + at, taken->payload_bytes - at, &member);
        if (bytes == 0)
            return MESSAGE_ILLEGAL;
        uint32_t joined = join_properties(NULL, &member, taken);
        if (joined > MS_PROPERTIES_BYTES_MAX)
            return ms_refused(&measure->detail, MS_REFUSED_PROPERTIES_LENGTH, PROPERTIES_SIZE_EXCEEDED);
        if (!ms_record_text_is_clean(member.properties, member.properties_bytes))
            return ms_refused(&measure->detail, MS_REFUSED_PROPERTIES_BYTES, MESSAGE_ILLEGAL);
        if (ms_light_has_places(member.properties, member.properties_bytes))
            return ms_refused(&measure->detail, MS_REFUSED_LIGHT_QUEUE_PLACE, MESSAGE_ILLEGAL);
        int64_t record = ms_record_bytes(head->sys_flag, head->topic_bytes, joined, member.body_bytes);
        uint32_t status = check_size(measure, member.body_bytes, record);
        if (status != PUT_OK)
            return status;
        measure->sum += record;
        at += bytes;
        count++;
    }
    if (count == 0 || count != head->count)
        return MESSAGE_ILLEGAL;
    if (measure->sum + MS_BLANK_BYTES > measure->segment_bytes)
        return ms_refused(&measure->detail, MS_REFUSED_SEGMENT, MESSAGE_ILLEGAL);
    measure->detail = MS_REFUSED_NO;
    plan(measure, measure->sum);
    return PUT_OK;
}

uint32_t ms_entry_measure(const struct ms_taken *taken, struct ms_measure *measure)
{
    const struct ms_entry *head = &taken->head;
    measure->sum = 0;
    measure->rolls = 0;
    measure->detail = MS_REFUSED_NO;
    if (head->kind == MS_ENTRY_MANY)
        return measure_many(taken, measure);
    if (head->kind == MS_ENTRY_BATCH)
        return measure_batch(taken, measure);
    measure->sum = ms_record_bytes(head->sys_flag, head->topic_bytes, head->properties_bytes, (uint32_t)taken->payload_bytes);
    uint32_t status = check_size(measure, (int64_t)taken->payload_bytes, measure->sum);
    if (status == PUT_OK)
        plan(measure, measure->sum);
    return status;
}

void ms_entry_records(const struct ms_taken *taken, struct ms_records *records)
{
    records->at = taken->head.kind == MS_ENTRY_BATCH ? taken->payload : taken->bodies;
    records->end = taken->payload + taken->payload_bytes;
    records->left = taken->head.kind == MS_ENTRY_PUT ? 1 : taken->head.count;
    records->lengths = taken->head.kind == MS_ENTRY_MANY ? many_lengths(taken) : NULL;
}

int ms_entry_next(const struct ms_taken *taken, struct ms_records *records, struct ms_record_template *record)
{
    static uint8_t joined[2 * MS_PROPERTIES_BYTES_MAX + 2]; /* valid until the next call */
    if (records->left == 0)
        return 0;
    records->left--;
    if (taken->head.kind == MS_ENTRY_BATCH) {
        struct member member;
        records->at += read_member(records->at, (uint64_t)(records->end - records->at), &member);
        record->flag = member.flag;
        record->body = member.body;
        record->body_bytes = (int32_t)member.body_bytes;
        record->properties = joined;
        record->properties_bytes = (int32_t)join_properties(joined, &member, taken);
        return 1;
    }
    record->body = records->at;
    record->body_bytes = (int32_t)(records->lengths != NULL ? *records->lengths++ : taken->payload_bytes);
    records->at += record->body_bytes;
    return 1;
}
