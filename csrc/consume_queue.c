#include "base.h"
#include "consume_queue.h"

#include "arrivals.h"
#include "flush.cdef.h"

int ms_queue_add(struct ms_queue_set *set, const uint8_t *topic, int32_t topic_bytes, int32_t queue_id)
{
    const int number = ms_queue_keys_add(&set->keys, topic, topic_bytes, queue_id);
    if (number < 0)
        return number;
    struct ms_queue *const queue = &set->queues[number];
    memset(queue, 0, sizeof *queue);
    queue->queue_id = queue_id;
    queue->arrival_slot = ms_arrivals_slot(topic, topic_bytes, queue_id);
    queue->max_physical = -1;
    queue->allocated_bytes = -1;
    queue->fd = -1;
    queue->chunk = -1;
    if (set->topic_stats != NULL)
        queue->counted = ms_topic_stats_find(set->topic_stats, topic, (uint32_t)topic_bytes);
    return number;
}

void ms_queue_encode_entry(uint8_t *to, int64_t physical_offset, int32_t size_bytes, int64_t tags_code)
{
    ms_put_64(to, (uint64_t)physical_offset);
    ms_put_32(to + 8, (uint32_t)size_bytes);
    ms_put_64(to + 12, (uint64_t)tags_code);
}

/* Drop the gathered units; afterwards `end` is unknown. */
static void drop_units(struct ms_ext_set *set, int32_t queue, int32_t run)
{
    if (set->runs[run].bytes > 0)
        set->queues[queue].end = -1;
    set->runs[run].bytes = 0;
}

/* Write the gathered units: 0, or -errno, after which `end` is unknown. Nothing stays gathered. */
static int write_units(struct ms_ext_set *set, int32_t number, int32_t run_number)
{
    struct ms_ext_run *const run = &set->runs[run_number];
    struct ms_ext_queue *const queue = &set->queues[number];
    if (run->bytes == 0)
        return 0;
    const int64_t at = run->first - queue->file_start;
    int error = ms_flush_allocate_windows(queue->fd, &queue->allocated_bytes, set->file_bytes, MS_QUEUE_WINDOW_BYTES,
                                          at, at + run->bytes);
    if (error == 0)
        error = ms_flush_pwrite_all(queue->fd, run->units, run->bytes, at);
    MS_FAILPOINT("ext_units_written");
    if (error != 0)
        drop_units(set, number, run_number);
    run->bytes = 0;
    return error;
}

/* Gather a unit: 0 with the tags code that names it, MS_QUEUE_NEEDS_EXT, or -errno. */
static int put_unit(struct ms_ext_set *set, int32_t number, int32_t run_number, int64_t tags_code, int64_t store_timestamp_ms,
                    int64_t *address)
{
    struct ms_ext_queue *const queue = &set->queues[number];
    struct ms_ext_run *const run = &set->runs[run_number];
    if (queue->fd < 0 || queue->end < queue->file_start || queue->end >= queue->file_start + set->file_bytes)
        return MS_QUEUE_NEEDS_EXT;
    if (run->bytes == 0)
        run->first = queue->end;
    uint8_t *const to = run->units + run->bytes;
    if (MS_EXT_UNIT_BYTES > queue->file_start + set->file_bytes - queue->end - MS_EXT_TAIL_BYTES) {
        ms_put_16(to, 0xFFFF); /* the file is full: size -1 */
        run->bytes += 2;
        const int error = write_units(set, number, run_number);
        if (error != 0)
            return error;
        queue->end = queue->file_start + set->file_bytes;
        return MS_QUEUE_NEEDS_EXT;
    }
    ms_put_16(to, MS_EXT_UNIT_BYTES);
    ms_put_64(to + 2, (uint64_t)tags_code);
    ms_put_64(to + 10, (uint64_t)store_timestamp_ms);
    ms_put_16(to + 18, 0);
    *address = (int64_t)((uint64_t)queue->end + (uint64_t)INT64_MIN);
    run->bytes += MS_EXT_UNIT_BYTES;
    queue->end += MS_EXT_UNIT_BYTES;
    return 0;
}

static int write_chunk(struct ms_queue_set *set, const struct ms_queue_chunk *chunk)
{
    struct ms_queue *const queue = &set->queues[chunk->queue];
    const int64_t bytes = (int64_t)chunk->count * MS_QUEUE_ENTRY_BYTES;
    const int64_t at = chunk->first * MS_QUEUE_ENTRY_BYTES - queue->file_start;
    int error = 0;
    if (set->ext != NULL && (error = write_units(set->ext, chunk->queue, (int32_t)(chunk - set->chunks))) != 0) {
        set->failed_queue = chunk->queue;
        return error;
    }
    if (!chunk->dirty)
        return 0;
    error = ms_flush_allocate_windows(queue->fd, &queue->allocated_bytes, set->file_bytes, MS_QUEUE_WINDOW_BYTES,
                                      at, at + bytes);
    MS_FAILPOINT("queue_room_allocated");
    if (error == 0)
        error = ms_flush_pwrite_all(queue->fd, chunk->entries, bytes, at);
    MS_FAILPOINT("queue_entries_written");
    if (error != 0) {
        set->failed_queue = chunk->queue;
    } else if (queue->counted != NULL && chunk->fresh > 0) {
        ms_store_relaxed(&queue->counted->messages, queue->counted->messages + (uint64_t)chunk->fresh);
        ms_store_relaxed(&queue->counted->bytes, queue->counted->bytes + (uint64_t)chunk->fresh_bytes);
    }
    return error;
}

