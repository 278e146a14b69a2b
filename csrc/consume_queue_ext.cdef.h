/* Gathers and writes units of consume queue extensions, with the entries that name them (docs/formats.md section 9).
 *
 * Who: the process that dispatches, through consume_queue.c, in a store with enable_consume_queue_ext. Blocks on: pwrite
 * and fallocate of extension files. After a crash: a unit is written before the entry that names it, so the last unit may
 * be an orphan, which the next dispatcher clears. The filter bit map stays empty, as in a broker without filters.
 */
#define MS_EXT_UNIT_BYTES 20
#define MS_EXT_TAIL_BYTES 4      /* RocketMQ reserves them in each file for its end mark */
#define MS_EXT_RUN_BYTES 1288    /* the units of a chunk of 64 entries, and the mark */
#define MS_EXT_NEEDS_FILE 1

struct ms_ext_queue {
    int64_t end;                 /* byte after the last unit; -1: unknown */
    int64_t file_start;
    int64_t allocated_bytes;     /* of the open file; -1 not known */
    int32_t fd;                  /* -1: none is open */
    int32_t reserved;
};

struct ms_ext_run {
    int64_t first;               /* byte of units[0] */
    int64_t bytes;
    uint8_t units[MS_EXT_RUN_BYTES];
};

struct ms_ext_set {
    struct ms_ext_queue *queues; /* by the number of the queue */
    struct ms_ext_run *runs;     /* by the number of its chunk */
    int64_t file_bytes;
};

/* Gather a unit: 0 with the tags code that names it, MS_EXT_NEEDS_FILE (attach the file that holds `end`), or -errno. */
int ms_ext_put(struct ms_ext_set *set, int32_t queue, int32_t run, int64_t tags_code, int64_t store_timestamp_ms,
               int64_t *address);
/* Write the gathered units: 0, or -errno, after which `end` is unknown. Nothing stays gathered. */
int ms_ext_write(struct ms_ext_set *set, int32_t queue, int32_t run);
/* Drop the gathered units; afterwards `end` is unknown. */
void ms_ext_drop(struct ms_ext_set *set, int32_t queue, int32_t run);
