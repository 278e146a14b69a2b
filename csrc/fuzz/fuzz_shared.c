/* Checks arbitrary bytes as each shared object that a process attaches to (csrc/{control,session,layout,blocked_reasons,
 * store_stats}.h), and reads an object to its end if its check accepts it. The writer makes passes over any session object,
 * whatever its producer has written there: it ends each, and the log has whole records only. */
#include "target.h"
#include "../control.h"
#include "../blocked_reasons.cdef.h"
#include "../shared_text.cdef.h"
#include "../layout.h"
#include "../session.h"
#include "../store_stats.h"
#include "../producer.h"
#include "../record.h"
#include "../writer.h"

#define OBJECT_BYTES_MAX (1 << 19)
#define RING_BYTES 4096
#define SEGMENT_BYTES 65536
#define TABLE_SLOTS 16
#define PASSES_MAX 64
#define PLAIN_MAGIC 0x4d53504c41494e21ULL
#define PLAIN_BYTES 4096

enum { CONTROL,
       SESSION,
       PLAIN,
       BLOCKED_REASONS,
       TOPIC_STATS,
       OBJECTS,
};

/* Put two entries into an empty session: one record, and two that share their topic. */
static void fill(struct ms_session *session)
{
    static const uint8_t many[16] = {4, 0, 0, 0, 4, 0, 0, 0, 'o', 'n', 'e', 't', 'w', 'o', '!', '!'};
    for (uint32_t n = 0; n < 2; n++) {
        struct ms_entry head = {.kind = n == 0 ? MS_ENTRY_PUT : MS_ENTRY_MANY, .sequence = n + 1, .count = n + 1, .topic_bytes = 5};
        head.payload_bytes = n == 0 ? 4 : 16;
        head.entry_bytes = (uint32_t)ms_entry_layout_bytes(head.topic_bytes, 0, head.payload_bytes);
        ms_entry_fill(ms_session_ring(session) + session->tail, &head, (const uint8_t *)"topic", (const uint8_t *)"",
                      n == 0 ? (const uint8_t *)"body" : many, head.payload_bytes);
        session->tail += head.entry_bytes;
    }
}

/* Make a valid object, since a fuzzer cannot fill one; the input replaces its begin, and its length is cut. */
static int64_t format(int which, uint8_t *at)
{
    switch (which) {
    case CONTROL:
        ((struct ms_control *)(void *)at)->identity.layout_version = MS_CONTROL_LAYOUT_VERSION;
        ((struct ms_control *)(void *)at)->identity.control_bytes = (uint32_t)sizeof(struct ms_control);
        ((struct ms_control *)(void *)at)->identity.magic = MS_CONTROL_MAGIC;
        return (int64_t)sizeof(struct ms_control);
    case SESSION:
        ms_session_format((struct ms_session *)(void *)at, RING_BYTES, 1, 2, 3);
        fill((struct ms_session *)(void *)at);
        return ms_session_bytes(RING_BYTES);
    case PLAIN:
        ms_layout_publish(at, PLAIN_MAGIC, 1);
        return PLAIN_BYTES;
    case BLOCKED_REASONS:
        ms_layout_publish(at, PLAIN_MAGIC, 1);
        return (int64_t)sizeof(struct ms_blocked_reasons);
    default:
        ms_topic_stats_format((struct ms_topic_stats *)(void *)at, 16);
        return ms_topic_stats_bytes(16);
    }
}

/* Let a writer execute what the session holds. */
static void execute(struct ms_session *session)
{
    static struct ms_control control;
    static struct ms_writer writer;
    static uint8_t log[SEGMENT_BYTES], scratch[2 * RING_BYTES], table[1 << 16] __attribute__((aligned(128)));
    memset(&control, 0, sizeof control);
    memset(&writer, 0, sizeof writer);
    memset(log, 0, sizeof log);
    memset(table, 0, sizeof table);
    CHECK(ms_queue_table_bytes(TABLE_SLOTS) <= (int64_t)sizeof table);
    ms_queue_table_format((void *)table, TABLE_SLOTS, 1);
    control.state.state = MS_STATE_RUNNING;
    control.allocator.reserved_end = INT64_MAX;
    writer.control = &control;
    writer.queues = (void *)table;
    writer.segment_bytes = SEGMENT_BYTES;
    writer.max_message_bytes = SEGMENT_BYTES;
    writer.scratch = scratch;
    writer.scratch_bytes = sizeof scratch;
    ms_writer_open(&writer);
    writer.current = (struct ms_segment){0, log, -1};
    ms_writer_attach_session(&writer, 1, session, 2, RING_BYTES);
    int passes = 0;
    for (int reason = -1; reason != MS_RUN_TIME && passes < PASSES_MAX; passes++) {
        reason = ms_writer_run(&writer, 0);
        writer.refuse_segment = reason == MS_RUN_SEGMENT;
        writer.side_failed = reason == MS_RUN_SIDE;
        writer.queues_refused = reason == MS_RUN_QUEUES;
        if (reason == MS_RUN_ROLLED || reason == MS_RUN_SESSIONS)
            break;
    }
    CHECK(passes < PASSES_MAX);
    const int64_t wrote = ms_load_acquire(&control.wrote.value);
    CHECK(wrote >= 0 && wrote <= SEGMENT_BYTES);
    for (int64_t at = 0; at < wrote;) {
        const uint32_t bytes = (uint32_t)log[at] << 24 | (uint32_t)log[at + 1] << 16 | (uint32_t)log[at + 2] << 8 | log[at + 3];
        const int what = ms_record_classify(log + at, SEGMENT_BYTES - at, at, MS_CHECK_CRC | MS_CHECK_OFFSET);
        CHECK(what == MS_CASE_MESSAGE || what == MS_CASE_BLANK);
        at += bytes;
    }
}

