#include "base.h"
#include "sends.h"

#include "property.h"
#include "utf8.h"

#define SEND_MESSAGE_V2 310
#define FRAME_HEAD_BYTES 8           /* length, header form and length of the header */
#define HOST_BITS (MS_SYS_FLAG_BORN_V6 | MS_SYS_FLAG_STORE_V6)
#define BUCKETS_MIN 16

/* ---- JSON ------------------------------------------------------------------- */

struct json {
    const uint8_t *at, *end;
    uint8_t *text;                   /* room for unescaped texts, which are not longer than the escaped ones */
};

static void skip_space(struct json *json)
{
    while (json->at < json->end && (*json->at == ' ' || *json->at == '\t' || *json->at == '\n' || *json->at == '\r'))
        json->at++;
}

static int next_is(struct json *json, uint8_t sign)
{
    skip_space(json);
    if (json->at == json->end || *json->at != sign)
        return 0;
    json->at++;
    return 1;
}

static int hex_digit(uint8_t sign)
{
    if (sign >= '0' && sign <= '9')
        return sign - '0';
    const uint8_t small = sign | 32;
    return small >= 'a' && small <= 'f' ? small - 'a' + 10 : -1;
}

/* Decode an escape after its backslash; -1 for a wrong one, or a character that is not ASCII. */
static int unescape(struct json *json)
{
    const uint8_t sign = *json->at++;
    if (sign == 'u') {
        int value = 0;
        if (json->end - json->at < 4)
            return -1;
        for (int i = 0; i < 4; i++) {
            const int digit = hex_digit(*json->at++);
            if (digit < 0)
                return -1;
            value = value << 4 | digit;
        }
        return value > 0 && value < 0x80 ? value : -1;
    }
    static const char names[] = "ntrbf\"\\/", signs[] = "\n\t\r\b\f\"\\/";
    const char *const found = sign != 0 ? strchr(names, sign) : NULL;
    return found != NULL ? signs[found - names] : -1;
}

/* Read a JSON string: 1, or 0 for another value or a text that Python must handle. */
static int take_text(struct json *json, struct ms_text *text)
{
    if (!next_is(json, '"'))
        return 0;
    const uint8_t *const start = json->at;
    while (json->at < json->end && *json->at != '"' && *json->at != '\\' && *json->at >= 0x20)
        json->at++;
    text->at = start;
    text->bytes = json->at - start;
    if (json->at < json->end && *json->at == '\\') {
        uint8_t *to = json->text;
        memcpy(to, start, (size_t)text->bytes);
        text->at = to;
        to += text->bytes;
        while (json->at < json->end && *json->at != '"') {
            int sign = *json->at++;
            if (sign < 0x20)
                return 0;
            if (sign == '\\') {
                sign = json->at < json->end ? unescape(json) : -1;
                if (sign < 0)
                    return 0;
            }
            *to++ = (uint8_t)sign;
        }
        text->bytes = to - text->at;
        json->text = to;
    }
    if (json->at == json->end || *json->at != '"')
        return 0;
    json->at++;
    return ms_record_text_is_clean(text->at, text->bytes); /* UTF-8: a NUL was refused above */
}

/* Read a JSON number with up to ten digits, within 32 bits: 1, or 0. */
static int take_number(struct json *json, int64_t *number)
{
    skip_space(json);
    int64_t value = 0;
    const int is_negative = json->at < json->end && *json->at == '-';
    json->at += is_negative;
    const uint8_t *const start = json->at;
    while (json->at < json->end && *json->at >= '0' && *json->at <= '9' && json->at - start < 10)
        value = value * 10 + (*json->at++ - '0');
    const int64_t digits = json->at - start;
    if (digits == 0 || (digits > 1 && *start == '0'))
        return 0;
    *number = is_negative ? -value : value;
    return *number <= INT32_MAX && *number >= INT32_MIN;
}

/* ---- the header of a send ------------------------------------------------------ */

struct header {
    int64_t code, flag, opaque;
    struct ms_text topic, properties;
    int64_t queue_id, sys_flag, born_timestamp_ms, message_flag, reconsume_times;
};

/* Read a field's decimal digits: 1, or 0. */
static int digits_of(struct ms_text text, int digits_max, int64_t *number)
{
    int64_t value = 0;
    if (text.bytes < 1 || text.bytes > digits_max)
        return 0;
    for (int64_t i = 0; i < text.bytes; i++) {
        if (text.at[i] < '0' || text.at[i] > '9')
            return 0;
        value = value * 10 + (text.at[i] - '0');
    }
    *number = value;
    return 1;
}

