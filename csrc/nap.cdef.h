/* Watching a position in short naps, for a worker that expects it to move at any moment.
 *
 * Who: committer and reputter after they have found work (spares the others the
 * wake-ups, and them the waking up), the reputter also when it knows that a commit
 * is under way. Blocks on: sleeps of nap_ns, growing to
 * eight times that, until the timeout. After a crash: nothing is left. A nap costs a few microseconds of CPU, so
 * this is for milliseconds, not for idling: for that there is the latch.
 */
/* 1 as soon as the position is above `value`, 0 after the timeout. */
int ms_nap_until_above(const struct ms_position *position, int64_t value, int64_t timeout_ns, int64_t nap_ns);
/* Let this process's sleeps end within a microsecond of what was asked (the kernel's default slack is 50). */
int ms_nap_precisely(void);
