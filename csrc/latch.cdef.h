/* A latch on which one process waits and which other processes wake: RocketMQ's ServiceThread (hasNotified and
 * CountDownLatch2), made of a shared flag and a named POSIX semaphore.
 *
 * Who: the waiter is one worker; wakers are workers. Producers wake the writer too, and only the writer. Blocks on: only
 * ms_latch_wait, until its timeout at most. The waiter's loop keeps this order:
 *
 *     ms_latch_arm            forget old wake-ups, ask for new ones
 *     look for work           after arming
 *     ms_latch_wait           only if there was none; a wake-up since arm ends it
 *
 * The waker publishes its position first and calls ms_latch_wakeup second. While the flag is 1 (the owner is awake or
 * being woken) a wake-up is one load. After a crash: if a waker is killed between taking the flag and waking the owner,
 * the owner sleeps until its timeout, so every wait has one; a waiter that is killed asleep leaves at most one token,
 * which the next arm drains.
 *
 * The writer's latch has no semaphore (NULL): the C library ends a process that uses a semaphore with a wrong value in it, and
 * producers would have it writable. The writer sleeps on the flag itself, a futex in the control block, which producers map
 * read-only. They ring: they wake that futex, and send the writer SIGURG when it was not asleep there, since a wake-up
 * that comes before the sleep would be lost (docs/design/01-one-writer.md).
 */
#pragma once

#include "control.h"

/* The semaphore is NULL for the latch of the writer. Open the semaphore `name`, which starts with a slash and must exist; NULL on error (errno in *error_number). */
void *ms_latch_open(const char *name, int *error_number);
void ms_latch_close(void *semaphore);
void ms_latch_wakeup(struct ms_latch *latch, void *semaphore);
/* The same for a caller that has issued a full fence after it published the position. */
void ms_latch_wakeup_fenced(struct ms_latch *latch, void *semaphore);
void ms_latch_arm(struct ms_latch *latch, void *semaphore);
#define MS_LATCH_WOKEN 1         /* by a worker, or by a ring's signal */
#define MS_LATCH_RUNG 2          /* by a process that may have nothing for the owner */
/* Sleep: MS_LATCH_*, 0 timed out, -EINTR a signal arrived (its handler has run). Afterwards the owner is marked awake. */
int ms_latch_wait(struct ms_latch *latch, void *semaphore, int64_t timeout_ns);
/* Wake the writer, for a producer that has published an entry. *rung notes for which arming it has done so; another value
 * makes it ring again. */
void ms_latch_ring(const struct ms_latch *latch, int32_t owner_pid, uint32_t *rung);
/* For the writer: let rings' signals reach this latch from now on; NULL: no more. 0 or -errno. */
int ms_latch_hear_rings(struct ms_latch *latch);
/* Mark the owner as awake, when it has found work after arming. */
void ms_latch_disarm(struct ms_latch *latch);
