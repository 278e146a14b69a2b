#include "base.h"
#include "pulse.cdef.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "crc32.cdef.h"

/* As ipc/group_members.py has them. */
#define SLOT_BYTES 64
#define SLOT_CRC_AT 24
#define RECORD_BYTES 32
#define RECORD_USED_BYTES 20     /* then comes the mark, which its holder moves with each delivery */

#define SLOTS_READ 16
#define RECORDS_READ 64
#define SILENT_LOOKS 2           /* a member whose record stays so long may be stopped */

struct name {
    struct name *next;
    uint64_t seen[4];
    int32_t what;
    int32_t is_known;
    char path[];
};

/* Another member: `moved` is 0 if there is none, else 1 and the number of looks since its record has moved. */
struct slot {
    uint32_t crc;
    uint32_t moved;
};

struct beat {
    struct beat *next;
    struct name *names;
    struct slot *slots;          /* NULL: it watches no other members */
    struct ms_member member;     /* fd: -1 for none */
    uint32_t records;            /* of queues; set without the mutex */
    uint64_t records_hash;
    uint32_t looks;
    uint32_t flags;              /* MS_BEAT_*; changed without the mutex */
};

struct pulse {
    pthread_mutex_t lock;        /* guards the list and what is in it */
    struct beat *first;
    int64_t due_ns;              /* of the waiting thread alone */
    uint32_t beats;              /* written by the waiting thread alone */
};

static void raise_flag(struct beat *beat, uint32_t flag)
{
    for (uint32_t before = ms_load_acquire(&beat->flags); !ms_compare_exchange(&beat->flags, &before, before | flag);) {
    }
}

/* ---- locks ---- */

/* The kernel names any one lock in the range, so that what is before it and after it is asked for again. */
int ms_locks_find(int32_t fd, int64_t start, int64_t count, uint8_t *found)
{
    int64_t at = 0;
    while (at < count) {
        struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = start + at, .l_len = count - at};
        if (fcntl(fd, F_OFD_GETLK, &lock) != 0)
            return -errno;
        if (lock.l_type == F_UNLCK)
            return 0;
        const int64_t first = lock.l_start > start + at ? lock.l_start - start : at;
        const int64_t end = lock.l_len != 0 && lock.l_start + lock.l_len < start + count ? lock.l_start + lock.l_len - start : count;
        memset(found + first, 1, (size_t)(end - first));
        const int error = ms_locks_find(fd, start + at, first - at, found + at);
        if (error != 0)
            return error;
        at = end;
    }
    return 0;
}

/* ---- a member ---- */

static void write_heartbeat(struct ms_member *member)
{
    uint8_t record[SLOT_CRC_AT + 4] = {0};
    member->heartbeats++;
    memcpy(record, &member->incarnation, 8); /* of a little-endian machine, as the whole module */
    memcpy(record + 8, &member->heartbeats, 8);
    memcpy(record + 16, &member->pid, 4);
    memcpy(record + 20, &member->wanted, 4);
    const uint32_t crc = ms_crc32(0, record, SLOT_CRC_AT);
    memcpy(record + SLOT_CRC_AT, &crc, 4);
    /* If the disk fails the other members see no heartbeat, as it should be. */
    (void)!pwrite(member->fd, record, sizeof record, member->slots_at + (int64_t)SLOT_BYTES * member->slot);
}

static int is_locked(int fd, int64_t byte)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    return fcntl(fd, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK; /* if it cannot be told, it lives */
}

/* Whether the member of a slot has come, gone or come back, or seems to be stopped. */
static int has_slot_changed(struct slot *slot, uint32_t crc, int fd, int64_t lock)
{
    if (crc != slot->crc) {
        const int is_known = slot->moved != 0 && slot->moved <= SILENT_LOOKS;
        slot->crc = crc;
        slot->moved = slot->moved != 0 || is_locked(fd, lock);
        return slot->moved != 0 && !is_known;
    }
    if (slot->moved == 0)
        return 0;
    if (!is_locked(fd, lock)) {
        slot->moved = 0;
        return 1;
    }
    slot->moved += slot->moved <= SILENT_LOOKS;
    return slot->moved > SILENT_LOOKS;
}

