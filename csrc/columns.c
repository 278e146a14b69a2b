#include "base.h"
#include "columns.cdef.h"

#include <arpa/inet.h>

#include "consume_queue.h"
#include "property.h"
#include "utf8.h"

/* -- the filter ------------------------------------------------------------- */

static int has_wanted_tag(const struct ms_row_filter *filter, const struct ms_record *record)
{
    struct ms_routing routing;
    ms_property_routing(record->properties, record->properties_bytes, &routing);
    const struct ms_text tags = routing.tags;
    if (tags.at == NULL)
        return 0;
    for (int32_t i = 0; i < filter->tag_count; i++)
        if (tags.bytes == filter->tags[i].bytes && memcmp(tags.at, filter->tags[i].at, (size_t)tags.bytes) == 0)
            return 1;
    return 0;
}

/* 1 wanted, 0 not, MS_COLUMNS_NEEDS_QUEUE. */
static int is_wanted(const struct ms_row_filter *filter, const struct ms_record *record, struct ms_selection *selection)
{
    if (record->store_timestamp_ms < filter->start_ms || record->store_timestamp_ms >= filter->end_ms)
        return 0;
    if (filter->queued_only && !ms_record_is_queued(record))
        return 0;
    if (filter->by_queue) {
        const int32_t queue_id = ms_record_queue_id(record);
        const int number = ms_queue_keys_find(&filter->keys, record->topic, record->topic_bytes, queue_id);
        if (number < 0) {
            selection->unknown_topic = record->topic;
            selection->unknown_topic_bytes = record->topic_bytes;
            selection->unknown_queue_id = queue_id;
            return MS_COLUMNS_NEEDS_QUEUE;
        }
        const struct ms_filter_queue *const queue = &filter->queues[number];
        const int64_t queue_offset = ms_record_queue_offset(record);
        if (queue_offset < queue->first_offset || queue_offset >= queue->end_offset ||
            record->store_timestamp_ms < queue->start_ms || record->store_timestamp_ms >= queue->end_ms)
            return 0;
    }
    return !filter->by_tag || has_wanted_tag(filter, record);
}

/* -- selecting rows --------------------------------------------------------- */

#define NOT_WANTED -1

/* Select a whole record: MS_CASE_MESSAGE: it is a row now; NOT_WANTED; or what stops the selection before it. */
static inline int choose(struct ms_selection *s, const struct ms_record *record, int64_t offset)
{
    if (ms_record_physical_offset(record) != offset)
        return MS_CASE_OFFSET_MISMATCH;
    const int wanted = s->filter == NULL ? 1 : is_wanted(s->filter, record, s);
    if (wanted != 1)
        return wanted == 0 ? NOT_WANTED : wanted;
    const int found = ms_record_verify(record, offset, s->checks);
    if (found != MS_CASE_MESSAGE)
        return found;
    const int64_t bytes = s->bytes + record->size_bytes - (s->count_bodies ? 0 : record->body_bytes);
    if (bytes > s->bytes_max && s->count > 0)
        return MS_COLUMNS_FULL;
    s->bytes = bytes;
    s->count++;
    return MS_CASE_MESSAGE;
}

int ms_columns_select(struct ms_selection *s, const uint8_t *view, int64_t base_offset, int64_t end, int64_t limit)
{
    s->count = s->bytes = 0;
    while (s->position < end) {
        struct ms_record *const row = &s->rows[s->count];
        if (s->count == s->rows_max)
            return MS_COLUMNS_FULL;
        int found = ms_record_parse(view + (s->position - base_offset), limit - s->position, row);
        if (found != MS_CASE_MESSAGE)
            return found;
        ms_record_prefetch(row);
        found = choose(s, row, s->position);
        if (found != MS_CASE_MESSAGE && found != NOT_WANTED)
            return found;
        s->position += row->size_bytes;
    }
    return MS_CASE_RANGE_END;
}

