#define _GNU_SOURCE
#include "attach_count.h"

#include <errno.h>
#include <sys/ipc.h>
#include <sys/sem.h>

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
