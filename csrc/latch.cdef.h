/* A wake-up that other processes leave for the one process that waits:
 * ServiceThread's hasNotified flag and CountDownLatch2, on a shared flag and a
 * named POSIX semaphore.
 *
 * Who: the waiter is one worker; wakers are workers and producers. Blocks on:
 * only ms_latch_wait, and never longer than its timeout. The waiter's loop, in
 * this order and no other:
 *
 *     ms_latch_arm            forget old wake-ups, say "wake me"
 *     look for work           after arming
 *     ms_latch_wait           only if there was none; a wake-up since arm ends it
 *
 * The waker publishes its position first and calls ms_latch_wakeup second.
 * While the flag is 1 (owner awake, or a wake-up under way) a wake-up is one
 * load. After a crash: a waker killed between taking the flag and posting the
 * semaphore leaves the owner asleep until its timeout, hence no untimed wait;
 * a waiter killed asleep leaves at most one token, drained by the next arm.
 */
/* NULL on error (errno in *error_number). `name` starts with a slash; must exist. */
void *ms_latch_open(const char *name, int *error_number);
void ms_latch_close(void *semaphore);
void ms_latch_wakeup(struct ms_latch *latch, void *semaphore);
/* The same where the caller made a full fence of its own after it published the position. */
void ms_latch_wakeup_fenced(struct ms_latch *latch, void *semaphore);
void ms_latch_arm(struct ms_latch *latch, void *semaphore);
/* 1 woken, 0 timed out, -EINTR a signal arrived (its handler has run). The owner is marked awake. */
int ms_latch_wait(struct ms_latch *latch, void *semaphore, int64_t timeout_ns);
/* For a producer or reader, whose mapping is read-only: while the owner has not noticed yet, each call posts. */
void ms_latch_wakeup_unmarked(const struct ms_latch *latch, void *semaphore);
/* After arm, when work was found: the owner is awake again. */
void ms_latch_disarm(struct ms_latch *latch);
