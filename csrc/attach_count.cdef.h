/* How many producers live: one SysV semaphore, which the kernel corrects for a producer that was killed.
 *
 * Who: the supervisor makes it (sysv_ipc, IPC_PRIVATE) and puts its id into the
 * control block; each producer adds one with SEM_UNDO and takes it back when it
 * closes; the kernel takes it back for a producer that was killed. Any
 * process reads it. sysv_ipc opens semaphores by key only, hence these two functions. Blocks on: nothing.
 * After a crash: the count is right; producers of another IPC namespace are not in it. `status` shows it,
 * `stop` waits for it; no process decides anything else by it.
 */
/* Add `by` (1 or -1) with SEM_UNDO. 0 or -errno (EINVAL, EIDRM: no such semaphore; EAGAIN: below zero). */
int ms_attach_count_add(int id, int by);
/* The number, or -errno. */
int ms_attach_count_get(int id);
