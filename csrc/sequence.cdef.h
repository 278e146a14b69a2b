/* A number that many processes sleep on until it moves (a futex, not a latch).
 *
 * Who: a process raises it after it has published what the sleepers wait for; any process waits, with a mapping that may be
 * read-only. Each raise is a system call: to count the sleepers, all of them would need memory that they can write and
 * truncate (docs/design/01-one-writer.md). Blocks on: ms_sequence_wait, always timed. After a crash: the number stays; it only says
 * "check again".
 *
 *     seen = ms_sequence_load       before checking
 *     check the condition; if it is true: done
 *     ms_sequence_wait(seen)        returns at once if the number has moved
 */
uint32_t ms_sequence_load(const struct ms_sequence *sequence);
/* Raise it and wake all sleepers. */
void ms_sequence_raise(struct ms_sequence *sequence);
/* Raise it and wake the sleepers that wait for this number (ms_futex_wait_for), and those that wait for any change. */
void ms_sequence_raise_for_next(struct ms_sequence *sequence);
/* Sleep until the number differs from `seen`: 1, or 0 after the timeout or a signal. */
int ms_sequence_wait(const struct ms_sequence *sequence, uint32_t seen, int64_t timeout_ns);
