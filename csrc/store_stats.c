#include "base.h"
#include "store_stats.h"

#include "layout.h"

void ms_latency_add(struct ms_latency *latency, int64_t ns)
{
    ms_latency_count(latency, ns < 0 ? 0 : ns, 1);
}

int64_t ms_latency_bound_ns(int32_t bucket)
{
    int64_t units = bucket + 1;
    if (units > 1 << MS_LATENCY_SUB_BITS) {
        int shift = (bucket >> MS_LATENCY_SUB_BITS) - 1;
        units = (int64_t)((bucket & ((1 << MS_LATENCY_SUB_BITS) - 1)) + (1 << MS_LATENCY_SUB_BITS) + 1) << shift;
    }
    return units << MS_LATENCY_UNIT_BITS;
}

int32_t ms_distribute_bucket(int64_t ns)
{
    static const int32_t bounds_ms[] = {10, 50, 100, 200, 500, 1000, 2000, 3000, 4000, 5000, 10000};
    int64_t ms = ns / 1000000; /* whole milliseconds, like RocketMQ's clock */
    if (ms <= 0)
        return 0;
    int32_t bucket = 1;
    for (size_t i = 0; i < sizeof bounds_ms / sizeof *bounds_ms && ms >= bounds_ms[i]; i++)
        bucket++;
    return bucket;
}

void ms_put_meter_exercise(struct ms_put_meter *meter, int64_t passes, int32_t entries)
{
    int64_t now_ns = 1000000000;
    for (int64_t pass = 0; pass < passes; pass++) {
        ms_put_meter_begin(meter);
        for (int32_t i = 0; i < entries; i++)
            ms_put_meter_take(meter, now_ns - 1000 - 37 * i, 219, 1);
        now_ns += 1500 + (pass & 1023);
        ms_put_meter_commit(meter, now_ns);
    }
}

/* ---- by topic ------------------------------------------------------------- */

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
    const int error = ms_layout_check(stats, mapped_bytes, MS_TOPIC_STATS_MAGIC, MS_TOPIC_STATS_LAYOUT_VERSION, sizeof *stats);
    if (error != 0)
        return error;
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
