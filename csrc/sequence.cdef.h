/* A number that many processes sleep on until it moves (a futex, not a latch).
 *
 * Who: a process raises it after it published what the sleepers wait for; any
 * process waits, its mapping of the number may be read-only. Each raise is a system
 * call: counting the sleepers would need memory that all of them can write and cut
 * short (docs/decisions/0111). Blocks on: ms_sequence_wait, always timed. After a
 * crash: the number stays; it only says "look again".
 *
 *     seen = ms_sequence_load       before looking
 *     look; found it: done
 *     ms_sequence_wait(seen)        returns at once if it moved since
 */
uint32_t ms_sequence_load(const struct ms_sequence *sequence);
/* Raise it and wake all sleepers. */
void ms_sequence_raise(struct ms_sequence *sequence);
/* Raise it and wake those that wait until it has this number (ms_futex_wait_for), and those that wait for any. */
void ms_sequence_raise_for_next(struct ms_sequence *sequence);
/* 1 when the number differs from `seen`, 0 after the timeout. A signal ends the sleep early: 0. */
int ms_sequence_wait(const struct ms_sequence *sequence, uint32_t seen, int64_t timeout_ns);
