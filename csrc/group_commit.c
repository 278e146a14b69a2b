#include "base.h"
#include "group_commit.cdef.h"

#include "latch.cdef.h"

static int sync_segment(struct ms_group_commit *group, int64_t base)
{
    int32_t at = 0;
    while (at < group->count && group->base[at] != base)
        at++;
    if (at == group->count)
        return MS_GROUP_SEGMENT;
    struct ms_flusher_lines *lines = &group->control->flusher;
    MS_FAILPOINT("group_sync_begins");
    int64_t began_ns = ms_monotonic_ns();
    if (group->recorder != NULL)
        ms_recorder_set_phase(group->recorder, MS_PHASE_SYNC, began_ns);
    int failed = fdatasync(group->fd[at]) != 0 ? errno : 0;
    MS_FAILPOINT("group_sync_done");
    uint64_t took_ns = (uint64_t)(ms_monotonic_ns() - began_ns);
    if (group->recorder != NULL)
        ms_recorder_set_phase(group->recorder, MS_PHASE_NONE, 0);
    group->sync_ns += (int64_t)took_ns;
    ms_store_relaxed(&lines->syncs, lines->syncs + 1);
    ms_store_relaxed(&lines->sync_ns_total, lines->sync_ns_total + took_ns);
    if (took_ns > lines->sync_ns_max)
        ms_store_relaxed(&lines->sync_ns_max, took_ns);
    if (group->latency != NULL)
        ms_latency_count(group->latency, (int64_t)took_ns, 1);
    if (failed == 0)
        return 0;
    group->error_number = failed;
    group->failed_base = base;
    return MS_GROUP_FAILED;
}

/* Record the end of a wait that began at `since_ns` (0: no known wait). */
static void record(struct ms_group_commit *group, int64_t since_ns, int64_t now_ns, int64_t from, int64_t to)
{
    struct ms_recorder_handle *recorder = group->recorder;
    if (recorder == NULL || recorder->shared == NULL)
        return;
    int64_t began_ns = since_ns > 0 && since_ns < now_ns - group->sync_ns ? since_ns : now_ns - group->sync_ns;
    if (now_ns - began_ns < recorder->threshold_ns)
        return;
    struct ms_stall sync = {.what = MS_STALL_SYNC, .began_ns = began_ns, .took_ns = now_ns - began_ns, .offset = to, .bytes = to - from, .detail = since_ns > 0};
    sync.phase_ns[MS_PHASE_SYNC] = group->sync_ns;
    sync.phase_ns[MS_PHASE_OTHER] = sync.took_ns - group->sync_ns;
    ms_recorder_note(recorder, &sync);
}

int ms_group_commit_once(struct ms_group_commit *group)
{
    struct ms_control *control = group->control;
    int64_t flushed = ms_load_relaxed(&control->flushed.value); /* only this process writes it */
    int64_t target = ms_load_acquire(&control->committed.value);
    if (target <= flushed || ms_load_acquire(&control->state.frozen) != 0 ||
        ms_load_acquire(&control->writer.verified_flusher) != group->incarnation)
        return 0;
    /* Not beyond the open segments: the rest follows when Python has opened them. */
    int64_t open_end = flushed;
    for (int32_t at = 0; at < group->count; at++)
        if (group->base[at] + group->segment_bytes > open_end)
            open_end = group->base[at] + group->segment_bytes;
    if (open_end == flushed)
        return -MS_GROUP_SEGMENT;
    if (target > open_end)
        target = open_end;
    ms_store_release(&control->flusher.sync_target, target);
    MS_FAILPOINT("group_sync_announced");
    group->sync_ns = 0;
    for (int64_t base = flushed - flushed % group->segment_bytes; base < target; base += group->segment_bytes) {
        int failed = sync_segment(group, base);
        if (failed != 0)
            return -failed;
    }
    MS_FAILPOINT("group_synced");
    int64_t since_ns = 0; /* read before `flushed` moves, after which the writer may store it for a later pass */
    if (group->recorder != NULL && group->recorder->shared != NULL)
        since_ns = ms_recorder_waiting_since(&group->recorder->shared->for_sync, target);
    ms_control_publish_flushed(control, target, !group->has_published);
    group->has_published = 1;
    MS_FAILPOINT("group_published");
    /* After waking the producers. In a stream the writer wakes up at the same time as they do, except on their CPU, where
     * it would only wait for them. */
    int64_t now_ns = ms_monotonic_ns();
    int stream = now_ns - group->last_ns < MS_GROUP_STREAM_NS;
    group->last_ns = now_ns;
    record(group, since_ns, now_ns, flushed, target);
    if (stream && !ms_load_relaxed(&control->writer.is_beside_producer))
        ms_latch_wakeup(&control->latch[MS_WRITER], NULL); /* the next put is near */
    return 1;
}

int ms_group_commit_run(struct ms_group_commit *group, int64_t deadline_ns, int64_t busy_ns)
{
    int woken = 0;
    struct ms_latch *latch = &group->control->latch[MS_FLUSHER];
    struct ms_worker *worker = &group->control->workers[MS_FLUSHER];
    for (;;) {
        ms_latch_arm(latch, group->semaphore);
        int moved = ms_group_commit_once(group);
        if (moved != 0)
            ms_latch_disarm(latch);
        if (moved < 0)
            return -moved;
        int64_t now_ns = ms_monotonic_ns();
        ms_store_relaxed(&worker->heartbeat_ns, now_ns);
        if (moved && now_ns + busy_ns < deadline_ns) /* the first sync that moves `flushed` sets it; later ones keep that deadline */
            deadline_ns = now_ns + busy_ns;
        if (now_ns >= deadline_ns || (woken && !moved)) { /* woken for another reason: a segment, settings, the end */
            ms_latch_disarm(latch);
            return MS_GROUP_TIME;
        }
        woken = 0;
        if (moved) {
            ms_affinity_follow(&group->affinity, ms_load_relaxed(&group->control->workers[MS_WRITER].cpu));
            continue;
        }
        woken = ms_latch_wait(latch, group->semaphore, deadline_ns - now_ns);
        if (woken == -EINTR)
            return MS_GROUP_TIME;
    }
}
