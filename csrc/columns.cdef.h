/* Reads log records into columns in Arrow's layout: select rows, measure, fill.
 *
 * Who: readers and Spark workers, over read-only mappings of their own. Blocks on: page faults, for the length of a
 * batch; cffi releases the GIL. Crash states: none.
 *
 * The caller first selects a batch of records (from a range, or from the entries of a consume queue), then measures all
 * columns, then fills them. So every buffer is allocated in the size it needs, and a new column is one more case. Selected
 * rows point into the view, which must stay mapped until the columns are filled.
 */
#pragma once

#include "queue_keys.h"
#include "record.h"

/* Columns of whole numbers: 4 bytes ... */
#define MS_COLUMN_QUEUE_ID 0
#define MS_COLUMN_FLAG 1
#define MS_COLUMN_SYS_FLAG 2
#define MS_COLUMN_RECONSUME_TIMES 3
#define MS_COLUMN_BODY_CRC 4
#define MS_COLUMN_SIZE 5
#define MS_COLUMN_BODY_SIZE 6
/* ... 8 bytes ... */
#define MS_COLUMN_QUEUE_OFFSET 16
#define MS_COLUMN_PHYSICAL_OFFSET 17
#define MS_COLUMN_PREPARED_OFFSET 18
/* ... and times, in microseconds; a time out of range becomes the nearest in range. */
#define MS_COLUMN_STORE_TIMESTAMP 19
#define MS_COLUMN_BORN_TIMESTAMP 20
/* Texts of the record as they are ... */
#define MS_COLUMN_TOPIC 32
#define MS_COLUMN_PROPERTIES 33
#define MS_COLUMN_BODY 34
#define MS_COLUMN_PROPERTY 35      /* the value of the property `name`; null if absent */
/* ... formatted from it, and not measured: they get MS_COLUMN_MADE_BYTES_MAX a row, which is enough ... */
#define MS_COLUMN_BORN_HOST 48
#define MS_COLUMN_STORE_HOST 49
#define MS_COLUMN_MSG_ID 50
#define MS_COLUMN_MADE_BYTES_MAX 64
/* ... and texts that the caller has put into `texts`: a column without records. */
#define MS_COLUMN_GIVEN 64

/* Beside MS_CASE_*: why a selection stopped. */
#define MS_COLUMNS_FULL 32         /* the batch is full: fill, then go on */
#define MS_COLUMNS_NEEDS_QUEUE 33  /* the filter does not know `unknown_topic`, `unknown_queue_id` */

/* The wanted part of a queue. */
struct ms_filter_queue {
    int64_t first_offset;      /* rows with first_offset <= queue offset < end_offset */
    int64_t end_offset;
    int64_t start_ms;          /* and start_ms <= store time < end_ms */
    int64_t end_ms;
};

struct ms_row_filter {
    struct ms_queue_keys keys; /* of the queues that were met; the caller adds one that is not */
    struct ms_filter_queue *queues;
    const struct ms_text *tags; /* wanted TAGS, any of them */
    int32_t tag_count;
    int32_t by_queue;          /* 0: every queue is wanted */
    int32_t by_tag;            /* 0: any tag, and none */
    int32_t queued_only;       /* 1: no prepared and rolled back messages */
    int64_t start_ms;          /* start_ms <= store time < end_ms */
    int64_t end_ms;
};

/* What to select (set once), and how far that has come. */
struct ms_selection {
    const struct ms_row_filter *filter; /* NULL: all rows */
    struct ms_record *rows;    /* room for rows_max */
    int64_t rows_max;
    int64_t bytes_max;         /* of all rows; a first row is selected at any size */
    int32_t count_bodies;      /* 0: `bytes_max` is without bodies */
    int32_t checks;            /* as for ms_record_classify; only lengths and offset of records that are not selected */
    int64_t position;          /* where to continue, or what stopped the selection */
    int64_t entries_read;      /* gather: before the one that stopped it */
    int64_t count;             /* rows selected */
    int64_t bytes;             /* of these */
    const uint8_t *unknown_topic; /* inside the view */
    int32_t unknown_topic_bytes;
    int32_t unknown_queue_id;
};

/* A column of a batch. */
struct ms_column {
    int32_t kind;              /* MS_COLUMN_* */
    int32_t is_bad;            /* measured: a text is not UTF-8; U+FFFD replaces each maximal invalid part */
    struct ms_text name;       /* MS_COLUMN_PROPERTY: not empty, without 0x01 and 0x02 */
    struct ms_text *texts;     /* MS_COLUMN_PROPERTY: memory for one text a row; NULL for other columns of records */
    int64_t nulls;             /* measured */
    int64_t bytes;             /* measured: length of `data` */
    void *data;                /* int32_t[rows], int64_t[rows], or the bytes of the texts */
    int32_t *offsets;          /* of texts: rows + 1 */
    uint8_t *validity;         /* one bit a row; NULL without nulls */
};

/* Select records that begin in [position, end). Reads nothing at or above `limit`. Returns MS_CASE_* (RANGE_END: done),
 * MS_COLUMNS_FULL or MS_COLUMNS_NEEDS_QUEUE. */
int ms_columns_select(struct ms_selection *selection, const uint8_t *view, int64_t base_offset, int64_t end, int64_t limit);
/* Select the records that `count` entries of a consume queue name; all must lie in this segment. Skips filler. An
 * entry whose record is not whole, or has another offset or size, stops it with what is wrong there. */
int ms_columns_gather(struct ms_selection *selection, const uint8_t *view, int64_t base_offset, int64_t limit,
                      const uint8_t *entries, int64_t count);

/* Find the properties and set `bytes`, `nulls` and `is_bad` of each column. Columns of properties come first. */
void ms_columns_measure(const struct ms_record *rows, int64_t count, struct ms_column *columns, int64_t column_count);
/* Fill the columns that were measured. Writes no more than `bytes`, even if the bytes of the records have changed since. */
void ms_columns_fill(const struct ms_record *rows, int64_t count, const struct ms_column *columns, int64_t column_count);
