/* Checks arbitrary bytes as each shared object that a process attaches to (csrc/{control,session,cleaning,blocked_reasons,
 * store_stats}.h), and reads an object to its end if its check accepts it. */
#include "../cleaning.h"
#include "../control.h"
#include "../blocked_reasons.h"
#include "../session.h"
#include "../store_stats.h"
#include "target.h"

#define OBJECT_BYTES_MAX (1 << 19)
#define RING_BYTES 4096

enum { CONTROL,
       SESSION,
       CLEANING,
       BLOCKED_REASONS,
       STORE_STATS,
       TOPIC_STATS,
       OBJECTS,
};

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
        return ms_session_bytes(RING_BYTES);
    case CLEANING:
        ms_cleaning_format((struct ms_cleaning *)(void *)at, 3);
        return (int64_t)sizeof(struct ms_cleaning);
    case BLOCKED_REASONS:
        ms_blocked_reasons_format((struct ms_blocked_reasons *)(void *)at);
        return (int64_t)sizeof(struct ms_blocked_reasons);
    case STORE_STATS:
        ms_store_stats_format((struct ms_store_stats *)(void *)at);
        return (int64_t)sizeof(struct ms_store_stats);
    default:
        ms_topic_stats_format((struct ms_topic_stats *)(void *)at, 16);
        return ms_topic_stats_bytes(16);
    }
}

static void use(int which, uint8_t *at, int64_t bytes)
{
    int64_t wrote, time;
    char text[MS_BLOCKED_REASON_BYTES];
    switch (which) {
    case CONTROL:
        if (ms_control_check((const void *)at, bytes) != 0)
            return;
        ms_control_committed_slot((const void *)at, &(struct ms_commit_totals){0});
        ms_control_flush_pair((const void *)at, &wrote, &time);
        return;
    case SESSION:
        if (ms_session_check((const void *)at, bytes) == 0)
            CHECK(*ms_session_ring((void *)at) + 1 > 0 && ((struct ms_session *)(void *)at)->completion[MS_COMPLETIONS - 1].count + 1ull > 0);
        return;
    case CLEANING:
        if (ms_cleaning_check((const void *)at, bytes) != 0)
            return;
        for (int32_t slot = 0; slot >= 0 && slot < MS_HOLDS_MAX; slot = ms_hold_find((void *)at, slot + 1, -1))
            ms_hold_release((void *)at, slot, 7);
        const int32_t mine = ms_hold_take((void *)at, 7, 1024);
        CHECK(mine < MS_HOLDS_MAX);
        if (mine >= 0)
            ms_hold_release((void *)at, mine, 7);
        return;
    case BLOCKED_REASONS:
        if (ms_blocked_reasons_check((const void *)at, bytes) != 0)
            return;
        for (uint32_t kind = 0; kind < 10; kind++) {
            ms_blocked_reason_read((const void *)at, kind, text);
            CHECK(memchr(text, 0, sizeof text) != NULL);
        }
        return;
    case STORE_STATS:
        CHECK(ms_store_stats_check((const void *)at, bytes) <= 0);
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
}
