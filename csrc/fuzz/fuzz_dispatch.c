/* Dispatches arbitrary bytes as a segment into queues and an index (csrc/dispatch.cdef.h): it must write only whole entries of records
 * inside the range, and change nothing when it is repeated. */
#include "target.h"
#include "../tests/dispatch_rig.h"

#define HEAD 8
#define BASE (1 << 20)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input input = {data, (int64_t)size};
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
    rig_begin(&d, index.at, multi_dispatch);
    const int found = rig_run(&d, view.at, BASE, BASE, end, FILE_BYTES);
    const int64_t reached = d.reached, keys = d.keys;
    check_files(&d, BASE, end);
    CHECK(rig_run(&d, view.at, BASE, BASE, end, FILE_BYTES) == found && d.reached == reached && d.keys == keys);
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
