/* The next queue offset of each (topic, queue id): RocketMQ's topicQueueTable.
 *
 * Who: the writer reads and changes it inside a pass; the supervisor creates it, fills it at start and provides a larger
 * one on request; other processes may read it. Blocks on: nothing. After a crash: the next writer restores the offsets
 * that an uncommitted pass changed from the undo list; a slot that such a pass claimed stays claimed, with offset 0, which
 * equals a queue that is not in the table.
 *
 * Open addressing, linear probing; the number of slots is a power of two. A slot is used if key_bytes != 0, stored last
 * with release.
 */
#define MS_QUEUE_TOPIC_BYTES 128

struct ms_queue_slot {
    int64_t next_offset;
    uint64_t pass;               /* the pass that has this queue in its undo list */
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
/* Initialize zeroed memory. */
void ms_queue_table_format(struct ms_queue_table *table, uint32_t slots, uint64_t generation);
/* 0, or -EPROTO if this is no table, -EMSGSIZE if its slots exceed the mapping or are no power of two. */
int ms_queue_table_check(const struct ms_queue_table *table, int64_t mapped_bytes);
/* Return the slot of the queue; -1 if it has none and `claim` is 0; -2 if the table is too full to claim one. */
int64_t ms_queue_table_find(struct ms_queue_table *table, const uint8_t *topic, uint32_t topic_bytes,
                            int32_t queue_id, int claim);
/* Set a queue's next offset outside of a pass (start, tests). 0 or -ENOSPC. */
int ms_queue_table_set(struct ms_queue_table *table, const uint8_t *topic, uint32_t topic_bytes,
                       int32_t queue_id, int64_t next_offset);
/* Copy all queues of `from` into the empty, larger `to`. 0 or -ENOSPC. */
int ms_queue_table_copy(struct ms_queue_table *to, const struct ms_queue_table *from);
