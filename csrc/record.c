#include "base.h"
#include "record.h"

#include "crc32.cdef.h"
#include "utf8.h"

#define FIXED_BYTES 75 /* of a record, besides hosts and the three texts */

int64_t ms_record_bytes(int32_t sys_flag, int64_t topic_bytes, int64_t properties_bytes, int64_t body_bytes)
{
    return FIXED_BYTES + ms_host_bytes(sys_flag, MS_SYS_FLAG_BORN_V6) + ms_host_bytes(sys_flag, MS_SYS_FLAG_STORE_V6) + body_bytes +
           topic_bytes + properties_bytes;
}

uint32_t ms_record_body_crc(const uint8_t *body, int64_t length)
{
    return length > 0 ? ms_crc32(0, body, length) & 0x7FFFFFFF : 0;
}

/* memcpy, for lengths that may be 0 with a null source. */
static inline uint8_t *append(uint8_t *to, const uint8_t *from, int64_t length)
{
    if (length > 0)
        memcpy(to, from, (size_t)length);
    return to + length;
}

int64_t ms_record_encode(uint8_t *to, const struct ms_record_template *t)
{
    const int32_t born = ms_host_bytes(t->sys_flag, MS_SYS_FLAG_BORN_V6);
    const int32_t store = ms_host_bytes(t->sys_flag, MS_SYS_FLAG_STORE_V6);
    const int64_t size = ms_record_bytes(t->sys_flag, t->topic_bytes, t->properties_bytes, t->body_bytes);
    uint8_t *const body = to + 72 + born + store;

    ms_put_32(to + MS_AT_SIZE, (uint32_t)size);
    ms_put_32(to + MS_AT_MAGIC, MS_RECORD_MAGIC);
    ms_put_32(to + MS_AT_QUEUE_ID, (uint32_t)t->queue_id);
    ms_put_32(to + MS_AT_FLAG, (uint32_t)t->flag);
    ms_put_64(to + MS_AT_QUEUE_OFFSET, (uint64_t)t->queue_offset);
    ms_put_64(to + MS_AT_PHYSICAL_OFFSET, (uint64_t)t->physical_offset);
    ms_put_32(to + MS_AT_SYS_FLAG, (uint32_t)t->sys_flag);
    ms_put_64(to + MS_AT_BORN_TIMESTAMP, (uint64_t)t->born_timestamp_ms);
    uint8_t *at = append(to + MS_AT_BORN_HOST, t->born_host, born);
    ms_put_64(at, (uint64_t)t->store_timestamp_ms);
    at = append(at + 8, t->store_host, store);
    ms_put_32(at, (uint32_t)t->reconsume_times);
    ms_put_64(at + 4, (uint64_t)t->prepared_transaction_offset);
    ms_put_32(at + 12, (uint32_t)t->body_bytes);
    MS_FAILPOINT("record_head_encoded");
    /* The CRC of the stored copy: the producer may change its bytes meanwhile. */
    const uint32_t crc = ms_crc32_copy(body, t->body, t->body_bytes);
    MS_FAILPOINT("record_body_copied");
    ms_put_32(to + MS_AT_BODY_CRC, t->body_bytes > 0 ? crc & 0x7FFFFFFF : 0);
    at = body + t->body_bytes;
    MS_FAILPOINT("record_body_encoded");
    *at++ = (uint8_t)t->topic_bytes;
    at = append(at, t->topic, t->topic_bytes);
    ms_put_16(at, (uint16_t)t->properties_bytes);
    append(at + 2, t->properties, t->properties_bytes);
    return size;
}

int64_t ms_record_encode_blank(uint8_t *to, int32_t free_bytes)
{
    ms_put_32(to, (uint32_t)free_bytes);
    ms_put_32(to + MS_AT_MAGIC, MS_BLANK_MAGIC);
    return MS_BLANK_BYTES;
}

#define LOW_BITS 0x0101010101010101ULL

int ms_record_text_is_clean(const uint8_t *text, int64_t length)
{
    const uint8_t *const end = text + length;
    int bad = 0;
    while (text < end) {
        if (end - text >= 8) { /* eight plain ASCII bytes at a time */
            uint64_t word;
            memcpy(&word, text, 8);
            /* Without a high bit, a byte is 0 exactly if subtracting 1 borrows into it. */
            if (((word | (word - LOW_BITS)) & MS_NOT_ASCII) == 0) {
                text += 8;
                continue;
            }
        }
        if (ms_utf8_next(&text, end, &bad) == 0 || bad)
            return 0;
    }
    return 1;
}

int ms_record_verify(const struct ms_record *record, int64_t physical_offset, int checks)
{
    if ((checks & MS_CHECK_OFFSET) && ms_record_physical_offset(record) != physical_offset)
        return MS_CASE_OFFSET_MISMATCH;
    if ((checks & MS_CHECK_CRC) && record->body_bytes > 0 &&
        ms_record_body_crc(record->body, record->body_bytes) != ms_get_u32(record->start + MS_AT_BODY_CRC))
        return MS_CASE_BAD_CRC;
    if ((checks & MS_CHECK_TEXT) && !(ms_record_text_is_clean(record->topic, record->topic_bytes) &&
                                      ms_record_text_is_clean(record->properties, record->properties_bytes)))
        return MS_CASE_BAD_TEXT;
    return MS_CASE_MESSAGE;
}

int ms_record_classify(const uint8_t *at, int64_t room, int64_t physical_offset, int checks)
{
    struct ms_record record;
    const int found = ms_record_parse(at, room, &record);
    return found == MS_CASE_MESSAGE ? ms_record_verify(&record, physical_offset, checks) : found;
}
