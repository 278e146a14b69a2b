/* Names a finished file atomically.
 *
 * Who: the process that creates segments, queue files or index files. Blocks on: the disk's directory block at most.
 * After a crash: the name exists, for the finished file, or it does not; the caller syncs the folder. Returns 0, or
 * -errno; -EEXIST if the name is taken: it never replaces a file.
 *
 * Why in C: linkat() must follow /proc/self/fd/N (AT_SYMLINK_FOLLOW), which Python's os.link cannot do, and AT_EMPTY_PATH
 * needs a capability that ordinary users lack. Python has no renameat2(RENAME_NOREPLACE).
 */

/* Link `fd`, which was opened with O_TMPFILE on the file system of `folder_fd`. -ENOENT although the folder exists means
 * that /proc is not mounted. */
int ms_new_file_link(int fd, int folder_fd, const char *name);

/* Turn copy-on-write off for an empty file (FS_NOCOW_FL: btrfs), so that allocated blocks suffice for each later write.
 * Best effort: most file systems write in place anyway. */
void ms_new_file_in_place(int fd);

/* Return the magic number of the file system of a file or folder (statfs), or -errno. */
int64_t ms_new_file_system(int fd);

/* Rename `from` to `to` unless `to` exists. -EINVAL: this file system cannot tell. */
int ms_new_file_rename(const char *from, const char *to);
