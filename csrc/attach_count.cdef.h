/* The number of living producers: one SysV semaphore, which the kernel decrements for a killed producer.
 *
 * Who: the supervisor creates it (sysv_ipc, IPC_PRIVATE) and stores its id in the control block; each producer
 * increments it with SEM_UNDO and decrements it when it closes; the kernel does so for a killed producer. Any process
 * reads it. sysv_ipc opens semaphores by key only, hence these two functions. Blocks on: nothing. After a crash: the
 * count is right; producers in another IPC namespace are not counted. `status` shows it and `stop` waits for it; it has no
 * other use.
 */
/* Add `by` (1 or -1) with SEM_UNDO. 0 or -errno (EINVAL, EIDRM: no such semaphore; EAGAIN: below zero). */
int ms_attach_count_add(int id, int by);
/* Return the number, or -errno. */
int ms_attach_count_get(int id);
