/* Light queues: assigns a message's offsets in the queues that INNER_MULTI_DISPATCH names (docs/formats.md section 8.6).
 *
 * Who: the writer, inside a pass, if the store has enable_multi_dispatch; MultiDispatch in RocketMQ. Blocks on: nothing.
 * It writes the offset in each named queue into the record's properties (INNER_MULTI_QUEUE_OFFSET), so that queues can be
 * rebuilt from the log alone. After a crash: the next writer restores the offsets of an uncommitted pass from the undo
 * list, like those of the message's own queue.
 */
#define MS_LIGHT_QUEUES_MAX 64      /* names in one message */
#define MS_LIGHT_TEXT_BYTES_MAX 34816

struct ms_light_queues {
    uint32_t enabled;               /* enable_multi_dispatch */
    uint32_t lmq;                   /* enable_lmq: names with %LMQ% are allowed; they only have queue 0 */
    int64_t lmq_max;                /* max_lmq_consume_queue_num */
    int64_t lmq_count;              /* queues with such names in the table; -1: count them first */
    uint32_t count;                 /* names in the current entry; 0: it is a plain message */
    uint32_t text_bytes;
    uint32_t table_slot[MS_LIGHT_QUEUES_MAX];
    uint8_t text[MS_LIGHT_TEXT_BYTES_MAX]; /* its property text with the offsets */
};

/* Return whether a property text has INNER_MULTI_QUEUE_OFFSET. Only the writer may set it: dispatch, recovery and rebuild
 * would put entries at a producer's offsets over those of other messages. */
int ms_light_has_places(const uint8_t *properties, uint32_t properties_bytes);
/* Set `text` to the property text without INNER_MULTI_QUEUE_OFFSET, and without WAIT unless `keeps_wait`. */
void ms_light_copy_text(struct ms_light_queues *light, const uint8_t *text, uint32_t bytes, int keeps_wait);
/* Read an entry's property text. 0: it names no queues. 1: `text` is the text to store and `table_slot` has the queues.
 * -ENOSPC: the table has no room for a new queue. -EMSGSIZE: the text became too long. -EDQUOT: too many light queues.
 * -EINVAL: a name is illegal, repeated or the message's own queue, %LMQ% is not enabled, or the message waits for its time
 * or its transaction. May be called again for the same entry. */
int ms_light_prepare(struct ms_light_queues *light, struct ms_queue_table *queues, const uint8_t *topic,
                     uint32_t topic_bytes, int32_t queue_id, const uint8_t *properties, uint32_t properties_bytes);
/* Increment the offsets of the named queues, after adding each to the undo list, once the record has its position. */
void ms_light_advance(struct ms_light_queues *light, struct ms_control *control, struct ms_queue_table *queues,
                      uint64_t pass);
