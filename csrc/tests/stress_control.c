/* Pairs of the control block, read while their writers publish at full speed: each is of one pass. */

#include "check.h"
#include <pthread.h>

#include "../control.h"

#define ROUNDS 200000

static struct ms_control control;
static int done;

/* Publishes as commit_pass() does, whose fence is the one here. */
static void *writer(void *unused)
{
    (void)unused;
    for (int64_t pass = 1; pass <= ROUNDS; pass++) {
        struct ms_commit_slot *slot = &control.slots[pass & 1];
        ms_store_relaxed(&slot->wrote, pass);
        ms_store_relaxed(&slot->store_timestamp_ms, 2 * pass);
        ms_store_relaxed(&slot->put_messages, (uint64_t)(3 * pass));
        ms_store_relaxed(&slot->put_bytes, (uint64_t)(4 * pass));
        ms_store_release(&control.slot_pass.value, pass);
        ms_control_publish_flushed(&control, pass, 1);
        ms_fence();
    }
    __atomic_store_n(&done, 1, __ATOMIC_RELEASE);
    return NULL;
}

int main(void)
{
    dice_begin("stress_control");
    pthread_t thread;
    pthread_create(&thread, NULL, writer, NULL);
    int64_t before = 0;
    while (!__atomic_load_n(&done, __ATOMIC_ACQUIRE)) {
        struct ms_commit_totals found;
        ms_control_committed_slot(&control, &found);
        CHECK(found.wrote >= before && found.store_timestamp_ms == 2 * found.wrote);
        CHECK(found.put_messages == 3 * (uint64_t)found.wrote && found.put_bytes == 4 * (uint64_t)found.wrote);
        before = found.wrote;
    }
    pthread_join(thread, NULL);
    return 0;
}
