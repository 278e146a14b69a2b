#include "base.h"
#include "flush.cdef.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

int ms_flush_fdatasync(int fd)
{
    return fdatasync(fd) == 0 ? 0 : -errno;
}

int ms_flush_file_system(int fd)
{
    return syncfs(fd) == 0 ? 0 : -errno;
}

int ms_flush_check(int fd)
{
    return sync_file_range(fd, 0, 0, SYNC_FILE_RANGE_WAIT_BEFORE) == 0 ? 0 : -errno;
}

int ms_flush_start(int fd)
{
    return sync_file_range(fd, 0, 0, SYNC_FILE_RANGE_WRITE) == 0 ? 0 : -errno;
}

int ms_flush_pwrite_all(int fd, const uint8_t *from, int64_t length, int64_t at)
{
    while (length > 0) {
        ssize_t done = pwrite(fd, from, (size_t)length, at);
        if (done < 0) {
            if (errno == EINTR)
                continue;
            return -errno;
        }
        if (done == 0)
            return -ENOSPC;
        from += done;
        length -= done;
        at += done;
    }
    return 0;
}

static int change_blocks(int fd, int mode, int64_t offset, int64_t length)
{
    int error;
    do
        error = fallocate(fd, mode | FALLOC_FL_KEEP_SIZE, offset, length) == 0 ? 0 : errno;
    while (error == EINTR);
    return error;
}

int ms_flush_allocate(int fd, int64_t offset, int64_t length)
{
    int error = change_blocks(fd, 0, offset, length);
    if (error != EOPNOTSUPP && error != ENOSYS)
        return -error;
    struct stat status;
    if (fstat(fd, &status) != 0)
        return -errno;
    if (offset + length > status.st_size) /* the next call would make the file longer */
        return -EINVAL;
    do
        error = posix_fallocate(fd, offset, length); /* writes a byte of zeros to each block */
    while (error == EINTR);
    return -error;
}

int ms_flush_allocate_windows(int fd, int64_t *allocated_bytes, int64_t file_bytes, int64_t window_bytes,
                              int64_t from, int64_t to)
{
    if (to <= *allocated_bytes)
        return 0;
    int64_t start = from - from % window_bytes;
    if (start < *allocated_bytes)
        start = *allocated_bytes;
    int64_t end = to + window_bytes - 1;
    end -= end % window_bytes;
    if (end > file_bytes)
        end = file_bytes;
    const int error = ms_flush_allocate(fd, start, end - start);
    if (error == 0)
        *allocated_bytes = end;
    return error;
}

int ms_flush_punch(int fd, int64_t offset, int64_t length)
{
    return -change_blocks(fd, FALLOC_FL_PUNCH_HOLE, offset, length);
}

int ms_flush_renew(int fd, int64_t offset, int64_t length)
{
    int error = change_blocks(fd, FALLOC_FL_ZERO_RANGE, offset, length);
    return error == EOPNOTSUPP || error == ENOSYS ? 0 : -error;
}

int ms_memory_lock(const uint8_t *base, int64_t length)
{
    return mlock(base, (size_t)length) == 0 ? 0 : -errno;
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
