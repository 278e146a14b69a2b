#include "base.h"
#include "process.cdef.h"

#include <linux/prctl.h>
#include <signal.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/sem.h>
#include <sys/syscall.h>

int ms_process_show_command(const char *text, int64_t words_bytes, int64_t bytes, const uint64_t *places)
{
    char *const shown = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (shown == MAP_FAILED)
        return -errno;
    memcpy(shown, text, (size_t)bytes);
    const struct prctl_mm_map map = {
        .start_code = places[0],
        .end_code = places[1],
        .start_data = places[2],
        .end_data = places[3],
        .start_brk = places[4],
        .brk = (uint64_t)syscall(SYS_brk, 0),
        .start_stack = places[5],
        .arg_start = (uintptr_t)shown,
        .arg_end = (uintptr_t)shown + (uint64_t)words_bytes,
        .env_start = (uintptr_t)shown + (uint64_t)words_bytes,
        .env_end = (uintptr_t)shown + (uint64_t)bytes,
        .exe_fd = (uint32_t)-1,
    };
    if (prctl(PR_SET_MM, PR_SET_MM_MAP, &map, sizeof map, 0) == 0)
        return 0;
    const int error = errno;
    munmap(shown, (size_t)bytes);
    return -error;
}

int ms_process_adopt_orphans(void)
{
    return prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0 ? 0 : -errno;
}

int ms_process_end_with_parent(void)
{
    return prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) == 0 ? 0 : -errno;
}

int ms_attach_count_add(int id, int by)
{
    struct sembuf change = {.sem_num = 0, .sem_op = (short)by, .sem_flg = SEM_UNDO | IPC_NOWAIT};
    return semop(id, &change, 1) == 0 ? 0 : -errno;
}

int ms_attach_count_get(int id)
{
    int value = semctl(id, 0, GETVAL);
    return value >= 0 ? value : -errno;
}