/* Slots are taken from the first on, so that an empty record ends those that ever had a member. */
static int have_slots_changed(struct beat *beat)
{
    const struct ms_member *member = &beat->member;
    int changed = 0;
    for (uint32_t first = 0; first < member->slots; first += SLOTS_READ) {
        uint8_t block[SLOTS_READ * SLOT_BYTES] = {0};
        uint32_t crc = 0;
        if (pread(member->fd, block, sizeof block, member->slots_at + (int64_t)SLOT_BYTES * first) < 0)
            return 1;
        for (uint32_t i = 0; i < SLOTS_READ && first + i < member->slots; i++) {
            memcpy(&crc, block + (size_t)SLOT_BYTES * i + SLOT_CRC_AT, 4);
            if (first + i != member->slot)
                changed |= has_slot_changed(&beat->slots[first + i], crc, member->fd, member->locks_at + first + i);
        }
        if (crc == 0)
            break;
    }
    return changed;
}

/* FNV-1a. No CRC: a record ends with the CRC of what is before it, so that all records have the same one. */
static uint64_t hashed(uint64_t hash, const uint8_t *from, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ from[i]) * 0x100000001B3;
    return hash;
}

static int have_records_changed(struct beat *beat)
{
    const uint32_t records = ms_load_acquire(&beat->records);
    uint64_t hash = 0xCBF29CE484222325 ^ records;
    for (uint32_t first = 0; first < records; first += RECORDS_READ) {
        uint8_t block[RECORDS_READ * RECORD_BYTES] = {0};
        const uint32_t count = records - first < RECORDS_READ ? records - first : RECORDS_READ;
        if (pread(beat->member.fd, block, (size_t)RECORD_BYTES * count, beat->member.records_at + (int64_t)RECORD_BYTES * first) < 0)
            return 1;
        for (uint32_t i = 0; i < count; i++)
            hash = hashed(hash, block + (size_t)RECORD_BYTES * i, RECORD_USED_BYTES);
    }
    const int changed = hash != beat->records_hash;
    beat->records_hash = hash;
    return changed;
}

/* ---- names ---- */

/* Which file it is, and the kind of the lock that keeps others from an exclusive one on its first byte; zeros if there is none. */
static void note_lock(const char *path, uint64_t now[4])
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};
    struct stat status;
    const int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return;
    if (fstat(fd, &status) == 0 && fcntl(fd, F_OFD_GETLK, &lock) == 0) {
        now[0] = status.st_dev;
        now[1] = status.st_ino;
        now[2] = (uint64_t)lock.l_type + 1;
    }
    close(fd);
}

static int is_recent(const struct timespec *changed)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    const int64_t age_ns = (int64_t)(now.tv_sec - changed->tv_sec) * 1000000000 + (now.tv_nsec - changed->tv_nsec);
    return age_ns < MS_NAME_RECENT_NS && age_ns > -MS_NAME_RECENT_NS;
}

static int has_name_changed(struct name *name)
{
    uint64_t now[4] = {0};
    struct stat status;
    int changed = !name->is_known;
    if (name->what == MS_NAME_LOCK) {
        note_lock(name->path, now);
    } else if (stat(name->path, &status) == 0) {
        now[0] = status.st_dev;
        now[1] = status.st_ino;
        if (name->what == MS_NAME_LENGTH)
            now[2] = (uint64_t)status.st_size;
        if (name->what == MS_NAME_FOLDER) {
            now[2] = (uint64_t)status.st_mtim.tv_sec;
            now[3] = (uint64_t)status.st_mtim.tv_nsec;
            changed |= is_recent(&status.st_mtim);
        }
    }
    changed |= memcmp(now, name->seen, sizeof now) != 0;
    memcpy(name->seen, now, sizeof now);
    name->is_known = 1;
    return changed;
}

static void free_names(struct beat *beat)
{
    while (beat->names != NULL) {
        struct name *name = beat->names;
        beat->names = name->next;
        free(name);
    }
}

/* ---- the pulse ---- */

