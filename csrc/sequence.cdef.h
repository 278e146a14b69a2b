/* A number that many processes sleep on until it moves (a futex, not a latch).
 *
 * Who: one process raises it after it published what the sleepers wait for; any
 * process waits, its mapping of the number may be read-only. The number of
 * sleepers stands in a doorbell, so it is advisory: one that was killed asleep,
 * or a liar, costs the raiser a system call, and a count that was cleared costs
 * sleepers their timeout. Blocks on: ms_sequence_wait, always timed. After a
 * crash: the number stands; it only says "look again".
 *
 *     seen = ms_sequence_load       before looking
 *     look; found it: done
 *     ms_sequence_wait(seen)        returns at once if it moved since
 */
uint32_t ms_sequence_load(const struct ms_sequence *sequence);
/* Raise it and wake all sleepers; without sleepers no system call. */
void ms_sequence_raise(struct ms_sequence *sequence, const struct ms_doorbell *sleepers);
/* Wake all, whatever the count says: shutdown, a retired block. */
void ms_sequence_shout(struct ms_sequence *sequence);
/* 1 when the number differs from `seen`, 0 after the timeout. A signal ends the
 * sleep early: 0. `sleepers` may be NULL if this process cannot count itself:
 * then the sleep is cut into steps of at most 10 ms. */
int ms_sequence_wait(const struct ms_sequence *sequence, uint32_t seen, struct ms_doorbell *sleepers, int64_t timeout_ns);
