/* Encodes and parses records of the commit log (docs/formats.md sections 2 to 5).
 *
 * Who: the writer encodes; every process that scans parses. Blocks on: nothing. Crash states: a writer killed
 * inside an encode leaves an incomplete record above its commit slot's position, which no process reads. Parsing trusts
 * no length in the bytes and reads nothing outside the given room.
 */
#define MS_RECORD_MAGIC 0xDAA320A7
#define MS_BLANK_MAGIC 0xCBD43194
#define MS_RECORD_BYTES_MIN 91
#define MS_BLANK_BYTES 8
#define MS_HOST_BYTES_MAX 20
#define MS_TOPIC_BYTES_MAX 127
#define MS_PROPERTIES_BYTES_MAX 32767
#define MS_SYS_FLAG_TRANSACTION 0xC
#define MS_SYS_FLAG_PREPARED 0x4
#define MS_SYS_FLAG_ROLLBACK 0xC
#define MS_SYS_FLAG_BORN_V6 0x10
#define MS_SYS_FLAG_STORE_V6 0x20

/* What a position holds: the labels of pyengine/formats/record.py. */
#define MS_CASE_MESSAGE 0          /* a whole record */
#define MS_CASE_RANGE_END 1        /* fewer than 8 bytes of room */
#define MS_CASE_ZEROES 2           /* never written */
#define MS_CASE_BLANK 3            /* the filler that closes a segment */
#define MS_CASE_FOREIGN 4          /* neither magic */
#define MS_CASE_OVERRUN 5          /* a size beyond the room */
#define MS_CASE_TORN 6             /* lengths that do not add up */
#define MS_CASE_OFFSET_MISMATCH 7  /* a whole record with another offset */
#define MS_CASE_BAD_CRC 8
#define MS_CASE_BAD_TEXT 9         /* NUL or no UTF-8 in topic or properties */
#define MS_CASES 10

#define MS_CHECK_CRC 1
#define MS_CHECK_TEXT 2
#define MS_CHECK_OFFSET 4

/* Bytes in the caller's memory; `at` NULL: absent. */
struct ms_text {
    const uint8_t *at;
    int64_t bytes;
};

/* A record in the caller's bytes. Every pointer and length is inside its room. */
struct ms_record {
    const uint8_t *start;
    const uint8_t *body;
    const uint8_t *topic;
    const uint8_t *properties;
    int64_t store_timestamp_ms;
    int32_t size_bytes;
    int32_t sys_flag;
    int32_t born_host_bytes;
    int32_t store_host_bytes;
    int32_t body_bytes;
    int32_t topic_bytes;
    int32_t properties_bytes;
};

/* A record to encode. Hosts are as on disk: 4 or 16 address bytes, by the bits BORN_V6 and STORE_V6 of sys_flag, then the
 * port as 4 bytes. */
struct ms_record_template {
    int64_t queue_offset;
    int64_t physical_offset;
    int64_t born_timestamp_ms;
    int64_t store_timestamp_ms;
    int64_t prepared_transaction_offset;
    int32_t queue_id;
    int32_t flag;
    int32_t sys_flag;
    int32_t reconsume_times;
    int32_t body_bytes;
    int32_t topic_bytes;
    int32_t properties_bytes;
    const uint8_t *body;
    const uint8_t *topic;
    const uint8_t *properties;
    uint8_t born_host[MS_HOST_BYTES_MAX];
    uint8_t store_host[MS_HOST_BYTES_MAX];
};

/* Return the size of the whole record (CommitLog.calMsgLength). */
int64_t ms_record_bytes(int32_t sys_flag, int64_t topic_bytes, int64_t properties_bytes, int64_t body_bytes);
/* Write a whole record with its CRC at `to`, which has room for ms_record_bytes; return the bytes written. The sources do not
 * overlap the target. The caller has checked the lengths. */
int64_t ms_record_encode(uint8_t *to, const struct ms_record_template *t);
/* Write the 8 bytes that end a segment with `free_bytes` (>= 8) left; return 8. */
int64_t ms_record_encode_blank(uint8_t *to, int32_t free_bytes);
/* Return what is at `at`, reading `room` bytes at most: one of MS_CASE_*. `checks` is a sum of MS_CHECK_*;
 * `physical_offset` is used only with MS_CHECK_OFFSET. */
int ms_record_classify(const uint8_t *at, int64_t room, int64_t physical_offset, int checks);
/* Return 1 if the bytes are UTF-8 without a NUL: the rule for topic and properties of puts, and of records above the
 * durable watermark. */
int ms_record_text_is_clean(const uint8_t *text, int64_t length);
/* Return the CRC-32 of a body without the sign bit; 0 for an empty one. */
uint32_t ms_record_body_crc(const uint8_t *body, int64_t length);
