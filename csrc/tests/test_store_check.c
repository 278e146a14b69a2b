/* The loops of the whole-store check count right entries, and read nothing outside the given memory, whatever a file has. */
#include "segments.h"
#include "../store_check.cdef.h"

#include "../consume_queue.h"
#include "../index_file.h"
#include "../property.h"
#include "../utf8.h"

enum { SLOTS = 7,
       ENTRIES = 40 };

/* Entries of all queued records of one topic and queue, as a consume queue would hold them. */
static int64_t entries_of(const struct segment *s, int record, uint8_t *to)
{
    struct ms_record r;
    const uint8_t *const at = s->bytes + (s->starts[record] - s->base);
    CHECK(ms_record_parse(at, s->total - (at - s->bytes), &r) == MS_CASE_MESSAGE);
    if (!ms_record_is_queued(&r))
        return 0;
    struct ms_routing routing;
    ms_property_routing(r.properties, r.properties_bytes, &routing);
    const int64_t tags = routing.tags.at == NULL ? 0 : (int32_t)ms_java_hash(0, routing.tags.at, routing.tags.bytes);
    ms_queue_encode_entry(to, s->starts[record], r.size_bytes, tags);
    return 1;
}

static void good_entries_fit_and_changed_ones_do_not(void)
{
    struct segment s;
    segment_build(&s, 30, 4096);
    struct guarded view = guarded_copy(s.bytes, s.total);
    for (int i = 0; i < s.records; i++) {
        uint8_t entry[MS_QUEUE_ENTRY_BYTES];
        struct ms_record r;
        CHECK(ms_record_parse(view.at + (s.starts[i] - s.base), s.total, &r) == MS_CASE_MESSAGE);
        if (!entries_of(&s, i, entry))
            continue;
        const int32_t queue_id = ms_record_queue_id(&r);
#define FITS(limit, queue, offset, after, tags) \
    ms_check_entries(view.at, s.base, limit, r.topic, r.topic_bytes, queue, offset, entry, 1, after, tags, 0)
        CHECK(FITS(s.base + s.total, queue_id, i, -1, 1) == 1);
        CHECK(FITS(s.starts[i + 1], queue_id, i, s.starts[i] - 1, 1) == 1);
        CHECK(FITS(s.starts[i + 1] - 1, queue_id, i, -1, 1) == 0);
        CHECK(FITS(s.base + s.total, queue_id, i, s.starts[i], 1) == 0);
        CHECK(FITS(s.base + s.total, queue_id + 1, i, -1, 1) == 0);
        CHECK(FITS(s.base + s.total, queue_id, i + 1, -1, 1) == 0);
        entry[19] ^= 1;
        CHECK(FITS(s.base + s.total, queue_id, i, -1, 1) == 0);
        CHECK(FITS(s.base + s.total, queue_id, i, -1, 0) == 1);
        entry[11] ^= 1;
        CHECK(FITS(s.base + s.total, queue_id, i, -1, 0) == 0);
    }
    guarded_free(&view);
}

