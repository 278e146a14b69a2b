#include "base.h"
#include "recorder.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>

#include "crc32.cdef.h"
#include "layout.h"

#define MINUTE_NS 60000000000
#define TOOK_NS_MAX ((int64_t)1 << 60)
#define PUTS_PAUSE_NS MS_STALL_NS /* shortest interval of records of slow puts, since a backlog makes every pass slow */

void ms_recorder_format(struct ms_recorder *recorder, const uint8_t *boot_id)
{
    memcpy(recorder->boot_id, boot_id, sizeof recorder->boot_id);
    memset(&recorder->for_sync, 0, sizeof recorder->for_sync);
    memset(&recorder->for_slave, 0, sizeof recorder->for_slave);
    for (uint32_t i = 0; i <= MS_WORKER_KINDS; i++)
        recorder->ring[i].phase_since_ns = 0;
    ms_layout_publish(recorder, MS_RECORDER_MAGIC, MS_RECORDER_LAYOUT_VERSION);
}

static uint32_t crc_of(const struct ms_stall *stall)
{
    return ms_crc32(0, (const uint8_t *)stall, (int64_t)offsetof(struct ms_stall, crc));
}

int ms_stall_is_whole(const struct ms_stall *stall)
{
    if (stall->number == 0 || stall->crc != crc_of(stall) || stall->cause >= MS_CAUSES || stall->began_ns < 0 || stall->took_ns < 0 ||
        stall->took_ns > TOOK_NS_MAX || stall->began_ns > INT64_MAX - TOOK_NS_MAX)
        return 0;
    for (int i = 0; i < MS_PHASES; i++)
        if (stall->phase_ns[i] < 0 || stall->phase_ns[i] > TOOK_NS_MAX)
            return 0;
    return 1;
}

/* ---- the kernel's counters of this process ------------------------------- */

static volatile sig_atomic_t resumes;
static volatile int64_t resumed_ns;

static void count_resume(int number)
{
    (void)number;
    resumed_ns = ms_monotonic_ns();
    resumes++;
}

void ms_recorder_count_resumes(void)
{
    struct sigaction action = {.sa_handler = count_resume, .sa_flags = SA_RESTART};
    sigaction(SIGCONT, &action, NULL);
}

uint32_t ms_recorder_resumes(int64_t *last_ns)
{
    *last_ns = resumed_ns;
    return (uint32_t)resumes;
}

/* Read "busy queued slices", in ns; unchanged if the kernel does not provide them. */
static void read_schedstat(const struct ms_recorder_handle *handle, int64_t *busy_ns, int64_t *queued_ns)
{
    char text[96];
    *busy_ns = handle->busy_ns;
    *queued_ns = handle->queued_ns;
    ssize_t got = handle->schedstat_fd < 0 ? -1 : pread(handle->schedstat_fd, text, sizeof text - 1, 0);
    if (got <= 0)
        return;
    text[got] = 0;
    char *end;
    int64_t busy = (int64_t)strtoull(text, &end, 10);
    if (*end != ' ')
        return;
    *busy_ns = busy;
    *queued_ns = (int64_t)strtoull(end, NULL, 10);
}

/* Read the kernel's counters; store their changes since the last read in `stall` unless that is NULL. */
static void read_usage(struct ms_recorder_handle *handle, int64_t now_ns, struct ms_stall *stall)
{
    struct rusage usage;
    int64_t busy_ns, queued_ns;
    uint32_t continued = (uint32_t)resumes;
    read_schedstat(handle, &busy_ns, &queued_ns);
    if (getrusage(RUSAGE_THREAD, &usage) != 0)
        memset(&usage, 0, sizeof usage);
    if (stall != NULL) {
        stall->window_ns = now_ns - handle->window_began_ns;
        stall->busy_ns = busy_ns - handle->busy_ns;
        stall->queued_ns = queued_ns - handle->queued_ns;
        stall->major_faults = (uint32_t)(usage.ru_majflt - handle->major_faults);
        stall->minor_faults = (uint32_t)(usage.ru_minflt - handle->minor_faults);
        stall->continued = continued - handle->continued;
    }
    handle->window_began_ns = now_ns;
    handle->busy_ns = busy_ns;
    handle->queued_ns = queued_ns;
    handle->major_faults = usage.ru_majflt;
    handle->minor_faults = usage.ru_minflt;
    handle->continued = continued;
}