int ms_queue_write_gathered(struct ms_queue_set *set)
{
    int error = 0;
    for (int32_t i = 0; i < set->chunks_used; i++) {
        const struct ms_queue_chunk *const chunk = &set->chunks[i];
        if (error == 0)
            error = write_chunk(set, chunk);
        else if (set->ext != NULL)
            drop_units(set->ext, chunk->queue, i);
        set->queues[chunk->queue].chunk = -1;
    }
    set->chunks_used = 0;
    return error;
}

/* Load the bytes of the file from `position` on; zeros beyond its end. */
static int load_chunk(const struct ms_queue_set *set, struct ms_queue_chunk *chunk, int64_t position)
{
    const struct ms_queue *const queue = &set->queues[chunk->queue];
    const int64_t at = position * MS_QUEUE_ENTRY_BYTES - queue->file_start;
    int64_t want = set->file_bytes - at;
    if (want > (int64_t)sizeof chunk->entries)
        want = sizeof chunk->entries;
    ssize_t got;
    do
        got = pread(queue->fd, chunk->entries, (size_t)want, at);
    while (got < 0 && errno == EINTR);
    if (got < 0)
        return -errno;
    memset(chunk->entries + got, 0, sizeof chunk->entries - (size_t)got);
    return 0;
}

/* Return whether the position has an entry, of this message or of another one (RocketMQ too keeps the first). */
static int is_taken(const uint8_t *entry, int64_t physical_offset, int32_t size_bytes, int64_t tags_code)
{
    const int64_t there = ms_get_i64(entry);
    const int32_t there_bytes = ms_get_i32(entry + 8);
    const int64_t there_tags = ms_get_i64(entry + 12);
    if (there < 0 || there_bytes <= 0 || (there == 0 && there_bytes == MS_QUEUE_FILLER_SIZE))
        return 0;
    return there != physical_offset ||
           (there_bytes == size_bytes && (there_tags == tags_code || there_tags <= MS_EXT_ADDRESS_MAX));
}

/* Return a chunk of the queue that can take `position`: the current one, or a new one. */
static int chunk_for(struct ms_queue_set *set, int32_t number, int64_t position, int repeated,
                     struct ms_queue_chunk **found)
{
    struct ms_queue *const queue = &set->queues[number];
    int error;
    if (queue->chunk < 0) {
        if (set->chunks_used == set->chunk_count && (error = ms_queue_write_gathered(set)) != 0)
            return error;
        queue->chunk = set->chunks_used++;
    } else {
        struct ms_queue_chunk *const chunk = &set->chunks[queue->chunk];
        if (position == chunk->first + chunk->count && chunk->count < MS_QUEUE_CHUNK_ENTRIES &&
            (chunk->loaded || !repeated)) {
            *found = chunk;
            return 0;
        }
        if ((error = write_chunk(set, chunk)) != 0)
            return error;
    }
    struct ms_queue_chunk *const chunk = &set->chunks[queue->chunk];
    chunk->first = position;
    chunk->count = 0;
    chunk->queue = number;
    chunk->loaded = repeated;
    chunk->dirty = 0;
    chunk->fresh = 0;
    chunk->fresh_bytes = 0;
    *found = chunk;
    if (repeated && (error = load_chunk(set, chunk, position)) != 0) {
        set->failed_queue = number;
        return error;
    }
    return 0;
}

int ms_queue_put(struct ms_queue_set *set, int32_t number, int64_t queue_offset, int64_t physical_offset,
                 int32_t size_bytes, int64_t tags_code, int64_t store_timestamp_ms, int64_t *position)
{
    struct ms_queue *const queue = &set->queues[number];
    const int repeated = physical_offset + size_bytes <= queue->max_physical;
    if (queue->refused)
        return 0;
    *position = queue_offset;
    if (repeated ? queue_offset < 0 || queue_offset >= queue->next_offset : queue_offset < queue->next_offset) {
        set->out_of_order += !repeated; /* an older message has its queue offset; else it is in its queue already */
        return 0;
    }
    if (!repeated && queue_offset > queue->next_offset)
        *position = queue->next_offset;
    const int64_t byte = *position * MS_QUEUE_ENTRY_BYTES;
    if (queue->fd < 0 || byte < queue->file_start || byte >= queue->file_start + set->file_bytes)
        return MS_QUEUE_NEEDS_FILE;

    struct ms_queue_chunk *chunk;
    int error = chunk_for(set, number, *position, repeated, &chunk);
    if (error != 0)
        return error;
    if (set->ext != NULL && !repeated) {
        error = put_unit(set->ext, number, queue->chunk, tags_code, store_timestamp_ms, &tags_code);
        if (error < 0)
            set->failed_queue = number;
        if (error != 0)
            return error;
    }
    uint8_t *const entry = chunk->entries + chunk->count * MS_QUEUE_ENTRY_BYTES;
    queue->last_used = set->tick;
    chunk->count++;
    if (repeated && is_taken(entry, physical_offset, size_bytes, tags_code))
        return 0;
    ms_queue_encode_entry(entry, physical_offset, size_bytes, tags_code);
    chunk->dirty = 1;
    if (!repeated) {
        set->out_of_order += queue_offset != *position;
        queue->next_offset = *position + 1;
        queue->max_physical = physical_offset + size_bytes;
    }
    chunk->fresh++;
    chunk->fresh_bytes += size_bytes;
    set->written++;
    return 0;
}

static int is_live(const uint8_t *entry)
{
    return ms_get_i64(entry) >= 0 && ms_get_i32(entry + 8) > 0;
}

int64_t ms_queue_live_entries(const uint8_t *entries, int64_t count, int64_t below)
{
    int64_t number = 0;
    while (number < count && is_live(entries) && ms_get_i64(entries) < below) {
        number++;
        entries += MS_QUEUE_ENTRY_BYTES;
    }
    return number;
}
