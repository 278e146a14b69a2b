#include "base.h"
#include "control.h"

#include "arrivals.h"
#include "layout.h"
#include "sequence.h"

int ms_control_check(const struct ms_control *control, int64_t mapped_bytes)
{
    const int error = ms_layout_check(control, mapped_bytes, MS_CONTROL_MAGIC, MS_CONTROL_LAYOUT_VERSION, sizeof *control);
    return error == 0 && control->identity.control_bytes != sizeof *control ? -EMSGSIZE : error;
}

void ms_control_publish(struct ms_control *control)
{
    control->identity.layout_version = MS_CONTROL_LAYOUT_VERSION;
    control->identity.control_bytes = sizeof(struct ms_control);
    MS_FAILPOINT("control_versioned");
    ms_store_release(&control->identity.magic, MS_CONTROL_MAGIC);
}

int64_t ms_load_i64(const int64_t *address) { return ms_load_acquire(address); }
uint32_t ms_load_u32(const uint32_t *address) { return ms_load_acquire(address); }
void ms_store_i64(int64_t *address, int64_t value) { ms_store_release(address, value); }
void ms_store_u32(uint32_t *address, uint32_t value) { ms_store_release(address, value); }
uint32_t ms_add_u32(uint32_t *address, int32_t by) { return ms_add(address, (uint32_t)by); }
int ms_cas_u32(uint32_t *address, uint32_t expected, uint32_t value) { return ms_compare_exchange(address, &expected, value); }
int ms_cas_i64(int64_t *address, int64_t expected, int64_t value) { return ms_compare_exchange(address, &expected, value); }

int ms_control_used_sessions(const struct ms_control *control, uint32_t slots, uint32_t *used)
{
    int count = 0;
    if (slots > MS_SESSION_SLOTS)
        slots = MS_SESSION_SLOTS;
    for (uint32_t slot = 0; slot < slots; slot++)
        if (ms_load_acquire(&control->sessions[slot].state) != MS_SESSION_FREE)
            used[count++] = slot;
    return count;
}

int ms_control_freeze(struct ms_control *control, uint32_t kind, int32_t error_number, const char *reason)
{
    uint32_t expected = 0;
    int first = ms_compare_exchange(&control->state.frozen, &expected, 1);
    if (first) {
        MS_FAILPOINT("freeze_claimed");
        control->state.frozen_kind = kind;
        control->state.frozen_errno = error_number;
        MS_FAILPOINT("freeze_numbered");
        strncpy((char *)control->state.reason, reason, sizeof control->state.reason - 1);
        MS_FAILPOINT("freeze_reasoned");
        ms_store_release(&control->state.state, MS_STATE_READ_ONLY);
        MS_FAILPOINT("freeze_stated");
        ms_store_release(&control->state.frozen, 2u);
    }
    MS_FAILPOINT("freeze_complete");
    ms_sequence_raise(&control->flush_seq);
    return first;
}

void ms_control_committed_slot(const struct ms_control *control, struct ms_commit_totals *found)
{
    /* The writer fills the other slot, so this one stays unchanged for at least one more pass. If the pass is the same
     * before and after the read, at most the other slot was being filled. */
    for (;;) {
        int64_t pass = ms_load_acquire(&control->slot_pass.value);
        const struct ms_commit_slot *slot = &control->slots[pass & 1];
        found->wrote = ms_load_relaxed(&slot->wrote);
        found->store_timestamp_ms = ms_load_relaxed(&slot->store_timestamp_ms);
        found->put_messages = ms_load_relaxed(&slot->put_messages);
        found->put_bytes = ms_load_relaxed(&slot->put_bytes);
        ms_fence_acquire();
        if (ms_load_relaxed(&control->slot_pass.value) == pass)
            return;
    }
}

void ms_control_publish_flushed(struct ms_control *control, int64_t flushed, int to_all)
{
    const int64_t from = ms_load_relaxed(&control->flushed.value);
    ms_store_release(&control->flushed.value, flushed);
    MS_FAILPOINT("flushed_published");
    if (to_all)
        ms_sequence_raise(&control->flush_seq);
    else
        ms_sequence_raise_for_next(&control->flush_seq);
    ms_arrivals_level_moved(control, from);
}

void ms_control_wait_synced(const struct ms_control *control, uint32_t seen, int64_t sync_target, int is_later, int64_t timeout_ns)
{
    /* Each sync raises the number by one. If any process has raised it since `seen`, the kernel does not let us sleep. So
     * `sync_target` is the sync that ends with the next raise, or it is over and no other has been announced. */
    int lasts = sync_target > ms_load_acquire(&control->flushed.value);
    uint32_t wanted = seen + 1 + (uint32_t)(lasts && is_later);
    ms_futex_wait_for(&control->flush_seq.value, seen, ms_sequence_bit(wanted), timeout_ns);
}

void ms_control_publish_confirm(struct ms_control *control, int64_t confirm)
{
    const int64_t from = ms_load_relaxed(&control->confirm.value);
    ms_store_release(&control->confirm.value, confirm);
    MS_FAILPOINT("confirm_stored");
    ms_sequence_raise(&control->confirm_seq);
    ms_arrivals_level_moved(control, from);
}