int ms_columns_gather(struct ms_selection *s, const uint8_t *view, int64_t base_offset, int64_t limit,
                      const uint8_t *entries, int64_t count)
{
    s->count = s->bytes = 0;
    for (s->entries_read = 0; s->entries_read < count; s->entries_read++) {
        const uint8_t *const at = entries + s->entries_read * MS_QUEUE_ENTRY_BYTES;
        const int64_t offset = s->position = ms_get_i64(at);
        const int32_t size = ms_get_i32(at + 8);
        struct ms_record *const row = &s->rows[s->count];
        if (offset == 0 && size == MS_QUEUE_FILLER_SIZE)
            continue;
        if (s->count == s->rows_max)
            return MS_COLUMNS_FULL;
        if (offset < base_offset || offset >= limit || size > limit - offset)
            return MS_CASE_OVERRUN;
        int found = ms_record_parse(view + (offset - base_offset), limit - offset, row);
        if (found == MS_CASE_MESSAGE)
            found = row->size_bytes == size ? choose(s, row, offset) : MS_CASE_TORN;
        if (found != MS_CASE_MESSAGE && found != NOT_WANTED)
            return found;
    }
    return MS_CASE_RANGE_END;
}

/* -- columns ---------------------------------------------------------------- */

/* Rows at a time: few enough that the processor's cache holds their heads until all columns are filled from them. */
#define BLOCK_ROWS 64

static int is_text(const struct ms_column *column)
{
    return column->kind >= MS_COLUMN_TOPIC;
}

static int is_formatted(const struct ms_column *column)
{
    return column->kind >= MS_COLUMN_BORN_HOST && column->kind <= MS_COLUMN_MSG_ID;
}

#define NUMBERS(kind, type, value)                  \
    case MS_COLUMN_##kind: {                        \
        type *const numbers = column->data;         \
        for (int64_t i = begin; i < end; i++) {     \
            const struct ms_record *row = &rows[i]; \
            numbers[i] = (value);                   \
        }                                           \
    } break

static void fill_numbers(const struct ms_column *column, const struct ms_record *rows, int64_t begin, int64_t end)
{
    switch (column->kind) {
        NUMBERS(QUEUE_ID, int32_t, ms_record_queue_id(row));
        NUMBERS(FLAG, int32_t, ms_get_i32(row->start + MS_AT_FLAG));
        NUMBERS(SYS_FLAG, int32_t, row->sys_flag);
        NUMBERS(RECONSUME_TIMES, int32_t, ms_record_reconsume_times(row));
        NUMBERS(BODY_CRC, int32_t, ms_get_i32(row->start + MS_AT_BODY_CRC));
        NUMBERS(SIZE, int32_t, row->size_bytes);
        NUMBERS(BODY_SIZE, int32_t, row->body_bytes);
        NUMBERS(QUEUE_OFFSET, int64_t, ms_record_queue_offset(row));
        NUMBERS(PHYSICAL_OFFSET, int64_t, ms_record_physical_offset(row));
        NUMBERS(PREPARED_OFFSET, int64_t, ms_get_i64(ms_record_tail(row) + 4));
        NUMBERS(STORE_TIMESTAMP, int64_t, ms_microseconds(row->store_timestamp_ms));
        NUMBERS(BORN_TIMESTAMP, int64_t, ms_microseconds(ms_get_i64(row->start + MS_AT_BORN_TIMESTAMP)));
    default:
        break;
    }
}

/* 1.2.3.4:10911 or [2001:db8::1]:10911 */
static uint8_t *put_host(uint8_t *to, const uint8_t *host, int32_t host_bytes)
{
    if (host_bytes == 8) {
        for (int i = 0; i < 4; i++) {
            to = ms_put_decimal(to, host[i]);
            *to++ = i < 3 ? '.' : ':';
        }
    } else {
        char text[INET6_ADDRSTRLEN];
        inet_ntop(AF_INET6, host, text, sizeof text);
        const size_t length = strlen(text);
        *to++ = '[';
        memcpy(to, text, length);
        to += length;
        *to++ = ']';
        *to++ = ':';
    }
    return ms_put_decimal(to, ms_get_i32(host + host_bytes - 4));
}

