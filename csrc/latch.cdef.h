/* A latch on which one process waits and which other processes wake: RocketMQ's ServiceThread (hasNotified and
 * CountDownLatch2), made of a shared flag and a named POSIX semaphore.
 *
 * Who: the waiter is one worker; wakers are workers and producers. Blocks on: only ms_latch_wait, until its timeout at
 * most. The waiter's loop keeps this order:
 *
 *     ms_latch_arm            forget old wake-ups, ask for new ones
 *     look for work           after arming
 *     ms_latch_wait           only if there was none; a wake-up since arm ends it
 *
 * The waker publishes its position first and calls ms_latch_wakeup second. While the flag is 1 (the owner is awake or
 * being woken) a wake-up is one load. After a crash: if a waker is killed between taking the flag and posting the
 * semaphore, the owner sleeps until its timeout, so every wait has one; a waiter that is killed asleep leaves at most one
 * token, which the next arm drains.
 */
#pragma once

#include "control.h"

/* Open the semaphore `name`, which starts with a slash and must exist; NULL on error (errno in *error_number). */
void *ms_latch_open(const char *name, int *error_number);
void ms_latch_close(void *semaphore);
void ms_latch_wakeup(struct ms_latch *latch, void *semaphore);
/* The same for a caller that has issued a full fence after it published the position. */
void ms_latch_wakeup_fenced(struct ms_latch *latch, void *semaphore);
void ms_latch_arm(struct ms_latch *latch, void *semaphore);
/* Sleep: 1 woken, 0 timed out, -EINTR a signal arrived (its handler has run). Afterwards the owner is marked awake. */
int ms_latch_wait(struct ms_latch *latch, void *semaphore, int64_t timeout_ns);
/* For a producer or reader, whose mapping is read-only: each call posts until the owner wakes up. */
void ms_latch_wakeup_unmarked(const struct ms_latch *latch, void *semaphore);
/* Mark the owner as awake, when it has found work after arming. */
void ms_latch_disarm(struct ms_latch *latch);
