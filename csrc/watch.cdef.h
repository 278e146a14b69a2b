/* Raises a descriptor for each reader of a process whose queues may have something to read: one thread for all of them.
 *
 * Who: readers that wait in an event loop, not in ms_arrivals_wait. ms_watch_start makes a thread that sleeps for the queues of all
 * that were added, with every signal blocked, so that the program's other threads get them. A reader arms its descriptor with
 * what it found empty; the thread raises it once, and forgets those queues. The thread needs no interpreter. It reads the
 * control block, which may be mapped read-only, until ms_watch_stop. Blocks on: the thread a second at a time; the others on a
 * mutex that is held for a scan. After a crash of another process: as in arrivals.cdef.h. A forked child has no such thread: it
 * calls nothing here for a watch of its parent.
 */
#pragma once

#include "arrivals.h"

/* A reader's descriptor; zeros but for `fd`. */
struct ms_watched {
    struct ms_watched *next;
    struct ms_awaited *rows;     /* the reader keeps them until it arms with others or is removed */
    uint32_t count;              /* 0: it is not armed */
    uint32_t bits;               /* of the queues that it was armed with last */
    int32_t fd;                  /* an eventfd that does not block */
    uint32_t reserved;
};

/* Start a thread; NULL and *error_number if there is none. */
void *ms_watch_start(const struct ms_control *control, int *error_number);
/* End the thread and free the watch, whose readers were removed. */
void ms_watch_stop(void *watch);
void ms_watch_add(void *watch, struct ms_watched *watched);
void ms_watch_remove(void *watch, struct ms_watched *watched);
/* Raise it once one of `rows` may have something to read, at once if that is so. `theirs`: the mapping that their levels are in. */
void ms_watch_arm(void *watch, struct ms_watched *watched, const struct ms_control *theirs, struct ms_awaited *rows, uint32_t count);
/* Do not raise it any more, until it is armed again. */
void ms_watch_disarm(void *watch, struct ms_watched *watched);
