#include "base.h"
#include "dispatch.cdef.h"

#include "arrivals.h"
#include "property.h"
#include "record.h"
#include "topic.h"
#include "utf8.h"

#define SCHEDULE_TOPIC "SCHEDULE_TOPIC_XXXX"
#define SCHEDULE_TOPIC_BYTES 19

/* One queue in which a message has an entry. */
struct target {
    struct ms_text topic;
    int32_t queue_id;
    int64_t queue_offset;
};

/* An iterator over the queues of INNER_MULTI_DISPATCH. */
struct multi {
    struct ms_text names;
    struct ms_text offsets;
    int32_t queue_id;
};

/* Count the pieces of Java's split, without empty ones at the end. */
static int count_pieces(struct ms_text text)
{
    struct ms_text piece;
    int count = 0, filled = 0;
    while (ms_text_split(&text, ',', &piece)) {
        count++;
        if (piece.bytes > 0)
            filled = count;
    }
    return filled;
}

static void multi_begin(struct multi *multi, const struct ms_routing *routing, int32_t queue_id)
{
    multi->names = routing->multi_dispatch;
    multi->offsets = routing->multi_queue_offset;
    multi->queue_id = queue_id;
    if (multi->offsets.at == NULL || count_pieces(multi->names) != count_pieces(multi->offsets))
        multi->names.at = NULL;
}

static int multi_next(struct multi *multi, struct target *target)
{
    struct ms_text offset;
    while (ms_text_split(&multi->names, ',', &target->topic) && ms_text_split(&multi->offsets, ',', &offset)) {
        if (target->topic.bytes == 0 || !ms_text_number(offset, 0, INT64_MAX, &target->queue_offset))
            continue;
        target->queue_id = ms_topic_is_light(target->topic.at, target->topic.bytes) ? 0 : multi->queue_id;
        return 1;
    }
    return 0;
}

/* Return the tags code of a queue entry: the hash of the tags, or the due time of a delayed message (docs/formats.md section
 * 8.2). */
static int64_t tags_code_of(const struct ms_dispatch *d, const struct ms_record *record, const struct ms_routing *routing)
{
    int64_t level;
    if (record->topic_bytes == SCHEDULE_TOPIC_BYTES && routing->delay.at != NULL &&
        memcmp(record->topic, SCHEDULE_TOPIC, SCHEDULE_TOPIC_BYTES) == 0 &&
        ms_text_number(routing->delay, INT32_MIN, INT32_MAX, &level)) {
        if (level > d->delay_levels)
            level = d->delay_levels;
        if (level > 0)
            return (int64_t)((uint64_t)record->store_timestamp_ms + (uint64_t)d->delays_ms[level - 1]);
    }
    if (routing->tags.at == NULL)
        return 0;
    return (int32_t)ms_java_hash(0, routing->tags.at, routing->tags.bytes);
}

static int fail(struct ms_dispatch *d, int error)
{
    d->error_number = -error;
    return MS_DISPATCH_FAILED;
}

static int put_entry(struct ms_dispatch *d, const struct ms_record *record, const struct target *target,
                     int64_t physical_offset, int64_t tags_code)
{
    const int queue = ms_queue_keys_find(&d->queues.keys, target->topic.at, (int32_t)target->topic.bytes, target->queue_id);
    if (queue < 0) {
        d->wanted_topic = target->topic.at;
        d->wanted_topic_bytes = (int32_t)target->topic.bytes;
        d->wanted_queue_id = target->queue_id;
        d->wanted_queue_offset = target->queue_offset;
        return MS_DISPATCH_NEEDS_QUEUE;
    }
    int64_t position;
    const int result = ms_queue_put(&d->queues, queue, target->queue_offset, physical_offset, record->size_bytes,
                                    tags_code, record->store_timestamp_ms, &position);
    if (result == MS_QUEUE_NEEDS_FILE) {
        d->wanted_queue = queue;
        d->wanted_queue_offset = position;
        return MS_DISPATCH_NEEDS_FILE;
    }
    if (result == MS_QUEUE_NEEDS_EXT) {
        d->wanted_queue = queue;
        return MS_DISPATCH_NEEDS_EXT;
    }
    if (result != 0)
        return fail(d, result);
    if (d->arrivals != NULL) {
        const uint32_t slot = d->queues.queues[queue].arrival_slot;
        ms_arrivals_note(d->arrivals, slot, physical_offset + record->size_bytes);
        d->arrived_bits |= ms_arrivals_bit(slot);
    }
    return 0;
}

