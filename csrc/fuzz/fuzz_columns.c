/* Reads arbitrary bytes as a segment and as queue entries into columns (csrc/columns.cdef.h), and counts them (csrc/tally.h). */
#include "target.h"
#include "../tests/columns_rig.h"
#include "../tally.h"

#define HEAD 16
#define BASE 0

static struct ms_record rows[ROWS_MAX];

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
    fill_all(rows, selection.count, NULL);
    for (int by = MS_TALLY_BY_TOPIC; by <= MS_TALLY_BY_STEP; by++)
        count_all(selection.count, by);
    /* The end of the input again, as the entries of a queue. */
    const int64_t count = input.left / 20 < 8 ? input.left / 20 : 8;
    struct guarded entries = guarded_copy(input.at + input.left - 20 * count, 20 * count);
    found = ms_columns_gather(&selection, memory.at, BASE, limit, entries.at, count);
    CHECK(found != MS_COLUMNS_NEEDS_QUEUE && selection.count <= selection.rows_max && selection.entries_read <= count);
    fill_all(rows, selection.count, NULL);
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
