/* Wakes the readers of the queues that have new messages, and no others.
 *
 * The control block has, for each of 1,024 sets of queues, the physical end of the newest message dispatched to one of them.
 * A reader that found nothing below some end compares these numbers with it, and sleeps on `arrival_seq` for the bits of its
 * topics. Two topics seldom share a bit and two queues seldom share a set; one that does costs a comparison.
 *
 * Who: the reputter notes ends before it moves `reput_from`, and wakes afterwards. The flusher and the replicator wake the
 * readers of their levels after they have moved `flushed` or `confirm`. Any process looks and sleeps, with a mapping that may
 * be read-only. Blocks on: ms_arrivals_wait, always timed. After a crash: ends above `reput_from` may be there already, and
 * the next reputter notes them again; a wake-up may be lost, so a sleeper looks again after a second.
 */
#define MS_ARRIVALS_SIGNAL 0     /* the timeout, or a signal */
#define MS_ARRIVALS_ARRIVED 1
#define MS_ARRIVALS_STIRRED 2

/* One queue that a reader waits for, having found nothing to read below `looked_end`. */
struct ms_awaited {
    const struct ms_position *level; /* of the control block: how far this reader may read the log */
    int64_t looked_end;
    uint32_t slot;               /* ms_arrivals_slot */
    uint32_t reserved;
};

/* A thread that sleeps for queues, so that others of its process can end its sleep. All fields zero at the beginning. */
struct ms_sleeper {
    const struct ms_control *control; /* in which it sleeps, if is_asleep */
    uint32_t stirs;              /* raised by those that end its sleep */
    uint32_t seen;               /* `stirs` as the sleeping thread knows it */
    uint32_t is_asleep;
    uint32_t bits;               /* that it sleeps for */
};

/* The number of a queue's set. */
uint32_t ms_arrivals_slot(const uint8_t *topic, int32_t topic_bytes, int32_t queue_id);
/* How far a reader of this level sees queues now. */
int64_t ms_arrivals_limit(const struct ms_control *control, const struct ms_position *level);
/* Whether there may be something to read: 0 or 1. */
int ms_arrivals_has(const struct ms_control *control, const struct ms_position *level, int64_t looked_end, uint32_t slot);
/* Sleep until one of the queues may have something to read, `sleeper->stirs` is not `seen`, or the timeout: MS_ARRIVALS_*. */
int ms_arrivals_wait(const struct ms_control *control, struct ms_sleeper *sleeper, uint32_t seen,
                     const struct ms_awaited *queues, uint32_t count, int64_t timeout_ns);
/* End a thread's sleep, or the one that it is about to begin. */
void ms_arrivals_stir(struct ms_sleeper *sleeper);
/* Wake the readers that sleep for one of `bits`. */
void ms_arrivals_wake(struct ms_control *control, uint32_t bits);
/* A position of a level has moved beyond `from`: wake the readers of queues with messages that end above it. */
void ms_arrivals_level_moved(struct ms_control *control, int64_t from);
