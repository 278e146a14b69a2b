#include "base.h"
#include "queue_keys.h"

int ms_queue_keys_find(const struct ms_queue_keys *keys, const uint8_t *topic, int32_t topic_bytes, int32_t queue_id)
{
    const uint64_t hash = ms_queue_hash(topic, topic_bytes, queue_id);
    for (uint32_t at = (uint32_t)hash;; at++) {
        const int32_t number = keys->buckets[at & (uint32_t)keys->bucket_mask];
        if (number < 0)
            return -1;
        const struct ms_queue_key *const key = &keys->key[number];
        if (key->hash == hash && key->queue_id == queue_id && key->topic_bytes == topic_bytes &&
            memcmp(keys->topics + key->topic_at, topic, (size_t)topic_bytes) == 0)
            return number;
    }
}

static void enter(struct ms_queue_keys *keys, int32_t number)
{
    uint32_t at = (uint32_t)keys->key[number].hash;
    while (keys->buckets[at & (uint32_t)keys->bucket_mask] >= 0)
        at++;
    keys->buckets[at & (uint32_t)keys->bucket_mask] = number;
}

int ms_queue_keys_add(struct ms_queue_keys *keys, const uint8_t *topic, int32_t topic_bytes, int32_t queue_id)
{
    if (keys->count == keys->capacity || 2 * (keys->count + 1) > keys->bucket_mask + 1 ||
        keys->topics_bytes + topic_bytes > keys->topics_capacity)
        return -ENOSPC;
    const int32_t number = keys->count++;
    struct ms_queue_key *const key = &keys->key[number];
    key->hash = ms_queue_hash(topic, topic_bytes, queue_id);
    key->topic_at = keys->topics_bytes;
    key->topic_bytes = topic_bytes;
    key->queue_id = queue_id;
    memcpy(keys->topics + keys->topics_bytes, topic, (size_t)topic_bytes);
    keys->topics_bytes += topic_bytes;
    enter(keys, number);
    return number;
}

void ms_queue_keys_rehash(struct ms_queue_keys *keys)
{
    for (int32_t at = 0; at <= keys->bucket_mask; at++)
        keys->buckets[at] = -1;
    for (int32_t number = 0; number < keys->count; number++)
        enter(keys, number);
}
