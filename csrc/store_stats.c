#include "store_stats.h"

#include <errno.h>
#include <string.h>

#include "layout.h"

void ms_store_stats_format(struct ms_store_stats *stats)
{
    stats->layout_version = MS_STATS_LAYOUT_VERSION;
    stats->stats_bytes = (uint32_t)sizeof *stats;
    ms_store_release(&stats->magic, MS_STORE_STATS_MAGIC);
}

int ms_store_stats_check(const struct ms_store_stats *stats, int64_t mapped_bytes)
{
    return ms_layout_check(stats, mapped_bytes, MS_STORE_STATS_MAGIC, MS_STATS_LAYOUT_VERSION, sizeof *stats);
}

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

void ms_dispatch_stats_add(struct ms_dispatch_stats *stats, uint64_t messages, uint64_t entries, uint64_t keys,
                           uint64_t out_of_order, uint64_t lag_bytes, int64_t lag_ns)
{
    ms_count(stats->batches, 1);
    ms_count(stats->messages, messages);
    ms_count(stats->entries, entries);
    ms_count(stats->keys, keys);
    ms_count(stats->out_of_order, out_of_order);
    if (lag_bytes > stats->lag_max_bytes)
        ms_store_relaxed(&stats->lag_max_bytes, lag_bytes);
    if (lag_ns >= 0)
        ms_latency_count(&stats->lag, lag_ns, 1);
}

void ms_stats_take_sample(struct ms_store_stats *stats, const struct ms_stats_sample *sample)
{
    uint64_t taken = stats->history.samples;
    stats->history.sample[taken % MS_STATS_SAMPLES] = *sample;
    ms_store_release(&stats->history.samples, taken + 1);
}

static void copy_counts(uint64_t *to, const uint64_t *from, int count)
{
    for (int i = 0; i < count; i++)
        to[i] = ms_load_relaxed(&from[i]);
}

void ms_stats_take_snapshot(struct ms_store_stats *stats, int64_t at_ns)
{
    uint64_t taken = stats->history.snapshots;
    struct ms_stats_snapshot *snapshot = &stats->history.snapshot[taken % MS_STATS_SNAPSHOTS];
    snapshot->at_ns = at_ns;
    copy_counts(snapshot->put, stats->put.latency.bucket, MS_LATENCY_BUCKETS);
    copy_counts(snapshot->distribute, stats->put.distribute, 16);
    copy_counts(snapshot->sync, stats->sync.latency.bucket, MS_LATENCY_BUCKETS);
    copy_counts(snapshot->lag, stats->dispatch.lag.bucket, MS_LATENCY_BUCKETS);
    ms_store_release(&stats->history.snapshots, taken + 1);
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
