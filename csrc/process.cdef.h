/* Process attributes in the kernel: command line, adoption of orphans, death with the parent.
 *
 * Who: the supervisor (orphans), its fork server and each worker forked from that (pyengine/engine/fork_server.py); one
 * thread each. Blocks on: nothing. After a crash: nothing remains, the kernel drops it with the process.
 */
#pragma once

/* Set the command line and environment of this process in /proc: `bytes` of NUL-terminated strings, the first `words_bytes` of which
 * are the command line. `places`: where /proc/self/stat has code, data, heap and stack (begin and end of code and of data, begin of
 * the others), which stay. 0, or -errno without effect: the kernel was built without this (EINVAL), or a filter refuses it (EPERM). */
int ms_process_show_command(const char *text, int64_t words_bytes, int64_t bytes, const uint64_t *places);
/* Make descendants whose parent ends children of this process, so that it can wait for them. 0 or -errno. */
int ms_process_adopt_orphans(void);
/* Have the kernel send SIGKILL to this process when the thread that forked it ends. 0 or -errno. */
int ms_process_end_with_parent(void);

/* The number of living producers: a SysV semaphore that the supervisor makes (sysv_ipc, IPC_PRIVATE), and whose id is in the
 * control block. Each producer increments it with SEM_UNDO and decrements it when it closes; the kernel does so for a killed
 * one. Producers in another IPC namespace are not counted. `status` shows the number and `stop` waits for it. sysv_ipc opens
 * semaphores by key only, hence these two functions. */
/* Add `by` (1 or -1) with SEM_UNDO. 0 or -errno (EINVAL, EIDRM: no such semaphore; EAGAIN: below zero). */
int ms_attach_count_add(int id, int by);
/* Return the number, or -errno. */
int ms_attach_count_get(int id);
