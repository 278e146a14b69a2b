/* Single rounds of group commit: what becomes durable, what does not, and the first failed sync. */

#include "check.h"
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>

#include "../latch.cdef.h"

static int during_sync(int fd);
#define fdatasync during_sync
#include "../group_commit.c"
#undef fdatasync

#define SEGMENT 4096

static struct ms_control control;
static struct ms_group_commit group;
static sem_t semaphore;

/* Act as the writer: store a commit slot, then `committed`, `lag` bytes less as if it was stopped in between. */
static void commit(int64_t wrote, int64_t lag)
{
    int64_t pass = control.slot_pass.value + 1;
    control.slots[pass & 1].wrote = wrote;
    control.slot_pass.value = pass;
    control.committed.value = wrote - lag;
}

static int64_t put_during_sync; /* a put at this moment commits up to here, 0: none comes */

static int during_sync(int fd)
{
    CHECK(control.flusher.sync_target > control.flushed.value); /* announced, for puts that wait for it or for the next one */
    if (put_during_sync != 0)
        commit(put_during_sync, 0);
    put_during_sync = 0;
    return fdatasync(fd);
}

static int open_file(const char *path)
{
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
    CHECK(fd >= 0);
    unlink(path);
    CHECK(posix_fallocate(fd, 0, SEGMENT) == 0);
    return fd;
}

static void *wake(void *unused)
{
    (void)unused;
    while (ms_load_acquire(&control.latch[MS_FLUSHER].has_notified) != 0)
        sched_yield();
    ms_latch_wakeup(&control.latch[MS_FLUSHER], &semaphore);
    return NULL;
}

int main(void)
{
    dice_begin("test_group_commit");
    sem_init(&semaphore, 0, 0);
    char path[] = "/tmp/test_group_commit.XXXXXX";
    int scratch = mkstemp(path);
    close(scratch);
    unlink(path);
    group = (struct ms_group_commit){.control = &control, .semaphore = &semaphore, .segment_bytes = SEGMENT, .incarnation = 7};
    group.base[0] = 0;
    group.fd[0] = open_file(path);
    group.count = 1;

    commit(100, 0);
    CHECK(ms_group_commit_once(&group) == 0); /* the writer has not verified this flusher */
    CHECK(control.flushed.value == 0);
    control.writer.verified_flusher = 7;
    uint32_t seen = control.flush_seq.value;
    CHECK(ms_group_commit_once(&group) == 1);
    CHECK(control.flushed.value == 100 && control.flush_seq.value != seen && control.flusher.sync_target == 100);
    CHECK(ms_group_commit_once(&group) == 0); /* nothing new */

    commit(300, 100); /* the slot covers more than `committed` */
    CHECK(ms_group_commit_once(&group) == 1);
    CHECK(control.flushed.value == 200);

    control.committed.value = 260;
    put_during_sync = 310; /* its bytes may have come after the sync */
    CHECK(ms_group_commit_once(&group) == 1);
    CHECK(control.flushed.value == 260);

    commit(SEGMENT + 50, 0); /* in a segment that is not open: flushed ends before it */
    CHECK(ms_group_commit_once(&group) == 1);
    CHECK(control.flushed.value == SEGMENT);
    CHECK(ms_group_commit_once(&group) == -MS_GROUP_SEGMENT);
    group.base[1] = SEGMENT;
    group.fd[1] = open_file(path);
    group.count = 2;
    uint64_t syncs = control.flusher.syncs;
    CHECK(ms_group_commit_once(&group) == 1);
    CHECK(control.flushed.value == SEGMENT + 50 && control.flusher.syncs == syncs + 1);

    commit(SEGMENT + 60, 0);
    int64_t deadline_ns = ms_monotonic_ns() + 20000000000;
    CHECK(ms_group_commit_run(&group, deadline_ns, 0) == MS_GROUP_TIME); /* returns after the first sync */
    CHECK(control.flushed.value == SEGMENT + 60 && ms_monotonic_ns() < deadline_ns);

    pthread_t other; /* wakes it without a commit, once it sleeps */
    CHECK(pthread_create(&other, NULL, wake, NULL) == 0);
    CHECK(ms_group_commit_run(&group, deadline_ns, 0) == MS_GROUP_TIME);
    CHECK(pthread_join(other, NULL) == 0 && ms_monotonic_ns() < deadline_ns);

    commit(SEGMENT + 100, 0); /* a descriptor that cannot be synced */
    int pipes[2];
    CHECK(pipe(pipes) == 0);
    int good = group.fd[1];
    group.fd[1] = pipes[1];
    CHECK(ms_group_commit_once(&group) == -MS_GROUP_FAILED);
    CHECK(group.error_number == EINVAL && group.failed_base == SEGMENT);
    CHECK(control.flushed.value == SEGMENT + 60);
    group.fd[1] = good;
    CHECK(ms_control_freeze(&control, MS_FLUSHER, EINVAL, "tried") == 1);
    CHECK(ms_group_commit_once(&group) == 0); /* frozen: no sync follows, although one would succeed */
    CHECK(control.flushed.value == SEGMENT + 60);
    CHECK(ms_group_commit_run(&group, 0, 0) == MS_GROUP_TIME); /* the deadline is in the past */
    return 0;
}
