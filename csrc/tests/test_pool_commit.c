/* The order of the committer's steps, seen at its failpoints: bytes in the file, then `committed`; what a blank leaves; no sleep
 * while bytes wait that were written before the latch was armed. */
#define MS_FAILPOINT(name) at_step(name)
static void at_step(const char *name);
#include "segments.h"
#include "../latch.cdef.h"
#define ms_latch_wait ms_latch_really_wait
#include "../latch.c"
#undef ms_latch_wait
#include "../pool_commit.c"

#define RECORDS 40

static struct ms_control control;
static struct segment segment; /* its bytes are the pool buffer */
static struct ms_pool_commit pool;
static sem_t semaphore, reputter;
static int file_fd;
static int next;      /* records below `wrote`; RECORDS + 1: the blank too */
static int at_arming; /* 1: a record is published while the latch is being armed */
static int sleeps;

static int64_t end_of(int record)
{
    return record <= RECORDS ? segment.starts[record] : segment.total;
}

static void put(void)
{
    ms_store_release(&control.wrote.value, end_of(++next));
    ms_latch_wakeup(&control.latch[MS_COMMITTER], &semaphore);
}

static int is_in_file(int64_t from, int64_t to)
{
    static uint8_t found[sizeof segment.bytes];
    return pread(file_fd, found, (size_t)(to - from), from) == to - from && memcmp(found, segment.bytes + from, (size_t)(to - from)) == 0;
}

static void at_step(const char *name)
{
    const int64_t committed = ms_load_acquire(&control.committed.value);
    if (strcmp(name, "latch_arming") == 0 && at_arming) {
        at_arming = 0;
        put();
    } else if (strcmp(name, "pool_piece_written") == 0) {
        pool.stream.rounds = 0; /* never a stream, which ends by the clock */
        CHECK(committed == pool.committed && is_in_file(committed, end_of(next < RECORDS ? next : RECORDS)));
    } else if (strcmp(name, "pool_blank_written") == 0) {
        CHECK(committed == pool.committed && is_in_file(end_of(RECORDS), end_of(RECORDS) + MS_BLANK_BYTES));
    } else if (strcmp(name, "pool_committed") == 0) {
        CHECK(committed == end_of(next) && sem_trywait(&reputter) == -1);
    }
}

/* Return as if a signal arrived, instead of sleeping. */
int ms_latch_wait(struct ms_latch *latch, void *unused, int64_t timeout_ns)
{
    (void)unused;
    CHECK(timeout_ns > 0 && ms_load_relaxed(&latch->has_notified) == 0 && pool.committed == end_of(next));
    ms_latch_disarm(latch);
    sleeps++;
    return -EINTR;
}

static int sleepy_run(void)
{
    ms_latch_arm(&control.latch[MS_COMMITTER], &semaphore);
    ms_latch_arm(&control.latch[MS_REPUTTER], &reputter);
    const int reason = ms_pool_commit_run(&pool, INT64_MAX / 2, 1);
    CHECK(ms_load_relaxed(&control.latch[MS_COMMITTER].has_notified) == 1);
    return reason;
}

int main(void)
{
    dice_begin("test_pool_commit");
    segment_build(&segment, RECORDS, 0);
    memset(segment.bytes + segment.starts[RECORDS] + MS_BLANK_BYTES, 0xee, sizeof segment.bytes - (size_t)(segment.starts[RECORDS] + MS_BLANK_BYTES));
    sem_init(&semaphore, 0, 0);
    sem_init(&reputter, 0, 0);
    char path[] = "/tmp/test_pool_commit.XXXXXX";
    file_fd = mkstemp(path);
    CHECK(file_fd >= 0 && ftruncate(file_fd, segment.total) == 0);
    const int read_only = open(path, O_RDONLY);
    unlink(path);
    pool.control = &control;
    pool.semaphore = &semaphore;
    pool.reputter_semaphore = &reputter;
    pool.base = -1;
    pool.view = segment.bytes;
    pool.segment_bytes = segment.total;
    pool.piece_bytes = 1 << 20;
    pool.fd = file_fd;
    ms_stream_begin(&pool.stream, 20000, 100000);

    CHECK(ms_pool_commit_run(&pool, INT64_MAX / 2, 0) == MS_COMMIT_IDLE && sleeps == 0);
    put();
    CHECK(ms_pool_commit_run(&pool, INT64_MAX / 2, 0) == MS_COMMIT_SEGMENT && pool.committed == 0);
    pool.base = 0;
    CHECK(ms_pool_commit_run(&pool, 0, 0) == MS_COMMIT_TIME && pool.committed == end_of(1));
    CHECK(sleepy_run() == MS_COMMIT_IDLE && sleeps == 1);
    while (next < RECORDS - 1) {
        at_arming = 1;
        put();
        CHECK(sleepy_run() == MS_COMMIT_IDLE && pool.committed == end_of(next));
        CHECK(sem_trywait(&reputter) == 0);
    }

    /* After a failed write, or bytes that are no record, nothing has moved and the error is noted. */
    const int64_t before = pool.committed;
    pool.fd = read_only;
    put();
    CHECK(sleepy_run() == MS_COMMIT_FAILED && pool.error_number == EBADF && pool.committed == before);
    pool.fd = file_fd;
    const uint8_t magic = segment.bytes[before + 4];
    segment.bytes[before + 4] = 0x55;
    CHECK(sleepy_run() == MS_COMMIT_BROKEN && pool.committed == before);
    segment.bytes[before + 4] = magic;
    CHECK(sleepy_run() == MS_COMMIT_IDLE && pool.committed == end_of(RECORDS));

    /* Of the blank only the header reaches the file. */
    put();
    CHECK(sleepy_run() == MS_COMMIT_SEGMENT && pool.committed == segment.total);
    for (int64_t at = segment.starts[RECORDS] + MS_BLANK_BYTES; at < segment.total; at++) {
        uint8_t byte = 1;
        CHECK(pread(file_fd, &byte, 1, at) == 1 && byte == 0);
    }

    /* A frozen store is left as it is. */
    ms_store_release(&control.state.frozen, 2u);
    ms_store_release(&control.wrote.value, segment.total + 100);
    CHECK(ms_pool_commit_run(&pool, INT64_MAX / 2, 0) == MS_COMMIT_IDLE && pool.committed == segment.total);
    return 0;
}