/* Read one of extFields, by the short names of SendMessageRequestHeaderV2; 0 if Python must handle it. */
static int take_field(struct header *header, uint8_t name, struct ms_text value)
{
    int64_t unused;
    switch (name) {
    case 'a': /* producerGroup */
    case 'c': /* defaultTopic, for a topic that does not exist */
    case 'k': /* unitMode */
    case 'n': /* the broker's name */
        return 1;
    case 'b':
        header->topic = value;
        return 1;
    case 'd':
        return digits_of(value, 9, &unused);
    case 'e':
        return digits_of(value, 9, &header->queue_id);
    case 'f':
        return digits_of(value, 9, &header->sys_flag);
    case 'g':
        return digits_of(value, 18, &header->born_timestamp_ms);
    case 'h':
        return digits_of(value, 9, &header->message_flag);
    case 'i':
        header->properties = value;
        return 1;
    case 'j':
        return digits_of(value, 9, &header->reconsume_times);
    case 'm':
        return ms_text_equals(value, "false", 5);
    default:
        return 0;
    }
}

static int take_fields(struct json *json, struct header *header)
{
    uint32_t seen = 0;
    struct ms_text name, value;
    if (!next_is(json, '{'))
        return 0;
    do {
        if (!take_text(json, &name) || name.bytes != 1 || *name.at < 'a' || *name.at > 'n' || seen >> (*name.at - 'a') & 1)
            return 0;
        seen |= 1u << (*name.at - 'a');
        if (!next_is(json, ':') || !take_text(json, &value) || !take_field(header, *name.at, value))
            return 0;
    } while (next_is(json, ','));
    return next_is(json, '}') && header->topic.bytes > 0 && header->queue_id >= 0;
}

#define SEEN(name, bit) (ms_text_equals(key, name, sizeof name - 1) && (seen & (bit)) == 0 && (seen |= (bit)))

/* Read the header: 1 if it is that of a plain send. */
static int take_header(struct json *json, struct header *header)
{
    uint32_t seen = 0;
    struct ms_text key, unused;
    int64_t number;
    memset(header, 0, sizeof *header);
    header->queue_id = -1;
    if (!next_is(json, '{'))
        return 0;
    do {
        int is_known = 0;
        if (!take_text(json, &key) || !next_is(json, ':'))
            return 0;
        if (SEEN("code", 1u)) /* the first field, so that other requests end here */
            is_known = take_number(json, &header->code) && header->code == SEND_MESSAGE_V2;
        else if (SEEN("extFields", 2u))
            is_known = take_fields(json, header);
        else if (SEEN("flag", 4u))
            is_known = take_number(json, &header->flag) && header->flag == 0;
        else if (SEEN("opaque", 8u))
            is_known = take_number(json, &header->opaque);
        else if (SEEN("version", 16u))
            is_known = take_number(json, &number);
        else if (SEEN("language", 32u) || SEEN("serializeTypeCurrentRPC", 64u))
            is_known = take_text(json, &unused);
        if (!is_known)
            return 0;
    } while (next_is(json, ','));
    if (!next_is(json, '}') || (seen & 3u) != 3u)
        return 0;
    skip_space(json);
    return json->at == json->end;
}

/* ---- properties -------------------------------------------------------------------- */

struct property {
    struct ms_text name, value;
    uint32_t bucket;                 /* in a java.util.HashMap */
};

static int is_handled_apart(struct ms_text name)
{
    static const char timer[] = "TIMER_DEL"; /* TIMER_DELAY_MS, TIMER_DELAY_SEC, TIMER_DELIVER_MS */
    return ms_text_equals(name, "DELAY", 5) || ms_text_equals(name, "TRAN_MSG", 8) || ms_text_equals(name, "CLUSTER", 7) ||
           ms_text_equals(name, "INNER_MULTI_DISPATCH", 20) ||
           (name.bytes > (int64_t)sizeof timer && memcmp(name.at, timer, sizeof timer - 1) == 0);
}

/* Write the properties to sends->properties in the order of the broker's map, with CLUSTER and without WAIT
 * (hash_map_order() in pyengine/formats/record.py). Return their bytes, or -1 if Python must do it. */
