/* What keeps each worker from its work just now, for `status`.
 *
 * Who: created by the supervisor at start beside the control block; each worker writes the
 * line of its own kind (the supervisor too: which workers it must start again), any
 * process reads. Blocks on: nothing. After a crash: the dead worker's text stays until
 * its successor is up. No process decides anything by it.
 */
#define MS_OBSTACLES_LAYOUT_VERSION 2
#define MS_OBSTACLE_TEXT_BYTES 504

struct ms_obstacle {
    uint32_t changes;            /* odd while the text is being written */
    uint32_t reserved;
    int8_t text[MS_OBSTACLE_TEXT_BYTES]; /* UTF-8, NUL-terminated; empty: nothing */
};

struct ms_obstacles {
    uint64_t magic;              /* stored last, with release: "MSOBSTAC" */
    uint32_t layout_version;
    uint32_t reserved;
    int8_t pad[112];
    struct ms_obstacle worker[MS_WORKER_KINDS];
};

/* For the supervisor, over zeros. */
void ms_obstacles_format(struct ms_obstacles *obstacles);
/* 0, or -EPROTO wrong magic, -EBADMSG other layout, -EMSGSIZE too short. */
int ms_obstacles_check(const struct ms_obstacles *obstacles, int64_t mapped_bytes);
/* The worker's own line; cut to what fits. */
void ms_obstacle_say(struct ms_obstacles *obstacles, uint32_t kind, const char *text);
/* One consistent text with its NUL into `into`; the text as it is if its worker died while writing it. */
void ms_obstacle_read(const struct ms_obstacles *obstacles, uint32_t kind, char *into);
