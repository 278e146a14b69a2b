/* Decodes sends of RocketMQ clients from the bytes of a connection into the ring, and encodes their answers.
 *
 * Who: the gateway's process through pyengine/native/session.py, the thread of its loop; ms_sends_take under the
 * producer's lock. Blocks on: ms_sends_answer waits for the writer, until a deadline. After a crash: as producer.cdef.h
 * says; the rest is memory of the process.
 *
 * The bytes are untrusted: each length is bounded before it is used. It takes a frame only if it is a send of one message
 * exactly as Java's client encodes it. It leaves any other frame to Python: another code, form or field, a topic that
 * Python has not entered here, a property that changes the message's destination, bytes that are no frame. So taken
 * messages are stored and answered as by pyengine/gateway/sends.py, without an object for each.
 */
#define MS_SENDS_MAX 32              /* of one round, so that other connections are served too */
#define MS_SEND_TOPICS_MAX 256
#define MS_SEND_TOPIC_BYTES_MAX 127
#define MS_SEND_HEADER_BYTES_MAX 65536
#define MS_SEND_PROPERTIES_MAX 47    /* properties of one message; Python handles messages with more */
#define MS_SEND_ANSWER_PIECES 5
#define MS_SEND_PIECE_BYTES_MAX 160  /* of an answer, between the variable parts */

struct ms_send_topic {
    uint32_t topic_bytes;
    int32_t queues;                  /* valid queues are below this number */
    uint8_t topic[MS_SEND_TOPIC_BYTES_MAX + 1];
};

struct ms_send {                     /* taken */
    uint64_t sequence;
    int32_t opaque;
    int32_t queue_id;
    uint32_t frame_bytes;
    uint32_t topic;                  /* its number in `topics` */
};

struct ms_sends {
    struct ms_entry head;            /* in: store host and its bit of sysFlag; the rest is set for each message */
    int64_t frame_bytes_max;         /* in */
    uint32_t topic_count;            /* in */
    uint32_t cluster_bytes;          /* in: the property CLUSTER, which the broker adds */
    uint8_t cluster[256];
    uint32_t piece_bytes[MS_SEND_ANSWER_PIECES]; /* in: an answer around message id, queue, queue offset and opaque */
    uint8_t piece[MS_SEND_ANSWER_PIECES][MS_SEND_PIECE_BYTES_MAX];
    struct ms_send_topic topics[MS_SEND_TOPICS_MAX]; /* in */
    uint32_t count;                  /* out: of the round */
    uint32_t answered;               /* out: the number of sends, from the first on, with an answer in `answers` */
    uint32_t answer_bytes;           /* out */
    struct ms_send taken[MS_SENDS_MAX]; /* out */
    uint8_t answers[MS_SENDS_MAX * 1024];
    uint8_t text[MS_SEND_HEADER_BYTES_MAX]; /* texts of the header without escapes */
    uint8_t properties[MS_SEND_HEADER_BYTES_MAX];
};

/* Run a round: take the sends at the beginning of `data`, whole frames only, and publish them to the writer together.
 * Return their bytes; sends->count is their number. The next frame is for Python, or had no room. */
int64_t ms_sends_take(struct ms_sends *sends, struct ms_producer *producer, const uint8_t *data, int64_t bytes,
                      const uint8_t *born_host, int32_t born_host_bytes);
/* Wait for the writer's answers to the round, and encode those for the clients. It stops before the first send that has no
 * answer by the deadline, or is not stored; the caller handles the sends from sends->answered on. */
void ms_sends_answer(struct ms_sends *sends, struct ms_producer *producer, int64_t deadline_ns);
