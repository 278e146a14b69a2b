/* Counters and latency buckets of a running engine, as RocketMQ's StoreStatsService has them.
 *
 * Who: the supervisor creates them beside the control block; each part has one writing process, which stores plain values
 * (relaxed, no lock, no atomic add); any process that may read the folder reads them, without disturbing the workers, and no
 * process depends on them. Blocks on: nothing. After a crash: the next incarnation continues the dead one's counts; one
 * pass or batch that the dead one had not counted yet stays uncounted.
 *
 * The numbers of messages and bytes put are not here: the writer's commit slot has them exactly.
 *
 * Latencies are counted in buckets whose width is at most 1/16 of their lower bound: of a value in units of 64 ns the top
 * five bits choose the bucket.
 */
#define MS_STATS_LAYOUT_VERSION 2
#define MS_LATENCY_BUCKETS 480
#define MS_DISTRIBUTE_BUCKETS 13
#define MS_DISTRIBUTE_ROOM 16
#define MS_STATUS_COUNTS 16
#define MS_SIZE_BUCKETS 32
#define MS_STATS_SAMPLES 640     /* one a second: the last 600 s, and spare ones that are written while a process reads */
#define MS_STATS_SNAPSHOTS 8     /* one in ten seconds: the last minute, and spare ones */

struct ms_latency {
    uint64_t count;
    uint64_t sum_ns;
    uint64_t max_ns;
    int8_t pad[104];
    uint64_t bucket[MS_LATENCY_BUCKETS];
};

/* Written by the writer. An entry is the submission of one put, put_many or put_batch. */
struct ms_put_stats {
    uint64_t entries;            /* answered PUT_OK */
    uint64_t passes;             /* with at least one of them */
    uint64_t entries_max;        /* in one pass */
    uint64_t unmeasured;         /* entries without a time of submission */
    int8_t pad[96];
    uint64_t refused[MS_STATUS_COUNTS]; /* entries by PutMessageStatus; [PUT_OK] stays 0 */
    uint64_t distribute[MS_DISTRIBUTE_ROOM]; /* entries by StoreStatsService's ranges of milliseconds; 13 are used */
    uint64_t size[MS_SIZE_BUCKETS]; /* records by size: [k] those of 2^k to 2^(k+1)-1 bytes, by the mean size of their entry */
    struct ms_latency latency;   /* from the producer's submission to the answer, by entry */
};

/* Written by the flusher. */
struct ms_sync_stats {
    struct ms_latency latency;   /* of each fdatasync of a segment, failed ones too */
};

/* Written by the reputter. */
struct ms_dispatch_stats {
    uint64_t batches;
    uint64_t messages;           /* records dispatched; some twice after a crash of the reputter */
    uint64_t entries;            /* queue entries written */
    uint64_t keys;               /* put into the index */
    uint64_t out_of_order;       /* messages beyond their queue's end, appended there, or below it, left out */
    uint64_t lag_max_bytes;      /* the most bytes that were committed and not dispatched */
    int8_t pad[80];
    struct ms_latency lag;       /* from the store time of a batch's last record to its visibility; store times are whole ms */
};

/* Written by the supervisor once a second. Sample n is at n % MS_STATS_SAMPLES. */
struct ms_stats_sample {
    int64_t at_ns;               /* CLOCK_MONOTONIC */
    uint64_t put_messages;
    uint64_t put_bytes;
    uint64_t refused;
    uint64_t dispatched;
    uint64_t syncs;
    uint64_t reserved[2];
};

/* Written by the supervisor every ten seconds: a copy of the buckets. */
struct ms_stats_snapshot {
    int64_t at_ns;
    int8_t pad[120];
    uint64_t put[MS_LATENCY_BUCKETS];
    uint64_t distribute[MS_DISTRIBUTE_ROOM];
    uint64_t sync[MS_LATENCY_BUCKETS];
    uint64_t lag[MS_LATENCY_BUCKETS];
};

