/* Segments of random records for the tests, and functions that damage them. */
#pragma once

#include "check.h"
#include "../record.h"

#define RECORDS_MAX 64

struct segment {
    uint8_t bytes[1 << 16];
    int64_t base;
    int64_t starts[RECORDS_MAX + 1]; /* offsets of the records and of the end */
    int records;
    int64_t total;                   /* with the blank */
};

static inline void random_bytes(uint8_t *to, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i++)
        to[i] = (uint8_t)dice(256);
}

static inline void segment_build(struct segment *s, int records, int64_t base)
{
    static const char *const topics[] = {"T", "topic-00", "SCHEDULE_TOPIC_XXXX", "\xe4\xb8\xbb\xe9\xa2\x98", ""};
    static const char *const properties[] = {
        "",
        "TAGS\1a",
        "KEYS\1k1 k2  k3\2TAGS\1b\2UNIQ_KEY\1U0001",
        "DELAY\1"
        "3\2TAGS\1c",
        "DELAY\1x\2KEYS\1 ",
        "INNER_MULTI_DISPATCH\1%LMQ%a,%LMQ%b\2INNER_MULTI_QUEUE_OFFSET\1"
        "0,1",
        "\1\2\1x\2y\1",
        "INNER_MULTI_DISPATCH\1,,q\2INNER_MULTI_QUEUE_OFFSET\1"
        "5,,99999999999999999999",
    };
    uint8_t body[700];
    int64_t at = 0;
    memset(s->bytes, 0, sizeof s->bytes);
    s->base = base;
    s->records = records;
    for (int i = 0; i < records; i++) {
        const char *topic = topics[dice(sizeof topics / sizeof *topics)];
        const char *text = properties[dice(sizeof properties / sizeof *properties)];
        struct ms_record_template t = {
            .queue_offset = i,
            .physical_offset = base + at,
            .store_timestamp_ms = 1700000000000 + i * 700,
            .queue_id = (int32_t)dice(4),
            .sys_flag = (int32_t)(dice(4) << 4 | dice(4) << 2),
            .body = body,
            .body_bytes = (int32_t)(dice(3) ? dice(100) : dice(700)),
            .topic = (const uint8_t *)topic,
            .topic_bytes = (int32_t)strlen(topic),
            .properties = (const uint8_t *)text,
            .properties_bytes = (int32_t)strlen(text),
        };
        random_bytes(body, t.body_bytes);
        s->starts[i] = base + at;
        at += ms_record_encode(s->bytes + at, &t);
    }
    s->starts[records] = base + at;
    s->total = at + 8 + (int64_t)dice(64);
    CHECK(s->total <= (int64_t)sizeof s->bytes);
    ms_record_encode_blank(s->bytes + at, (int32_t)(s->total - at));
}

/* Change some bytes, mostly in lengths and numbers. */
static inline void segment_damage(struct segment *s)
{
    static const uint8_t nasty[] = {0, 1, 0x7F, 0x80, 0xFF};
    for (int changes = 1 + (int)dice(4); changes > 0; changes--) {
        const int64_t start = s->starts[dice((uint64_t)s->records)] - s->base;
        const int64_t at = dice(2) ? start + (int64_t)dice(92) : (int64_t)dice((uint64_t)s->total);
        if (at < s->total)
            s->bytes[at] = dice(2) ? nasty[dice(sizeof nasty)] : (uint8_t)dice(256);
    }
}
