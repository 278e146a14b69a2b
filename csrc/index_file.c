#include "base.h"
#include "index_file.h"

#include "flush.cdef.h"
#include "utf8.h"

enum { AT_BEGIN_TIME = 0,
       AT_END_TIME = 8,
       AT_BEGIN_OFFSET = 16,
       AT_END_OFFSET = 24,
       AT_SLOT_COUNT = 32,
       AT_COUNT = 36,
};

static uint8_t *slot_at(const struct ms_index_file *file, int32_t slot)
{
    return file->base + MS_INDEX_HEADER_BYTES + 4 * (int64_t)slot;
}

static uint8_t *entry_at(const struct ms_index_file *file, int32_t entry)
{
    return slot_at(file, file->slots) + MS_INDEX_ENTRY_BYTES * (int64_t)entry;
}

static int put_at(const struct ms_index_file *file, uint8_t *at, const uint8_t *from, int64_t bytes)
{
    if (file->is_written)
        return ms_flush_pwrite_all(file->fd, from, bytes, at - file->base);
    memcpy(at, from, (size_t)bytes);
    return 0;
}

static int put_head(const struct ms_index_file *file, int32_t slot, int32_t entry)
{
    uint8_t bytes[4];
    ms_put_32(bytes, (uint32_t)entry);
    return put_at(file, slot_at(file, slot), bytes, sizeof bytes);
}

int32_t ms_index_count(const struct ms_index_file *file)
{
    const int32_t count = ms_get_i32(file->base + AT_COUNT);
    if (count <= 0)
        return 1;
    return count < file->entries ? count : file->entries;
}

int32_t ms_index_key_hash(const uint8_t *topic, int64_t topic_bytes, const uint8_t *key, int64_t key_bytes)
{
    uint32_t hash = ms_java_hash(0, topic, topic_bytes);
    hash = ms_java_hash(31 * hash + '#', key, key_bytes);
    if (hash == 0x80000000u)
        return 0;
    return (int32_t)hash < 0 ? (int32_t)-hash : (int32_t)hash;
}

/* Return whole seconds since the file's begin, as in IndexFile.putKey. */
static uint32_t seconds_since(int64_t begin_timestamp_ms, int64_t store_timestamp_ms)
{
    int64_t passed;
    if (begin_timestamp_ms <= 0 || store_timestamp_ms < begin_timestamp_ms)
        return 0;
    passed = (store_timestamp_ms - begin_timestamp_ms) / 1000;
    return passed > INT32_MAX ? INT32_MAX : (uint32_t)passed;
}

/* Store how to undo a put of `entry` before the put changes the file. */
static void begin_put(const struct ms_index_file *file, struct ms_index_progress *progress, int64_t physical_offset,
                      int32_t slot, int32_t head, int32_t entry)
{
    progress->file_number = file->number;
    progress->physical_offset = physical_offset;
    progress->slot = slot;
    progress->old_head = head;
    progress->entry = entry;
    memcpy(progress->old_header, file->base, MS_INDEX_HEADER_BYTES);
    ms_store_release(&progress->putting, (uint64_t)1);
    ms_compiler_fence();
    MS_FAILPOINT("index_undo_written");
}

int ms_index_allocate(struct ms_index_file *file, int32_t entry)
{
    const int64_t file_bytes = entry_at(file, file->entries) - file->base;
    const int64_t end = entry_at(file, entry + 1) - file->base;
    if (end <= file->allocated_bytes)
        return 0;
    const int error = ms_flush_allocate_windows(file->fd, &file->allocated_bytes, file_bytes, file->window_bytes, file->allocated_bytes, end);
    MS_FAILPOINT("index_window_allocated");
    return error;
}

