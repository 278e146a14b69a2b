#pragma once

#include "store_stats.cdef.h"

#define MS_TOPIC_STATS_MAGIC 0x4d53544f50494353ULL /* "MSTOPICS" */
#define MS_LATENCY_UNIT_BITS 6
#define MS_LATENCY_SUB_BITS 4

/* Add to a field that only this process writes. */
#define ms_count(field, by) ms_store_relaxed(&(field), (field) + (uint64_t)(by))

/* Return the bucket that counts a duration. */
static inline int32_t ms_latency_bucket_of(int64_t ns)
{
    uint64_t units = (uint64_t)ns >> MS_LATENCY_UNIT_BITS;
    if (ns < 0 || units < (1u << MS_LATENCY_SUB_BITS))
        return ns < 0 ? 0 : (int32_t)units;
    int top = 63 - __builtin_clzll(units);
    int32_t bucket = ((top - MS_LATENCY_SUB_BITS + 1) << MS_LATENCY_SUB_BITS) +
                     (int32_t)((units >> (top - MS_LATENCY_SUB_BITS)) & ((1u << MS_LATENCY_SUB_BITS) - 1));
    return bucket < MS_LATENCY_BUCKETS ? bucket : MS_LATENCY_BUCKETS - 1;
}

static inline void ms_latency_count(struct ms_latency *latency, int64_t ns, uint64_t times)
{
    ms_count(latency->count, times);
    ms_count(latency->sum_ns, (uint64_t)ns * times);
    if ((uint64_t)ns > latency->max_ns)
        ms_store_relaxed(&latency->max_ns, (uint64_t)ns);
    ms_count(latency->bucket[ms_latency_bucket_of(ns)], times);
}

/* ---- the writer's pass: begin, one take or refuse for each entry, commit ------------------- */

static inline void ms_put_meter_begin(struct ms_put_meter *meter)
{
    meter->entries = meter->timed = 0;
}

static inline void ms_put_meter_take(struct ms_put_meter *meter, int64_t submitted_ns, uint64_t bytes, uint32_t records)
{
    struct ms_put_stats *stats = meter->stats;
    if (stats == NULL)
        return;
    meter->entries++;
    if (meter->timed < MS_METER_ENTRIES)
        meter->submitted_ns[meter->timed++] = submitted_ns;
    if (records > 1)
        bytes /= records;
    ms_count(stats->size[bytes < 2 ? 0 : (63 - __builtin_clzll(bytes)) & 31], records);
}

static inline void ms_put_meter_refuse(struct ms_put_meter *meter, uint32_t status)
{
    if (meter->stats != NULL)
        ms_count(meter->stats->refused[status & 15], 1);
}

/* Count the pass, after its answers are published; `now_ns`: CLOCK_MONOTONIC, read once in the pass. */
static inline void ms_put_meter_commit(struct ms_put_meter *meter, int64_t now_ns)
{
    struct ms_put_stats *stats = meter->stats;
    meter->slow = 0;
    if (stats == NULL || meter->entries == 0)
        return;
    meter->slowest_ns = 0;
    ms_count(stats->entries, meter->entries);
    ms_count(stats->passes, 1);
    if (meter->entries > stats->entries_max)
        ms_store_relaxed(&stats->entries_max, (uint64_t)meter->entries);
    for (uint32_t i = 0; i < meter->timed; i++) {
        uint64_t times = i + 1 == meter->timed ? 1 + meter->entries - meter->timed : 1;
        if (meter->submitted_ns[i] <= 0) {
            ms_count(stats->unmeasured, times);
            continue;
        }
        int64_t ns = now_ns - meter->submitted_ns[i];
        if (ns < 0) /* the time comes from the producer and may be wrong */
            ns = 0;
        if (ns > meter->slowest_ns)
            meter->slowest_ns = ns;
        if (ns >= meter->slow_ns && meter->slow_ns > 0)
            meter->slow += (uint32_t)times;
        ms_latency_count(&stats->latency, ns, times);
        ms_count(stats->distribute[ns < 1000000 ? 0 : ms_distribute_bucket(ns)], times);
    }
    meter->entries = meter->timed = 0;
}