void ms_recorder_begin_window(struct ms_recorder_handle *handle, int64_t now_ns)
{
    /* A stop that no stall has recorded yet belongs to the next one. */
    if (handle->shared != NULL && handle->continued == (uint32_t)resumes)
        read_usage(handle, now_ns, NULL);
}

/* ---- causes --------------------------------------------------------------- */

/* The least, and the most, of `ns` in the window that can be part of the stall, which is the end of the window. */
static int64_t least_of(const struct ms_stall *stall, int64_t ns)
{
    int64_t before_ns = stall->window_ns - stall->took_ns;
    return before_ns <= 0 ? ns : ns - before_ns;
}

static int is_half(const struct ms_stall *stall, int64_t ns)
{
    return ns * 2 >= stall->took_ns;
}

/* Return how much of [began, ended) the ring's last stall covers. */
static int64_t shared_with_last(const struct ms_recorder_handle *handle, const struct ms_stall *stall)
{
    int64_t ended_ns = stall->began_ns + stall->took_ns;
    int64_t from = stall->began_ns > handle->last_began_ns ? stall->began_ns : handle->last_began_ns;
    int64_t to = ended_ns < handle->last_ended_ns ? ended_ns : handle->last_ended_ns;
    return to > from ? to - from : 0;
}

static uint32_t cause_of_longest_phase(const struct ms_stall *stall)
{
    static const uint32_t causes[MS_PHASES] = {MS_CAUSE_WOKEN_LATE, MS_CAUSE_SEGMENT, MS_CAUSE_FAULT, MS_CAUSE_WRITE,
                                               MS_CAUSE_SYNC, MS_CAUSE_SLAVE, MS_CAUSE_LOCK, MS_CAUSE_WOKEN_LATE};
    int longest = 0;
    for (int i = 1; i < MS_PHASES; i++)
        if (stall->phase_ns[i] > stall->phase_ns[longest])
            longest = i;
    return stall->phase_ns[longest] > 0 ? causes[longest] : MS_CAUSE_UNKNOWN;
}

/* Find the cause. The most certain come first: what the caller knows, what the kernel counted, what was measured around a
 * wait. */
static uint32_t cause_of(const struct ms_recorder_handle *handle, const struct ms_stall *stall)
{
    if (stall->error_number == ENOSPC || stall->error_number == EDQUOT)
        return MS_CAUSE_NO_ROOM;
    if (stall->what == MS_STALL_BLOCKED)
        return MS_CAUSE_BLOCKED;
    if (stall->error_number != 0)
        return MS_CAUSE_FAILED;
    if (stall->what == MS_STALL_STOPPED || stall->continued != 0)
        return MS_CAUSE_STOPPED;
    if (handle->last_cause == MS_CAUSE_STOPPED && is_half(stall, shared_with_last(handle, stall)))
        return MS_CAUSE_STOPPED;
    if (stall->began_ns < handle->attached_ns && is_half(stall, handle->attached_ns - stall->began_ns))
        return MS_CAUSE_RESTART;
    if (is_half(stall, least_of(stall, stall->queued_ns)))
        return MS_CAUSE_CPU;
    if (stall->what == MS_STALL_ROUND)
        return MS_CAUSE_ROUND;
    uint32_t cause = stall->likely != MS_CAUSE_UNKNOWN ? stall->likely : cause_of_longest_phase(stall);
    int is_wait = cause == MS_CAUSE_SYNC || cause == MS_CAUSE_WRITE || cause == MS_CAUSE_SEGMENT || cause == MS_CAUSE_SLAVE ||
                  cause == MS_CAUSE_LOCK || cause == MS_CAUSE_POOL;
    if (is_wait)
        return cause;
    if (is_half(stall, stall->queued_ns)) /* perhaps not all in the stall, but there is no better explanation */
        return MS_CAUSE_CPU;
    if (cause == MS_CAUSE_FAULT && stall->major_faults == 0 && is_half(stall, least_of(stall, stall->busy_ns)))
        return MS_CAUSE_LARGE;
    return cause;
}

/* ---- record --------------------------------------------------------------- */

