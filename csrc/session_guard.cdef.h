/* A producer that cuts its session object short loses its session; the writer survives.
 *
 * Who: the writer, the only process beside the producer that keeps a session mapped. A load
 * or store beyond the end of a shortened object raises SIGBUS there. The handler looks the
 * address up in a table of the mapped sessions, lays private zero pages over that session's
 * whole range, marks it broken and returns: the instruction is done again, on zeros. The
 * writer sees the mark where it has copied an entry, or the zeros where a length should be,
 * and closes the session as for any malformed entry. After it copied bodies it looks at the mark too, and
 * rolls the pass back. A SIGBUS anywhere else is counted and goes
 * where it would have gone without this: a mapped segment that the disk has no room for, or cannot
 * read; the next writer sees the count and writes its segments. Blocks on: nothing. After a crash: nothing is left, the table is
 * private to the process, the next writer makes its own.
 */

/* Take SIGBUS for this process, count those outside sessions in *elsewhere (NULL: do not); once more does nothing. 0 or -errno. */
int ms_session_guard_install(uint64_t *elsewhere);
/* `slot`'s session is mapped at `start` (page aligned), `bytes` long; it is not broken. */
void ms_session_guard_add(uint32_t slot, void *start, int64_t bytes);
/* Before the range is unmapped. */
void ms_session_guard_remove(uint32_t slot);
/* 1 when the session's memory was replaced by private zero pages. */
int ms_session_guard_broken(uint32_t slot);
