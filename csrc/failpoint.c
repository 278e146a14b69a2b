#include "base.h"
#include <signal.h>

static struct ms_failpoint *used;
static char own_process[sizeof used->process];

void ms_failpoint_use(struct ms_failpoint *failpoint, const char *process)
{
    strncpy(own_process, process, sizeof own_process - 1);
    used = failpoint;
}

void ms_failpoint_reach(const char *name)
{
    struct ms_failpoint *const point = used;
    if (point == NULL || ms_load_acquire(&point->state) != MS_FAILPOINT_ARMED ||
        strncmp(name, (const char *)point->name, sizeof point->name) != 0)
        return;
    if (point->process[0] != 0 && strncmp(own_process, (const char *)point->process, sizeof point->process) != 0)
        return;
    if (ms_add(&point->hits, 1) != point->nth)
        return;
    uint32_t armed = MS_FAILPOINT_ARMED;
    ms_store_relaxed(&point->pid, (int32_t)getpid());
    if (ms_compare_exchange(&point->state, &armed, MS_FAILPOINT_STRUCK))
        kill(getpid(), point->signal);
}
