/* Gathers entries of many consume queues and writes them in runs (docs/formats.md section 8).
 *
 * Who: the process that dispatches: the reputter, or recovery before it; one process, one thread. Blocks on: pwrite and
 * fallocate of queue files. Entry k of a queue goes to byte 20 k of it, whatever is there, so writing it again is
 * harmless. After a crash: any run of entries may be missing, and the last one may be written in part; the next
 * dispatcher starts again from the published position.
 *
 * In a store with enable_consume_queue_ext new entries name units of the queue's extension (docs/formats.md section 9). A
 * unit is written before the entry that names it, so the last unit may be an orphan, which the next dispatcher clears. The
 * filter bit map stays empty, as in a broker without filters.
 *
 * All memory belongs to the caller (Python), which also opens and creates files; C returns which one it needs.
 */
#define MS_QUEUE_ENTRY_BYTES 20
#define MS_QUEUE_CHUNK_ENTRIES 64
#define MS_QUEUE_WINDOW_BYTES 65536
#define MS_QUEUE_FILLER_SIZE 0x7FFFFFFF

#define MS_QUEUE_NEEDS_FILE 1
#define MS_QUEUE_NEEDS_EXT 2

#define MS_EXT_UNIT_BYTES 20
#define MS_EXT_TAIL_BYTES 4      /* RocketMQ reserves them in each file for its end mark */
#define MS_EXT_RUN_BYTES 1288    /* the units of a chunk of 64 entries, and the mark */

struct ms_queue {
    int64_t next_offset;     /* the expected queue offset of the next entry */
    int64_t max_physical;    /* physical end of the newest message in it; -1 none */
    int64_t file_start;      /* byte of the queue at which the open file begins */
    int64_t allocated_bytes; /* of the open file; -1 not known */
    int32_t queue_id;
    int32_t fd;              /* -1: none is open */
    int32_t chunk;           /* -1: nothing is gathered */
    uint32_t last_used;      /* ms_queue_set.tick */
    uint32_t arrival_slot;   /* ms_arrivals_slot */
    uint32_t refused;        /* 1: no folder can have this topic's name; entries are dropped */
    struct ms_topic_count *counted; /* where its new entries are counted; NULL: nowhere */
};

/* A run of entries of one queue. */
struct ms_queue_chunk {
    int64_t first;           /* queue offset of entries[0] */
    int32_t count;
    int32_t queue;
    int32_t loaded;          /* 1: entries[] was read from the file first, to keep right entries */
    int32_t dirty;           /* 1: something differs from the file */
    int32_t fresh;           /* entries that were not in the file yet */
    int64_t fresh_bytes;     /* of their records */
    uint8_t entries[MS_QUEUE_CHUNK_ENTRIES * MS_QUEUE_ENTRY_BYTES];
};

struct ms_ext_queue {
    int64_t end;                 /* byte after the last unit; -1: unknown */
    int64_t file_start;
    int64_t allocated_bytes;     /* of the open file; -1 not known */
    int32_t fd;                  /* -1: none is open */
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

struct ms_queue_set {
    struct ms_queue_keys keys;
    struct ms_queue *queues;
    struct ms_ext_set *ext;  /* new entries name units of the extension; NULL: they carry the tags code */
    struct ms_queue_chunk *chunks;
    struct ms_topic_stats *topic_stats; /* NULL: nothing is counted */
    int64_t file_bytes;      /* size of every queue file: a multiple of 20 */
    int32_t chunk_count;
    int32_t chunks_used;
    uint32_t tick;           /* +1 a batch; the age of descriptors is told by it */
    int32_t failed_queue;       /* the queue whose write failed; -1: the index (csrc/dispatch.c) */
    int64_t written;         /* entries appended to their queue: since the reputter counted them */
    int64_t out_of_order;    /* those beyond their queue's end, appended at the end, and those below it, left out, as in RocketMQ */
};

/* Add a queue without a file; return as ms_queue_keys_add. */
int ms_queue_add(struct ms_queue_set *set, const uint8_t *topic, int32_t topic_bytes, int32_t queue_id);
/* Gather one entry: 0, MS_QUEUE_NEEDS_FILE (attach the file that holds byte 20 * `*position`), MS_QUEUE_NEEDS_EXT
 * (attach the queue's extension file), or -errno. A message whose end is at or below max_physical was dispatched before:
 * its entry is written only if the file does not have it, and then with the tags code itself. */
int ms_queue_put(struct ms_queue_set *set, int32_t queue, int64_t queue_offset, int64_t physical_offset,
                 int32_t size_bytes, int64_t tags_code, int64_t store_timestamp_ms, int64_t *position);
/* Write the gathered entries: 0, or -errno with failed_queue. After an error nothing stays gathered. */
int ms_queue_write_gathered(struct ms_queue_set *set);
/* 20 bytes. */
void ms_queue_encode_entry(uint8_t *to, int64_t physical_offset, int32_t size_bytes, int64_t tags_code);
/* Count the entries before the first of `count` that is empty or names an offset at or above `below`. */
int64_t ms_queue_live_entries(const uint8_t *entries, int64_t count, int64_t below);
