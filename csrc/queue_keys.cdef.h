/* Numbers queues by topic and id, from 0 on in the order in which they are added. What is known of each is in an array beside it.
 *
 * Who: dispatch, and a scan that chooses queues; one thread. Blocks on: nothing. After a crash: nothing is left, since all memory is
 * that of the calling Python process.
 */
struct ms_queue_key {
    uint64_t hash;           /* of topic and queue id */
    int64_t topic_at;        /* in ms_queue_keys.topics */
    int32_t topic_bytes;
    int32_t queue_id;
};

struct ms_queue_keys {
    struct ms_queue_key *key;
    int32_t *buckets;        /* number, or -1; linear probing, at most half full */
    uint8_t *topics;
    int64_t topics_bytes;
    int64_t topics_capacity;
    int32_t count;
    int32_t capacity;
    int32_t bucket_mask;
};

/* Return the number of the queue, or -1. */
int ms_queue_keys_find(const struct ms_queue_keys *keys, const uint8_t *topic, int32_t topic_bytes, int32_t queue_id);
/* Add a queue; return its number, or -ENOSPC if a table is full (the caller makes larger ones). */
int ms_queue_keys_add(struct ms_queue_keys *keys, const uint8_t *topic, int32_t topic_bytes, int32_t queue_id);
/* Enter all queues into `buckets`, which the caller has just replaced. */
void ms_queue_keys_rehash(struct ms_queue_keys *keys);
