/* System calls that make bytes durable, allocate blocks or free them.
 *
 * Who: flusher (fdatasync), committer and writer (pwrite), allocator and queue files (fallocate), cleaner
 * (punch), all workers that lock memory. Blocks on: the disk, so cffi's release of the GIL matters. Each returns 0, or
 * -errno. A failed sync is final: the kernel may have dropped the pages, so the caller freezes the store and does not
 * sync the same bytes again. After a crash: what returned 0 is on the disk, the rest may be.
 */
#pragma once

int ms_flush_fdatasync(int fd);
/* Sync the whole file system of `fd`, with names. It may miss errors (Linux before 5.8), or report those of other files:
 * call ms_flush_check for each file. */
int ms_flush_file_system(int fd);
/* Return the error that a sync of the file would report for past writeback; it makes nothing durable. */
int ms_flush_check(int fd);
/* Start writeback of dirty pages without waiting; a later sync reports errors. */
int ms_flush_start(int fd);
/* Write all `length` bytes, or return an error; it continues after short writes, with which a full disk begins. */
int ms_flush_pwrite_all(int fd, const uint8_t *from, int64_t length, int64_t at);
/* Allocate blocks for [offset, offset+length) of a file; its length stays. On a file system without fallocate it writes to
 * each block: no other process may write there meanwhile. */
int ms_flush_allocate(int fd, int64_t offset, int64_t length);
/* Allocate blocks for bytes [from, to) of a file of `file_bytes` before they are written: whole windows beyond
 * *allocated_bytes, which moves. A pwrite into an unallocated part could still fail at writeback. */
int ms_flush_allocate_windows(int fd, int64_t *allocated_bytes, int64_t file_bytes, int64_t window_bytes,
                              int64_t from, int64_t to);
/* Free the blocks of [offset, offset+length); the file's length stays, and mappings read zeros there. -EOPNOTSUPP if the
 * file system cannot. */
int ms_flush_punch(int fd, int64_t offset, int64_t length);
/* Make [offset, offset+length) blocks of zeros with new pages, mapped or not; no effect if the file system cannot. */
int ms_flush_renew(int fd, int64_t offset, int64_t length);
int ms_memory_lock(const uint8_t *base, int64_t length);

/* Turn copy-on-write off for an empty file (FS_NOCOW_FL: btrfs), so that allocated blocks suffice for each later write.
 * Best effort: most file systems write in place anyway. */
void ms_new_file_in_place(int fd);
/* Return the magic number of the file system of a file or folder (statfs), or -errno. */
int64_t ms_new_file_system(int fd);
