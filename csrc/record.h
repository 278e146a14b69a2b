#pragma once

#include "record.cdef.h"

/* Fixed positions in a record; positions after the born host depend on the host bits. */
enum {
    MS_AT_SIZE = 0,
    MS_AT_MAGIC = 4,
    MS_AT_BODY_CRC = 8,
    MS_AT_QUEUE_ID = 12,
    MS_AT_FLAG = 16,
    MS_AT_QUEUE_OFFSET = 20,
    MS_AT_PHYSICAL_OFFSET = 28,
    MS_AT_SYS_FLAG = 36,
    MS_AT_BORN_TIMESTAMP = 40,
    MS_AT_BORN_HOST = 48
};

static inline int32_t ms_host_bytes(int32_t sys_flag, int32_t v6_bit)
{
    return (sys_flag & v6_bit) != 0 ? 20 : 8;
}

/* Parse a record: MS_CASE_MESSAGE and `record`, or the first failed check, up to MS_CASE_TORN. The order of checks is that of
 * pyengine/formats/record.py. */
static inline int ms_record_parse(const uint8_t *at, int64_t room, struct ms_record *record)
{
    if (room < MS_BLANK_BYTES)
        return MS_CASE_RANGE_END;
    const int32_t size = ms_get_i32(at);
    const uint32_t magic = ms_get_u32(at + MS_AT_MAGIC);
    if (__builtin_expect(magic != MS_RECORD_MAGIC, 0)) {
        if (magic == MS_BLANK_MAGIC)
            return MS_CASE_BLANK;
        return magic == 0 && size == 0 ? MS_CASE_ZEROES : MS_CASE_FOREIGN;
    }
    if (size > room)
        return MS_CASE_OVERRUN;
    if (size < MS_RECORD_BYTES_MIN)
        return MS_CASE_TORN;
    const int32_t sys_flag = ms_get_i32(at + MS_AT_SYS_FLAG);
    const int32_t born = ms_host_bytes(sys_flag, MS_SYS_FLAG_BORN_V6);
    const int32_t store = ms_host_bytes(sys_flag, MS_SYS_FLAG_STORE_V6);
    const int64_t body_at = 72 + born + store;
    if (size < body_at + 3) /* topic length and properties length still follow */
        return MS_CASE_TORN;
    const int64_t body_bytes = ms_get_i32(at + body_at - 4);
    if (body_bytes < 0 || body_at + body_bytes + 3 > size)
        return MS_CASE_TORN;
    const int64_t topic_bytes = at[body_at + body_bytes];
    const int64_t topic_at = body_at + body_bytes + 1;
    if (topic_bytes > MS_TOPIC_BYTES_MAX || topic_at + topic_bytes + 2 > size)
        return MS_CASE_TORN;
    const int64_t properties_at = topic_at + topic_bytes + 2;
    const int64_t properties_bytes = ms_get_i16(at + properties_at - 2);
    if (properties_bytes < 0 || properties_at + properties_bytes != size)
        return MS_CASE_TORN;
    record->start = at;
    record->body = at + body_at;
    record->topic = at + topic_at;
    record->properties = at + properties_at;
    record->store_timestamp_ms = ms_get_i64(at + MS_AT_BORN_HOST + born);
    record->size_bytes = size;
    record->sys_flag = sys_flag;
    record->born_host_bytes = born;
    record->store_host_bytes = store;
    record->body_bytes = (int32_t)body_bytes;
    record->topic_bytes = (int32_t)topic_bytes;
    record->properties_bytes = (int32_t)properties_bytes;
    return MS_CASE_MESSAGE;
}

/* Prefetch the lines 2 KiB ahead, as many as were passed. Walks jump from header to header and wait for memory at each; this
 * makes them three times as fast. A prefetch may point anywhere without a fault. */
static inline void ms_record_prefetch(const struct ms_record *record)
{
    if (record->size_bytes <= 4096)
        for (int32_t ahead = 2048; ahead < 2048 + record->size_bytes; ahead += 64)
            __builtin_prefetch((const void *)((uintptr_t)record->start + (uintptr_t)ahead));
    else
        __builtin_prefetch((const void *)((uintptr_t)record->start + (uintptr_t)record->size_bytes));
}

static inline int64_t ms_record_queue_offset(const struct ms_record *record)
{
    return ms_get_i64(record->start + MS_AT_QUEUE_OFFSET);
}

static inline int64_t ms_record_physical_offset(const struct ms_record *record)
{
    return ms_get_i64(record->start + MS_AT_PHYSICAL_OFFSET);
}

static inline int32_t ms_record_queue_id(const struct ms_record *record)
{
    return ms_get_i32(record->start + MS_AT_QUEUE_ID);
}

/* The fields after the store host: reconsume times, prepared offset, body length. */
static inline const uint8_t *ms_record_tail(const struct ms_record *record)
{
    return record->body - 16;
}

static inline int32_t ms_record_reconsume_times(const struct ms_record *record)
{
    return ms_get_i32(ms_record_tail(record));
}

/* Return a time in microseconds. One that is not within the years 1678 to 2261, as nanoseconds of pandas are in every time zone,
 * becomes the nearest that is. A client's born time is any number. */
static inline int64_t ms_microseconds(int64_t milliseconds)
{
    const int64_t most = INT64_C(106750) * 86400000; /* days */
    if (milliseconds > most)
        return 1000 * most;
    return 1000 * (milliseconds < -most ? -most : milliseconds);
}

/* Return 1 for plain and committed messages: only they have a queue entry. */
static inline int ms_record_is_queued(const struct ms_record *record)
{
    const int32_t transaction = record->sys_flag & MS_SYS_FLAG_TRANSACTION;
    return transaction != MS_SYS_FLAG_PREPARED && transaction != MS_SYS_FLAG_ROLLBACK;
}

/* Make the checks beyond the lengths, for a parsed record. */
int ms_record_verify(const struct ms_record *record, int64_t physical_offset, int checks);
