#include "base.h"
#include "light_queues.h"

#include <stdio.h>

#include "property.h"
#include "topic.h"
#include "undo.h"

#define OFFSETS_NAME "INNER_MULTI_QUEUE_OFFSET"
#define OFFSETS_NAME_BYTES 24

static void count_lmqs(struct ms_light_queues *light, const struct ms_queue_table *queues)
{
    light->lmq_count = 0;
    for (uint32_t at = 0; at < queues->slots; at++)
        light->lmq_count += queues->slot[at].key_bytes > 0 && ms_topic_is_light(queues->slot[at].topic, queues->slot[at].key_bytes);
}

/* Check that a message of this topic and queue may name this queue: 0 with *queue_id, or -EINVAL. */
static int check_name(const struct ms_light_queues *light, struct ms_text name, const struct ms_text *topic, int32_t *queue_id)
{
    const int lmq = ms_topic_is_light(name.at, name.bytes);
    if (name.bytes == 0 || name.bytes > MS_TOPIC_BYTES_MAX || !ms_topic_is_legal(name.at, name.bytes) ||
        (lmq && !light->lmq))
        return -EINVAL;
    const int is_own_topic = name.bytes == topic->bytes && memcmp(name.at, topic->at, (size_t)name.bytes) == 0;
    if (is_own_topic && (!lmq || *queue_id == 0))
        return -EINVAL;
    if (lmq)
        *queue_id = 0;
    return 0;
}

/* Return the next offset of names[count], after `count` other names: 0 for a new queue; or -errno. */
static int64_t look_up(struct ms_light_queues *light, struct ms_queue_table *queues, const struct ms_text *names,
                       uint32_t count, int32_t queue_id, int64_t *new_lmqs)
{
    const struct ms_text name = names[count];
    for (uint32_t i = 0; i < count; i++)
        if (names[i].bytes == name.bytes && memcmp(names[i].at, name.at, (size_t)name.bytes) == 0)
            return -EINVAL;
    const int64_t at = ms_queue_table_find(queues, name.at, (uint32_t)name.bytes, queue_id, 0);
    if (at >= 0)
        return queues->slot[at].next_offset;
    if (!ms_topic_is_light(name.at, name.bytes))
        return 0;
    if (light->lmq_count < 0)
        count_lmqs(light, queues);
    if (light->lmq_count + *new_lmqs >= light->lmq_max)
        return -EDQUOT;
    ++*new_lmqs;
    return 0;
}

/* Return the table slot of a queue, claiming one for a new queue; or -ENOSPC. */
static int64_t claim(struct ms_light_queues *light, struct ms_queue_table *queues, struct ms_text name, int32_t queue_id)
{
    int64_t at = ms_queue_table_find(queues, name.at, (uint32_t)name.bytes, queue_id, 0);
    if (at >= 0)
        return at;
    at = ms_queue_table_find(queues, name.at, (uint32_t)name.bytes, queue_id, 1);
    if (at < 0)
        return -ENOSPC;
    light->lmq_count += light->lmq_count >= 0 && ms_topic_is_light(name.at, name.bytes);
    return at;
}

static int is_places(struct ms_text piece)
{
    return piece.bytes > OFFSETS_NAME_BYTES && memcmp(piece.at, OFFSETS_NAME "\1", OFFSETS_NAME_BYTES + 1) == 0;
}

int ms_light_has_places(const uint8_t *properties, uint32_t properties_bytes)
{
    struct ms_text rest = {properties, properties_bytes}, piece;
    while (rest.bytes > OFFSETS_NAME_BYTES && ms_text_split(&rest, 2, &piece))
        if (is_places(piece))
            return 1;
    return 0;
}

void ms_light_copy_text(struct ms_light_queues *light, const uint8_t *text, uint32_t bytes, int keeps_wait)
{
    struct ms_text rest = {text, bytes}, piece;
    light->text_bytes = 0;
    while (ms_text_split(&rest, 2, &piece)) {
        const int is_wait = piece.bytes > 4 && memcmp(piece.at, "WAIT\1", 5) == 0;
        if (piece.bytes == 0 || is_places(piece) || (is_wait && !keeps_wait))
            continue;
        if (light->text_bytes > 0)
            light->text[light->text_bytes++] = 2;
        memcpy(light->text + light->text_bytes, piece.at, (size_t)piece.bytes);
        light->text_bytes += (uint32_t)piece.bytes;
    }
}

int ms_light_prepare(struct ms_light_queues *light, struct ms_queue_table *queues, const uint8_t *topic,
                     uint32_t topic_bytes, int32_t queue_id, const uint8_t *properties, uint32_t properties_bytes)
{
    struct ms_routing routing;
    const struct ms_text own = {topic, topic_bytes};
    light->count = 0;
    ms_property_routing(properties, properties_bytes, &routing);
    if (routing.multi_dispatch.at == NULL)
        return 0;
    if (ms_text_equals(own, "SCHEDULE_TOPIC_XXXX", 19) || ms_text_equals(own, "RMQ_SYS_TRANS_HALF_TOPIC", 24))
        return -EINVAL; /* the further queues would have it at once, and again when it is delivered or committed */
    struct ms_text rest = routing.multi_dispatch, names[MS_LIGHT_QUEUES_MAX], name;
    int32_t queue_ids[MS_LIGHT_QUEUES_MAX];
    int64_t offsets[MS_LIGHT_QUEUES_MAX], new_lmqs = 0;
    uint32_t count = 0;
    for (; ms_text_split(&rest, ',', &name); count++) {
        if (count == MS_LIGHT_QUEUES_MAX)
            return -EINVAL;
        names[count] = name;
        queue_ids[count] = queue_id;
        const int error = check_name(light, name, &own, &queue_ids[count]);
        if (error < 0)
            return error;
        offsets[count] = look_up(light, queues, names, count, queue_ids[count], &new_lmqs);
        if (offsets[count] < 0)
            return (int)offsets[count];
    }
    ms_light_copy_text(light, properties, properties_bytes, 0);
    uint8_t *const text = light->text;
    if (light->text_bytes > 0)
        text[light->text_bytes++] = 2;
    memcpy(text + light->text_bytes, OFFSETS_NAME "\1", OFFSETS_NAME_BYTES + 1);
    light->text_bytes += OFFSETS_NAME_BYTES + 1;
    for (uint32_t i = 0; i < count; i++)
        light->text_bytes += (uint32_t)snprintf((char *)text + light->text_bytes, 22, i > 0 ? ",%lld" : "%lld",
                                                (long long)offsets[i]);
    if (light->text_bytes > MS_PROPERTIES_BYTES_MAX)
        return -EMSGSIZE;
    /* Last, because a refused message must not create queues. */
    for (uint32_t i = 0; i < count; i++) {
        const int64_t at = claim(light, queues, names[i], queue_ids[i]);
        if (at < 0)
            return (int)at;
        light->table_slot[i] = (uint32_t)at;
    }
    light->count = count;
    return 1;
}

void ms_light_advance(struct ms_light_queues *light, struct ms_control *control, struct ms_queue_table *queues,
                      uint64_t pass)
{
    for (uint32_t i = 0; i < light->count; i++) {
        ms_undo_remember(control, queues, light->table_slot[i], pass);
        queues->slot[light->table_slot[i]].next_offset++;
        MS_FAILPOINT("light_queue_advanced");
    }
}
