/* Next queue offset per (topic, queue id): RocketMQ's topicQueueTable.
 *
 * Who: the writer reads and changes it inside a pass; the supervisor creates
 * it, fills it at start and offers a larger one when asked; others may look.
 * Blocks on: nothing. After a crash: offsets that an uncommitted pass changed
 * are put back by the next writer from the undo list; a slot claimed by such a
 * pass stays claimed, with offset 0, as for a queue that is not in the table.
 *
 * Open addressing, linear probing; the number of slots is a power of two. A
 * slot is taken when key_bytes != 0, stored last with release.
 */
#define MS_QUEUE_TOPIC_BYTES 128

struct ms_queue_slot {
    int64_t next_offset;
    uint64_t pass;               /* pass that has this queue on its undo list */
    uint32_t hash;
    int32_t queue_id;
    uint32_t key_bytes;          /* topic length */
    uint32_t reserved;
    uint8_t topic[MS_QUEUE_TOPIC_BYTES];
};

struct ms_queue_table {
    uint64_t magic;
    uint64_t generation;
    uint32_t slots;              /* power of two */
    uint32_t used;               /* writer */
    int8_t pad[104];
    struct ms_queue_slot slot[];
};

int64_t ms_queue_table_bytes(uint32_t slots);
/* On zeroed memory. */
void ms_queue_table_format(struct ms_queue_table *table, uint32_t slots, uint64_t generation);
/* 0, or -EPROTO for what is no table, -EMSGSIZE where its slots do not fit into the mapping or are no power of two. */
int ms_queue_table_check(const struct ms_queue_table *table, int64_t mapped_bytes);
/* Slot number of the queue, or -1 when it is not there and `claim` is 0, or -2 when the table is too full to claim. */
int64_t ms_queue_table_find(struct ms_queue_table *table, const uint8_t *topic, uint32_t topic_bytes,
                            int32_t queue_id, int claim);
/* Set a queue's next offset outside any pass (start, tests). 0 or -ENOSPC. */
int ms_queue_table_set(struct ms_queue_table *table, const uint8_t *topic, uint32_t topic_bytes,
                       int32_t queue_id, int64_t next_offset);
/* Everything of `from` into the empty, larger `to`. 0 or -ENOSPC. */
int ms_queue_table_copy(struct ms_queue_table *to, const struct ms_queue_table *from);
