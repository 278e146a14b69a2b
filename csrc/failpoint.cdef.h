/* Failpoints: named steps at which a process can be killed or stopped on purpose, for tests.
 *
 * Who: any process that passes the step. The table of all steps is pyengine/native/failpoints.py.
 * Steps in C are there in a build with MS_FAILPOINTS only (PYENGINE_BUILD_FAILPOINTS=1); those in
 * Python cost one look at a variable. Nothing strikes unless ms_failpoint_use has armed something.
 * Blocks on: nothing, but for the stop that was asked for. Crash states: those of the step that was
 * named; the structure may be shared by processes, then it strikes one of them, once.
 */
#define MS_FAILPOINT_IDLE 0
#define MS_FAILPOINT_ARMED 1
#define MS_FAILPOINT_STRUCK 2
#define MS_FAILPOINT_PROCESS_BYTES 32
#define MS_FAILPOINT_NAME_BYTES 64

struct ms_failpoint {
    uint32_t state;      /* MS_FAILPOINT_*; stored last when it is armed */
    int32_t signal;      /* SIGKILL or SIGSTOP */
    int64_t nth;         /* which passing of the step strikes, from 1 */
    int64_t hits;        /* passings so far, of all processes that share this */
    int32_t pid;         /* the process that was struck */
    uint32_t spare;
    uint8_t process[MS_FAILPOINT_PROCESS_BYTES]; /* only in a process of this kind; empty: in any */
    uint8_t name[MS_FAILPOINT_NAME_BYTES];
};

/* Whether the steps in C are there. */
int ms_failpoint_built(void);
/* From now on this process, of the kind `process`, looks at `failpoint`; NULL: at none. */
void ms_failpoint_use(struct ms_failpoint *failpoint, const char *process);
/* The step `name` was reached. */
void ms_failpoint_reach(const char *name);
