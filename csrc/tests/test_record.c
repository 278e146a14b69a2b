/* Records with wrong lengths: parsing reads and finds nothing outside its room. */
#include "segments.h"
#include "../crc32.cdef.h"
#include "../utf8.h"

static void check_inside(const struct ms_record *record, const uint8_t *at, int64_t room)
{
    const uint8_t *const end = at + room;
    CHECK(record->start == at && record->size_bytes <= room);
    CHECK(record->body >= at && record->body_bytes >= 0 && record->body + record->body_bytes <= end);
    CHECK(record->topic >= at && record->topic_bytes >= 0 && record->topic + record->topic_bytes <= end);
    CHECK(record->properties >= at && record->properties + record->properties_bytes == at + record->size_bytes);
}

static void classify_everywhere(const struct segment *s)
{
    for (int i = 0; i < s->records; i++) {
        const int64_t at = s->starts[i] - s->base;
        for (int64_t room = 0; room <= s->total - at && room < 900; room++) {
            struct guarded memory = guarded_copy(s->bytes + at, room);
            struct ms_record record;
            const int found = ms_record_parse(memory.at, room, &record);
            if (found == MS_CASE_MESSAGE)
                check_inside(&record, memory.at, room);
            const int checks = (int)dice(8);
            const int judged = ms_record_classify(memory.at, room, s->starts[i], checks);
            CHECK(found == MS_CASE_MESSAGE || judged == found);
            CHECK(judged >= 0 && judged < MS_CASES);
            guarded_free(&memory);
        }
    }
}

static void test_whole_and_damaged_records(void)
{
    static struct segment s;
    segment_build(&s, 12, 1 << 20);
    for (int i = 0; i < s.records; i++)
        CHECK(ms_record_classify(s.bytes + s.starts[i] - s.base, s.total, s.starts[i], 7) == MS_CASE_MESSAGE);
    classify_everywhere(&s);
    for (int round = 0; round < 10; round++) {
        segment_build(&s, 6, 1 << 20);
        segment_damage(&s);
        classify_everywhere(&s);
    }
}

static void test_noise(void)
{
    for (int round = 0; round < 20000; round++) {
        uint8_t noise[300];
        const int64_t bytes = (int64_t)dice(sizeof noise);
        random_bytes(noise, bytes);
        if (bytes >= 8 && dice(2)) { /* so that it passes the first two checks */
            ms_put_32(noise, (uint32_t)dice(320));
            ms_put_32(noise + 4, MS_RECORD_MAGIC);
        }
        struct guarded memory = guarded_copy(noise, bytes);
        struct ms_record record;
        if (ms_record_parse(memory.at, bytes, &record) == MS_CASE_MESSAGE)
            check_inside(&record, memory.at, bytes);
        ms_record_text_is_clean(memory.at, bytes);
        ms_java_hash(0, memory.at, bytes);
        guarded_free(&memory);
    }
}

static void test_encode_writes_no_byte_too_many(void)
{
    for (int round = 0; round < 2000; round++) {
        uint8_t text[400];
        random_bytes(text, sizeof text);
        struct ms_record_template t = {
            .sys_flag = (int32_t)(dice(4) << 4),
            .body = text,
            .body_bytes = (int32_t)dice(300),
            .topic = text,
            .topic_bytes = (int32_t)dice(128),
            .properties = text,
            .properties_bytes = (int32_t)dice(400),
        };
        const int64_t size = ms_record_bytes(t.sys_flag, t.topic_bytes, t.properties_bytes, t.body_bytes);
        struct guarded memory = guarded_new(size);
        CHECK(ms_record_encode(memory.at, &t) == size);
        CHECK(ms_record_classify(memory.at, size, 0, MS_CHECK_CRC | MS_CHECK_OFFSET) == MS_CASE_MESSAGE);
        guarded_free(&memory);
    }
}

int main(void)
{
    dice_begin("record");
    test_whole_and_damaged_records();
    test_noise();
    test_encode_writes_no_byte_too_many();
    return 0;
}
