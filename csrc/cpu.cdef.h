/* Choose the CPU that a worker runs on, and how the kernel schedules it; measure how long a wake-up takes.
 *
 * Who: each worker for itself. Blocks on: one or two system calls; the mover's at most once per MS_MOVE_PAUSE_NS. After a
 * crash: nothing remains; the kernel drops it with the process.
 *
 * The mover keeps the writer off its producer's CPU; ms_writer_run calls it. Two processes that hand work to each other
 * are fast only on two CPUs. If the other CPU is busy for a moment, the scheduler puts a woken process beside its waker
 * and leaves it there: then each hand-off is a context switch. Moving away once ends that state.
 *
 * In sync mode writer and flusher work in turns, so they share a CPU: waking a process on another CPU is an interrupt
 * there, five times as long as a switch, and longer in a virtual machine. The writer stays for MS_AFFINITY_NS on the CPU that
 * the scheduler chose, then lets it choose again; the flusher follows. A mask that another process has set is
 * respected.
 */
#pragma once

#define MS_MOVE_AFTER_PASSES 4      /* move after so many passes in a row on the producer's CPU */
#define MS_MOVE_PAUSE_NS 200000     /* from one move to the next; doubled while moving does not help */
#define MS_MOVE_PAUSE_NS_MAX 100000000

struct ms_mover {
    int64_t next_ns;
    int64_t pause_ns;
    uint32_t passes;                /* in a row on the producer's CPU */
};

/* Note after each pass whether it ran on its producer's CPU; move to another CPU if that lasts. */
void ms_mover_note(struct ms_mover *mover, int same_cpu, int64_t now_ns);

#define MS_AFFINITY_NS 1000000000

struct ms_affinity {
    uint32_t is_enabled;            /* in: 0: the scheduler chooses the CPU */
    int32_t cpu;                    /* the CPU chosen last; -1 none */
    int64_t until_ns;               /* the writer's: when the scheduler chooses again */
    uint32_t is_bound;              /* 1: the mask is `cpu` alone, set here */
    uint64_t allowed[16];           /* the mask before it was set here */
};

/* Enable the affinity of writer and flusher in sync mode, without a CPU yet. */
void ms_affinity_begin(struct ms_affinity *affinity);
/* For the writer after each pass, which ran on `cpu`: stay there, or let the scheduler choose again. */
void ms_affinity_note(struct ms_affinity *affinity, int cpu, int64_t now_ns);
/* For the flusher: move to the writer's CPU. */
void ms_affinity_follow(struct ms_affinity *affinity, int cpu);

/* Set how the kernel schedules this process; 0 or -errno. */
#define MS_CPU_INTERACTIVE 0        /* short slices: when woken it preempts a process with longer ones (Linux 6.12) */
#define MS_CPU_BATCH 1              /* SCHED_BATCH: when woken it takes an idle CPU but preempts no process */
int ms_cpu_schedule(int how);
/* Return the `percent` percentile of `rounds` wake-ups of a thread of this process, from sem_post to the return of sem_wait, in
 * ns; -errno on failure. The supervisor measures it once at start, for about 5 ms: the lengths of all spins follow from it. A
 * spin shorter than a wake-up ends before the other process answers, and costs both CPU and a sleep; a much longer one wastes
 * CPU. */
int64_t ms_calibrate_wake_ns(int rounds, int percent);
