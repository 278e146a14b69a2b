/* Arbitrary bytes as a segment and as queue entries: selected, measured, filled into columns (csrc/columns.h), counted (csrc/tally.h). */
#include "../columns.h"
#include "../tally.h"
#include "target.h"

#define HEAD 16
#define BASE 0
#define ROWS_MAX 32

static struct ms_record rows[ROWS_MAX];

static void fill_texts(const struct ms_text *texts, int64_t count, int is_utf8)
{
    int64_t nulls = 0;
    int bad = 0;
    const int64_t bytes = ms_columns_measure(texts, count, is_utf8, &nulls, &bad);
    CHECK(bytes >= 0 && nulls >= 0 && nulls <= count);
    struct guarded data = guarded_new(bytes);
    struct guarded validity = guarded_new((count + 7) / 8);
    int32_t offsets[ROWS_MAX + 1];
    ms_columns_copy(texts, count, is_utf8 && bad, offsets, data.at, validity.at);
    CHECK(offsets[0] == 0 && offsets[count] == bytes);
    for (int64_t row = 0; row < count; row++)
        CHECK(offsets[row] <= offsets[row + 1]);
    CHECK(!is_utf8 || count == 0 || bytes == 0 || memchr(data.at, 0xFF, (size_t)bytes) == NULL);
    guarded_free(&data);
    guarded_free(&validity);
}

static void fill_all(int64_t count)
{
    static const int numbers[] = {
        MS_COLUMN_QUEUE_ID,
        MS_COLUMN_FLAG,
        MS_COLUMN_SYS_FLAG,
        MS_COLUMN_RECONSUME_TIMES,
        MS_COLUMN_BODY_CRC,
        MS_COLUMN_SIZE,
        MS_COLUMN_BODY_SIZE,
        MS_COLUMN_QUEUE_OFFSET,
        MS_COLUMN_PHYSICAL_OFFSET,
        MS_COLUMN_PREPARED_OFFSET,
        MS_COLUMN_STORE_TIMESTAMP,
        MS_COLUMN_BORN_TIMESTAMP,
    };
    static const struct ms_text names[] = {{(const uint8_t *)"TAGS", 4}, {(const uint8_t *)"KEYS", 4}};
    int64_t values[ROWS_MAX];
    int32_t offsets[ROWS_MAX + 1];
    struct ms_text texts[2 * ROWS_MAX];
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        ms_columns_numbers(rows, count, numbers[i], values);
    for (int column = MS_COLUMN_TOPIC; column <= MS_COLUMN_BODY; column++) {
        ms_columns_texts(rows, count, column, texts);
        fill_texts(texts, count, column != MS_COLUMN_BODY);
    }
    ms_columns_properties(rows, count, names, 2, texts);
    fill_texts(texts, count, 1);
    fill_texts(texts + count, count, 1);
    for (int column = MS_COLUMN_BORN_HOST; column <= MS_COLUMN_MSG_ID; column++) {
        struct guarded made = guarded_new(count * MS_COLUMN_MADE_BYTES_MAX);
        const int64_t used = ms_columns_make(rows, count, column, offsets, made.at);
        CHECK(used >= 0 && used <= count * MS_COLUMN_MADE_BYTES_MAX && offsets[count] == used);
        guarded_free(&made);
    }
}

static void count_all(int64_t count, int by)
{
    static struct ms_tally_group groups[ROWS_MAX];
    static int32_t places[2 * ROWS_MAX];
    struct ms_tally tally = {.groups = groups, .places = places, .group_capacity = ROWS_MAX, .place_mask = 2 * ROWS_MAX - 1, .by = by, .step_us = 3600000000};
    int64_t numbers[ROWS_MAX], messages = 0;
    ms_tally_clear(&tally);
    CHECK(ms_tally_add(&tally, rows, count, NULL) == count && tally.group_count <= count);
    ms_tally_numbers(&tally, MS_TALLY_MESSAGES, numbers);
    for (int32_t at = 0; at < tally.group_count; at++)
        messages += numbers[at];
    CHECK(messages == count);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input input = {data, (int64_t)size};
    if (size < HEAD || size > INPUT_BYTES_MAX)
        return 0;
    struct input numbers = {input.at, HEAD};
    input.at += HEAD;
    input.left -= HEAD;
    const int checks = (int)take(&numbers, 1) & 7;
    const int count_bodies = (int)take(&numbers, 1) & 1;
    const int64_t rows_max = 1 + take_up_to(&numbers, ROWS_MAX - 1);
    const int64_t limit = BASE + take_near(&numbers, input.left);
    const int64_t end = BASE + take_near(&numbers, limit - BASE);
    struct guarded memory = guarded_copy(input.at, input.left);
    struct ms_selection selection = {.position = BASE};
    int why = ms_columns_select(memory.at, BASE, end, limit, checks, NULL, count_bodies, rows_max, 1 << 14, rows, &selection);
    CHECK(why != MS_COLUMNS_NEEDS_QUEUE && selection.rows >= 0 && selection.rows <= rows_max);
    CHECK(selection.position >= BASE && selection.position <= limit);
    fill_all(selection.rows);
    for (int by = MS_TALLY_BY_TOPIC; by <= MS_TALLY_BY_STEP; by++)
        count_all(selection.rows, by);
    /* The end of the input once more, as the entries of a queue. */
    const int64_t count = input.left / 20 < 8 ? input.left / 20 : 8;
    struct guarded entries = guarded_copy(input.at + input.left - 20 * count, 20 * count);
    selection = (struct ms_selection){0};
    why = ms_columns_gather(memory.at, BASE, limit, checks, entries.at, count, NULL, count_bodies, rows_max, 1 << 14, rows,
                            &selection);
    CHECK(why != MS_COLUMNS_NEEDS_QUEUE && selection.rows <= rows_max && selection.passed_entries <= count);
    fill_all(selection.rows);
    for (int by = MS_TALLY_BY_TOPIC; by <= MS_TALLY_BY_STEP; by++)
        count_all(selection.rows, by);
    guarded_free(&entries);
    guarded_free(&memory);
    return 0;
}

void fuzz_seeds(void (*emit)(const uint8_t *data, size_t size))
{
    emit_segments(emit, HEAD, BASE);
}
