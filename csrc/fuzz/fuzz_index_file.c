/* Reads, rolls back and puts into arbitrary bytes as an index file and as the undo record of a put (csrc/index_file.h). */
#include "target.h"
#include "../index_file.h"

#define SLOTS 7
#define ENTRIES 12
#define FILE_BYTES (MS_INDEX_HEADER_BYTES + 4 * SLOTS + 20 * ENTRIES)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size > INPUT_BYTES_MAX)
        return 0;
    struct guarded memory = guarded_new(FILE_BYTES);
    struct ms_index_progress progress = {0};
    memcpy(memory.at, data, size < FILE_BYTES ? size : FILE_BYTES);
    if (size > FILE_BYTES)
        memcpy(&progress, data + FILE_BYTES, size - FILE_BYTES < sizeof progress ? size - FILE_BYTES : sizeof progress);
    struct ms_index_file file = {.base = memory.at, .number = progress.file_number, .slots = SLOTS, .entries = ENTRIES, .allocated_bytes = INT64_MAX};
    ms_index_roll_back(&file, &progress);
    CHECK(ms_index_count(&file) >= 1 && ms_index_count(&file) <= ENTRIES);
    for (int32_t key = 0; key < ENTRIES; key++) {
        const int answer = ms_index_put(&file, &progress, key * 5, 1000 + key, 1700000000000 + key);
        CHECK(answer == 0 || answer == MS_INDEX_FULL);
    }
    guarded_free(&memory);
    return 0;
}

void fuzz_seeds(void (*emit)(const uint8_t *data, size_t size))
{
    uint8_t bytes[FILE_BYTES + sizeof(struct ms_index_progress)] = {0};
    struct ms_index_file file = {.base = bytes, .number = 0, .slots = SLOTS, .entries = ENTRIES, .allocated_bytes = INT64_MAX};
    struct ms_index_progress *progress = (struct ms_index_progress *)(void *)(bytes + FILE_BYTES);
    emit(bytes, FILE_BYTES);
    struct ms_index_progress undo = {0};
    for (int32_t key = 0; key < ENTRIES; key++) {
        ms_index_put(&file, &undo, key * 3, 100 * key, 1700000000000 + 1000 * key);
        memcpy(progress, &undo, sizeof undo);
        emit(bytes, sizeof bytes);
    }
    undo.putting = 1;
    memcpy(progress, &undo, sizeof undo);
    emit(bytes, sizeof bytes);
}
