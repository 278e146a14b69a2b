/* Polls a position with short sleeps, for a worker that expects it to move at any moment.
 *
 * Who: committer and reputter after they have found work, which saves wake-ups; the reputter also during a commit. Blocks
 * on: sleeps of interval_ns, growing to eight times that, until the timeout. After a crash: nothing remains. A sleep costs a
 * few microseconds of CPU, so this is for waits of milliseconds; for longer ones use the latch.
 */
/* Wait until the position is above `value`: 1, or 0 after the timeout. */
int ms_poll_until_above(const struct ms_position *position, int64_t value, int64_t timeout_ns, int64_t interval_ns);
/* Let this process's sleeps end within a microsecond of the requested time (the kernel's default slack is 50). */
int ms_sleep_precisely(void);