/* The texts of a block of rows, and the bytes of formatted ones. */
struct block {
    struct ms_text texts[BLOCK_ROWS];
    uint8_t made[BLOCK_ROWS * MS_COLUMN_MADE_BYTES_MAX];
};

static void make_texts(struct block *block, int kind, const struct ms_record *rows, int64_t count)
{
    uint8_t *at = block->made;
    const uint8_t *last = NULL;
    int32_t last_bytes = 0;
    for (int64_t i = 0; i < count; i++) {
        const struct ms_record *const row = &rows[i];
        const int32_t bytes = kind == MS_COLUMN_BORN_HOST ? row->born_host_bytes : row->store_host_bytes;
        const uint8_t *const host = kind == MS_COLUMN_BORN_HOST ? row->start + MS_AT_BORN_HOST : ms_record_tail(row) - bytes;
        struct ms_text *const text = &block->texts[i];
        text->at = at;
        if (kind == MS_COLUMN_MSG_ID) {
            at = ms_put_hex(ms_put_hex(at, host, bytes), row->start + MS_AT_PHYSICAL_OFFSET, 8);
        } else if (bytes == last_bytes && memcmp(host, last, (size_t)bytes) == 0) { /* most rows have the host of the row before */
            *text = text[-1];
            continue;
        } else {
            at = put_host(at, host, bytes);
        }
        text->bytes = at - text->at;
        last = host;
        last_bytes = bytes;
    }
}