static void look(struct beat *beat)
{
    int changed = beat->looks++ == 0;
    if (beat->member.fd >= 0) {
        write_heartbeat(&beat->member);
        changed |= beat->slots != NULL && have_slots_changed(beat);
        changed |= have_records_changed(beat);
    }
    for (struct name *name = beat->names; name != NULL; name = name->next)
        if (!name->is_known || name->what == MS_NAME_LENGTH || name->what == MS_NAME_FOLDER || (beat->looks & 1) == 0)
            changed |= has_name_changed(name);
    if (changed)
        raise_flag(beat, MS_BEAT_CHANGED);
}

/* Beat once; return whether something is to be taken, or there is no beat. */
static int beat_all(struct pulse *pulse)
{
    pthread_mutex_lock(&pulse->lock);
    int is_over = pulse->first == NULL;
    for (struct beat *beat = pulse->first; beat != NULL; beat = beat->next) {
        look(beat);
        is_over |= ms_load_acquire(&beat->flags) != 0;
    }
    pthread_mutex_unlock(&pulse->lock);
    ms_store_release(&pulse->beats, pulse->beats + 1);
    return is_over;
}

void *ms_pulse_new(void)
{
    struct pulse *pulse = calloc(1, sizeof *pulse);
    if (pulse != NULL)
        pthread_mutex_init(&pulse->lock, NULL);
    return pulse;
}

void ms_pulse_wait(void *argument, int64_t interval_ns, int64_t timeout_ns)
{
    struct pulse *pulse = argument;
    const int64_t until_ns = ms_monotonic_ns() + timeout_ns;
    int is_over;
    do {
        const struct timespec due = {.tv_sec = pulse->due_ns / 1000000000, .tv_nsec = pulse->due_ns % 1000000000};
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL) == EINTR) {
        }
        pulse->due_ns = ms_monotonic_ns() + interval_ns;
        is_over = beat_all(pulse);
    } while (!is_over && ms_monotonic_ns() < until_ns);
}

uint32_t ms_pulse_beats(void *argument)
{
    struct pulse *pulse = argument;
    return ms_load_acquire(&pulse->beats);
}

void *ms_beat_add(void *argument, const struct ms_member *member)
{
    struct pulse *pulse = argument;
    struct beat *beat = calloc(1, sizeof *beat);
    if (beat == NULL)
        return NULL;
    beat->member.fd = -1;
    if (member != NULL)
        beat->member = *member;
    if (member != NULL && member->slots != 0 && (beat->slots = calloc(member->slots, sizeof *beat->slots)) == NULL) {
        free(beat);
        return NULL;
    }
    pthread_mutex_lock(&pulse->lock);
    beat->next = pulse->first;
    pulse->first = beat;
    pthread_mutex_unlock(&pulse->lock);
    return beat;
}

void ms_beat_remove(void *argument, void *removed)
{
    struct pulse *pulse = argument;
    struct beat *beat = removed;
    pthread_mutex_lock(&pulse->lock);
    struct beat **at = &pulse->first;
    while (*at != beat)
        at = &(*at)->next;
    *at = beat->next;
    pthread_mutex_unlock(&pulse->lock);
    free_names(beat);
    free(beat->slots);
    free(beat);
}

int ms_beat_watch(void *argument, void *watching, const char *path, int32_t what)
{
    struct pulse *pulse = argument;
    struct beat *beat = watching;
    const size_t bytes = strlen(path) + 1;
    struct name *name = calloc(1, sizeof *name + bytes);
    if (name == NULL)
        return -ENOMEM;
    memcpy(name->path, path, bytes);
    name->what = what;
    pthread_mutex_lock(&pulse->lock);
    name->next = beat->names;
    beat->names = name;
    pthread_mutex_unlock(&pulse->lock);
    return 0;
}

void ms_beat_forget(void *argument, void *watching)
{
    struct pulse *pulse = argument;
    pthread_mutex_lock(&pulse->lock);
    free_names(watching);
    pthread_mutex_unlock(&pulse->lock);
}

void ms_beat_set_records(void *argument, uint32_t records)
{
    struct beat *beat = argument;
    ms_store_release(&beat->records, records);
}

void ms_beat_rouse(void *beat)
{
    raise_flag(beat, MS_BEAT_ROUSED);
}

uint32_t ms_beat_take(void *argument)
{
    struct beat *beat = argument;
    return ms_exchange(&beat->flags, 0);
}
