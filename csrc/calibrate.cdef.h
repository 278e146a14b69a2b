/* Measures how long a sleeping process takes to wake up on this machine, from which the lengths of all spins follow.
 *
 * Who: the supervisor, once at start. Blocks on: itself, for about 5 ms. After a crash: nothing remains. A spin shorter
 * than the wake-up time ends before the other process answers, and costs both CPU and a sleep; a much longer one wastes
 * CPU.
 */
/* Return the `percent` percentile of `rounds` wake-ups of a thread of this process, from sem_post to the return of
 * sem_wait, in ns; -errno on failure. */
int64_t ms_calibrate_wake_ns(int rounds, int percent);
