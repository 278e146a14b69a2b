/* Light queues: a message's further places in queues that INNER_MULTI_DISPATCH names (docs/formats.md section 8.6).
 *
 * Who: the writer, inside a pass, when the store has enable_multi_dispatch;
 * MultiDispatch in RocketMQ. Blocks on: nothing. The place in each named queue
 * is written into the record's own text (INNER_MULTI_QUEUE_OFFSET), so that the
 * log alone says it all. After a crash inside a pass: the offsets that it gave
 * out are put back from the undo list, like those of the message's own queue.
 */
#define MS_LIGHT_QUEUES_MAX 64      /* names in one message */
#define MS_LIGHT_TEXT_BYTES_MAX 34816

struct ms_light_queues {
    uint32_t enabled;               /* enable_multi_dispatch */
    uint32_t lmq;                   /* enable_lmq: names with %LMQ% are allowed; they have the queue 0 only */
    int64_t lmq_max;                /* max_lmq_consume_queue_num */
    int64_t lmq_count;              /* queues with such names in the table; -1: to be counted */
    uint32_t count;                 /* of the entry at hand; 0: it is a plain message */
    uint32_t text_bytes;
    uint32_t table_slot[MS_LIGHT_QUEUES_MAX];
    uint8_t text[MS_LIGHT_TEXT_BYTES_MAX]; /* its property text with the offsets */
};

/* Whether a property text has INNER_MULTI_QUEUE_OFFSET. Only the writer gives places: what dispatch, recovery and a rebuild
 * find there would take those of other messages. */
int ms_light_has_places(const uint8_t *properties, uint32_t properties_bytes);
/* `text` is the property text without it. */
void ms_light_drop_places(struct ms_light_queues *light, const uint8_t *properties, uint32_t properties_bytes);
/* Look at an entry's property text. 0: it names no queues. 1: `text` is what is to be stored and `table_slot` the
 * queues. -ENOSPC: the table has no room for a new queue. -EMSGSIZE: the text became too long. -EDQUOT: too many
 * light queues. -EINVAL: a name is illegal, doubled or the message's own queue, or %LMQ% is not enabled.
 * May be called again for the same entry. */
int ms_light_prepare(struct ms_light_queues *light, struct ms_queue_table *queues, const uint8_t *topic,
                     uint32_t topic_bytes, int32_t queue_id, const uint8_t *properties, uint32_t properties_bytes);
/* The record has its place: the named queues go on by one, each on the undo list first. */
void ms_light_advance(struct ms_light_queues *light, struct ms_control *control, struct ms_queue_table *queues,
                      uint64_t pass);
