/* A pulse: heartbeats that others see, and each thing that makes it return. */

#include "check.h"
#include <fcntl.h>
#include <sys/stat.h>

#include "../crc32.cdef.h"
#include "../pulse.cdef.h"

#define LOCKS_AT (1ll << 40)
#define SLOTS_AT 4096
#define RECORDS_AT (1 << 20)
#define INTERVAL_NS 1000
#define TIMEOUT_NS 3000000

static char folder[] = "/tmp/test_pulse.XXXXXX";
static char path[64];
static char other_path[64];
static void *pulse;

static int open_file(const char *name)
{
    const int fd = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    return fd;
}

static void lock_byte(int fd, int64_t byte, short kind)
{
    struct flock lock = {.l_type = kind, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    CHECK(fcntl(fd, F_OFD_SETLK, &lock) == 0);
}

static void write_record(int fd, uint32_t slot, uint64_t heartbeats)
{
    uint8_t record[28] = {7};
    memcpy(record + 8, &heartbeats, 8);
    const uint32_t crc = ms_crc32(0, record, 24);
    memcpy(record + 24, &crc, 4);
    CHECK(pwrite(fd, record, sizeof record, SLOTS_AT + 64 * (int64_t)slot) == sizeof record);
}

static struct ms_member member_of(int fd, uint32_t slot, uint32_t slots)
{
    struct ms_member member = {.incarnation = 5, .heartbeats = 3, .slots_at = SLOTS_AT, .locks_at = LOCKS_AT};
    member.records_at = RECORDS_AT;
    member.fd = fd;
    member.slot = slot;
    member.slots = slots;
    member.pid = 9;
    return member;
}

/* One look: whether it has found a change. */
static int changes(void *beat)
{
    ms_beat_rouse(beat);
    ms_pulse_wait(pulse, INTERVAL_NS, 1000000000);
    const uint32_t found = ms_beat_take(beat);
    CHECK(found & MS_BEAT_ROUSED);
    return (found & MS_BEAT_CHANGED) != 0;
}

static void heartbeats(void)
{
    ms_pulse_wait(pulse, INTERVAL_NS, 1000000000000); /* without a beat it does not wait */
    const int fd = open_file(path);
    const struct ms_member member = member_of(fd, 2, 1024);
    void *beat = ms_beat_add(pulse, &member);
    CHECK(changes(beat)); /* the first look */
    uint64_t record[8], before = 0;
    for (int i = 0; i < 3; i++) {
        const uint32_t beats = ms_pulse_beats(pulse);
        ms_pulse_wait(pulse, INTERVAL_NS, TIMEOUT_NS);
        CHECK(ms_beat_take(beat) == 0 && ms_pulse_beats(pulse) > beats);
        CHECK(pread(fd, record, 28, SLOTS_AT + 64 * 2) == 28);
        CHECK(record[0] == 5 && record[1] > before && (uint32_t)record[2] == 9);
        CHECK((uint32_t)record[3] == ms_crc32(0, (const uint8_t *)record, 24));
        before = record[1];
    }
    ms_beat_remove(pulse, beat);
    ms_pulse_wait(pulse, INTERVAL_NS, TIMEOUT_NS);
    CHECK(pread(fd, record, 28, SLOTS_AT + 64 * 2) == 28 && record[1] == before);
    close(fd);
    unlink(path);
}

static void members(uint32_t mine, uint32_t other)
{
    const int fd = open_file(path), theirs = open_file(path);
    uint64_t moves = 1;
    for (uint32_t slot = 0; slot <= 40; slot++) /* of members that have died */
        write_record(theirs, slot, moves);
    const struct ms_member member = member_of(fd, mine, 1024);
    lock_byte(fd, LOCKS_AT + mine, F_WRLCK);
    void *beat = ms_beat_add(pulse, &member);
    CHECK(changes(beat) && !changes(beat) && !changes(beat));
    lock_byte(theirs, LOCKS_AT + other, F_WRLCK);
    CHECK(!changes(beat)); /* it has not written its record */
    for (int i = 0; i < 5; i++) {
        write_record(theirs, other, ++moves);
        CHECK(changes(beat) == (i == 0));
    }
    CHECK(!changes(beat) && changes(beat) && changes(beat)); /* it seems stopped */
    for (int i = 0; i < 3; i++) {
        write_record(theirs, other, ++moves);
        CHECK(changes(beat) == (i == 0)); /* it is back */
    }
    close(theirs); /* it dies */
    CHECK(changes(beat) && !changes(beat));
    ms_beat_remove(pulse, beat);
    close(fd);
    unlink(path);
}

static void records(void)
{
    const int fd = open_file(path);
    const struct ms_member member = member_of(fd, 0, 0);
    void *beat = ms_beat_add(pulse, &member);
    CHECK(changes(beat));
    CHECK(pwrite(fd, "x", 1, RECORDS_AT + 32 * 99) == 1 && !changes(beat)); /* not one of its own */
    ms_beat_set_records(beat, 100);
    CHECK(changes(beat) && !changes(beat));
    for (int at = 0; at < 32; at++) {
        CHECK(pwrite(fd, "y", 1, RECORDS_AT + 32 * 99 + at) == 1);
        CHECK(changes(beat) == (at < 20));
    }
    for (uint64_t fence = 1; fence < 9; fence++) {
        uint64_t record[3] = {fence, 7};
        record[2] = ms_crc32(0, (const uint8_t *)record, 16);
        CHECK(pwrite(fd, record, 20, RECORDS_AT + 32 * 99) == 20 && changes(beat) && !changes(beat));
    }
    ms_beat_remove(pulse, beat);
    close(fd);
    unlink(path);
}

static void make_old(const char *name)
{
    const struct timespec times[2] = {{.tv_sec = 1000 + (time_t)dice(1000000)}, {.tv_sec = 1000 + (time_t)dice(1000000)}};
    CHECK(utimensat(AT_FDCWD, name, times, 0) == 0);
}

/* Two looks: files and locks are looked at by each second one. */
static int renamed(void *beat)
{
    const int first = changes(beat), second = changes(beat);
    return first || second;
}

static void names(void)
{
    void *file = ms_beat_add(pulse, NULL), *length = ms_beat_add(pulse, NULL), *inside = ms_beat_add(pulse, NULL);
    void *lock = ms_beat_add(pulse, NULL);
    CHECK(ms_beat_watch(pulse, file, path, MS_NAME_FILE) == 0 && ms_beat_watch(pulse, length, path, MS_NAME_LENGTH) == 0);
    CHECK(ms_beat_watch(pulse, inside, folder, MS_NAME_FOLDER) == 0 && ms_beat_watch(pulse, lock, path, MS_NAME_LOCK) == 0);
    void *all[] = {file, length, inside, lock};
    make_old(folder);
    for (int i = 0; i < 4; i++)
        CHECK(renamed(all[i])); /* the first looks */
    for (int i = 0; i < 4; i++)
        CHECK(!renamed(all[i]));
    int fd = open_file(path);
    CHECK(renamed(file) && renamed(length) && renamed(lock)); /* it was made */
    CHECK(renamed(inside) && renamed(inside)); /* what is in it may come later */
    make_old(folder);
    CHECK(renamed(inside) && !renamed(inside) && !renamed(file));
    CHECK(write(fd, "more", 4) == 4);
    CHECK(renamed(length) && !renamed(length) && !renamed(file) && !renamed(inside));
    lock_byte(fd, 0, F_RDLCK);
    CHECK(renamed(lock) && !renamed(lock));
    lock_byte(fd, 0, F_WRLCK);
    CHECK(renamed(lock) && !renamed(lock) && !renamed(file));
    close(fd);
    CHECK(renamed(lock) && !renamed(lock));
    fd = open_file(other_path);
    CHECK(write(fd, "more", 4) == 4 && close(fd) == 0 && rename(other_path, path) == 0); /* another of the same length */
    CHECK(renamed(file) && renamed(length) && renamed(lock));
    ms_beat_forget(pulse, file);
    unlink(path);
    CHECK(!renamed(file) && renamed(length) && renamed(lock));
    for (int i = 0; i < 4; i++)
        ms_beat_remove(pulse, all[i]);
}

int main(void)
{
    dice_begin("test_pulse");
    CHECK(mkdtemp(folder) != NULL);
    snprintf(path, sizeof path, "%s/file", folder);
    snprintf(other_path, sizeof other_path, "%s/other", folder);
    pulse = ms_pulse_new();
    CHECK(pulse != NULL);
    heartbeats();
    members(0, 1);
    members(3, 0);
    members(17, 16);
    members(2, 38);
    records();
    names();
    rmdir(folder);
    return 0;
}