static void use(int which, uint8_t *at, int64_t bytes)
{
    char text[MS_BLOCKED_REASON_BYTES];
    switch (which) {
    case CONTROL:
        if (ms_control_check((const void *)at, bytes) != 0)
            return;
        ms_control_committed_slot((const void *)at, &(struct ms_commit_totals){0});
        return;
    case SESSION:
        if (ms_session_check((const void *)at, bytes) == 0)
            CHECK(*ms_session_ring((void *)at) + 1 > 0 && ((struct ms_session *)(void *)at)->completion[MS_COMPLETIONS - 1].count + 1ull > 0);
        if (bytes >= ms_session_bytes(RING_BYTES))
            execute((void *)at);
        return;
    case PLAIN:
        CHECK(ms_layout_check(at, bytes, PLAIN_MAGIC, 1, PLAIN_BYTES) <= 0);
        return;
    case BLOCKED_REASONS:
        if (ms_layout_check(at, bytes, PLAIN_MAGIC, 1, sizeof(struct ms_blocked_reasons)) != 0)
            return;
        for (uint32_t kind = 0; kind < 10; kind++) {
            const struct ms_blocked_reason *line = &((const struct ms_blocked_reasons *)(const void *)at)->worker[kind];
            ms_text_read(&line->changes, line->text, text, sizeof text);
            CHECK(memchr(text, 0, sizeof text) != NULL);
        }
        return;
    default:
        if (ms_topic_stats_check((const void *)at, bytes) == 0) {
            const struct ms_topic_stats *stats = (void *)at;
            CHECK(stats->slots > 0 && (stats->slots & (stats->slots - 1)) == 0);
            const struct ms_topic_count *found = ms_topic_stats_find((void *)at, (const uint8_t *)"T", 1);
            CHECK((const uint8_t *)(found + 1) <= at + bytes);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct guarded objects[OBJECTS];
    struct input input = {data, (int64_t)size};
    if (size < 9 || size > INPUT_BYTES_MAX)
        return 0;
    const int which = (int)take(&input, 1) % OBJECTS;
    static uint8_t good[OBJECT_BYTES_MAX] __attribute__((aligned(128)));
    memset(good, 0, sizeof good);
    const int64_t whole = format(which, good);
    CHECK(whole <= OBJECT_BYTES_MAX);
    const int64_t bytes = take_near(&input, whole) / 8 * 8;
    const int64_t at = take(&input, 1) & 1 ? 0 : take_up_to(&input, bytes);
    const int64_t laid = input.left < bytes - at ? input.left : bytes - at;
    memcpy(good + at, input.at, (size_t)(laid > 0 ? laid : 0));
    objects[which] = guarded_copy(good, bytes);
    use(which, objects[which].at, bytes);
    guarded_free(&objects[which]);
    return 0;
}

void fuzz_seeds(void (*emit)(const uint8_t *data, size_t size))
{
    static uint8_t object[OBJECT_BYTES_MAX] __attribute__((aligned(128)));
    for (uint8_t which = 0; which < OBJECTS; which++) {
        uint8_t bytes[512] = {which, 3, 1};
        memset(object, 0, sizeof object);
        format(which, object);
        memcpy(bytes + 3, object, sizeof bytes - 3);
        emit(bytes, sizeof bytes);
        bytes[1] = 0;
        emit(bytes, sizeof bytes);
    }
    uint8_t ring[7 + 512] = {SESSION, 3, 0, 0, 0, 0, 0}; /* laid over the ring, where there are entries */
    memset(object, 0, sizeof object);
    format(SESSION, object);
    const uint64_t at = ms_session_ring_at();
    for (int i = 0; i < 4; i++)
        ring[3 + i] = (uint8_t)(at >> (24 - 8 * i));
    memcpy(ring + 7, object + at, 512);
    emit(ring, sizeof ring);
}
