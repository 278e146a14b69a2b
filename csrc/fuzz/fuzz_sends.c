/* Reads arbitrary bytes as sends of a gateway's client (csrc/sends.h). Taken frames must become whole entries that the writer
 * accepts, one for each frame, with an answer of one frame each. */
#include "target.h"
#include <stdlib.h>

#include "../entry.h"
#include "../sends.h"

#define RING_BYTES 65536
#define SLOT 1
#define GENERATION 2

static struct ms_control *control;
static struct ms_session *session;
static struct ms_sends sends;

static void set_text(uint8_t *to, uint32_t *bytes, const char *text)
{
    *bytes = (uint32_t)strlen(text);
    memcpy(to, text, *bytes);
}

static void begin(void)
{
    static const char *const pieces[MS_SEND_ANSWER_PIECES] = {"{\"msgId\":\"", "\",\"queueId\":\"", "\",\"queueOffset\":\"", "\",\"opaque\":", "}"};
    static const uint8_t host[8] = {127, 0, 0, 1, 0, 0, 42, 159};
    if (control != NULL)
        return;
    control = calloc(1, sizeof(struct ms_control));
    session = calloc(1, (size_t)ms_session_bytes(RING_BYTES));
    control->sessions[SLOT].generation = GENERATION;
    control->sessions[SLOT].state = MS_SESSION_OPEN;
    control->latch[MS_WRITER].has_notified = 1; /* it is awake */
    control->identity.max_message_bytes = 4096;
    set_text(sends.cluster, &sends.cluster_bytes, "DefaultCluster");
    for (int i = 0; i < MS_SEND_ANSWER_PIECES; i++)
        set_text(sends.piece[i], &sends.piece_bytes[i], pieces[i]);
    set_text(sends.topics[0].topic, &sends.topics[0].topic_bytes, "topic");
    sends.topics[0].queues = 4;
    sends.topic_count = 1;
    sends.frame_bytes_max = INPUT_BYTES_MAX;
    memcpy(sends.head.store_host, host, sizeof host);
}

/* Do as the writer: check that it accepts each entry, and answer it. */
static void answer_entries(void)
{
    uint64_t at = session->head, sequence = session->acked;
    while (at != session->tail) {
        struct ms_taken taken;
        uint32_t detail = 0;
        const uint8_t *const entry = ms_session_ring(session) + (at & (RING_BYTES - 1));
        uint32_t bytes;
        uint16_t kind;
        memcpy(&bytes, entry, sizeof bytes);
        memcpy(&kind, entry + 4, sizeof kind);
        CHECK(bytes % 8 == 0 && bytes > 0 && bytes <= session->tail - at);
        if (kind != MS_ENTRY_PAD) {
            CHECK(ms_entry_parse(entry, bytes, &taken) && ms_entry_check(&taken, &detail) == PUT_OK);
            CHECK(taken.head.sequence == sequence + 1 && taken.head.queue_id >= 0 && taken.head.queue_id < 4);
            CHECK(taken.head.topic_bytes == 5 && memcmp(taken.topic, "topic", 5) == 0 && taken.head.payload_bytes <= 4096);
            sequence++;
            struct ms_completion *const completion = &session->completion[sequence % MS_COMPLETIONS];
            *completion = (struct ms_completion){.sequence = sequence, .physical_offset = (int64_t)at, .queue_offset = (int64_t)sequence};
        }
        at += bytes;
    }
    session->head = at;
    session->acked = sequence;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint8_t born[MS_HOST_BYTES_MAX] = {1};
    static struct ms_producer producer;
    if (size < 1 || size > INPUT_BYTES_MAX)
        return 0;
    begin();
    memset(&producer, 0, sizeof producer);
    ms_session_format(session, RING_BYTES, SLOT, GENERATION, 3);
    session->head = session->tail = session->acked = 0;
    producer.control = control;
    producer.session = session;
    producer.slot = SLOT;
    producer.generation = GENERATION;
    ms_producer_attach(&producer);
    struct guarded memory = guarded_new((int64_t)size - 1);
    memcpy(memory.at, data + 1, size - 1);
    int64_t at = 0, took = 1;
    while (took > 0) {
        took = ms_sends_take(&sends, &producer, memory.at + at, (int64_t)size - 1 - at, born, data[0] & 1 ? MS_HOST_BYTES_MAX : 8);
        int64_t frames = 0;
        for (int64_t next = at; next < at + took; frames++)
            next += 4 + ms_get_i32(memory.at + next);
        CHECK(took >= 0 && at + took <= (int64_t)size - 1 && frames == sends.count && sends.count <= MS_SENDS_MAX);
        answer_entries();
        ms_sends_answer(&sends, &producer, 0);
        CHECK(sends.answered == sends.count && sends.answer_bytes <= sizeof sends.answers);
        uint32_t answers = 0;
        for (uint32_t next = 0; next < sends.answer_bytes; answers++)
            next += 4 + (uint32_t)ms_get_i32(sends.answers + next);
        CHECK(answers == sends.count);
        at += took;
    }
    guarded_free(&memory);
    return 0;
}

static size_t put_frame(uint8_t *to, const char *header, size_t body_bytes)
{
    const size_t header_bytes = strlen(header);
    ms_put_32(to, (uint32_t)(4 + header_bytes + body_bytes));
    ms_put_32(to + 4, (uint32_t)header_bytes);
    memcpy(to + 8, header, header_bytes);
    memset(to + 8 + header_bytes, 'x', body_bytes);
    return 8 + header_bytes + body_bytes;
}

void fuzz_seeds(void (*emit)(const uint8_t *data, size_t size))
{
    static const char *const headers[] = {
        "{\"code\":310,\"extFields\":{\"a\":\"group\",\"b\":\"topic\",\"c\":\"TBW102\",\"d\":\"4\",\"e\":\"1\",\"f\":\"0\",\"g\":\"1795294055449\","
        "\"h\":\"0\",\"i\":\"UNIQ_KEY\\u0001FD0000\\u0002WAIT\\u0001true\\u0002TAGS\\u0001t\",\"j\":\"0\",\"k\":\"false\",\"m\":\"false\",\"n\":\"broker-a\"},"
        "\"flag\":0,\"language\":\"JAVA\",\"opaque\":478,\"serializeTypeCurrentRPC\":\"JSON\",\"version\":409}",
        "{\"code\":310,\"extFields\":{\"b\":\"topic\",\"e\":\"3\",\"i\":\"\\\"\\\\\\n\\u0001\xc3\xa4\"}}",
        "{ \"opaque\" : -1 , \"extFields\" : { \"e\" : \"0\" , \"b\" : \"topic\" } , \"code\" : 310 }",
        "{\"code\":11,\"extFields\":{},\"flag\":0}",
    };
    static uint8_t input[INPUT_BYTES_MAX];
    size_t size = 1;
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++) {
        input[0] = (uint8_t)i;
        emit(input, 1 + put_frame(input + 1, headers[i], 40 * i));
    }
    for (int i = 0; i < 9; i++)
        size += put_frame(input + size, headers[i % 3], 100);
    emit(input, size);
}
