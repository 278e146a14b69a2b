/* The dispatch loop over damaged segments before guard pages: it stops inside its range, writes only whole entries to the
 * right queue files, and changes nothing when it is repeated. */
#include "dispatch_rig.h"

#include <signal.h>

/* Dispatch; there is room for all queues and keys. */
static int run(struct ms_dispatch *d, const uint8_t *view, int64_t base, int64_t from, int64_t to)
{
    const int found = rig_run(d, view, base, from, to, -1);
    CHECK(found != MS_DISPATCH_NEEDS_QUEUE && found != MS_DISPATCH_NEEDS_INDEX);
    return found;
}

static void one_round(int damage)
{
    static struct segment s;
    struct ms_dispatch d;
    segment_build(&s, 40, 1 << 20);
    if (damage)
        segment_damage(&s);
    struct guarded view = guarded_copy(s.bytes, s.total);
    struct guarded index = guarded_new(INDEX_BYTES);
    rig_begin(&d, index.at, 1);
    const int64_t middle = s.base + (int64_t)dice((uint64_t)s.total + 1);
    run(&d, view.at, s.base, s.base, middle);
    const int found = run(&d, view.at, s.base, d.reached, s.base + s.total);
    if (!damage)
        CHECK(found == MS_CASE_BLANK && d.messages == 40 && d.reached == s.starts[40]);
    check_files(&d, s.base, s.base + s.total);

    struct guarded before = guarded_copy(index.at, INDEX_BYTES);
    const int64_t keys = d.keys, reached = d.reached;
    CHECK(run(&d, view.at, s.base, s.base, s.base + s.total) == found && d.reached == reached);
    CHECK(d.keys == keys && memcmp(before.at, index.at, INDEX_BYTES) == 0);
    check_files(&d, s.base, s.base + s.total);

    struct ms_touched_queue places[128] = {0};
    int64_t touched_to = 0, last_ms = -1;
    const int touched = ms_dispatch_touched(places, 128, MS_TOUCHED_ALL, view.at, s.base, s.base, s.base + s.total,
                                            &touched_to, &last_ms);
    CHECK(touched == found || found == MS_CASE_OFFSET_MISMATCH || touched == -ENOSPC);
    guarded_free(&before);
    guarded_free(&index);
    guarded_free(&view);
}

static struct guarded one_record(const char *topic, const char *properties, int64_t store_timestamp_ms)
{
    uint8_t bytes[1024];
    const struct ms_record_template t = {
        .store_timestamp_ms = store_timestamp_ms,
        .topic = (const uint8_t *)topic,
        .topic_bytes = (int32_t)strlen(topic),
        .properties = (const uint8_t *)properties,
        .properties_bytes = (int32_t)strlen(properties),
    };
    return guarded_copy(bytes, ms_record_encode(bytes, &t));
}

/* A due time beyond 64 bits wraps, as in Java. */
static void due_time_wraps(void)
{
    struct ms_dispatch d;
    uint8_t entry[20];
    struct guarded view = one_record("SCHEDULE_TOPIC_XXXX", "DELAY\1"
                                                            "1",
                                     INT64_MAX);
    rig_begin(&d, NULL, 1);
    d.index_enabled = 0;
    CHECK(run(&d, view.at, 0, 0, view.bytes) == MS_CASE_RANGE_END && d.messages == 1);
    CHECK(pread(queues[0].fd, entry, sizeof entry, 0) == sizeof entry && ms_get_i64(entry + 12) == INT64_MIN + 999);
    guarded_free(&view);
}

#define PLACES 16
#define ONE_NAME "INNER_MULTI_DISPATCH\1abcdefghijklmnopqrstuvwxyz012345\2INNER_MULTI_QUEUE_OFFSET\1" \
                 "00000000000000000000000000000000"

static struct guarded changing;
static struct ms_touched_queue *places_of_changing;

/* At the first access to the places, change every second byte of the texts to a comma. */
static void change(int number)
{
    (void)number;
    CHECK(mprotect(places_of_changing, 4096, PROT_READ | PROT_WRITE) == 0);
    uint8_t *const names = memchr(changing.at, 'a', (size_t)changing.bytes);
    for (int i = 1; i < 32; i += 2)
        names[i] = changing.at[changing.bytes - 32 + i] = ',';
}

/* Another process overwrites a record between two reads of it: queues beyond those counted do not fill the table. */
static void touched_while_changing(void)
{
    int64_t reached, last_ms;
    changing = one_record("T", ONE_NAME, 0);
    places_of_changing = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(places_of_changing != MAP_FAILED && signal(SIGSEGV, change) != SIG_ERR);
    alarm(30); /* for a search that never ends */
    CHECK(ms_dispatch_touched(places_of_changing, PLACES, MS_TOUCHED_ALL, changing.at, 0, 0, changing.bytes, &reached, &last_ms) == -ENOSPC);
    alarm(0);
    signal(SIGSEGV, SIG_DFL);
    munmap(places_of_changing, 4096);
    guarded_free(&changing);
}

int main(void)
{
    dice_begin("dispatch");
    due_time_wraps();
    touched_while_changing();
    for (int round = 0; round < 300; round++)
        one_round(round % 4 != 0);
    return 0;
}
