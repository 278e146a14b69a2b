/* Buckets have no gaps and StoreStatsService's ranges; a pass is counted as a whole or not at all. */

#include "check.h"
#include "../store_stats.h"

static struct ms_store_stats stats;
static struct ms_put_meter meter;

static void buckets_meet(void)
{
    CHECK(ms_latency_bucket_of(-1) == 0 && ms_latency_bucket_of(0) == 0);
    for (int32_t bucket = 0; bucket + 1 < MS_LATENCY_BUCKETS; bucket++) {
        int64_t bound = ms_latency_bound_ns(bucket);
        CHECK(ms_latency_bucket_of(bound - 1) == bucket);
        CHECK(ms_latency_bucket_of(bound) == bucket + 1);
    }
    CHECK(ms_latency_bucket_of(INT64_MAX) == MS_LATENCY_BUCKETS - 1);
    for (int32_t bucket = 32; bucket < MS_LATENCY_BUCKETS; bucket++) {
        int64_t low = ms_latency_bound_ns(bucket - 1);
        CHECK((ms_latency_bound_ns(bucket) - low) * 16 <= low);
    }
}

static void ranges_are_rocketmqs(void)
{
    static const int64_t first_ms[] = {0, 1, 10, 50, 100, 200, 500, 1000, 2000, 3000, 4000, 5000, 10000};
    for (int32_t range = 0; range < MS_DISTRIBUTE_BUCKETS; range++) {
        CHECK(ms_distribute_bucket(first_ms[range] * 1000000) == range);
        if (range > 0)
            CHECK(ms_distribute_bucket(first_ms[range] * 1000000 - 1) == range - 1);
    }
    CHECK(ms_distribute_bucket(-5) == 0 && ms_distribute_bucket(INT64_MAX) == MS_DISTRIBUTE_BUCKETS - 1);
}

static uint64_t sum(const uint64_t *counts, int n)
{
    uint64_t total = 0;
    for (int i = 0; i < n; i++)
        total += counts[i];
    return total;
}

static void passes(void)
{
    struct ms_put_stats *put = &stats.put;
    meter.stats = put;
    ms_put_meter_begin(&meter);
    ms_put_meter_take(&meter, 1000, 300, 1);
    ms_put_meter_take(&meter, 2000, 800, 4);
    ms_put_meter_take(&meter, 0, 64, 1);                /* without a time of submission */
    ms_put_meter_take(&meter, 90000000, 64, 1);         /* with one in the future */
    CHECK(put->entries == 0 && put->latency.count == 0); /* nothing before the commit */
    ms_put_meter_commit(&meter, 30001000);
    CHECK(put->entries == 4 && put->passes == 1 && put->entries_max == 4 && put->unmeasured == 1);
    CHECK(put->latency.count == 3 && put->latency.max_ns == 30000000);
    CHECK(put->latency.sum_ns == 30000000 + 29999000 && put->latency.bucket[0] == 1);
    CHECK(put->distribute[2] == 2 && put->distribute[0] == 1);
    CHECK(put->size[8] == 1 && put->size[7] == 4 && put->size[6] == 2);

    ms_put_meter_begin(&meter);
    ms_put_meter_take(&meter, 1000, 300, 1);
    ms_put_meter_begin(&meter); /* the pass before failed: its entries are tried again */
    ms_put_meter_refuse(&meter, 6);
    ms_put_meter_commit(&meter, 5000);
    CHECK(put->entries == 4 && put->passes == 1 && put->refused[6] == 1);

    ms_put_meter_begin(&meter);
    for (int i = 0; i < MS_METER_ENTRIES + 500; i++)
        ms_put_meter_take(&meter, 1000 + i, 300, 1);
    ms_put_meter_commit(&meter, 100000);
    CHECK(put->entries_max == MS_METER_ENTRIES + 500);
    CHECK(put->latency.count == 3 + MS_METER_ENTRIES + 500);
    CHECK(sum(put->latency.bucket, MS_LATENCY_BUCKETS) == put->latency.count);
    CHECK(sum(put->distribute, MS_DISTRIBUTE_BUCKETS) == put->latency.count);

    ms_put_meter_begin(&meter);
    ms_put_meter_take(&meter, INT64_MIN, 64, 1); /* of a hostile producer */
    ms_put_meter_commit(&meter, 100000);
    CHECK(put->unmeasured == 2);

    meter.stats = NULL;
    ms_put_meter_begin(&meter);
    ms_put_meter_take(&meter, 1000, 300, 1);
    ms_put_meter_commit(&meter, 5000);
    CHECK(meter.entries == 0);
}

static void topics(void)
{
    enum { SLOTS = 16 };
    static union {
        struct ms_topic_stats stats;
        uint8_t room[128 + (SLOTS + 1) * sizeof(struct ms_topic_count)];
    } table;
    CHECK(ms_topic_stats_bytes(SLOTS) == (int64_t)sizeof table.room);
    CHECK(ms_topic_stats_check(&table.stats, sizeof table) == -EPROTO);
    ms_topic_stats_format(&table.stats, SLOTS);
    CHECK(ms_topic_stats_check(&table.stats, sizeof table) == 0);
    CHECK(ms_topic_stats_check(&table.stats, sizeof table - 1) == -EMSGSIZE);
    struct ms_topic_count *first = ms_topic_stats_find(&table.stats, (const uint8_t *)"a", 1);
    CHECK(first != &table.stats.others && first == ms_topic_stats_find(&table.stats, (const uint8_t *)"a", 1));
    uint8_t name[2] = {'x', 0};
    for (int i = 1; i < SLOTS / 4 * 3; i++) {
        name[1] = (uint8_t)i;
        CHECK(ms_topic_stats_find(&table.stats, name, 2) != &table.stats.others);
    }
    CHECK(ms_topic_stats_find(&table.stats, (const uint8_t *)"late", 4) == &table.stats.others);
    CHECK(first == ms_topic_stats_find(&table.stats, (const uint8_t *)"a", 1));
}

int main(void)
{
    dice_begin("test_store_stats");
    buckets_meet();
    ranges_are_rocketmqs();
    passes();
    topics();
    return 0;
}
