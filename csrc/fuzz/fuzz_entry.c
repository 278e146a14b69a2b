/* Parses arbitrary bytes as an entry in a producer's ring, also a client's batch, and encodes its records (csrc/entry.h,
 * csrc/light_queues.h). The records must have the measured sizes. */
#include "target.h"
#include "../entry.h"
#include "../light_queues.h"
#include "../queue_table.h"

#define SEGMENT_BYTES 32768
#define MESSAGE_BYTES_MAX 8192
#define SLOTS 16

static void encode_all(const struct ms_taken *taken, int64_t sum)
{
    struct guarded log = guarded_new(sum);
    struct ms_record_template record = {
        .flag = taken->head.flag,
        .sys_flag = taken->head.sys_flag,
        .queue_id = taken->head.queue_id,
        .topic = taken->topic,
        .topic_bytes = (int32_t)taken->head.topic_bytes,
        .properties = taken->properties,
        .properties_bytes = (int32_t)taken->head.properties_bytes,
    };
    struct ms_records records;
    int64_t at = 0;
    uint32_t count = 0;
    memcpy(record.born_host, taken->head.born_host, sizeof record.born_host);
    memcpy(record.store_host, taken->head.store_host, sizeof record.store_host);
    ms_entry_records(taken, &records);
    for (; ms_entry_next(taken, &records, &record); count++) {
        const int64_t bytes = ms_record_bytes(record.sys_flag, record.topic_bytes, record.properties_bytes, record.body_bytes);
        record.physical_offset = at;
        CHECK(bytes > 0 && at + bytes <= sum);
        CHECK(ms_record_encode(log.at + at, &record) == bytes);
        CHECK(ms_record_classify(log.at + at, bytes, at, 7) == MS_CASE_MESSAGE);
        at += bytes;
    }
    CHECK(at == sum && count == (taken->head.kind == MS_ENTRY_PUT ? 1 : taken->head.count));
    guarded_free(&log);
}

static void name_light_queues(const struct ms_taken *taken)
{
    static struct ms_light_queues light;
    struct guarded memory = guarded_new(ms_queue_table_bytes(SLOTS));
    struct ms_queue_table *table = (struct ms_queue_table *)(void *)memory.at;
    ms_queue_table_format(table, SLOTS, 1);
    light.enabled = 1;
    light.lmq = (uint32_t)taken->head.flags & 1;
    light.lmq_max = 3;
    light.lmq_count = -1;
    for (int again = 0; again < 2; again++) {
        const int found = ms_light_prepare(&light, table, taken->topic, taken->head.topic_bytes, taken->head.queue_id,
                                           taken->properties, taken->head.properties_bytes);
        CHECK(found <= 1 && light.count <= MS_LIGHT_QUEUES_MAX);
        if (found == 1)
            CHECK(light.text_bytes <= MS_LIGHT_TEXT_BYTES_MAX && ms_record_text_is_clean(light.text, light.text_bytes));
    }
    ms_light_copy_text(&light, taken->properties, taken->head.properties_bytes, 1);
    CHECK(light.text_bytes <= taken->head.properties_bytes && !ms_light_has_places(light.text, light.text_bytes));
    guarded_free(&memory);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ms_taken taken;
    struct ms_measure measure = {.segment_bytes = SEGMENT_BYTES, .max_message_bytes = MESSAGE_BYTES_MAX, .room = SEGMENT_BYTES / 2};
    uint32_t detail;
    if (size < sizeof taken.head || size > INPUT_BYTES_MAX)
        return 0;
    struct guarded memory = guarded_new((int64_t)ms_align8(size)); /* entries are whole words */
    memcpy(memory.at, data, size);
    if (ms_entry_parse(memory.at, ms_align8(size), &taken) && taken.head.kind != MS_ENTRY_SIDE &&
        ms_entry_check(&taken, &detail) == PUT_OK) {
        name_light_queues(&taken);
        if (taken.head.kind != MS_ENTRY_RAW && ms_entry_measure(&taken, &measure) == PUT_OK) {
            CHECK(measure.sum > 0 && measure.sum <= MS_SIDE_BYTES_MAX && measure.detail == MS_REFUSED_NO);
            CHECK(measure.room >= 0 && measure.room <= SEGMENT_BYTES);
            CHECK(taken.head.kind == MS_ENTRY_MANY || measure.sum + MS_BLANK_BYTES <= SEGMENT_BYTES);
            if (measure.sum <= 1 << 20)
                encode_all(&taken, measure.sum);
        }
    }
    guarded_free(&memory);
    return 0;
}

static uint8_t *put_member(uint8_t *to, const char *body, const char *properties)
{
    const uint32_t body_bytes = (uint32_t)strlen(body), properties_bytes = (uint32_t)strlen(properties);
    const uint32_t words[] = {22 + body_bytes + properties_bytes, 0, 0, 7, body_bytes};
    for (int i = 0; i < 5; i++, to += 4)
        ms_put_32(to, words[i]);
    memcpy(to, body, body_bytes);
    to += body_bytes;
    *to++ = (uint8_t)(properties_bytes >> 8);
    *to++ = (uint8_t)properties_bytes;
    memcpy(to, properties, properties_bytes);
    return to + properties_bytes;
}

static void emit_entry(void (*emit)(const uint8_t *, size_t), uint16_t kind, const char *topic, const char *properties,
                       const uint8_t *payload, uint32_t payload_bytes, uint32_t count)
{
    static uint8_t bytes[INPUT_BYTES_MAX];
    struct ms_entry head = {
        .kind = kind,
        .flags = 1,
        .sequence = 1,
        .count = count,
        .topic_bytes = (uint32_t)strlen(topic),
        .properties_bytes = (uint32_t)strlen(properties),
        .payload_bytes = payload_bytes,
    };
    const uint64_t payload_at = ms_align8(sizeof head + head.topic_bytes + head.properties_bytes);
    head.entry_bytes = (uint32_t)ms_align8(payload_at + payload_bytes);
    memset(bytes, 0, sizeof bytes);
    memcpy(bytes, &head, sizeof head);
    memcpy(bytes + sizeof head, topic, head.topic_bytes);
    memcpy(bytes + sizeof head + head.topic_bytes, properties, head.properties_bytes);
    memcpy(bytes + payload_at, payload, payload_bytes);
    emit(bytes, head.entry_bytes);
}

void fuzz_seeds(void (*emit)(const uint8_t *data, size_t size))
{
    static const char *const light = "INNER_MULTI_DISPATCH\1a,%LMQ%b,c\2TAGS\1t";
    static const uint32_t lengths[] = {3, 0, 5, 8};
    uint8_t payload[512] = {0};
    emit_entry(emit, MS_ENTRY_PUT, "topic", "TAGS\1a\2KEYS\1k", (const uint8_t *)"a body of some bytes", 20, 1);
    emit_entry(emit, MS_ENTRY_PUT, "topic", light, (const uint8_t *)"x", 1, 1);
    memcpy(payload, lengths, sizeof lengths);
    emit_entry(emit, MS_ENTRY_MANY, "t", "", payload, sizeof lengths + 16, 4);
    uint8_t *end = put_member(payload, "first", "TAGS\1a");
    end = put_member(end, "", "");
    end = put_member(end, "third", "KEYS\1b\2");
    emit_entry(emit, MS_ENTRY_BATCH, "batch", "", payload, (uint32_t)(end - payload), 3);
    emit_entry(emit, MS_ENTRY_BATCH, "batch", "UNIQ_KEY\1u", payload, (uint32_t)(end - payload), 3);
    emit_entry(emit, MS_ENTRY_SIDE, "t", "", payload, 0, 1);
}
