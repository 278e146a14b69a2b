/* Puts keys into one index file (docs/formats.md section 10), each completely or not at all.
 *
 * Who: the process that dispatches (reputter, or recovery before it); one process, one thread. Blocks on: page faults of
 * the mapping, and fallocate: header, slots and a window of entries have blocks before they are stored to, so that a full
 * disk refuses a put and does no other harm. On a copy-on-write disk it writes instead, which can fail on a full disk. After a crash: at most one put is unfinished; its undo record is in ms_index_progress, and
 * the next dispatcher rolls it back. The file's last entries tell how many keys of the newest record it has. After a
 * power cut pages may have any age: recovery rebuilds the files above its restart point.
 */
#define MS_INDEX_HEADER_BYTES 40
#define MS_INDEX_ENTRY_BYTES 20

#define MS_INDEX_FULL 1

/* The undo record of the current put. In shared memory it survives its writer. */
struct ms_index_progress {
    uint64_t putting;          /* 1: a put is unfinished, and the fields below undo it */
    int64_t file_number;       /* the file's name as a number */
    int64_t physical_offset;   /* of the record whose key is put */
    int32_t slot;
    int32_t old_head;          /* the previous value of the slot */
    int32_t entry;             /* the entry that is filled */
    int32_t reserved;
    uint8_t old_header[MS_INDEX_HEADER_BYTES];
    int8_t pad[176];
};

/* One mapped file. base NULL: none. The mapping has 40 + 4 * slots + 20 * entries bytes. */
struct ms_index_file {
    uint8_t *base;
    int64_t number;            /* its name as a number */
    int32_t slots;
    int32_t entries;           /* entry 0 included, which is never used */
    int32_t is_written;        /* 1: bytes are written to `fd` and read through the mapping; 0: stored into the mapping */
    int32_t fd;
    int64_t allocated_bytes;   /* the file has blocks up to here */
    int64_t window_bytes;      /* so many are allocated at a time */
};

/* Return |String.hashCode| of `topic#key`, 0 for the smallest int. */
int32_t ms_index_key_hash(const uint8_t *topic, int64_t topic_bytes, const uint8_t *key, int64_t key_bytes);
/* Allocate whole windows of the file, so that it has blocks to the end of `entry`, which is in it; 0 or -errno. */
int ms_index_allocate(struct ms_index_file *file, int32_t entry);
/* Put one key: 0; MS_INDEX_FULL, without a change; or -errno if its entry gets no blocks or a write failed: then the put is
 * undone, now or by the next call. */
int ms_index_put(struct ms_index_file *file, struct ms_index_progress *progress, int32_t key_hash,
                 int64_t physical_offset, int64_t store_timestamp_ms);
/* Undo the unfinished put of this file, if there is one: 1 undone, 0 nothing to do, -errno of a write. */
int ms_index_roll_back(const struct ms_index_file *file, struct ms_index_progress *progress);
/* Return the number of the next free entry: 1 to `entries`, whatever the header says. */
int32_t ms_index_count(const struct ms_index_file *file);
/* Write the header of a file after a full one: begin and end are the predecessor's end. 0, or -errno of a write. */
int ms_index_inherit(const struct ms_index_file *file, int64_t end_timestamp_ms, int64_t end_physical_offset);
