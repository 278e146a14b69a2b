/* Choose the CPU that a worker runs on, and how the kernel schedules it.
 *
 * Who: each worker for itself. Blocks on: a system call or two; the mover's at most once per
 * MS_MOVE_PAUSE_NS. After a crash: nothing; all of it dies with the process.
 *
 * The mover keeps the writer off its producer's CPU, from ms_writer_run. Two processes that
 * hand work to each other are fast only on two CPUs. The scheduler puts a woken one beside
 * its waker when the other CPU is busy for a moment, and leaves it there: each hand-off is
 * then a context switch. Moving away once ends that state.
 *
 * In sync mode writer and flusher work by turns, so they share a CPU: waking a process on another one is an
 * interrupt there, five times as long as a switch, and in a virtual machine more. The writer stays for
 * MS_HOME_NS on the CPU where the scheduler has put it, then lets it choose again; the flusher follows.
 * A mask that another process has set meanwhile is respected.
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

#define MS_HOME_NS 1000000000

struct ms_home {
    uint32_t is_kept;               /* in: 0 this process goes where the scheduler puts it */
    int32_t cpu;                    /* the CPU chosen last; -1 none */
    int64_t until_ns;               /* the writer's: then the scheduler chooses again */
    uint32_t is_bound;              /* 1: the mask is `cpu` alone, set here */
    uint32_t reserved;
    uint64_t allowed[16];           /* the mask before */
};

/* No CPU is chosen yet: writer and flusher of sync mode will share one. */
void ms_home_begin(struct ms_home *home);
/* The writer, after each pass, which it made on `cpu`. */
void ms_home_note(struct ms_home *home, int cpu, int64_t now_ns);
/* The flusher: be where the writer is. */
void ms_home_follow(struct ms_home *home, int cpu);

/* How this process is scheduled from now on; 0 or -errno. */
#define MS_CPU_INTERACTIVE 0        /* short slices: woken, it interrupts a process with longer ones (Linux 6.12) */
#define MS_CPU_BATCH 1              /* SCHED_BATCH: woken, it takes an idle CPU but interrupts none */
int ms_cpu_schedule(int how);
