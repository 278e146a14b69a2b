/* Protects the writer from a producer that truncates its session object: only that session ends.
 *
 * Who: the writer, the only process beside the producer that maps a session. A load or store beyond the end of a truncated
 * object raises SIGBUS in it. The handler finds the address in a table of the mapped sessions, maps private zero pages over
 * that session's whole range, marks it broken and returns, so that the instruction repeats on zeros. The writer notices
 * the mark after it has copied an entry, or a length of zero, and closes the session as for any malformed entry. If it
 * notices the mark after it has copied bodies, it rolls the pass back. Any other SIGBUS, as from a mapped segment for which
 * the disk has no room, is counted and handled as without this guard; the next writer finds the count and writes its
 * segments with pwrite. Blocks on: nothing. After a crash: nothing remains, the table is in private memory.
 */
#pragma once

/* Handle SIGBUS in this process, and count faults outside of sessions in *elsewhere unless NULL; idempotent. 0 or -errno. */
int ms_session_guard_install(uint64_t *elsewhere);
/* Guard the session of `slot`, mapped at `start` (page aligned) with `bytes`. */
void ms_session_guard_add(uint32_t slot, void *start, int64_t bytes);
/* Remove the guard, before the range is unmapped. */
void ms_session_guard_remove(uint32_t slot);
/* Return 1 if private zero pages have replaced the session's memory. */
int ms_session_guard_broken(uint32_t slot);
