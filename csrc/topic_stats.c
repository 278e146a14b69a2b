#include "topic_stats.h"

#include <errno.h>
#include <string.h>

#include "atomics.h"

int64_t ms_topic_stats_bytes(uint32_t slots)
{
    return (int64_t)sizeof(struct ms_topic_stats) + (int64_t)slots * (int64_t)sizeof(struct ms_topic_count);
}

void ms_topic_stats_format(struct ms_topic_stats *stats, uint32_t slots)
{
    stats->layout_version = MS_TOPIC_STATS_LAYOUT_VERSION;
    stats->slots = slots;
    ms_store_release(&stats->magic, MS_TOPIC_STATS_MAGIC);
}

int ms_topic_stats_check(const struct ms_topic_stats *stats, int64_t mapped_bytes)
{
    if (mapped_bytes < (int64_t)sizeof *stats)
        return -EMSGSIZE;
    if (ms_load_acquire(&stats->magic) != MS_TOPIC_STATS_MAGIC)
        return -EPROTO;
    if (stats->layout_version != MS_TOPIC_STATS_LAYOUT_VERSION)
        return -EBADMSG;
    if (stats->slots == 0 || (stats->slots & (stats->slots - 1)) != 0) /* slots are found with a mask */
        return -EBADMSG;
    return mapped_bytes < ms_topic_stats_bytes(stats->slots) ? -EMSGSIZE : 0;
}

static uint32_t hash_of(const uint8_t *topic, uint32_t topic_bytes)
{
    uint32_t hash = 2166136261u; /* FNV-1a */
    for (uint32_t i = 0; i < topic_bytes; i++)
        hash = (hash ^ topic[i]) * 16777619u;
    return hash ^ hash >> 15;
}

struct ms_topic_count *ms_topic_stats_find(struct ms_topic_stats *stats, const uint8_t *topic, uint32_t topic_bytes)
{
    if (topic_bytes == 0 || topic_bytes > sizeof stats->slot[0].topic)
        return &stats->others;
    const uint32_t hash = hash_of(topic, topic_bytes), mask = stats->slots - 1;
    for (uint32_t probe = 0, at = hash & mask; probe < stats->slots; probe++, at = (at + 1) & mask) {
        struct ms_topic_count *slot = &stats->slot[at];
        if (slot->topic_bytes == 0) {
            if (stats->used >= stats->slots / 4 * 3)
                return &stats->others;
            memcpy(slot->topic, topic, topic_bytes);
            slot->hash = hash;
            ms_store_release(&slot->topic_bytes, topic_bytes);
            ms_store_relaxed(&stats->used, stats->used + 1);
            return slot;
        }
        if (slot->hash == hash && slot->topic_bytes == topic_bytes && memcmp(slot->topic, topic, topic_bytes) == 0)
            return slot;
    }
    return &stats->others; /* only after another process has written to the table: a quarter of it stays free */
}
