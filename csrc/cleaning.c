#include "cleaning.h"

#include <errno.h>

#include "atomics.h"
#include "failpoint.h"
#include "layout.h"

void ms_cleaning_format(struct ms_cleaning *cleaning, uint64_t epoch)
{
    for (int32_t slot = 0; slot < MS_HOLDS_MAX; slot++)
        cleaning->holds[slot].segment = -1;
    cleaning->used_percent = -1;
    cleaning->queue_used_percent = -1;
    cleaning->epoch = epoch;
    cleaning->holds_max = MS_HOLDS_MAX;
    cleaning->layout_version = MS_CLEANING_LAYOUT_VERSION;
    ms_store_release(&cleaning->magic, MS_CLEANING_MAGIC);
}

int ms_cleaning_check(const struct ms_cleaning *cleaning, int64_t mapped_bytes)
{
    return ms_layout_check(cleaning, mapped_bytes, MS_CLEANING_MAGIC, MS_CLEANING_LAYOUT_VERSION, sizeof *cleaning);
}

static int free_slot(struct ms_cleaning *cleaning, uint64_t owner)
{
    uint32_t start = (uint32_t)(owner >> 32); /* different start slots by pid, so that readers seldom collide */
    for (uint32_t i = 0; i < MS_HOLDS_MAX; i++) {
        uint32_t slot = (start + i) % MS_HOLDS_MAX;
        uint64_t expected = 0;
        if (ms_load_relaxed(&cleaning->holds[slot].owner) == 0 &&
            ms_compare_exchange(&cleaning->holds[slot].owner, &expected, owner))
            return (int)slot;
    }
    return -EAGAIN;
}

/* The reader stores its hold, then loads removing_end; the cleaner stores removing_end, then loads the holds. With a fence in
 * between on both sides, at least one of them sees the other's store. */
int32_t ms_hold_take(struct ms_cleaning *cleaning, uint64_t owner, int64_t segment)
{
    if (segment < ms_load_acquire(&cleaning->removing_end))
        return -ENOENT;
    int slot = free_slot(cleaning, owner);
    if (slot < 0)
        return slot;
    MS_FAILPOINT("hold_owned");
    ms_store_release(&cleaning->holds[slot].segment, segment);
    ms_fence();
    MS_FAILPOINT("hold_stored");
    if (segment < ms_load_acquire(&cleaning->removing_end)) {
        ms_hold_release(cleaning, slot, owner);
        return -ENOENT;
    }
    return slot;
}

void ms_hold_release(struct ms_cleaning *cleaning, int32_t slot, uint64_t owner)
{
    if (slot < 0 || slot >= MS_HOLDS_MAX || ms_load_acquire(&cleaning->holds[slot].owner) != owner)
        return;
    ms_store_release(&cleaning->holds[slot].segment, (int64_t)-1);
    MS_FAILPOINT("hold_emptied");
    ms_store_release(&cleaning->holds[slot].owner, (uint64_t)0);
}

void ms_cleaning_refuse_holds(struct ms_cleaning *cleaning, int64_t end)
{
    if (end > ms_load_relaxed(&cleaning->removing_end))
        ms_store_release(&cleaning->removing_end, end);
    ms_fence();
    MS_FAILPOINT("removing_end_moved");
}

int32_t ms_hold_find(const struct ms_cleaning *cleaning, int32_t from, int64_t end)
{
    for (int32_t slot = from < 0 ? 0 : from; slot < MS_HOLDS_MAX; slot++) {
        if (ms_load_acquire(&cleaning->holds[slot].owner) == 0)
            continue;
        int64_t segment = ms_load_acquire(&cleaning->holds[slot].segment);
        if (end < 0 || (segment >= 0 && segment < end))
            return slot;
    }
    return -1;
}

int ms_hold_reap(struct ms_cleaning *cleaning, int32_t slot, uint64_t owner)
{
    if (slot < 0 || slot >= MS_HOLDS_MAX || owner == 0)
        return 0;
    /* Clear the dead owner's segment first, so that the next owner does not find it. While the owner's number is there, no
     * other process can take the slot. */
    if (ms_load_acquire(&cleaning->holds[slot].owner) != owner)
        return 0;
    ms_store_release(&cleaning->holds[slot].segment, (int64_t)-1);
    MS_FAILPOINT("dead_hold_emptied");
    return ms_compare_exchange(&cleaning->holds[slot].owner, &owner, (uint64_t)0);
}
