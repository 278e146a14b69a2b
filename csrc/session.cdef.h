/* One producer's session: its submission ring and the answers.
 *
 * Who: the supervisor makes it; one producer process and the writer map it, both read-write. So the writer trusts
 * nothing in it: it keeps heads and counts in its commit slot, reads each length once, bounds it by the tail that it
 * loaded, and works on a private copy; only bodies are copied directly into the record. Blocks on: nothing (the producer's
 * waits are in producer.c). After a crash: the producer's unpublished entries do not exist; this writer or the next
 * executes a published entry exactly once.
 *
 * The ring holds entries of a multiple of 8 bytes, which are not split at its end: a PAD entry fills the rest. `tail` and
 * `head` count bytes and only grow; the position in the ring is count & (ring_bytes - 1).
 */
#define MS_SESSION_LAYOUT_VERSION 2
#define MS_COMPLETIONS 4096

#define MS_ENTRY_PAD 0
#define MS_ENTRY_PUT 1           /* one record */
#define MS_ENTRY_MANY 2          /* `count` records sharing everything but the body */
#define MS_ENTRY_BATCH 3         /* RocketMQ's putMessages: members in its client encoding, one segment */
#define MS_ENTRY_SIDE 4          /* the real entry is in the side object `sequence` */
#define MS_ENTRY_RAW 5           /* whole records of a master, which begin at prepared_transaction_offset */

/* After the header: topic, properties, then PUT: the body; MANY: count uint32 lengths (padded to 8), then the joined bodies;
 * BATCH: the members; SIDE: nothing (payload_bytes is the size of the side object). */
struct ms_entry {
    uint32_t entry_bytes;        /* header and payload, multiple of 8 */
    uint16_t kind;
    uint16_t flags;
    uint64_t sequence;           /* 1, 2, 3 ... of the session */
    int64_t born_timestamp_ms;
    int64_t prepared_transaction_offset;
    int64_t clock_ms;            /* replay only: the store time; 0 none */
    int32_t queue_id;
    int32_t flag;
    int32_t sys_flag;
    int32_t reconsume_times;
    uint8_t born_host[MS_HOST_BYTES_MAX]; /* address (4 or 16 bytes) and port, as on disk */
    uint8_t store_host[MS_HOST_BYTES_MAX];
    uint32_t count;
    uint32_t topic_bytes;
    uint32_t properties_bytes;
    uint32_t payload_bytes;      /* bodies, members, or the side object */
    int64_t submitted_ns;        /* CLOCK_MONOTONIC, for the statistics; 0 unknown */
    uint64_t reserved;
};

struct ms_completion {
    uint64_t sequence;           /* stored last, with release */
    int64_t physical_offset;     /* of the first record, -1 none */
    int64_t end_offset;          /* after the last record */
    int64_t queue_offset;        /* of the first record */
    int64_t store_timestamp_ms;
    uint32_t status;             /* PutStatus */
    uint32_t detail;             /* MS_REFUSED_*: the reason */
    uint32_t count;
    uint32_t size_bytes;         /* of the first record */
    uint64_t reserved;
};

struct ms_session {
    uint64_t magic;
    uint32_t layout_version;
    uint32_t slot;
    uint32_t generation;
    uint32_t completions;
    uint64_t epoch;
    uint64_t ring_bytes;         /* power of two */
    uint64_t ring_at;            /* offset of the ring in the object */
    int8_t pad[80];
    uint64_t tail;               /* producer, release */
    int8_t pad1[120];
    uint32_t waiting;            /* producer: it sleeps on acked_seq */
    int32_t producer_cpu;
    int8_t pad2[120];
    uint64_t head;               /* writer, advisory copy for the producer */
    uint64_t acked;              /* writer: entries answered */
    uint32_t acked_seq;          /* low half of acked; the producer's futex */
    uint32_t closed;             /* writer: MS_REFUSED_* of the entry that closed it */
    int8_t pad3[104];
    struct ms_completion completion[MS_COMPLETIONS];
};

int64_t ms_session_bytes(uint64_t ring_bytes);
/* Initialize zeroed memory. */
void ms_session_format(struct ms_session *session, uint64_t ring_bytes, uint32_t slot, uint32_t generation, uint64_t epoch);
/* 0, or -EPROTO, -EBADMSG, -EMSGSIZE as ms_control_check. */
int ms_session_check(const struct ms_session *session, int64_t mapped_bytes);
