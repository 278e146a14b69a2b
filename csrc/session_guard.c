#include "base.h"
#include "session_guard.cdef.h"

#include <signal.h>
#include <sys/mman.h>

#include "control.h"

#define PAGE_BYTES 4096

/* Written by the thread that maps; read by the handler, in the thread that faults. */
struct guarded {
    uintptr_t start;
    uintptr_t bytes; /* 0: unused; stored last */
    uint32_t broken;
    uint32_t reserved;
};

static struct guarded table[MS_SESSION_SLOTS];
static struct sigaction before;
static uint32_t installed;
static uint64_t *others;

/* Async-signal-safe: loads, stores and the system calls mmap, sigaction and raise. */
static void on_sigbus(int number, siginfo_t *info, void *context)
{
    const int saved = errno;
    const uintptr_t address = (uintptr_t)info->si_addr;
    (void)context;
    if (info->si_code > 0) { /* a fault, not a kill() */
        for (uint32_t slot = 0; slot < MS_SESSION_SLOTS; slot++) {
            struct guarded *const range = &table[slot];
            const uintptr_t bytes = ms_load_acquire(&range->bytes);
            if (bytes == 0 || address - range->start >= bytes)
                continue;
            if (mmap((void *)range->start, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
                MAP_FAILED)
                break;
            ms_store_release(&range->broken, 1u);
            errno = saved;
            return;
        }
        if (others != NULL)
            ms_add(others, 1);
    }
    /* Outside of sessions: a fault repeats when the handler returns; a signal from kill() must be raised again. */
    sigaction(SIGBUS, &before, NULL);
    ms_store_release(&installed, 0u);
    if (info->si_code <= 0)
        raise(number);
    errno = saved;
}

int ms_session_guard_install(uint64_t *elsewhere)
{
    struct sigaction action = {.sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    if (ms_load_acquire(&installed))
        return 0;
    others = elsewhere;
    sigemptyset(&action.sa_mask);
    if (sigaction(SIGBUS, &action, &before) != 0)
        return -errno;
    ms_store_release(&installed, 1u);
    return 0;
}

void ms_session_guard_add(uint32_t slot, void *start, int64_t bytes)
{
    struct guarded *const range = &table[slot];
    ms_store_release(&range->bytes, (uintptr_t)0);
    range->start = (uintptr_t)start;
    range->broken = 0;
    ms_store_release(&range->bytes, ((uintptr_t)bytes + PAGE_BYTES - 1) & ~(uintptr_t)(PAGE_BYTES - 1));
}

void ms_session_guard_remove(uint32_t slot)
{
    ms_store_release(&table[slot].bytes, (uintptr_t)0);
    ms_store_release(&table[slot].broken, 0u);
}

int ms_session_guard_broken(uint32_t slot)
{
    return (int)ms_load_acquire(&table[slot].broken);
}