int ms_index_put(struct ms_index_file *file, struct ms_index_progress *progress, int32_t key_hash,
                 int64_t physical_offset, int64_t store_timestamp_ms)
{
    uint8_t *const base = file->base;
    int error = file->is_written ? ms_index_roll_back(file, progress) : 0; /* undo one that failed on a full disk */
    if (error < 0)
        return error;
    const int32_t number = ms_index_count(file);
    if (number >= file->entries)
        return MS_INDEX_FULL;
    if ((error = ms_index_allocate(file, number)) != 0)
        return error;
    const int32_t slot = key_hash % file->slots;
    int32_t head = ms_get_i32(slot_at(file, slot));
    if (head == number) /* an unfinished put whose undo record is lost: the chain continues after it */
        head = ms_get_i32(entry_at(file, number) + 16);
    if (head < 0 || head >= number)
        head = 0;
    begin_put(file, progress, physical_offset, slot, head, number);

    uint8_t copy_of_entry[MS_INDEX_ENTRY_BYTES], copy_of_header[MS_INDEX_HEADER_BYTES];
    uint8_t *const entry = file->is_written ? copy_of_entry : entry_at(file, number);
    uint8_t *const header = file->is_written ? memcpy(copy_of_header, base, MS_INDEX_HEADER_BYTES) : base;
    ms_put_32(entry, (uint32_t)key_hash);
    MS_FAILPOINT("index_hash_written");
    ms_put_64(entry + 4, (uint64_t)physical_offset);
    ms_put_32(entry + 12, seconds_since(ms_get_i64(base + AT_BEGIN_TIME), store_timestamp_ms));
    ms_put_32(entry + 16, (uint32_t)head);
    ms_compiler_fence();
    error = file->is_written ? put_at(file, entry_at(file, number), entry, MS_INDEX_ENTRY_BYTES) : 0;
    MS_FAILPOINT("index_entry_written");
    if (error == 0)
        error = put_head(file, slot, number);
    ms_compiler_fence();
    MS_FAILPOINT("index_slot_written");
    if (number == 1) {
        ms_put_64(header + AT_BEGIN_OFFSET, (uint64_t)physical_offset);
        ms_put_64(header + AT_BEGIN_TIME, (uint64_t)store_timestamp_ms);
    }
    MS_FAILPOINT("index_begin_written");
    if (head == 0)
        ms_put_32(header + AT_SLOT_COUNT, ms_get_u32(header + AT_SLOT_COUNT) + 1);
    ms_compiler_fence();
    MS_FAILPOINT("index_slots_counted");
    ms_put_32(header + AT_COUNT, (uint32_t)number + 1);
    ms_compiler_fence();
    MS_FAILPOINT("index_entry_counted");
    ms_put_64(header + AT_END_OFFSET, (uint64_t)physical_offset);
    ms_compiler_fence();
    MS_FAILPOINT("index_end_offset_written");
    ms_put_64(header + AT_END_TIME, (uint64_t)store_timestamp_ms);
    MS_FAILPOINT("index_end_time_written");
    if (file->is_written && error == 0)
        error = put_at(file, base, header, MS_INDEX_HEADER_BYTES);
    if (error != 0) {
        (void)ms_index_roll_back(file, progress);
        return error;
    }
    ms_store_release(&progress->putting, (uint64_t)0);
    MS_FAILPOINT("index_put_done");
    return 0;
}

int ms_index_roll_back(const struct ms_index_file *file, struct ms_index_progress *progress)
{
    if (ms_load_acquire(&progress->putting) == 0 || progress->file_number != file->number ||
        progress->slot < 0 || progress->slot >= file->slots)
        return 0;
    int error = put_head(file, progress->slot, progress->old_head);
    if (error != 0)
        return error;
    MS_FAILPOINT("index_slot_put_back");
    if ((error = put_at(file, file->base, progress->old_header, MS_INDEX_HEADER_BYTES)) != 0)
        return error;
    MS_FAILPOINT("index_header_put_back");
    ms_store_release(&progress->putting, (uint64_t)0);
    return 1;
}

int ms_index_inherit(const struct ms_index_file *file, int64_t end_timestamp_ms, int64_t end_physical_offset)
{
    uint8_t copy[MS_INDEX_HEADER_BYTES];
    uint8_t *const header = file->is_written ? memcpy(copy, file->base, MS_INDEX_HEADER_BYTES) : file->base;
    ms_put_64(header + AT_BEGIN_TIME, (uint64_t)end_timestamp_ms);
    ms_put_64(header + AT_END_TIME, (uint64_t)end_timestamp_ms);
    MS_FAILPOINT("index_inherits");
    ms_put_64(header + AT_BEGIN_OFFSET, (uint64_t)end_physical_offset);
    ms_put_64(header + AT_END_OFFSET, (uint64_t)end_physical_offset);
    return file->is_written ? put_at(file, file->base, header, MS_INDEX_HEADER_BYTES) : 0;
}
