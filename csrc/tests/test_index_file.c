/* A put that is killed after any of its stores is undone and repeated: no key is lost or twice in the file.
 *
 * The hook copies the file and the progress area at each step of each put. A new dispatcher continues from each copy, with and
 * without the progress area. */

#define SLOTS 5
#define ENTRIES 40
#define FILE_BYTES (40 + 4 * SLOTS + 20 * ENTRIES)
#define STEPS_MAX 16
#define WINDOW_BYTES 64

static void kill_point(const char *name);
#define MS_FAILPOINT(name) kill_point(name)
#define ms_flush_pwrite_all write_or_fail
#define ms_flush_allocate_windows allocate_or_fail
#include "check.h"
#include "../index_file.c"

struct life {
    uint8_t file[FILE_BYTES];
    struct ms_index_progress progress;
    char step[32];
};

static uint8_t file_bytes[FILE_BYTES] __attribute__((aligned(8)));
static int writes_left; /* before the disk is full */
static struct ms_index_progress area;
static struct ms_index_file file = {
    .base = file_bytes,
    .number = 20240101000000000,
    .slots = SLOTS,
    .entries = ENTRIES,
    .fd = 7,
    .window_bytes = WINDOW_BYTES,
};
static struct life lives[STEPS_MAX];
static int life_count;
static int recording;

static void kill_point(const char *name)
{
    if (!recording)
        return;
    CHECK(life_count < STEPS_MAX);
    memcpy(lives[life_count].file, file_bytes, FILE_BYTES);
    lives[life_count].progress = area;
    snprintf(lives[life_count].step, sizeof lives[life_count].step, "%s", name);
    life_count++;
}

/* Replaces the write of a file by one into the mapping. A full disk takes half of a write, or none of it. */
int write_or_fail(int fd, const uint8_t *from, int64_t length, int64_t at)
{
    CHECK(fd == 7 && at >= 0 && at + length <= FILE_BYTES);
    if (writes_left-- > 0) {
        memcpy(file_bytes + at, from, (size_t)length);
        return 0;
    }
    memcpy(file_bytes + at, from, (size_t)dice(length));
    return -ENOSPC;
}

static int full_at = FILE_BYTES; /* the disk has no blocks for the file beyond this */

/* Replaces fallocate. What has no blocks yet must be zero: a store there would be a bus error on a full disk. */
int allocate_or_fail(int fd, int64_t *allocated_bytes, int64_t total_bytes, int64_t window_bytes, int64_t from, int64_t to)
{
    CHECK(fd == 7 && total_bytes == FILE_BYTES && window_bytes == WINDOW_BYTES && from == *allocated_bytes && to <= FILE_BYTES);
    for (int64_t at = from; at < FILE_BYTES; at++)
        CHECK(file_bytes[at] == 0);
    if (to > full_at)
        return -ENOSPC;
    *allocated_bytes = to + (WINDOW_BYTES - to % WINDOW_BYTES) % WINDOW_BYTES;
    return 0;
}

/* Key k of record r: hashes that share slots, several keys a record. */
static int32_t hash_of(int key)
{
    return (int32_t)((uint32_t)key * 2654435761u >> 8);
}

static int put(int key)
{
    const int record = key / 3;
    return ms_index_put(&file, &area, hash_of(key), 1000 + record * 100, 1700000000000 + record * 1500);
}

/* Do as a dispatcher at its start: undo, count the keys in the file, put the rest of the record's. */
static void live_on(int key)
{
    const int64_t offset = 1000 + key / 3 * 100;
    ms_index_roll_back(&file, &area);
    CHECK(area.putting == 0);
    int done = 0;
    while (done + 1 < ms_index_count(&file) && ms_get_i64(entry_at(&file, ms_index_count(&file) - 1 - done) + 4) == offset)
        done++;
    for (int next = key / 3 * 3 + done; next <= key; next++)
        CHECK(put(next) == 0);
}

static void test_every_step_of_every_put(void)
{
    static uint8_t before[FILE_BYTES];
    for (int key = 0; key < ENTRIES - 1; key++) {
        memcpy(before, file_bytes, FILE_BYTES);
        life_count = 0;
        recording = 1;
        CHECK(put(key) == 0);
        recording = 0;
        CHECK(life_count >= 9);
        static uint8_t after[FILE_BYTES];
        memcpy(after, file_bytes, FILE_BYTES);
        for (int i = 0; i < life_count; i++) {
            memcpy(file_bytes, lives[i].file, FILE_BYTES);
            area = lives[i].progress;
            if (ms_index_roll_back(&file, &area)) { /* all is as before, but for the free entry */
                memcpy(entry_at(&file, key + 1), before + (entry_at(&file, key + 1) - file_bytes), MS_INDEX_ENTRY_BYTES);
                CHECK(memcmp(file_bytes, before, FILE_BYTES) == 0);
            }
            live_on(key);
            if (memcmp(file_bytes, after, FILE_BYTES) != 0) {
                fprintf(stderr, "killed at '%s' of key %d\n", lives[i].step, key);
                CHECK(0);
            }
        }
        memcpy(file_bytes, after, FILE_BYTES);
        area.putting = 0;
    }
    static uint8_t full[FILE_BYTES];
    memcpy(full, file_bytes, FILE_BYTES);
    CHECK(put(ENTRIES - 1) == MS_INDEX_FULL);
    CHECK(memcmp(file_bytes, full, FILE_BYTES) == 0);
}

