/* Why each worker is blocked at present, for `status`.
 *
 * Who: the supervisor creates it at start beside the control block; each worker writes the line of its own kind (the
 * supervisor the workers that it must restart); any process reads, and none depends on it. Blocks on: nothing. After a
 * crash: the dead worker's text stays until its successor is ready.
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

/* The supervisor: initialize zeros. */
void ms_obstacles_format(struct ms_obstacles *obstacles);
/* 0, or -EPROTO wrong magic, -EBADMSG other layout, -EMSGSIZE too short. */
int ms_obstacles_check(const struct ms_obstacles *obstacles, int64_t mapped_bytes);
/* Write the worker's own line; truncate a long text. */
void ms_obstacle_say(struct ms_obstacles *obstacles, uint32_t kind, const char *text);
/* Copy one consistent text with its NUL to `into`; or the text as it is, if its worker died while it wrote it. */
void ms_obstacle_read(const struct ms_obstacles *obstacles, uint32_t kind, char *into);
