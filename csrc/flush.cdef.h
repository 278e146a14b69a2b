/* System calls that make bytes durable, take their room or give it back.
 *
 * Who: flusher (fdatasync), committer and writer (pwrite), allocator and queue
 * files (fallocate, populate), cleaner (punch), all workers that lock memory. Blocks on: the
 * disk, so cffi's release of the GIL matters. Returns 0, or -errno. A failed
 * sync is final: the kernel may have dropped the pages; the caller freezes the
 * store and never calls again for the same bytes. After a crash: what returned
 * 0 is on the disk, the rest may be.
 */
int ms_flush_fdatasync(int fd);
int ms_flush_fsync(int fd);
/* Sync the whole file system of `fd`, names too. It may miss errors (Linux before 5.8), or report those of
 * other files: call ms_flush_check for each file. */
int ms_flush_file_system(int fd);
/* The error that a sync of the file would report for what the kernel wrote back; makes nothing durable itself. */
int ms_flush_check(int fd);
/* Start writeback of what is dirty; waits for nothing, promises nothing, and leaves errors for a later sync to report. */
int ms_flush_start(int fd);
/* All `length` bytes or an error; short writes are continued (a full disk shows first as one). */
int ms_flush_pwrite_all(int fd, const uint8_t *from, int64_t length, int64_t at);
/* Really allocate [offset, offset+length) and extend the file. */
int ms_flush_allocate(int fd, int64_t offset, int64_t length);
/* Room for bytes [from, to) of a file of `file_bytes` before they are written: whole windows beyond
 * *allocated_bytes, which moves. A pwrite into an unallocated part could still fail when the kernel writes it back. */
int ms_flush_allocate_windows(int fd, int64_t *allocated_bytes, int64_t file_bytes, int64_t window_bytes,
                              int64_t from, int64_t to);
/* Give the blocks of [offset, offset+length) back; the length stays, and a process that has it mapped reads zeros there.
 * -EOPNOTSUPP where the file system cannot. */
int ms_flush_punch(int fd, int64_t offset, int64_t length);
/* Zero what is not zero already in [offset, offset+length): pages never touched stay untouched.
 * Returns the number of bytes written, or -errno. */
int64_t ms_flush_zero_range(int fd, int64_t offset, int64_t length);
/* Bring pages of a writable mapping in, ready to be written; -errno where the kernel cannot, and nothing was touched. */
int ms_memory_populate(uint8_t *base, int64_t length);
int ms_memory_lock(const uint8_t *base, int64_t length);
/* sched_getcpu */
int ms_current_cpu(void);
int64_t ms_clock_monotonic_ns(void);