static int to_queues(struct ms_dispatch *d, const struct ms_record *record, const struct ms_routing *routing,
                     int64_t physical_offset)
{
    const int64_t tags_code = tags_code_of(d, record, routing);
    struct target target = {
        .topic = {record->topic, record->topic_bytes},
        .queue_id = ms_record_queue_id(record),
        .queue_offset = ms_record_queue_offset(record),
    };
    int result = put_entry(d, record, &target, physical_offset, tags_code);
    if (result == 0 && d->multi_dispatch && routing->multi_dispatch.at != NULL) {
        struct multi multi;
        multi_begin(&multi, routing, target.queue_id);
        while (result == 0 && multi_next(&multi, &target))
            result = put_entry(d, record, &target, physical_offset, tags_code);
    }
    return result;
}

/* Put the key, unless it is one of the record's first indexed_keys keys, which were put before a crash. */
static int put_key(struct ms_dispatch *d, const struct ms_record *record, struct ms_text key, int64_t physical_offset,
                   int64_t *seen)
{
    if ((*seen)++ < d->indexed_keys)
        return 0;
    if (d->index.base == NULL)
        return MS_DISPATCH_NEEDS_INDEX;
    const int32_t hash = ms_index_key_hash(record->topic, record->topic_bytes, key.at, key.bytes);
    const int error = ms_index_put(&d->index, d->progress, hash, physical_offset, record->store_timestamp_ms);
    if (error < 0)
        d->queues.failed_queue = -1;
    if (error != 0)
        return error < 0 ? fail(d, error) : MS_DISPATCH_NEEDS_INDEX;
    d->indexed_keys++;
    d->keys++;
    return 0;
}

static int to_index(struct ms_dispatch *d, const struct ms_record *record, const struct ms_routing *routing,
                    int64_t physical_offset)
{
    if (physical_offset < d->indexed_offset)
        return 0;
    if (physical_offset > d->indexed_offset) {
        /* Like RocketMQ, provide a file with room before looking for keys. */
        if (d->index.base == NULL || ms_index_count(&d->index) >= d->index.entries)
            return MS_DISPATCH_NEEDS_INDEX;
        d->indexed_offset = physical_offset;
        d->indexed_keys = 0;
    }
    struct ms_keys keys = ms_keys_of(record, routing);
    struct ms_text key;
    int64_t seen = 0;
    int result = 0;
    while (result == 0 && ms_keys_next(&keys, &key))
        result = put_key(d, record, key, physical_offset, &seen);
    return result;
}

int ms_dispatch_run(struct ms_dispatch *d, const uint8_t *view, int64_t base_offset, int64_t start, int64_t end)
{
    int64_t offset = start;
    int found = MS_CASE_RANGE_END;
    struct ms_record record;
    struct ms_routing routing;

    d->queues.tick++;
    while (offset < end) {
        found = ms_record_parse(view + (offset - base_offset), end - offset, &record);
        if (found != MS_CASE_MESSAGE)
            break;
        ms_record_prefetch(&record);
        if (ms_record_physical_offset(&record) != offset) {
            found = MS_CASE_OFFSET_MISMATCH;
            break;
        }
        ms_property_routing(record.properties, record.properties_bytes, &routing);
        if (ms_record_is_queued(&record) && (found = to_queues(d, &record, &routing, offset)) != 0)
            break;
        MS_FAILPOINT("dispatch_queued");
        if (d->index_enabled && (found = to_index(d, &record, &routing, offset)) != 0)
            break;
        MS_FAILPOINT("dispatch_indexed");
        d->last_store_timestamp_ms = record.store_timestamp_ms;
        d->messages++;
        offset += record.size_bytes;
        found = MS_CASE_RANGE_END;
    }
    MS_FAILPOINT("dispatch_gathered");
    const int error = ms_queue_write_gathered(&d->queues);
    MS_FAILPOINT("dispatch_written");
    if (error != 0 && found != MS_DISPATCH_FAILED)
        found = fail(d, error);
    d->reached = found == MS_DISPATCH_FAILED ? start : offset;
    return found;
}

