/* Failpoints: named steps at which tests kill or stop a process.
 *
 * Who: any process that reaches the step. scripts/crash/steps.py lists all steps. Steps in C exist only in a build
 * with MS_FAILPOINTS (PYENGINE_BUILD_FAILPOINTS=1); those in Python cost one read of a variable. A failpoint has no effect
 * unless ms_failpoint_use has set one. Blocks on: nothing but the requested stop. Crash states: those of the named step.
 * Processes may share the structure; then it strikes one of them, once.
 */
#define MS_FAILPOINT_IDLE 0
#define MS_FAILPOINT_ARMED 1
#define MS_FAILPOINT_STRUCK 2
#define MS_FAILPOINT_PROCESS_BYTES 32
#define MS_FAILPOINT_NAME_BYTES 64

struct ms_failpoint {
    uint32_t state;      /* MS_FAILPOINT_*; stored last when it is armed */
    int32_t signal;      /* SIGKILL or SIGSTOP */
    int64_t nth;         /* the hit that strikes, counted from 1 */
    int64_t hits;        /* so far, of all processes that share this */
    int32_t pid;         /* the process that was struck */
    uint32_t spare;
    uint8_t process[MS_FAILPOINT_PROCESS_BYTES]; /* only in a process of this kind; empty: in any */
    uint8_t name[MS_FAILPOINT_NAME_BYTES];
};

/* Use `failpoint` in this process, which is of the kind `process`; NULL: none. */
void ms_failpoint_use(struct ms_failpoint *failpoint, const char *process);
/* Kill or stop this process if the step `name` is armed. */
void ms_failpoint_reach(const char *name);
