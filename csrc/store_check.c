#include "base.h"
#include "store_check.cdef.h"

#include "consume_queue.h"
#include "index_file.h"
#include "property.h"
#include "record.h"
#include "utf8.h"

/* Parse the record at a physical offset, if [base_offset, limit) contains it completely. */
static int record_at(const uint8_t *view, int64_t base_offset, int64_t limit, int64_t offset, struct ms_record *record)
{
    return offset >= base_offset && offset < limit &&
           ms_record_parse(view + (offset - base_offset), limit - offset, record) == MS_CASE_MESSAGE;
}

static int tags_fit(const struct ms_record *record, int64_t tags_code)
{
    struct ms_routing routing;
    if (tags_code <= MS_EXT_ADDRESS_MAX)
        return 1;
    ms_property_routing(record->properties, record->properties_bytes, &routing);
    return tags_code == (routing.tags.at == NULL ? 0 : (int32_t)ms_java_hash(0, routing.tags.at, routing.tags.bytes));
}

int64_t ms_check_entries(const uint8_t *view, int64_t base_offset, int64_t limit, const uint8_t *topic,
                         int32_t topic_bytes, int32_t queue_id, int64_t first_queue_offset, const uint8_t *entries,
                         int64_t count, int64_t after, int check_tags, int check_offset)
{
    struct ms_record record;
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *const entry = entries + MS_QUEUE_ENTRY_BYTES * i;
        const int64_t offset = ms_get_i64(entry);
        if (offset <= after || !record_at(view, base_offset, limit, offset, &record) ||
            record.size_bytes != ms_get_i32(entry + 8) || !ms_record_is_queued(&record) ||
            (check_offset && ms_record_physical_offset(&record) != offset) ||
            ms_record_queue_id(&record) != queue_id || ms_record_queue_offset(&record) != first_queue_offset + i ||
            record.topic_bytes != topic_bytes || memcmp(record.topic, topic, (size_t)topic_bytes) != 0 ||
            (check_tags && !tags_fit(&record, ms_get_i64(entry + 12))))
            return i;
        after = offset;
    }
    return count;
}

int64_t ms_check_chains(const uint8_t *file, int32_t slots, int32_t count, int32_t end, int32_t *heads)
{
    const uint8_t *const first_slot = file + MS_INDEX_HEADER_BYTES;
    const uint8_t *const entry_zero = first_slot + 4 * (int64_t)slots;
    for (int32_t n = 1; n < count; n++) {
        const uint8_t *const entry = entry_zero + MS_INDEX_ENTRY_BYTES * (int64_t)n;
        const int32_t hash = ms_get_i32(entry);
        if (hash < 0 || ms_get_i32(entry + 16) != heads[hash % slots])
            return n;
        heads[hash % slots] = n;
    }
    for (int32_t slot = 0; slot < slots; slot++) {
        int32_t newest = ms_get_i32(first_slot + 4 * (int64_t)slot);
        for (int32_t after = end; newest >= count && newest < after;) {
            after = newest;
            newest = ms_get_i32(entry_zero + MS_INDEX_ENTRY_BYTES * (int64_t)after + 16);
        }
        if (newest != heads[slot])
            return -1 - (int64_t)slot;
    }
    return 0;
}

static struct ms_keys keys_of(const struct ms_record *record)
{
    struct ms_routing routing;
    ms_property_routing(record->properties, record->properties_bytes, &routing);
    return ms_keys_of(record, &routing);
}

int32_t ms_check_keys(const uint8_t *view, int64_t base_offset, int64_t limit, const uint8_t *entry_zero, int32_t first,
                      int32_t end)
{
    struct ms_record record;
    struct ms_text key;
    for (int32_t n = first; n < end; n++) {
        const uint8_t *const entry = entry_zero + MS_INDEX_ENTRY_BYTES * (int64_t)n;
        if (!record_at(view, base_offset, limit, ms_get_i64(entry + 4), &record))
            return n;
        int found = 0;
        struct ms_keys keys = keys_of(&record);
        while (!found && ms_keys_next(&keys, &key))
            found = ms_index_key_hash(record.topic, record.topic_bytes, key.at, key.bytes) == ms_get_i32(entry);
        if (!found)
            return n;
    }
    return end;
}

int64_t ms_check_count_keys(const uint8_t *view, int64_t base_offset, int64_t start, int64_t end)
{
    struct ms_record record;
    struct ms_text key;
    int64_t count = 0;
    for (int64_t offset = start; record_at(view, base_offset, end, offset, &record); offset += record.size_bytes) {
        struct ms_keys keys = keys_of(&record);
        while (ms_keys_next(&keys, &key))
            count++;
    }
    return count;
}