/* Return the queue's place in the table; for a new queue claim one, and count it in *taken. NULL if the table is half full. */
static struct ms_touched_queue *place_of(struct ms_touched_queue *places, int64_t place_count, const struct target *target,
                                         int64_t *taken)
{
    const uint64_t hash = ms_queue_hash(target->topic.at, (int32_t)target->topic.bytes, target->queue_id);
    struct ms_touched_queue *place;
    for (uint64_t at = hash;; at++) {
        place = &places[at & (uint64_t)(place_count - 1)];
        if (place->topic == NULL)
            break;
        if (place->hash == hash && place->queue_id == target->queue_id && place->topic_bytes == target->topic.bytes &&
            memcmp(place->topic, target->topic.at, (size_t)target->topic.bytes) == 0)
            return place;
    }
    if (2 * (*taken + 1) > place_count)
        return NULL;
    place->hash = hash;
    place->topic = target->topic.at;
    place->topic_bytes = (int32_t)target->topic.bytes;
    place->queue_id = target->queue_id;
    place->min_queue_offset = place->max_queue_offset = place->newest = -1;
    ++*taken;
    return place;
}

static void touch(struct ms_touched_queue *place, int64_t queue_offset, int64_t physical_offset, int64_t store_timestamp_ms)
{
    if (place->count == 0 || queue_offset < place->min_queue_offset)
        place->min_queue_offset = queue_offset;
    if (place->count == 0 || queue_offset > place->max_queue_offset)
        place->max_queue_offset = queue_offset;
    place->count++;
    place->newest = physical_offset;
    place->newest_ms = store_timestamp_ms;
}

/* Count a record once, even if it names the queue twice or is of that queue itself (docs/formats.md section 8.4). */
static void touch_apart(struct ms_touched_queue *place, int64_t physical_offset)
{
    if (place->newest != physical_offset)
        place->further++;
    place->newest = physical_offset;
}

int ms_dispatch_touched(struct ms_touched_queue *places, int64_t place_count, int how, const uint8_t *view,
                        int64_t base_offset, int64_t start, int64_t end, int64_t *reached,
                        int64_t *last_store_timestamp_ms)
{
    int64_t taken = 0, offset = start;
    int found = MS_CASE_RANGE_END;
    struct ms_record record;
    struct ms_routing routing;
    struct multi multi = {{NULL, 0}, {NULL, 0}, 0};
    while (offset < end) {
        found = ms_record_parse(view + (offset - base_offset), end - offset, &record);
        if (found != MS_CASE_MESSAGE)
            break;
        ms_record_prefetch(&record);
        if (ms_record_is_queued(&record)) {
            struct target target = {
                .topic = {record.topic, record.topic_bytes},
                .queue_id = ms_record_queue_id(&record),
                .queue_offset = ms_record_queue_offset(&record),
            };
            if (how != MS_TOUCHED_OWN) {
                ms_property_routing(record.properties, record.properties_bytes, &routing);
                multi_begin(&multi, &routing, target.queue_id);
            }
            struct ms_touched_queue *place = place_of(places, place_count, &target, &taken);
            if (place == NULL)
                return -ENOSPC;
            touch(place, target.queue_offset, offset, record.store_timestamp_ms);
            while (multi_next(&multi, &target)) { /* counted as they come: another process may change the file meanwhile */
                place = place_of(places, place_count, &target, &taken);
                if (place == NULL)
                    return -ENOSPC;
                if (how == MS_TOUCHED_APART)
                    touch_apart(place, offset);
                else
                    touch(place, target.queue_offset, offset, record.store_timestamp_ms);
            }
        }
        *last_store_timestamp_ms = record.store_timestamp_ms;
        offset += record.size_bytes;
        found = MS_CASE_RANGE_END;
    }
    *reached = offset;
    return found;
}