static void an_index_that_was_put_has_sound_chains_and_founded_keys(void)
{
    struct segment s;
    segment_build(&s, 30, 0);
    const int64_t bytes = MS_INDEX_HEADER_BYTES + 4 * SLOTS + MS_INDEX_ENTRY_BYTES * ENTRIES;
    struct guarded file = guarded_new(bytes);
    memset(file.at, 0, (size_t)bytes);
    struct ms_index_progress progress = {0};
    struct ms_index_file index = {.base = file.at, .slots = SLOTS, .entries = ENTRIES, .allocated_bytes = INT64_MAX};
    const uint8_t *const entry_zero = file.at + MS_INDEX_HEADER_BYTES + 4 * SLOTS;
    int32_t count = 1;
    for (int i = 0; i < s.records; i++) {
        struct ms_record r;
        struct ms_routing routing;
        CHECK(ms_record_parse(s.bytes + s.starts[i], s.total, &r) == MS_CASE_MESSAGE);
        ms_property_routing(r.properties, r.properties_bytes, &routing);
        if (routing.uniq_key.at == NULL || (r.sys_flag & MS_SYS_FLAG_TRANSACTION) == MS_SYS_FLAG_ROLLBACK)
            continue;
        const int32_t hash = ms_index_key_hash(r.topic, r.topic_bytes, routing.uniq_key.at, routing.uniq_key.bytes);
        CHECK(ms_index_put(&index, &progress, hash, s.starts[i], r.store_timestamp_ms) == 0);
        count++;
    }
    int32_t heads[SLOTS] = {0};
    CHECK(ms_check_chains(file.at, SLOTS, count, count, heads) == 0);
    memset(heads, 0, sizeof heads);
    CHECK(count == 1 || ms_check_chains(file.at, SLOTS, 1 + count / 2, count, heads) == 0); /* the others are put meanwhile */
    memset(heads, 0, sizeof heads);
    CHECK(count < 3 || ms_check_chains(file.at, SLOTS, 1 + count / 2, 1 + count / 2, heads) < 0);
    CHECK(ms_check_keys(s.bytes, 0, s.total, entry_zero, 1, count) == count);
    CHECK(ms_check_count_keys(s.bytes, 0, 0, s.total) >= count - 1);
    if (count > 1) {
        file.at[MS_INDEX_HEADER_BYTES + 4 * SLOTS + MS_INDEX_ENTRY_BYTES * (count - 1) + 1] ^= 1;
        memset(heads, 0, sizeof heads);
        CHECK(ms_check_keys(s.bytes, 0, s.total, entry_zero, 1, count) == count - 1);
        ms_check_chains(file.at, SLOTS, count, count, heads);
        CHECK(ms_check_keys(s.bytes, 0, s.starts[0], entry_zero, 1, count) == 1);
    }
    guarded_free(&file);
}

static void arbitrary_bytes_lead_nowhere(void)
{
    for (int round = 0; round < 3000; round++) {
        struct segment s;
        segment_build(&s, 5, 1 << 20);
        for (uint64_t n = dice(20); n > 0; n--)
            s.bytes[dice((uint64_t)s.total)] = (uint8_t)dice(256);
        struct guarded view = guarded_copy(s.bytes, s.total);
        const int64_t limit = s.base + (int64_t)dice((uint64_t)s.total + 1);
        uint8_t raw[MS_INDEX_HEADER_BYTES + 4 * SLOTS + MS_INDEX_ENTRY_BYTES * ENTRIES];
        random_bytes(raw, sizeof raw);
        for (int i = 0; i < ENTRIES; i++) { /* half of the offsets hit the segment */
            uint8_t *const entry = raw + MS_INDEX_HEADER_BYTES + 4 * SLOTS + MS_INDEX_ENTRY_BYTES * i;
            if (dice(2)) {
                ms_put_64(entry, (uint64_t)s.starts[dice(5)]);
                ms_put_64(entry + 4, (uint64_t)s.starts[dice(5)]);
            }
        }
        struct guarded file = guarded_copy(raw, sizeof raw);
        const uint8_t *const entry_zero = file.at + MS_INDEX_HEADER_BYTES + 4 * SLOTS;
        int32_t heads[SLOTS] = {0};
        for (int i = 0; i < ENTRIES; i++)
            CHECK(ms_check_entries(view.at, s.base, limit, (const uint8_t *)"T", 1, (int32_t)dice(4), i,
                                   entry_zero + MS_QUEUE_ENTRY_BYTES * i, ENTRIES - i, -1, 1, 1) <= ENTRIES - i);
        ms_check_chains(file.at, SLOTS, ENTRIES / 2, ENTRIES, heads);
        for (int32_t i = 0; i < ENTRIES; i++)
            CHECK(ms_check_keys(view.at, s.base, limit, entry_zero, i, ENTRIES) >= i);
        CHECK(ms_check_count_keys(view.at, s.base, s.base, limit) >= 0);
        guarded_free(&view);
        guarded_free(&file);
    }
}

int main(void)
{
    dice_begin("test_store_check");
    good_entries_fit_and_changed_ones_do_not();
    an_index_that_was_put_has_sound_chains_and_founded_keys();
    arbitrary_bytes_lead_nowhere();
    return 0;
}
