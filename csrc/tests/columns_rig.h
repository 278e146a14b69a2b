/* Columns of records in memory that ends at guard pages, for the test and the fuzz target. */
#pragma once

#include "segments.h"
#include "../columns.cdef.h"
#include "../utf8.h"

#define ROWS_MAX 48

static const int kinds[] = {0, 1, 2, 3, 4, 5, 6, 16, 17, 18, 19, 20, 32, 33, 34, 48, 49, 50};
#define KINDS ((int)(sizeof kinds / sizeof *kinds))
#define NAMES 3
#define COLUMNS_MAX (NAMES + KINDS)

/* Measure and fill columns whose memory ends at a guard page; call `between` after measuring. */
static inline void check_columns(const struct ms_record *rows, int64_t count, struct ms_column *columns, int64_t column_count,
                                 void (*between)(void))
{
    struct guarded data[COLUMNS_MAX], offsets[COLUMNS_MAX], validity[COLUMNS_MAX];
    ms_columns_measure(rows, count, columns, column_count);
    for (int64_t i = 0; i < column_count; i++) {
        struct ms_column *const column = &columns[i];
        CHECK(column->bytes >= 0 && column->nulls >= 0 && column->nulls <= count);
        data[i] = guarded_new(column->bytes);
        offsets[i] = guarded_new(4 * (count + 1));
        validity[i] = guarded_new((count + 7) / 8);
        column->data = data[i].at;
        column->offsets = (int32_t *)(void *)offsets[i].at;
        column->validity = column->nulls > 0 ? validity[i].at : NULL;
    }
    if (between != NULL)
        between();
    ms_columns_fill(rows, count, columns, column_count);
    for (int64_t i = 0; i < column_count; i++) {
        const struct ms_column *const column = &columns[i];
        if (column->kind >= MS_COLUMN_TOPIC) {
            int32_t last;
            memcpy(&last, offsets[i].at + 4 * count, 4);
            const int is_exact = between == NULL && (column->kind < MS_COLUMN_BORN_HOST || column->kind == MS_COLUMN_GIVEN);
            CHECK(is_exact ? last == column->bytes : last <= column->bytes);
            CHECK(column->offsets[0] == 0);
            for (int64_t row = 0; row < count; row++)
                CHECK(column->offsets[row] <= column->offsets[row + 1]);
            const uint8_t *at = data[i].at;
            int bad = 0;
            while (at < data[i].at + last)
                ms_utf8_next(&at, data[i].at + last, &bad);
            CHECK(!bad || column->kind == MS_COLUMN_BODY || between != NULL);
        }
        guarded_free(&validity[i]);
        guarded_free(&offsets[i]);
        guarded_free(&data[i]);
    }
}

static inline void fill_all(const struct ms_record *rows, int64_t count, void (*between)(void))
{
    static const struct ms_text names[NAMES] = {
        {(const uint8_t *)"TAGS", 4}, {(const uint8_t *)"KEYS", 4}, {(const uint8_t *)"x", 1}};
    struct ms_text texts[NAMES][ROWS_MAX];
    struct ms_column columns[COLUMNS_MAX] = {0};
    for (int i = 0; i < NAMES; i++) {
        columns[i].kind = MS_COLUMN_PROPERTY;
        columns[i].name = names[i];
        columns[i].texts = texts[i];
    }
    for (int i = 0; i < KINDS; i++)
        columns[NAMES + i].kind = kinds[i];
    check_columns(rows, count, columns, COLUMNS_MAX, between);
}
