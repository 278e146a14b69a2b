/* What a process is to the kernel: its command line, whose orphans it adopts, what its parent's death does to it.
 *
 * Who: the supervisor (orphans), its fork server and each worker forked from that (pyengine/engine/fork_server.py); one thread
 * each. Blocks on: nothing. After a crash: nothing is left, all of it ends with the process.
 */
/* Show `words` and `environment` as this process's command line and environment in /proc, as if it had been started with
 * them; each is a row of NUL-terminated strings. 0, or -errno: the kernel was built without this (EINVAL), or a filter
 * refuses it (EPERM); then nothing has changed. */
int ms_process_show_command(const char *words, int64_t words_bytes, const char *environment, int64_t environment_bytes);
/* From now on descendants whose parent ends become this process's children, so that it can wait for them. 0 or -errno. */
int ms_process_adopt_orphans(void);
/* This process is killed (SIGKILL) when the thread that forked it ends. 0 or -errno. */
int ms_process_end_with_parent(void);
