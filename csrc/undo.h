/* The undo list of a pass: the next offsets of queues before the pass changed them.
 *
 * Who: the writer adds one entry per queue and pass, before it changes next_offset, so that the next writer can restore it
 * (ms_writer_roll_back).
 */
#pragma once

#include "control.h"
#include "queue_table.h"

static inline void ms_undo_remember(struct ms_control *control, struct ms_queue_table *queues, uint32_t table_slot,
                                    uint64_t pass)
{
    struct ms_queue_slot *const queue = &queues->slot[table_slot];
    if (queue->pass == pass)
        return;
    struct ms_undo *const undo = &control->undo;
    undo->old_offset[undo->count] = queue->next_offset;
    undo->table_slot[undo->count] = table_slot;
    MS_FAILPOINT("undo_filled");
    ms_store_release(&undo->count, undo->count + 1);
    ms_compiler_fence(); /* undo first, change after */
    MS_FAILPOINT("undo_counted");
    queue->pass = pass;
}
