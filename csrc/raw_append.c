#include "base.h"
#include "raw_append.h"

#include "log_tail.h"
#include "record.h"

int ms_raw_is_allowed(const struct ms_writer *writer, const struct ms_writer_session *own)
{
    const struct ms_control *control = writer->control;
    int32_t replicator = ms_load_acquire(&control->workers[MS_REPLICATOR].pid);
    return control->identity.role == MS_ROLE_SLAVE && replicator != 0 &&
           ms_load_relaxed(&control->sessions[own - writer->sessions].pid) == replicator;
}

uint32_t ms_raw_measure(const struct ms_writer *writer, const struct ms_taken *taken, struct ms_measure *measure)
{
    const uint8_t *at = taken->payload;
    const uint8_t *end = at + taken->payload_bytes;
    int64_t position = writer->position;
    int64_t room = measure->room;
    measure->sum = (int64_t)taken->payload_bytes;
    measure->rolls = 0;
    measure->detail = MS_REFUSED_OFFSET;
    if (taken->head.prepared_transaction_offset != position)
        return MESSAGE_ILLEGAL;
    measure->detail = MS_REFUSED_RAW;
    if (at == end)
        return MESSAGE_ILLEGAL;
    if (room == 0) {
        room = measure->segment_bytes;
        measure->rolls = 1;
    }
    int closed = 0;
    while (at < end) {
        struct ms_record record;
        int what = closed ? MS_CASE_FOREIGN : ms_record_parse(at, end - at, &record);
        int64_t bytes;
        if (what == MS_CASE_BLANK) {
            bytes = ms_get_i32(at);
            closed = 1;
            if (bytes != room || bytes != end - at)
                return MESSAGE_ILLEGAL;
        } else if (what == MS_CASE_MESSAGE) {
            bytes = record.size_bytes;
            if (ms_record_physical_offset(&record) != position || bytes + MS_BLANK_BYTES > room)
                return MESSAGE_ILLEGAL;
        } else {
            return MESSAGE_ILLEGAL;
        }
        at += bytes;
        position += bytes;
        room -= bytes;
    }
    measure->detail = MS_REFUSED_NO;
    measure->room = room;
    return PUT_OK;
}

int ms_raw_append(struct ms_writer *writer, const struct ms_taken *taken, struct ms_completion *what)
{
    const uint8_t *at = taken->payload;
    const uint8_t *end = at + taken->payload_bytes;
    if (ms_tail_room(writer) == 0 && ms_tail_roll(writer) != 0)
        return -EIO;
    MS_FAILPOINT("raw_begun");
    what->physical_offset = writer->position;
    while (at < end) {
        struct ms_record record;
        int64_t bytes = ms_get_i32(at);
        if (ms_record_parse(at, end - at, &record) == MS_CASE_MESSAGE) {
            /* The master's clock, which may step back; own puts continue at the highest time. */
            if (record.store_timestamp_ms >= writer->store_timestamp_ms)
                writer->store_timestamp_ms = record.store_timestamp_ms;
            else
                ms_store_relaxed(&writer->control->writer.ordered_from, writer->position);
            writer->put_messages++;
            what->count++;
        }
        if (ms_tail_copy(writer, at, bytes) != 0)
            return -EIO;
        MS_FAILPOINT("raw_record_copied");
        at += bytes;
    }
    MS_FAILPOINT("raw_copied");
    what->end_offset = writer->position;
    what->store_timestamp_ms = writer->store_timestamp_ms;
    writer->put_bytes += taken->payload_bytes;
    return 0;
}
