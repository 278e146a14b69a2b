/* Dispatches arbitrary bytes as a segment into queues and an index (csrc/dispatch.cdef.h): it must write only whole entries of records
 * inside the range, and change nothing when it is repeated. */
#include "target.h"
#include "../dispatch.cdef.h"

#define HEAD 8
#define BASE (1 << 20)
#define FILE_BYTES 400
#define QUEUES 64
#define INDEX_SLOTS 16
#define INDEX_ENTRIES 500
#define INDEX_BYTES (40 + 4 * INDEX_SLOTS + 20 * INDEX_ENTRIES)

static struct ms_queue queues[QUEUES];
static int32_t buckets[2 * QUEUES];
static uint8_t topics[QUEUES * 256];
static struct ms_queue_chunk chunks[3]; /* few, so that the loop needs more */
static const int64_t delays[] = {1000, 5000, 10000};
static int files[QUEUES];

static void begin(struct ms_dispatch *d, struct ms_index_progress *progress, uint8_t *index, int multi_dispatch)
{
    memset(d, 0, sizeof *d);
    memset(progress, 0, sizeof *progress);
    d->queues.queues = queues;
    d->queues.buckets = buckets;
    d->queues.topics = topics;
    d->queues.chunks = chunks;
    d->queues.chunk_count = sizeof chunks / sizeof *chunks;
    d->queues.file_bytes = FILE_BYTES;
    d->queues.topics_capacity = sizeof topics;
    d->queues.capacity = QUEUES;
    d->queues.bucket_mask = 2 * QUEUES - 1;
    ms_queue_rehash(&d->queues);
    d->index = (struct ms_index_file){.base = index, .number = 1, .slots = INDEX_SLOTS, .entries = INDEX_ENTRIES, .allocated_bytes = INT64_MAX};
    d->progress = progress;
    d->delays_ms = delays;
    d->delay_levels = 3;
    d->index_enabled = 1;
    d->multi_dispatch = multi_dispatch;
    d->indexed_offset = -1;
}

/* Return a file, which is created once and reused for each input. */
static int file_of(int number)
{
    if (files[number] == 0)
        files[number] = memfd_create("queue", 0);
    CHECK(files[number] > 0 && ftruncate(files[number], 0) == 0 && ftruncate(files[number], FILE_BYTES) == 0);
    return files[number];
}

static int run(struct ms_dispatch *d, const uint8_t *view, int64_t from, int64_t to)
{
    for (int turn = 0; turn < 100000; turn++) {
        const int found = ms_dispatch_run(d, view, BASE, from, to);
        CHECK(d->reached >= from && d->reached <= to);
        from = d->reached;
        if (found == MS_DISPATCH_NEEDS_QUEUE) {
            const int number = ms_queue_add(&d->queues, d->wanted_topic, d->wanted_topic_bytes, d->wanted_queue_id);
            if (number == -ENOSPC)
                return found;
            CHECK(number >= 0);
            queues[number].next_offset = d->wanted_queue_offset;
            queues[number].refused = d->wanted_queue_offset < 0 || d->wanted_queue_offset > INT64_MAX / 40;
        } else if (found == MS_DISPATCH_NEEDS_FILE) {
            struct ms_queue *queue = &queues[d->wanted_queue];
            queue->fd = file_of(d->wanted_queue);
            queue->file_start = d->wanted_queue_offset * 20 - d->wanted_queue_offset * 20 % FILE_BYTES;
            queue->allocated_bytes = FILE_BYTES;
        } else {
            CHECK(found != MS_DISPATCH_FAILED);
            return found;
        }
    }
    CHECK(0); /* it requests something for ever */
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input input = {data, (int64_t)size};
    struct ms_index_progress progress;
    struct ms_dispatch d;
    if (size < HEAD || size > INPUT_BYTES_MAX)
        return 0;
    struct input numbers = {input.at, HEAD};
    input.at += HEAD;
    input.left -= HEAD;
    const int multi_dispatch = (int)take(&numbers, 1) & 1;
    const int64_t end = BASE + take_near(&numbers, input.left);
    struct guarded view = guarded_copy(input.at, input.left);
    struct guarded index = guarded_new(INDEX_BYTES);
    begin(&d, &progress, index.at, multi_dispatch);
    const int found = run(&d, view.at, BASE, end);
    const int64_t reached = d.reached, keys = d.keys;
    for (int i = 0; i < d.queues.count; i++) {
        uint8_t bytes[FILE_BYTES];
        if (queues[i].fd < 0)
            continue;
        CHECK(lseek(queues[i].fd, 0, SEEK_END) == FILE_BYTES && pread(queues[i].fd, bytes, FILE_BYTES, 0) == FILE_BYTES);
        for (int at = 0; at < FILE_BYTES; at += 20) {
            const int64_t offset = ms_get_i64(bytes + at);
            const int32_t bytes_of = ms_get_i32(bytes + at + 8);
            CHECK((offset == 0 && bytes_of == 0) || (offset >= BASE && bytes_of >= MS_RECORD_BYTES_MIN && offset + bytes_of <= end));
        }
    }
    CHECK(run(&d, view.at, BASE, end) == found && d.reached == reached && d.keys == keys);
    struct ms_touched_queue places[64] = {0};
    int64_t touched_to = BASE, last_ms = -1;
    const int how = multi_dispatch ? 1 + (reached & 1) : 0;
    const int touched = ms_dispatch_touched(places, 64, how, view.at, BASE, BASE, end, &touched_to, &last_ms);
    CHECK(touched == -ENOSPC || (touched_to >= BASE && touched_to <= end));
    guarded_free(&index);
    guarded_free(&view);
    return 0;
}

void fuzz_seeds(void (*emit)(const uint8_t *data, size_t size))
{
    emit_segments(emit, HEAD, BASE);
}
