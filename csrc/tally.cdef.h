/* Counts records in groups: by queue, by topic, or by topic and interval of the store time.
 *
 * Who: readers and Spark workers, over records that ms_columns_select or _gather has selected in mappings of their own.
 * Blocks on: page faults; cffi releases the GIL. Crash states: none.
 *
 * A group has a copy of its topic, so a mapping may end before the group does.
 */
#define MS_TALLY_BY_TOPIC 0
#define MS_TALLY_BY_QUEUE 1
#define MS_TALLY_BY_STEP 2

/* Columns of groups, 8 bytes each; `largest` and `queue` 4. */
#define MS_TALLY_STEP 0        /* begin of the interval, in microseconds */
#define MS_TALLY_MESSAGES 1
#define MS_TALLY_BODY_BYTES 2
#define MS_TALLY_BYTES 3
#define MS_TALLY_DELAYED 4
#define MS_TALLY_TRANSACTIONAL 5
#define MS_TALLY_COMPRESSED 6
#define MS_TALLY_RETRIED 7
#define MS_TALLY_FIRST_OFFSET 8
#define MS_TALLY_LAST_OFFSET 9
#define MS_TALLY_FIRST_TIMESTAMP 10 /* in microseconds, as the column */
#define MS_TALLY_LAST_TIMESTAMP 11
#define MS_TALLY_NUMBERS 12
#define MS_TALLY_LARGEST 16
#define MS_TALLY_QUEUE 17

struct ms_tally_group {
    uint64_t hash;
    int64_t numbers[MS_TALLY_NUMBERS]; /* MS_TALLY_*; MS_TALLY_STEP is the queue id by queue, and 0 by topic */
    int32_t largest;
    int32_t topic_bytes;
    uint8_t topic[128];
};

struct ms_tally {
    struct ms_tally_group *groups;
    int32_t *places;           /* group, or -1; linear probing, at most half full */
    int32_t group_capacity;
    int32_t group_count;
    int32_t place_mask;
    int32_t by;                /* MS_TALLY_BY_* */
    int64_t step_us;
};

/* Remove all groups; `places` may be uninitialized. */
void ms_tally_clear(struct ms_tally *tally);
/* Count records; unless `keep` is NULL only those whose byte there is not 0. Stop before the first that needs a group too
 * many; return the number of records processed. */
int64_t ms_tally_add(struct ms_tally *tally, const struct ms_record *rows, int64_t count, const uint8_t *keep);
/* Write a column of the groups to `to`: int64_t[groups], or int32_t[groups] for MS_TALLY_LARGEST and _QUEUE. */
void ms_tally_numbers(const struct ms_tally *tally, int column, void *to);
/* Find the groups' topics. */
void ms_tally_topics(const struct ms_tally *tally, struct ms_text *texts);