#define TEXTS(kind, name)                                                           \
    case MS_COLUMN_##kind:                                                          \
        for (int64_t i = 0; i < count; i++)                                         \
            block->texts[i] = (struct ms_text){rows[i].name, rows[i].name##_bytes}; \
        break

/* Return the texts of a column in the rows [begin, end). */
static const struct ms_text *texts_of(const struct ms_column *column, const struct ms_record *rows, int64_t begin, int64_t end,
                                      struct block *block)
{
    if (column->texts != NULL)
        return column->texts + begin;
    rows += begin;
    const int64_t count = end - begin;
    switch (column->kind) {
        TEXTS(TOPIC, topic);
        TEXTS(PROPERTIES, properties);
        TEXTS(BODY, body);
    default:
        make_texts(block, column->kind, rows, count);
        break;
    }
    return block->texts;
}

static void find_properties(const struct ms_column *columns, int64_t names, const struct ms_record *rows, int64_t begin, int64_t end)
{
    for (int64_t row = begin; row < end; row++) {
        struct ms_text rest = {rows[row].properties, rows[row].properties_bytes}, piece;
        for (int64_t i = 0; i < names; i++)
            columns[i].texts[row] = (struct ms_text){NULL, 0};
        while (ms_text_split(&rest, 2, &piece)) /* as ms_property_next, but the names are known: no search for where one ends */
            for (int64_t i = 0; i < names; i++) {
                const struct ms_text name = columns[i].name;
                if (piece.bytes > name.bytes + 1 && piece.at[name.bytes] == 1 && piece.at[0] == name.at[0] &&
                    memcmp(piece.at, name.at, (size_t)name.bytes) == 0)
                    columns[i].texts[row] = (struct ms_text){piece.at + name.bytes + 1, piece.bytes - name.bytes - 1};
            }
    }
}

/* Copy UTF-8, and replace invalid bytes by U+FFFD, up to `room` bytes; to NULL: only count. Set *bad if there are invalid bytes. */
static int64_t repair_text(struct ms_text text, uint8_t *to, int64_t room, int32_t *bad)
{
    const uint8_t *at = text.at, *const end = text.at + text.bytes;
    int64_t used = 0;
    while (at < end) {
        const uint8_t *const start = at;
        int bad_here = 0;
        ms_utf8_next(&at, end, &bad_here);
        const int64_t length = bad_here ? 3 : at - start;
        if (length > room - used)
            break;
        if (to != NULL)
            memcpy(to + used, bad_here ? (const uint8_t *)"\xEF\xBF\xBD" : start, (size_t)length);
        used += length;
        *bad |= bad_here;
    }
    return used;
}

static void measure_texts(struct ms_column *column, const struct ms_record *rows, int64_t begin, int64_t end)
{
    struct block block;
    const struct ms_text *const texts = texts_of(column, rows, begin, end, &block);
    const int is_utf8 = column->kind != MS_COLUMN_BODY;
    int64_t bytes = 0, nulls = 0;
    for (int64_t i = 0; i < end - begin; i++) {
        nulls += texts[i].at == NULL;
        if (!is_utf8 || ms_is_ascii(texts[i].at, texts[i].bytes))
            bytes += texts[i].bytes;
        else
            bytes += repair_text(texts[i], NULL, INT64_MAX, &column->is_bad);
    }
    column->bytes += bytes;
    column->nulls += nulls;
}

/* Another process may change the file after the texts were measured: a text that no longer fits is cut. */
static void fill_texts(const struct ms_column *column, const struct ms_record *rows, int64_t begin, int64_t end)
{
    struct block block;
    const struct ms_text *const texts = texts_of(column, rows, begin, end, &block);
    const int repair = column->is_bad;
    uint8_t *const data = column->data, *const validity = column->validity;
    int32_t *const offsets = column->offsets, bad = 0;
    int64_t used = offsets[begin];
    for (int64_t i = begin; i < end; i++) {
        const struct ms_text text = texts[i - begin];
        const int64_t room = column->bytes - used, bytes = text.bytes < room ? text.bytes : room;
        if (text.at != NULL && validity != NULL)
            validity[i / 8] |= (uint8_t)(1 << i % 8);
        if (repair) {
            used += repair_text(text, data + used, room, &bad);
        } else if (text.at != NULL) {
            memcpy(data + used, text.at, (size_t)bytes);
            used += bytes;
        }
        offsets[i + 1] = (int32_t)used;
    }
}

void ms_columns_measure(const struct ms_record *rows, int64_t count, struct ms_column *columns, int64_t column_count)
{
    int64_t names = 0;
    for (int64_t i = 0; i < column_count; i++) {
        struct ms_column *const column = &columns[i];
        names += column->kind == MS_COLUMN_PROPERTY;
        if (is_text(column))
            column->bytes = is_formatted(column) ? count * MS_COLUMN_MADE_BYTES_MAX : 0;
        else
            column->bytes = count * (column->kind < MS_COLUMN_QUEUE_OFFSET ? 4 : 8);
        column->nulls = column->is_bad = 0;
    }
    for (int64_t begin = 0; begin < count; begin += BLOCK_ROWS) {
        const int64_t end = count - begin < BLOCK_ROWS ? count : begin + BLOCK_ROWS;
        if (names > 0)
            find_properties(columns, names, rows, begin, end);
        for (int64_t i = 0; i < column_count; i++)
            if (is_text(&columns[i]) && !is_formatted(&columns[i]))
                measure_texts(&columns[i], rows, begin, end);
    }
}

void ms_columns_fill(const struct ms_record *rows, int64_t count, const struct ms_column *columns, int64_t column_count)
{
    for (int64_t i = 0; i < column_count; i++) {
        if (is_text(&columns[i]))
            columns[i].offsets[0] = 0;
        if (columns[i].validity != NULL)
            memset(columns[i].validity, 0, (size_t)(count + 7) / 8);
    }
    for (int64_t begin = 0; begin < count; begin += BLOCK_ROWS) {
        const int64_t end = count - begin < BLOCK_ROWS ? count : begin + BLOCK_ROWS;
        for (int64_t i = 0; i < column_count; i++) {
            if (is_text(&columns[i]))
                fill_texts(&columns[i], rows, begin, end);
            else
                fill_numbers(&columns[i], rows, begin, end);
        }
    }
}
