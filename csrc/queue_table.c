#include "base.h"
#include "queue_table.h"

int64_t ms_queue_table_bytes(uint32_t slots)
{
    return (int64_t)sizeof(struct ms_queue_table) + (int64_t)slots * (int64_t)sizeof(struct ms_queue_slot);
}

void ms_queue_table_format(struct ms_queue_table *table, uint32_t slots, uint64_t generation)
{
    table->slots = slots;
    table->used = 0;
    table->generation = generation;
    ms_store_release(&table->magic, MS_QUEUE_TABLE_MAGIC);
}

int ms_queue_table_check(const struct ms_queue_table *table, int64_t mapped_bytes)
{
    if (mapped_bytes < (int64_t)sizeof *table)
        return -EMSGSIZE;
    if (ms_load_acquire(&table->magic) != MS_QUEUE_TABLE_MAGIC)
        return -EPROTO;
    if (table->slots == 0 || (table->slots & (table->slots - 1)) != 0) /* slots are found with a mask */
        return -EMSGSIZE;
    return mapped_bytes < ms_queue_table_bytes(table->slots) ? -EMSGSIZE : 0;
}

static uint32_t hash_of(const uint8_t *topic, uint32_t topic_bytes, int32_t queue_id)
{
    uint32_t hash = 2166136261u; /* FNV-1a */
    for (uint32_t i = 0; i < topic_bytes; i++)
        hash = (hash ^ topic[i]) * 16777619u;
    hash = (hash ^ (uint32_t)queue_id) * 16777619u;
    return hash ^ hash >> 15;
}

static int64_t find(struct ms_queue_table *table, uint32_t hash, const uint8_t *topic, uint32_t topic_bytes,
                    int32_t queue_id, int claim)
{
    uint32_t mask = table->slots - 1;
    for (uint32_t probe = 0, at = hash & mask; probe < table->slots; probe++, at = (at + 1) & mask) {
        struct ms_queue_slot *slot = &table->slot[at];
        uint32_t taken = ms_load_acquire(&slot->key_bytes);
        if (taken == 0) {
            if (!claim)
                return -1;
            if (table->used >= table->slots / 4 * 3)
                return -2;
            slot->hash = hash;
            slot->queue_id = queue_id;
            slot->next_offset = 0;
            slot->pass = 0;
            memcpy(slot->topic, topic, topic_bytes);
            MS_FAILPOINT("queue_slot_filled");
            ms_store_release(&slot->key_bytes, topic_bytes);
            MS_FAILPOINT("queue_slot_claimed");
            table->used++;
            return at;
        }
        if (slot->hash == hash && slot->queue_id == queue_id && taken == topic_bytes &&
            memcmp(slot->topic, topic, topic_bytes) == 0)
            return at;
    }
    return -2;
}

int64_t ms_queue_table_find(struct ms_queue_table *table, const uint8_t *topic, uint32_t topic_bytes,
                            int32_t queue_id, int claim)
{
    if (topic_bytes == 0 || topic_bytes > sizeof table->slot[0].topic)
        return -1;
    return find(table, hash_of(topic, topic_bytes, queue_id), topic, topic_bytes, queue_id, claim);
}

int ms_queue_table_set(struct ms_queue_table *table, const uint8_t *topic, uint32_t topic_bytes,
                       int32_t queue_id, int64_t next_offset)
{
    int64_t at = ms_queue_table_find(table, topic, topic_bytes, queue_id, 1);
    if (at < 0)
        return -ENOSPC;
    table->slot[at].next_offset = next_offset;
    return 0;
}

int ms_queue_table_copy(struct ms_queue_table *to, const struct ms_queue_table *from)
{
    for (uint32_t at = 0; at < from->slots; at++) {
        const struct ms_queue_slot *slot = &from->slot[at];
        if (slot->key_bytes == 0)
            continue;
        int64_t found = find(to, slot->hash, slot->topic, slot->key_bytes, slot->queue_id, 1);
        if (found < 0)
            return -ENOSPC;
        to->slot[found].next_offset = slot->next_offset;
        MS_FAILPOINT("queue_table_copying");
    }
    return 0;
}
