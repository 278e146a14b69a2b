/* Columns of damaged segments: selecting reads nothing above its limit, filling writes exactly what was measured. */
#include "columns_rig.h"
#include "../consume_queue.h"
#include "../tally.h"

/* Compare the groups of a tally with sums of the rows; a table that is too small stops before the row that does not fit. */
static void count_all(const struct ms_record *rows, int64_t count)
{
    static struct ms_tally_group groups[ROWS_MAX];
    static int32_t places[128];
    uint8_t keep[ROWS_MAX];
    int64_t numbers[ROWS_MAX], messages = 0, bytes = 0, wanted_messages = 0, wanted_bytes = 0;
    struct ms_tally tally = {
        .groups = groups,
        .places = places,
        .group_capacity = 1 + (int32_t)dice(ROWS_MAX),
        .place_mask = 127,
        .by = (int32_t)dice(3),
        .step_us = 1 + (int64_t)dice(1000000),
    };
    ms_tally_clear(&tally);
    for (int64_t i = 0; i < count; i++)
        keep[i] = (uint8_t)dice(3);
    const uint8_t *const kept = dice(2) ? keep : NULL;
    const int64_t passed = ms_tally_add(&tally, rows, count, kept);
    CHECK(passed == count || tally.group_count == tally.group_capacity);
    for (int64_t i = 0; i < passed; i++) {
        if (kept == NULL || kept[i] != 0) {
            wanted_messages++;
            wanted_bytes += rows[i].size_bytes;
        }
    }
    for (int column = 0; column < MS_TALLY_NUMBERS; column++) {
        struct guarded to = guarded_new(8 * tally.group_count);
        ms_tally_numbers(&tally, column, to.at);
        memcpy(numbers, to.at, 8 * (size_t)tally.group_count);
        for (int32_t at = 0; at < tally.group_count; at++) {
            messages += column == MS_TALLY_MESSAGES ? numbers[at] : 0;
            bytes += column == MS_TALLY_BYTES ? numbers[at] : 0;
        }
        guarded_free(&to);
    }
    CHECK(messages == wanted_messages && bytes == wanted_bytes);
    for (int column = MS_TALLY_LARGEST; column <= MS_TALLY_QUEUE; column++) {
        struct guarded to = guarded_new(4 * tally.group_count);
        ms_tally_numbers(&tally, column, to.at);
        guarded_free(&to);
    }
    struct ms_text texts[ROWS_MAX];
    struct ms_column topics = {.kind = MS_COLUMN_GIVEN, .texts = texts};
    ms_tally_topics(&tally, texts);
    check_columns(NULL, tally.group_count, &topics, 1, NULL);
}

static void select_all(const struct segment *s, int64_t limit, const struct ms_row_filter *filter)
{
    struct guarded view = guarded_copy(s->bytes, limit - s->base);
    static struct ms_record rows[ROWS_MAX];
    struct ms_selection selection = {.position = s->base, .filter = filter, .rows = rows};
    selection.rows_max = 1 + (int64_t)dice(ROWS_MAX);
    selection.bytes_max = 1 + (int64_t)dice(4000);
    int found;
    do {
        const int64_t before = selection.position;
        selection.checks = (int)dice(4);
        selection.count_bodies = (int)dice(2);
        found = ms_columns_select(&selection, view.at, s->base, limit, limit);
        CHECK(selection.count >= 0 && selection.count <= selection.rows_max);
        CHECK(selection.position >= before && selection.position <= limit);
        CHECK(found != MS_COLUMNS_FULL || selection.count > 0);
        fill_all(rows, selection.count, NULL);
        count_all(rows, selection.count);
        if (found == MS_COLUMNS_NEEDS_QUEUE) {
            struct ms_row_filter *learning = (struct ms_row_filter *)filter;
            const int number = ms_queue_keys_add(&learning->keys, selection.unknown_topic, selection.unknown_topic_bytes,
                                                 selection.unknown_queue_id);
            CHECK(number >= 0);
            learning->queues[number] = (struct ms_filter_queue){0, (int64_t)dice(40), INT64_MIN, INT64_MAX};
        }
    } while (found >= MS_COLUMNS_FULL);
    guarded_free(&view);
}

static struct guarded changing;

static void change(void)
{
    random_bytes(changing.at, changing.bytes);
}

/* Another process overwrites the records between measure and fill: nothing is written beyond what was measured. */
static void fill_changing(const struct segment *s)
{
    static struct ms_record rows[ROWS_MAX];
    struct ms_selection selection = {.position = s->base, .rows = rows, .rows_max = ROWS_MAX, .bytes_max = INT32_MAX, .count_bodies = 1};
    changing = guarded_copy(s->bytes, s->total);
    ms_columns_select(&selection, changing.at, s->base, s->base + s->total, s->base + s->total);
    fill_all(rows, selection.count, change);
    guarded_free(&changing);
}

static void gather_some(const struct segment *s, int64_t limit)
{
    struct guarded view = guarded_copy(s->bytes, limit - s->base);
    static struct ms_record rows[ROWS_MAX];
    uint8_t entries[30 * MS_QUEUE_ENTRY_BYTES];
    for (int i = 0; i < 30; i++) {
        const int64_t start = s->starts[dice((uint64_t)s->records)];
        const int32_t size = ms_get_i32(s->bytes + (start - s->base));
        ms_queue_encode_entry(entries + i * MS_QUEUE_ENTRY_BYTES, dice(20) ? start : (int64_t)dice(UINT64_MAX),
                              dice(20) ? size : (int32_t)dice(1ull << 32), 0);
    }
    for (int64_t done = 0; done < 30;) {
        struct ms_selection selection = {.rows = rows, .rows_max = 1 + (int64_t)dice(ROWS_MAX), .bytes_max = 3000};
        selection.checks = (int)dice(4);
        selection.count_bodies = (int)dice(2);
        const int found = ms_columns_gather(&selection, view.at, s->base, limit, entries + done * MS_QUEUE_ENTRY_BYTES, 30 - done);
        fill_all(rows, selection.count, NULL);
        done += selection.entries_read + (found != MS_COLUMNS_FULL);
        CHECK(found != MS_COLUMNS_FULL || selection.count > 0);
    }
    guarded_free(&view);
}

int main(void)
{
    static struct segment s;
    dice_begin("columns");
    for (int round = 0; round < 60; round++) {
        static struct ms_filter_queue queues[128];
        static struct ms_queue_key keys[128];
        static int32_t places[256];
        static uint8_t topics[4096];
        static const struct ms_text tags[] = {{(const uint8_t *)"a", 1}, {(const uint8_t *)"b", 1}};
        struct ms_row_filter filter = {
            .keys = {keys, places, topics, .topics_capacity = sizeof topics, .capacity = 128, .bucket_mask = 255},
            .queues = queues,
            .tags = tags,
            .tag_count = 2,
            .by_queue = 1,
            .by_tag = (int32_t)dice(2),
            .queued_only = (int32_t)dice(2),
            .start_ms = INT64_MIN,
            .end_ms = INT64_MAX,
        };
        ms_queue_keys_rehash(&filter.keys);
        segment_build(&s, 40, (int64_t)dice(1 << 30));
        if (round % 4 != 0)
            segment_damage(&s);
        const int64_t limit = dice(2) ? s.base + s.total : s.starts[dice((uint64_t)s.records)] + (int64_t)dice(100);
        select_all(&s, limit < s.base + s.total ? limit : s.base + s.total, NULL);
        select_all(&s, s.base + s.total, &filter);
        fill_changing(&s);
        gather_some(&s, limit < s.base + s.total ? limit : s.base + s.total);
    }
    return 0;
}
