#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* renameat2 */
#endif
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "new_file.h"

int ms_new_file_link(int fd, int folder_fd, const char *name)
{
    char own_path[sizeof "/proc/self/fd/" + 11]; /* an int has at most 11 characters */
    snprintf(own_path, sizeof own_path, "/proc/self/fd/%d", fd);
    return linkat(AT_FDCWD, own_path, folder_fd, name, AT_SYMLINK_FOLLOW) == 0 ? 0 : -errno;
}

void ms_new_file_in_place(int fd)
{
    int flags = 0;
    if (ioctl(fd, FS_IOC_GETFLAGS, &flags) != 0)
        return;
    flags |= FS_NOCOW_FL;
    (void)ioctl(fd, FS_IOC_SETFLAGS, &flags);
}

int64_t ms_new_file_system(int fd)
{
    struct statfs found;
    return fstatfs(fd, &found) == 0 ? (int64_t)(uint32_t)found.f_type : -errno;
}

int ms_new_file_rename(const char *from, const char *to)
{
    return renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE) == 0 ? 0 : -errno;
}
