/* Give a finished file its name, in one step.
 *
 * Who: the process that creates segments, queue files or index files. Blocks on: the
 * disk's directory block at most. After a crash: the name is there, for the
 * finished file, or it is not; the caller syncs the folder. Returns 0, or
 * -errno. Nothing existing is ever replaced: a name that is taken is -EEXIST.
 *
 * Why in C: linkat() must follow /proc/self/fd/N (AT_SYMLINK_FOLLOW), which
 * Python's os.link cannot ask for, and AT_EMPTY_PATH needs a capability that
 * ordinary users lack. renameat2(RENAME_NOREPLACE) has no Python name at all.
 */

/* `fd` was opened with O_TMPFILE on the file system of `folder_fd`.
 * -ENOENT with a living folder means that /proc is not mounted. */
int ms_new_file_link(int fd, int folder_fd, const char *name);

/* The file, empty as yet, is written in place where its file system would copy on write (FS_NOCOW_FL: btrfs), so
 * that room once allocated is enough for each later write. Best effort: most file systems write in place anyway. */
void ms_new_file_in_place(int fd);

/* What kind of file system a file or folder lies on: statfs's magic number, or -errno. */
int64_t ms_new_file_system(int fd);

/* Move `from` to `to` unless `to` exists. -EINVAL: this file system cannot say. */
int ms_new_file_rename(const char *from, const char *to);
