#include "base.h"
#include "tally.h"

#include "consume_queue.h"
#include "property.h"

#define SYS_FLAG_COMPRESSED 1

void ms_tally_clear(struct ms_tally *tally)
{
    tally->group_count = 0;
    for (int32_t at = 0; at <= tally->place_mask; at++)
        tally->places[at] = -1;
}

/* Return the group of this key, a new one if there is none; NULL without room for it. */
static struct ms_tally_group *group_of(struct ms_tally *tally, const struct ms_record *row, int64_t key)
{
    const int32_t folded = (int32_t)((uint64_t)key ^ (uint64_t)key >> 32);
    const uint64_t hash = ms_queue_hash(row->topic, row->topic_bytes, folded);
    for (uint32_t at = (uint32_t)hash;; at++) {
        int32_t *const place = &tally->places[at & (uint32_t)tally->place_mask];
        if (*place < 0) {
            if (tally->group_count == tally->group_capacity)
                return NULL;
            *place = tally->group_count++;
            struct ms_tally_group *const group = &tally->groups[*place];
            memset(group, 0, sizeof *group);
            group->hash = hash;
            group->numbers[MS_TALLY_STEP] = key;
            group->topic_bytes = row->topic_bytes;
            memcpy(group->topic, row->topic, (size_t)row->topic_bytes);
            group->numbers[MS_TALLY_FIRST_OFFSET] = group->numbers[MS_TALLY_FIRST_TIMESTAMP] = INT64_MAX;
            group->numbers[MS_TALLY_LAST_OFFSET] = group->numbers[MS_TALLY_LAST_TIMESTAMP] = INT64_MIN;
            return group;
        }
        struct ms_tally_group *const group = &tally->groups[*place];
        if (group->hash == hash && group->numbers[MS_TALLY_STEP] == key && group->topic_bytes == row->topic_bytes &&
            memcmp(group->topic, row->topic, (size_t)row->topic_bytes) == 0)
            return group;
    }
}

/* Return whether it has the property DELAY, by the rules of property.h. */
static int is_delayed(const struct ms_record *row)
{
    static const char wanted[] = "DELAY\1";
    const int64_t wanted_bytes = sizeof wanted - 1;
    struct ms_text rest = {row->properties, row->properties_bytes}, piece;
    while (ms_text_split(&rest, 2, &piece))
        if (piece.bytes > wanted_bytes && memcmp(piece.at, wanted, (size_t)wanted_bytes) == 0) /* its value is not empty */
            return 1;
    return 0;
}

/* Return the begin of the interval that contains `us`. */
static int64_t step_of(int64_t us, int64_t step_us)
{
    const int64_t inside = us % step_us;
    return us - (inside < 0 ? inside + step_us : inside);
}

static void widen(int64_t *first, int64_t *last, int64_t value)
{
    if (value < *first)
        *first = value;
    if (value > *last)
        *last = value;
}

int64_t ms_tally_add(struct ms_tally *tally, const struct ms_record *rows, int64_t count, const uint8_t *keep)
{
    for (int64_t i = 0; i < count; i++) {
        if (keep != NULL && keep[i] == 0)
            continue;
        const struct ms_record *const row = &rows[i];
        const int64_t us = ms_microseconds(row->store_timestamp_ms);
        int64_t key = 0;
        if (tally->by == MS_TALLY_BY_QUEUE)
            key = ms_record_queue_id(row);
        else if (tally->by == MS_TALLY_BY_STEP)
            key = step_of(us, tally->step_us);
        struct ms_tally_group *const group = group_of(tally, row, key);
        if (group == NULL)
            return i;
        int64_t *const numbers = group->numbers;
        numbers[MS_TALLY_MESSAGES]++;
        numbers[MS_TALLY_BODY_BYTES] += row->body_bytes;
        numbers[MS_TALLY_BYTES] += row->size_bytes;
        numbers[MS_TALLY_DELAYED] += is_delayed(row);
        numbers[MS_TALLY_TRANSACTIONAL] += (row->sys_flag & MS_SYS_FLAG_TRANSACTION) != 0;
        numbers[MS_TALLY_COMPRESSED] += (row->sys_flag & SYS_FLAG_COMPRESSED) != 0;
        numbers[MS_TALLY_RETRIED] += ms_record_reconsume_times(row) > 0;
        widen(&numbers[MS_TALLY_FIRST_OFFSET], &numbers[MS_TALLY_LAST_OFFSET], ms_record_queue_offset(row));
        widen(&numbers[MS_TALLY_FIRST_TIMESTAMP], &numbers[MS_TALLY_LAST_TIMESTAMP], us);
        if (row->size_bytes > group->largest)
            group->largest = row->size_bytes;
    }
    return count;
}

void ms_tally_numbers(const struct ms_tally *tally, int column, void *to)
{
    int64_t *const wide = to;
    int32_t *const narrow = to;
    for (int32_t at = 0; at < tally->group_count; at++) {
        const struct ms_tally_group *const group = &tally->groups[at];
        switch (column) {
        case MS_TALLY_LARGEST:
            narrow[at] = group->largest;
            break;
        case MS_TALLY_QUEUE:
            narrow[at] = (int32_t)group->numbers[MS_TALLY_STEP];
            break;
        default:
            wide[at] = group->numbers[column];
            break;
        }
    }
}

void ms_tally_topics(const struct ms_tally *tally, struct ms_text *texts)
{
    for (int32_t at = 0; at < tally->group_count; at++)
        texts[at] = (struct ms_text){tally->groups[at].topic, tally->groups[at].topic_bytes};
}
