/* One record of the commit log: its bytes both ways (docs/formats.md sections 2 to 5).
 *
 * Who: the writer encodes and stamps; every process that scans parses. Blocks
 * on: nothing. Crash states: none here; a writer killed inside an encode leaves
 * a half-written record above its commit slot's position, which is never read.
 * No length found in the bytes is trusted: parsing looks at nothing outside the
 * room it is given, whatever the bytes say.
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

/* What a position holds: the rows of formats' RECORD_CASES, in the order of the checks. */
#define MS_CASE_MESSAGE 0          /* a whole record */
#define MS_CASE_RANGE_END 1        /* fewer than 8 bytes of room */
#define MS_CASE_ZEROES 2           /* never written */
#define MS_CASE_BLANK 3            /* the filler that closes a segment */
#define MS_CASE_FOREIGN 4          /* neither magic */
#define MS_CASE_OVERRUN 5          /* a size beyond the room */
#define MS_CASE_TORN 6             /* lengths that do not add up */
#define MS_CASE_OFFSET_MISMATCH 7  /* a whole record of another place */
#define MS_CASE_BAD_CRC 8
#define MS_CASE_BAD_TEXT 9         /* NUL or no UTF-8 in topic or properties */
#define MS_CASES 10

#define MS_CHECK_CRC 1
#define MS_CHECK_TEXT 2
#define MS_CHECK_OFFSET 4

/* Some bytes of the caller's memory; at NULL: absent. */
struct ms_text {
    const uint8_t *at;
    int64_t bytes;
};

/* A record found in the caller's bytes. Every pointer and length lies inside its room. */
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
    int32_t reserved;
};

/* A record about to be written. Hosts are as on disk: 4 or 16 address bytes, then
 * the port as 4 bytes; bits BORN_V6 and STORE_V6 of sys_flag say which. */
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
    int32_t reserved;
    const uint8_t *body;
    const uint8_t *topic;
    const uint8_t *properties;
    uint8_t born_host[MS_HOST_BYTES_MAX];
    uint8_t store_host[MS_HOST_BYTES_MAX];
};

/* The whole record's size (CommitLog.calMsgLength). */
int64_t ms_record_bytes(int32_t sys_flag, int64_t topic_bytes, int64_t properties_bytes, int64_t body_bytes);
/* Write a whole record at `to`, which has room for ms_record_bytes; computes the CRC and
 * returns the bytes written. A body that is already at its place (ms_record_body_at)
 * is not copied; otherwise the sources lie outside the target. The caller has checked
 * the lengths against their maxima. */
int64_t ms_record_encode(uint8_t *to, const struct ms_record_template *t);
/* Where the body of a record with this sys_flag begins, counted from the record's start. */
int64_t ms_record_body_at(int32_t sys_flag);
/* Change what is only known under the put lock, in a record that ms_record_encode made. */
void ms_record_stamp(uint8_t *record, int64_t queue_offset, int64_t physical_offset, int64_t store_timestamp_ms);
/* The 8 bytes that close a segment of which `free_bytes` (>= 8) are left; returns 8. */
int64_t ms_record_encode_blank(uint8_t *to, int32_t free_bytes);
/* One of MS_CASE_*: what is at `at`, of which `room` bytes may be looked at.
 * `checks` is a sum of MS_CHECK_*; `physical_offset` counts only with MS_CHECK_OFFSET. */
int ms_record_classify(const uint8_t *at, int64_t room, int64_t physical_offset, int checks);
/* 1 when the bytes are UTF-8 without a NUL: the rule for topic and properties, the same
 * at the door and above the durable watermark. */
int ms_record_text_is_clean(const uint8_t *text, int64_t length);
/* CRC-32 of a body without the sign bit; 0 for an empty one. */
uint32_t ms_record_body_crc(const uint8_t *body, int64_t length);