/* Without an undo, a put that reached its slot must not cut the chain after it. */
static void test_lost_progress_keeps_chains(void)
{
    memset(file_bytes, 0, FILE_BYTES);
    memset(&area, 0, sizeof area);
    for (int i = 0; i < 3; i++)
        CHECK(ms_index_put(&file, &area, 7, 100 + i, 1700000000000) == 0);
    life_count = 0;
    recording = 1;
    CHECK(ms_index_put(&file, &area, 7, 103, 1700000000000) == 0);
    recording = 0;
    for (int i = 0; i < life_count; i++) {
        if (strcmp(lives[i].step, "index_slot_written") != 0)
            continue;
        memcpy(file_bytes, lives[i].file, FILE_BYTES);
        memset(&area, 0, sizeof area);
        CHECK(ms_index_put(&file, &area, 7, 103, 1700000000000) == 0);
        int chain = 0;
        for (int32_t at = ms_get_i32(slot_at(&file, 7 % SLOTS)); at > 0; at = ms_get_i32(entry_at(&file, at) + 16))
            CHECK(++chain <= 4);
        CHECK(chain == 4);
        return;
    }
    CHECK(0);
}

/* A file that is written and not mapped has the same bytes; a put without room is undone, at once or by the next one. */
static void test_written_file_on_a_full_disk(void)
{
    static uint8_t stored[FILE_BYTES], before[FILE_BYTES];
    static struct ms_index_file written = {
        .base = file_bytes,
        .number = 1,
        .slots = SLOTS,
        .entries = ENTRIES,
        .is_written = 1,
        .fd = 7,
        .allocated_bytes = INT64_MAX,
    };
    const int writes_of_put = 3, writes_of_undo = 2;
    memset(file_bytes, 0, FILE_BYTES);
    ms_index_inherit(&file, 5, 900);
    for (int key = 0; key < ENTRIES - 1; key++)
        CHECK(put(key) == 0);
    memcpy(stored, file_bytes, FILE_BYTES);

    memset(file_bytes, 0, FILE_BYTES);
    writes_left = 0;
    CHECK(ms_index_inherit(&written, 5, 900) == -ENOSPC);
    writes_left = 1;
    CHECK(ms_index_inherit(&written, 5, 900) == 0);
    for (int key = 0; key < ENTRIES - 1; key++) {
        const int record = key / 3;
        for (int room = 0; room < writes_of_put; room++) {
            memcpy(before, file_bytes, FILE_BYTES);
            writes_left = room;
            CHECK(ms_index_put(&written, &area, hash_of(key), 1000 + record * 100, 1700000000000 + record * 1500) == -ENOSPC);
            writes_left = writes_of_undo;
            ms_index_roll_back(&written, &area);
            CHECK(area.putting == 0);
            memcpy(entry_at(&written, key + 1), before + (entry_at(&written, key + 1) - file_bytes), MS_INDEX_ENTRY_BYTES);
            CHECK(memcmp(file_bytes, before, FILE_BYTES) == 0);
        }
        writes_left = 1; /* the undo fails too: the next put repeats it */
        CHECK(ms_index_put(&written, &area, hash_of(key), 1000 + record * 100, 1700000000000 + record * 1500) == -ENOSPC);
        writes_left = writes_of_undo + writes_of_put;
        CHECK(ms_index_put(&written, &area, hash_of(key), 1000 + record * 100, 1700000000000 + record * 1500) == 0);
    }
    CHECK(memcmp(file_bytes, stored, FILE_BYTES) == 0);
}

/* Without blocks for its entry a put changes nothing, and nothing lies beyond the blocks; with blocks it goes on. */
static void test_puts_follow_the_blocks(void)
{
    static uint8_t before[FILE_BYTES];
    memset(file_bytes, 0, FILE_BYTES);
    memset(&area, 0, sizeof area);
    file.allocated_bytes = 0;
    full_at = (int)(entry_at(&file, 12) - file_bytes);
    for (int key = 0; key < ENTRIES - 1; key++) {
        memcpy(before, file_bytes, FILE_BYTES);
        while (put(key) == -ENOSPC) {
            CHECK(memcmp(file_bytes, before, FILE_BYTES) == 0 && area.putting == 0);
            full_at += 20;
        }
        CHECK(entry_at(&file, key + 2) - file_bytes <= file.allocated_bytes);
    }
    CHECK(full_at > FILE_BYTES - WINDOW_BYTES);
    full_at = FILE_BYTES;
}

/* A file of random bytes between guard pages: no access leaves it, whatever its numbers are. */
static void test_garbage_files(void)
{
    for (int round = 0; round < 20000; round++) {
        struct guarded memory = guarded_new(FILE_BYTES);
        struct ms_index_file garbage = {.base = memory.at, .number = 1, .slots = SLOTS, .entries = ENTRIES, .allocated_bytes = INT64_MAX};
        struct ms_index_progress undo = {0};
        for (int i = 0; i < FILE_BYTES; i++)
            memory.at[i] = dice(3) ? (uint8_t)dice(256) : 0;
        if (dice(2))
            ms_put_32(memory.at + 36, (uint32_t)dice(ENTRIES + 2));
        CHECK(ms_index_count(&garbage) >= 1 && ms_index_count(&garbage) <= ENTRIES);
        for (int i = 0; i < 5; i++)
            ms_index_put(&garbage, &undo, (int32_t)dice(1u << 31), (int64_t)dice(1u << 30), (int64_t)dice(1u << 30));
        undo.putting = 1;
        undo.file_number = 1;
        undo.slot = (int32_t)dice(20) - 5;
        ms_index_roll_back(&garbage, &undo);
        guarded_free(&memory);
    }
}

int main(void)
{
    dice_begin("index_file");
    test_every_step_of_every_put();
    test_lost_progress_keeps_chains();
    test_written_file_on_a_full_disk();
    test_puts_follow_the_blocks();
    test_garbage_files();
    return 0;
}