void ms_recorder_open(struct ms_recorder_handle *handle, struct ms_recorder *shared, uint32_t kind)
{
    memset(handle, 0, sizeof *handle);
    handle->schedstat_fd = -1;
    handle->threshold_ns = INT64_MAX;
    if (shared == NULL || kind >= MS_WORKER_KINDS)
        return;
    handle->shared = shared;
    handle->ring = &shared->ring[kind];
    handle->threshold_ns = MS_STALL_NS;
    handle->schedstat_fd = open("/proc/self/schedstat", O_RDONLY | O_CLOEXEC);
    handle->pid = (int32_t)getpid();
    handle->attached_ns = ms_monotonic_ns();
    ms_store_relaxed(&handle->ring->phase_since_ns, (int64_t)0);
    handle->checked_ns = handle->attached_ns;
    read_usage(handle, handle->attached_ns, NULL);
}

void ms_recorder_close(struct ms_recorder_handle *handle)
{
    if (handle->schedstat_fd >= 0)
        close(handle->schedstat_fd);
    handle->schedstat_fd = -1;
    handle->shared = NULL;
    handle->ring = NULL;
    handle->threshold_ns = INT64_MAX;
}

static void count_minute(struct ms_recorder *recorder, const struct ms_stall *stall)
{
    int64_t number = (stall->began_ns + stall->took_ns) / MINUTE_NS;
    struct ms_stall_minute *minute = &recorder->puts_minute[(uint64_t)number % MS_STALL_MINUTES];
    if (minute->minute != number)
        *minute = (struct ms_stall_minute){.minute = number};
    minute->stalls++;
}

static void put_into(struct ms_recorder_ring *ring, struct ms_stall *stall)
{
    stall->number = ring->stalls == UINT64_MAX ? 1 : ring->stalls + 1; /* 0 is no stall */
    stall->crc = crc_of(stall);
    struct ms_stall *place = &ring->stall[stall->number % MS_STALLS];
    place->crc = ~stall->crc; /* wrong until the stall is complete */
    ms_compiler_fence();
    *place = *stall;
    ms_store_release(&ring->stalls, stall->number);
}

static void complete(const struct ms_recorder_handle *handle, struct ms_stall *stall)
{
    if (stall->took_ns < 0)
        stall->took_ns = 0;
    if (stall->took_ns > TOOK_NS_MAX)
        stall->took_ns = TOOK_NS_MAX;
    for (int i = 0; i < MS_PHASES; i++)
        if (stall->phase_ns[i] < 0)
            stall->phase_ns[i] = 0;
    stall->pid = handle->pid;
    if (stall->cause == MS_CAUSE_UNKNOWN || stall->cause >= MS_CAUSES)
        stall->cause = cause_of(handle, stall);
}

void ms_recorder_note(struct ms_recorder_handle *handle, struct ms_stall *stall)
{
    if (handle->shared == NULL)
        return;
    read_usage(handle, ms_monotonic_ns(), stall);
    complete(handle, stall);
    put_into(handle->ring, stall);
    handle->last_cause = stall->cause;
    handle->last_began_ns = stall->began_ns;
    handle->last_ended_ns = stall->began_ns + stall->took_ns;
}

void ms_recorder_note_if_long(struct ms_recorder_handle *handle, uint32_t what, uint32_t phase, int64_t began_ns, int64_t offset, int64_t bytes)
{
    struct ms_stall stall = {.what = what, .began_ns = began_ns, .took_ns = ms_monotonic_ns() - began_ns, .offset = offset, .bytes = bytes};
    if (stall.took_ns < handle->threshold_ns)
        return;
    stall.phase_ns[phase] = stall.took_ns;
    ms_recorder_note(handle, &stall);
}

void ms_recorder_check_stopped(struct ms_recorder_handle *handle, int64_t now_ns)
{
    if (handle->shared != NULL && handle->continued != (uint32_t)resumes) {
        struct ms_stall stop = {.what = MS_STALL_STOPPED, .began_ns = handle->checked_ns, .took_ns = resumed_ns - handle->checked_ns};
        stop.phase_ns[MS_PHASE_OTHER] = stop.took_ns;
        if (stop.took_ns >= handle->threshold_ns)
            ms_recorder_note(handle, &stop);
        handle->continued = (uint32_t)resumes;
    }
    handle->checked_ns = now_ns;
}