struct ms_stats_history {
    uint64_t samples;            /* taken; stored with release after the sample */
    uint64_t snapshots;
    int8_t pad[112];
    struct ms_stats_sample sample[MS_STATS_SAMPLES];
    struct ms_stats_snapshot snapshot[MS_STATS_SNAPSHOTS];
};

struct ms_store_stats {
    uint64_t magic;              /* stored last, with release: "MSSTATS!" */
    uint32_t layout_version;
    uint32_t reserved;
    int8_t pad[112];
    struct ms_put_stats put;
    struct ms_sync_stats sync;
    struct ms_dispatch_stats dispatch;
    struct ms_stats_history history;
};

/* Entries of the current pass, in the writer's private memory. */
#define MS_METER_ENTRIES 1024
struct ms_put_meter {
    struct ms_put_stats *stats;  /* NULL: nothing is counted */
    uint32_t entries;            /* of the pass */
    uint32_t timed;              /* used elements of submitted_ns; further entries of a pass count with the last time */
    uint32_t slow;               /* out: entries of the last pass that took `slow_ns` or more */
    int64_t slow_ns;             /* in: 0 none is */
    int64_t slowest_ns;          /* out: the slowest of them */
    int64_t submitted_ns[MS_METER_ENTRIES];
};

/* Count one duration (flusher, reputter; the writer counts in its pass). Negative ones count as 0. */
void ms_latency_add(struct ms_latency *latency, int64_t ns);
/* Return the first duration beyond a bucket. */
int64_t ms_latency_bound_ns(int32_t bucket);
/* Return StoreStatsService's range of a duration: 0 (<= 0 ms) to 12 (10 s and more). */
int32_t ms_distribute_bucket(int64_t ns);
/* Only count, to measure what it costs: `passes` passes of `entries` each on the given counters. */
void ms_put_meter_exercise(struct ms_put_meter *meter, int64_t passes, int32_t entries);

/* ---- messages and bytes by topic: BrokerStatsManager's TOPIC_PUT_NUMS and TOPIC_PUT_SIZE ---------
 *
 * The reputter, which reads every record anyway, counts when it has written the entries of a queue. After a crash of it,
 * entries that it had written but not counted (one run of at most 64) stay uncounted; none is counted twice.
 *
 * Open addressing, linear probing; the number of slots is a power of two. A slot is used if topic_bytes != 0, stored last
 * with release, and stays used. Topics without a slot are counted together in `others`.
 */
#define MS_TOPIC_STATS_LAYOUT_VERSION 1
#define MS_TOPIC_STATS_NAME_BYTES 256

struct ms_topic_count {
    uint64_t messages;           /* entries written to the topic's queues */
    uint64_t bytes;              /* of their records in the log */
    uint32_t topic_bytes;
    uint32_t hash;
    int8_t pad[8];
    uint8_t topic[MS_TOPIC_STATS_NAME_BYTES]; /* a light queue's name may be as long as a folder's */
};

struct ms_topic_stats {
    uint64_t magic;              /* stored last, with release: "MSTOPICS" */
    uint32_t layout_version;
    uint32_t slots;
    uint32_t used;               /* reputter */
    int8_t pad[108];
    struct ms_topic_count others;
    struct ms_topic_count slot[];
};

int64_t ms_topic_stats_bytes(uint32_t slots);
/* Initialize zeroed memory. */
void ms_topic_stats_format(struct ms_topic_stats *stats, uint32_t slots);
/* 0, or -EPROTO, -EBADMSG, -EMSGSIZE as ms_store_stats_check. */
int ms_topic_stats_check(const struct ms_topic_stats *stats, int64_t mapped_bytes);
/* Return the topic's count; `others` if there is no slot for it. */
struct ms_topic_count *ms_topic_stats_find(struct ms_topic_stats *stats, const uint8_t *topic, uint32_t topic_bytes);