static int64_t order_properties(struct ms_sends *sends, struct ms_text text)
{
    struct property found[MS_SEND_PROPERTIES_MAX + 1];
    uint32_t count = 0, buckets = BUCKETS_MIN;
    struct ms_text name, value;
    while (ms_property_next(&text, &name, &value)) {
        if (count == MS_SEND_PROPERTIES_MAX || is_handled_apart(name) || !ms_is_ascii(name.at, name.bytes))
            return -1;
        for (uint32_t i = 0; i < count; i++)
            if (found[i].name.bytes == name.bytes && memcmp(found[i].name.at, name.at, (size_t)name.bytes) == 0)
                return -1;
        found[count].name = name;
        found[count++].value = value;
    }
    found[count].name = (struct ms_text){(const uint8_t *)"CLUSTER", 7};
    found[count++].value = (struct ms_text){sends->cluster, sends->cluster_bytes};
    while (count > buckets * 3 / 4)
        buckets *= 2;
    for (uint32_t i = 0; i < count; i++) {
        struct property moved = found[i];
        const uint32_t hash = ms_java_hash(0, moved.name.at, moved.name.bytes);
        uint32_t to = i;
        moved.bucket = (hash ^ hash >> 16) & (buckets - 1);
        for (; to > 0 && found[to - 1].bucket > moved.bucket; to--)
            found[to] = found[to - 1];
        found[to] = moved;
    }
    uint8_t *to = sends->properties;
    for (uint32_t i = 0; i < count; i++) {
        if (ms_text_equals(found[i].name, "WAIT", 4))
            continue;
        if (to - sends->properties + 2 + found[i].name.bytes + found[i].value.bytes > MS_PROPERTIES_BYTES_MAX)
            return -1; /* or nearly so: Python counts exactly */
        if (to != sends->properties)
            *to++ = 2;
        memcpy(to, found[i].name.at, (size_t)found[i].name.bytes);
        to += found[i].name.bytes;
        *to++ = 1;
        memcpy(to, found[i].value.at, (size_t)found[i].value.bytes);
        to += found[i].value.bytes;
    }
    return to - sends->properties;
}

/* ---- frames ------------------------------------------------------------------------- */

static int topic_of(const struct ms_sends *sends, struct ms_text topic)
{
    const uint32_t count = sends->topic_count < MS_SEND_TOPICS_MAX ? sends->topic_count : MS_SEND_TOPICS_MAX;
    for (uint32_t i = 0; i < count; i++)
        if (topic.bytes == sends->topics[i].topic_bytes && memcmp(topic.at, sends->topics[i].topic, (size_t)topic.bytes) == 0)
            return (int)i;
    return -1;
}

/* Fill in the entry of one frame, given without its length field; 0 if the frame is not taken. */
static int take_frame(struct ms_sends *sends, struct ms_producer *producer, const uint8_t *frame, int64_t bytes)
{
    const uint32_t mark = ms_get_u32(frame);
    const int64_t header_bytes = mark & 0xFFFFFF;
    struct json json = {.at = frame + 4, .end = frame + 4 + header_bytes, .text = sends->text};
    struct header header;
    struct ms_send *const send = &sends->taken[sends->count];
    if (mark >> 24 != 0 || header_bytes > MS_SEND_HEADER_BYTES_MAX || header_bytes > bytes - 4 || !take_header(&json, &header))
        return 0;
    const int64_t body_bytes = bytes - 4 - header_bytes;
    const int topic = topic_of(sends, header.topic);
    if (topic < 0 || header.queue_id >= sends->topics[topic].queues || (header.sys_flag & MS_SYS_FLAG_TRANSACTION) != 0 ||
        body_bytes > producer->control->identity.max_message_bytes)
        return 0;
    const int64_t properties_bytes = order_properties(sends, header.properties);
    if (properties_bytes < 0)
        return 0;
    struct ms_entry *const head = &sends->head;
    head->kind = MS_ENTRY_PUT;
    head->count = 1;
    head->queue_id = (int32_t)header.queue_id;
    head->flag = (int32_t)header.message_flag;
    head->sys_flag = ((int32_t)header.sys_flag & ~HOST_BITS) | (head->sys_flag & HOST_BITS);
    head->born_timestamp_ms = header.born_timestamp_ms;
    head->reconsume_times = (int32_t)header.reconsume_times;
    head->topic_bytes = (uint32_t)header.topic.bytes;
    head->properties_bytes = (uint32_t)properties_bytes;
    head->payload_bytes = (uint32_t)body_bytes;
    if (ms_producer_fill(producer, head, header.topic.at, sends->properties, frame + 4 + header_bytes) != 0)
        return 0;
    *send = (struct ms_send){producer->sequence, (int32_t)header.opaque, (int32_t)header.queue_id, (uint32_t)bytes + 4,
                             (uint32_t)topic};
    sends->count++;
    return 1;
}

