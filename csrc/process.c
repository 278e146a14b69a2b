#define _GNU_SOURCE
#include "process.cdef.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/prctl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/sem.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Fields of /proc/self/stat, numbered as in proc(5). */
enum {
    STATE = 3,
    START_CODE = 26,
    END_CODE = 27,
    START_STACK = 28,
    START_DATA = 45,
    END_DATA = 46,
    START_BRK = 47,
    FIELDS = 53,
};

/* Read the kernel's map of this process's memory, so that only the command line changes. */
static int read_map(struct prctl_mm_map *map)
{
    char text[4096];
    uint64_t values[FIELDS] = {0};
    const int descriptor = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    if (descriptor < 0)
        return -errno;
    const ssize_t length = read(descriptor, text, sizeof text - 1);
    close(descriptor);
    if (length <= 0)
        return -EIO;
    text[length] = 0;
    char *at = strrchr(text, ')'); /* the last one, since the program's name may contain any character */
    if (at == NULL)
        return -EIO;
    at += 3; /* skip the parenthesis and the state letter */
    int field = STATE + 1;
    for (char *end; field < FIELDS; field++, at = end) {
        values[field] = strtoull(at, &end, 10);
        if (end == at)
            break;
    }
    if (field <= START_BRK)
        return -EIO;
    *map = (struct prctl_mm_map){
        .start_code = values[START_CODE],
        .end_code = values[END_CODE],
        .start_data = values[START_DATA],
        .end_data = values[END_DATA],
        .start_brk = values[START_BRK],
        .brk = (uint64_t)syscall(SYS_brk, 0),
        .start_stack = values[START_STACK],
        .exe_fd = (uint32_t)-1,
    };
    return 0;
}

int ms_process_show_command(const char *words, int64_t words_bytes, const char *environment, int64_t environment_bytes)
{
    struct prctl_mm_map map;
    const int failed = read_map(&map);
    if (failed)
        return failed;
    const size_t bytes = (size_t)(words_bytes + environment_bytes);
    char *const text = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (text == MAP_FAILED)
        return -errno;
    memcpy(text, words, (size_t)words_bytes);
    memcpy(text + words_bytes, environment, (size_t)environment_bytes);
    map.arg_start = (uintptr_t)text;
    map.arg_end = map.env_start = map.arg_start + (uint64_t)words_bytes;
    map.env_end = map.env_start + (uint64_t)environment_bytes;
    if (prctl(PR_SET_MM, PR_SET_MM_MAP, &map, sizeof map, 0) == 0)
        return 0;
    const int error = errno;
    munmap(text, bytes);
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
