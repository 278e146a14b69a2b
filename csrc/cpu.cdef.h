/* Which process gets which CPU when.
 *
 * Who: each worker for itself. Blocks on: a system call or two; the mover's at most once per
 * MS_MOVE_PAUSE_NS. After a crash: nothing; all of it dies with the process.
 *
 * The mover keeps the writer off its producer's CPU, from ms_writer_run. Two processes that
 * hand work to each other are fast only on two CPUs. The scheduler puts a woken one beside
 * its waker when the other CPU is busy for a moment, and leaves it there: each hand-off is
 * then a context switch. Moving away once ends that state.
 */
#define MS_MOVE_AFTER_PASSES 4      /* so many passes in a row on the producer's CPU */
#define MS_MOVE_PAUSE_NS 200000     /* from one move to the next; doubled while moving does not help */
#define MS_MOVE_PAUSE_NS_MAX 100000000

struct ms_mover {
    int64_t next_ns;
    int64_t pause_ns;
    uint32_t passes;                /* in a row on the producer's CPU */
    uint32_t moves;
};

/* After each pass: whether it was made on the CPU that its producer ran on. Moves away when that lasts. */
void ms_mover_note(struct ms_mover *mover, int same_cpu, int64_t now_ns);

/* How this process is scheduled from now on; 0 or -errno. */
#define MS_CPU_PROMPT 0             /* short slices: woken, it interrupts who runs with long ones (Linux 6.12) */
#define MS_CPU_BEHIND 1             /* SCHED_BATCH: woken, it takes an idle CPU but interrupts none */
int ms_cpu_schedule(int how);
