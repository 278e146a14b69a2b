/* How long a sleeping process takes to wake up on this machine: the lengths of all spins follow from it.
 *
 * Who: the supervisor, once at start. Blocks on: itself, for about 5 ms. After a
 * crash: nothing is left. A spin shorter than the wake-up time ends before
 * the other process answers, and costs both CPU and a sleep; a much longer one costs CPU for nothing.
 */
/* Time from sem_post to the return of the sleeper's sem_wait, in ns, that `percent`
 * of `rounds` wake-ups stay below; a thread of this process sleeps. -errno on failure. */
int64_t ms_calibrate_wake_ns(int rounds, int percent);