int64_t ms_sends_take(struct ms_sends *sends, struct ms_producer *producer, const uint8_t *data, int64_t bytes,
                      const uint8_t *born_host, int32_t born_host_bytes)
{
    int64_t at = 0;
    sends->count = sends->answered = sends->answer_bytes = 0;
    if (born_host_bytes < 0 || born_host_bytes > MS_HOST_BYTES_MAX)
        return 0;
    memset(sends->head.born_host, 0, sizeof sends->head.born_host);
    memcpy(sends->head.born_host, born_host, (size_t)born_host_bytes);
    sends->head.sys_flag = (sends->head.sys_flag & MS_SYS_FLAG_STORE_V6) | (born_host_bytes == MS_HOST_BYTES_MAX ? MS_SYS_FLAG_BORN_V6 : 0);
    sends->head.submitted_ns = ms_monotonic_ns();
    while (sends->count < MS_SENDS_MAX && bytes - at >= FRAME_HEAD_BYTES) {
        const int64_t length = ms_get_i32(data + at);
        if (length < 4 || length > sends->frame_bytes_max || length > bytes - at - 4 ||
            !take_frame(sends, producer, data + at + 4, length))
            break;
        at += 4 + length;
    }
    if (sends->count > 0)
        ms_producer_publish_filled(producer);
    return at;
}

/* ---- answers ------------------------------------------------------------------------- */

static uint8_t *put_piece(uint8_t *to, const struct ms_sends *sends, int piece)
{
    const uint32_t bytes = sends->piece_bytes[piece] < MS_SEND_PIECE_BYTES_MAX ? sends->piece_bytes[piece] : MS_SEND_PIECE_BYTES_MAX;
    memcpy(to, sends->piece[piece], bytes);
    return to + bytes;
}

static uint8_t *put_answer(uint8_t *to, const struct ms_sends *sends, const struct ms_send *send, const struct ms_completion *answer)
{
    uint8_t *const start = to;
    const int64_t offset = (int64_t)MS_BIG64((uint64_t)answer->physical_offset);
    to = put_piece(to + FRAME_HEAD_BYTES, sends, 0);
    to = ms_put_hex(to, sends->head.store_host, sends->head.sys_flag & MS_SYS_FLAG_STORE_V6 ? MS_HOST_BYTES_MAX : 8);
    to = ms_put_hex(to, (const uint8_t *)&offset, 8);
    to = put_piece(to, sends, 1);
    to = ms_put_decimal(to, send->queue_id);
    to = put_piece(to, sends, 2);
    to = ms_put_decimal(to, answer->queue_offset);
    to = put_piece(to, sends, 3);
    to = ms_put_decimal(to, send->opaque);
    to = put_piece(to, sends, 4);
    ms_put_32(start, (uint32_t)(to - start) - 4);
    ms_put_32(start + 4, (uint32_t)(to - start) - FRAME_HEAD_BYTES); /* header form 0: JSON */
    return to;
}

void ms_sends_answer(struct ms_sends *sends, struct ms_producer *producer, int64_t deadline_ns)
{
    uint8_t *to = sends->answers + sends->answer_bytes;
    struct ms_completion answer;
    if (sends->count > sends->answered) /* sleep once, for all of them */
        ms_producer_wait_acked(producer, sends->taken[sends->count - 1].sequence, deadline_ns, &answer);
    for (; sends->answered < sends->count; sends->answered++) {
        const struct ms_send *const send = &sends->taken[sends->answered];
        if (ms_producer_wait_acked(producer, send->sequence, 0, &answer) != 0 || answer.status != 0 || answer.physical_offset < 0)
            break;
        ms_producer_finish(producer, send->sequence);
        to = put_answer(to, sends, send, &answer);
    }
    sends->answer_bytes = (uint32_t)(to - sends->answers);
}