/* Return the cause of most of the writer's stalls during these puts, if the stalls cover half of the time. */
static uint32_t cause_of_stalls(const struct ms_recorder_handle *handle, const struct ms_stall *puts)
{
    int64_t by_cause[MS_CAUSES] = {0}, all_ns = 0;
    const int64_t ended_ns = puts->began_ns + puts->took_ns;
    const uint64_t newest = handle->ring->stalls;
    uint32_t most = MS_CAUSE_UNKNOWN;
    for (uint64_t back = 0; back < MS_STALLS && back < newest; back++) {
        const struct ms_stall stall = handle->ring->stall[(newest - back) % MS_STALLS];
        if (!ms_stall_is_whole(&stall) || stall.began_ns + stall.took_ns <= puts->began_ns)
            break;
        const int64_t from = stall.began_ns > puts->began_ns ? stall.began_ns : puts->began_ns;
        const int64_t to = stall.began_ns + stall.took_ns < ended_ns ? stall.began_ns + stall.took_ns : ended_ns;
        if (to <= from || stall.what == MS_STALL_BLOCKED)
            continue;
        all_ns += to - from;
        by_cause[stall.cause] += to - from;
        if (by_cause[stall.cause] > by_cause[most])
            most = stall.cause;
    }
    return is_half(puts, all_ns) ? most : MS_CAUSE_UNKNOWN;
}

static uint32_t cause_of_puts(const struct ms_recorder_handle *handle, const struct ms_stall *puts)
{
    uint32_t cause = cause_of_stalls(handle, puts);
    if (cause != MS_CAUSE_UNKNOWN)
        return cause;
    cause = cause_of(handle, puts);
    if (cause != MS_CAUSE_WOKEN_LATE)
        return cause;
    return is_half(puts, least_of(puts, puts->busy_ns)) ? MS_CAUSE_BACKLOG : cause;
}

void ms_recorder_note_puts(struct ms_recorder_handle *handle, struct ms_stall *puts, const struct ms_stall *pass)
{
    if (handle->shared == NULL)
        return;
    int64_t now_ns = puts->began_ns + puts->took_ns;
    struct ms_stall *held = &handle->puts_held;
    if (held->entries > 0 && held->took_ns > puts->took_ns) {
        held->entries += puts->entries;
        *puts = *held;
    } else {
        puts->entries += held->entries;
    }
    if (now_ns - handle->puts_noted_ns < PUTS_PAUSE_NS && handle->puts_noted_ns <= now_ns) {
        *held = *puts;
        return;
    }
    handle->puts_noted_ns = now_ns;
    held->entries = 0;
    if (pass == NULL) {
        read_usage(handle, ms_monotonic_ns(), puts);
    } else {
        puts->window_ns = pass->window_ns;
        puts->busy_ns = pass->busy_ns;
        puts->queued_ns = pass->queued_ns;
        puts->major_faults = pass->major_faults;
        puts->minor_faults = pass->minor_faults;
        puts->continued = pass->continued;
    }
    puts->cause = cause_of_puts(handle, puts);
    complete(handle, puts);
    put_into(&handle->shared->ring[MS_WORKER_KINDS], puts);
    count_minute(handle->shared, puts);
}

void ms_recorder_note_held(struct ms_recorder_handle *handle)
{
    if (handle->shared == NULL || handle->puts_held.entries == 0)
        return;
    struct ms_stall puts = handle->puts_held;
    handle->puts_held.entries = 0;
    handle->puts_noted_ns = 0;
    ms_recorder_note_puts(handle, &puts, NULL);
}

void ms_recorder_set_phase(struct ms_recorder_handle *handle, uint32_t phase, int64_t since_ns)
{
    if (handle->shared == NULL)
        return;
    if (phase == MS_PHASE_NONE) {
        ms_store_release(&handle->ring->phase_since_ns, (int64_t)0);
        return;
    }
    ms_store_relaxed(&handle->ring->phase, phase);
    ms_store_release(&handle->ring->phase_since_ns, since_ns);
}

int64_t ms_recorder_waiting_since(const struct ms_waiting *waiting, int64_t reached)
{
    int64_t end = ms_load_acquire(&waiting->end);
    return end > 0 && end <= reached ? ms_load_relaxed(&waiting->since_ns) : 0;
}
