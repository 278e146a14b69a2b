/* Reads arbitrary bytes as a segment and as queue entries into columns (csrc/columns.cdef.h), and counts them (csrc/tally.h). */
#include "target.h"
#include "../columns.cdef.h"
#include "../tally.h"

#define HEAD 16
#define BASE 0
#define ROWS_MAX 32

static struct ms_record rows[ROWS_MAX];

static void fill_all(int64_t count)
{
    enum { NAMES = 2,
           COLUMNS = 20 };
    static const int kinds[COLUMNS - NAMES] = {
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
        MS_COLUMN_TOPIC,
        MS_COLUMN_PROPERTIES,
        MS_COLUMN_BODY,
        MS_COLUMN_BORN_HOST,
        MS_COLUMN_STORE_HOST,
        MS_COLUMN_MSG_ID,
    };
    static const struct ms_text names[NAMES] = {{(const uint8_t *)"TAGS", 4}, {(const uint8_t *)"KEYS", 4}};
    struct ms_text texts[NAMES][ROWS_MAX];
    struct guarded data[COLUMNS], validity[COLUMNS];
    int32_t offsets[COLUMNS][ROWS_MAX + 1];
    struct ms_column columns[COLUMNS] = {0};
    for (int i = 0; i < COLUMNS; i++) {
        columns[i].kind = i < NAMES ? MS_COLUMN_PROPERTY : kinds[i - NAMES];
        if (i < NAMES) {
            columns[i].name = names[i];
            columns[i].texts = texts[i];
        }
    }
    ms_columns_measure(rows, count, columns, COLUMNS);
    for (int i = 0; i < COLUMNS; i++) {
        CHECK(columns[i].bytes >= 0 && columns[i].nulls >= 0 && columns[i].nulls <= count);
        data[i] = guarded_new(columns[i].bytes);
        validity[i] = guarded_new((count + 7) / 8);
        columns[i].data = data[i].at;
        columns[i].offsets = offsets[i];
        columns[i].validity = validity[i].at;
    }
    ms_columns_fill(rows, count, columns, COLUMNS);
    for (int i = 0; i < COLUMNS; i++) {
        if (columns[i].kind >= MS_COLUMN_TOPIC) {
            CHECK(offsets[i][0] == 0 && (columns[i].kind < MS_COLUMN_BORN_HOST ? offsets[i][count] == columns[i].bytes
                                                                               : offsets[i][count] <= columns[i].bytes));
            for (int64_t row = 0; row < count; row++)
                CHECK(offsets[i][row] <= offsets[i][row + 1]);
            CHECK(columns[i].kind == MS_COLUMN_BODY || offsets[i][count] == 0 ||
                  memchr(data[i].at, 0xFF, (size_t)offsets[i][count]) == NULL);
        }
        guarded_free(&data[i]);
        guarded_free(&validity[i]);
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
    struct ms_selection selection = {.position = BASE, .rows = rows, .bytes_max = 1 << 14};
    selection.checks = (int)take(&numbers, 1) & 7;
    selection.count_bodies = (int)take(&numbers, 1) & 1;
    selection.rows_max = 1 + take_up_to(&numbers, ROWS_MAX - 1);
    const int64_t limit = BASE + take_near(&numbers, input.left);
    const int64_t end = BASE + take_near(&numbers, limit - BASE);
    struct guarded memory = guarded_copy(input.at, input.left);
    int found = ms_columns_select(&selection, memory.at, BASE, end, limit);
    CHECK(found != MS_COLUMNS_NEEDS_QUEUE && selection.count >= 0 && selection.count <= selection.rows_max);
    CHECK(selection.position >= BASE && selection.position <= limit);
    fill_all(selection.count);
    for (int by = MS_TALLY_BY_TOPIC; by <= MS_TALLY_BY_STEP; by++)
        count_all(selection.count, by);
    /* The end of the input again, as the entries of a queue. */
    const int64_t count = input.left / 20 < 8 ? input.left / 20 : 8;
    struct guarded entries = guarded_copy(input.at + input.left - 20 * count, 20 * count);
    found = ms_columns_gather(&selection, memory.at, BASE, limit, entries.at, count);
    CHECK(found != MS_COLUMNS_NEEDS_QUEUE && selection.count <= selection.rows_max && selection.entries_read <= count);
    fill_all(selection.count);
    for (int by = MS_TALLY_BY_TOPIC; by <= MS_TALLY_BY_STEP; by++)
        count_all(selection.count, by);
    guarded_free(&entries);
    guarded_free(&memory);
    return 0;
}

void fuzz_seeds(void (*emit)(const uint8_t *data, size_t size))
{
    emit_segments(emit, HEAD, BASE);
}
