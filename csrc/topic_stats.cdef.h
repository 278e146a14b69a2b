/* Messages and bytes by topic: BrokerStatsManager's TOPIC_PUT_NUMS and TOPIC_PUT_SIZE.
 *
 * Who: the supervisor creates it; the reputter, which reads every record anyway, counts when it has written the entries of
 * a queue; other processes read. Blocks on: nothing. After a crash of the reputter: entries that it had written but not
 * counted (one run of at most 64) stay uncounted; none is counted twice.
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
