#include "base.h"
#include "log_tail.h"

#include <stdio.h>

#include "flush.cdef.h"

#define MS_PAGE_BYTES 4096

/* The first write into allocated blocks changes the file's block map, which makes the next sync slow. So write zeros to a
 * whole window at once. They are above all acknowledged bytes, so no reader sees them. */
static int write_zeros_ahead(struct ms_writer *writer, int64_t end)
{
    int64_t limit = writer->current.base + writer->segment_bytes;
    int64_t bytes = writer->zero_ahead_bytes;
    if (bytes == 0 || end <= writer->zeroed_end)
        return 0;
    if (limit > writer->reserved_end)
        limit = writer->reserved_end;
    if (bytes > limit - end)
        bytes = limit - end;
    writer->zeroed_end = end + bytes;
    MS_FAILPOINT("tail_zeros_due");
    return ms_flush_pwrite_all(writer->current.fd, writer->zeros, bytes, end - writer->current.base);
}

/* Add zeros after the gathered bytes, to the end of the last page: writes of whole new pages are a sixth cheaper. The zeros
 * are above all acknowledged bytes, so no reader sees them. */
static int64_t fill_page(struct ms_writer *writer)
{
    int64_t end = writer->stage_from + writer->stage_bytes - writer->current.base;
    int64_t filled = (end + MS_PAGE_BYTES - 1) & ~(int64_t)(MS_PAGE_BYTES - 1);
    if (filled > writer->segment_bytes)
        filled = writer->segment_bytes;
    memset(writer->stage + writer->stage_bytes, 0, (size_t)(filled - end));
    return writer->stage_bytes + filled - end;
}

/* Write the gathered bytes at stage_from. */
int ms_tail_write(struct ms_writer *writer)
{
    if (writer->stage_bytes == 0)
        return 0;
    MS_FAILPOINT("tail_gathered");
    int64_t bytes = writer->current.memory != NULL ? fill_page(writer) : writer->stage_bytes;
    int64_t began_ns = ms_monotonic_ns();
    int error = ms_flush_pwrite_all(writer->current.fd, writer->stage, bytes, writer->stage_from - writer->current.base);
    if (error == 0)
        error = write_zeros_ahead(writer, writer->stage_from + writer->stage_bytes);
    writer->write_ns += ms_monotonic_ns() - began_ns;
    if (error == -ENOSPC || error == -EDQUOT) { /* nothing is lost: the pass is rolled back and repeated */
        writer->error_number = -error;
        return error;
    }
    if (error != 0) {
        char reason[200];
        snprintf(reason, sizeof reason, "writing the commit log at offset %lld failed: %s",
                 (long long)writer->stage_from, strerror(-error));
        ms_control_freeze(writer->control, MS_WRITER, -error, reason);
        writer->error_number = -error;
        return error;
    }
    MS_FAILPOINT("tail_written");
    writer->stage_from += writer->stage_bytes;
    writer->stage_bytes = 0;
    return 0;
}

/* Return whether the current pass is written to its segment, not stored into memory. */
static int is_written(const struct ms_writer *writer)
{
    return writer->is_gathering || writer->current.memory == NULL;
}

/* Return where to put `bytes` more bytes at the write position; NULL if a write failed. */
static uint8_t *take_place(struct ms_writer *writer, int64_t bytes)
{
    if (!is_written(writer)) {
        ms_store_release(&writer->control->writer.intent_end, writer->position + bytes);
        ms_compiler_fence(); /* intent first, bytes after */
        MS_FAILPOINT("tail_intended");
        return writer->current.memory + (writer->position - writer->current.base);
    }
    if (writer->stage_bytes + bytes > writer->stage_bytes_max && ms_tail_write(writer) != 0)
        return NULL;
    if (writer->stage_bytes == 0)
        writer->stage_from = writer->position;
    ms_store_release(&writer->control->writer.intent_end, writer->position + bytes);
    MS_FAILPOINT("tail_stage_intended");
    uint8_t *place = writer->stage + writer->stage_bytes;
    writer->stage_bytes += bytes;
    return place;
}

int64_t ms_tail_room(const struct ms_writer *writer)
{
    if (writer->current.base < 0)
        return 0;
    return writer->current.base + writer->segment_bytes - writer->position;
}

int ms_tail_roll(struct ms_writer *writer)
{
    int64_t room = ms_tail_room(writer);
    if (room > 0) {
        uint8_t *place = take_place(writer, MS_BLANK_BYTES);
        if (place == NULL)
            return -EIO;
        ms_record_encode_blank(place, (int32_t)room);
        MS_FAILPOINT("tail_blank_encoded");
        if (is_written(writer) && ms_tail_write(writer) != 0)
            return -EIO;
        writer->position += room;
        writer->stage_from = writer->position;
    } else if (is_written(writer) && ms_tail_write(writer) != 0) {
        return -EIO;
    }
    if (writer->current.base >= 0)
        writer->finished[writer->rolled++] = writer->current;
    writer->current = writer->ahead[0];
    MS_FAILPOINT("tail_rolled");
    writer->ahead_count--;
    memmove(&writer->ahead[0], &writer->ahead[1], writer->ahead_count * sizeof writer->ahead[0]);
    return 0;
}

int ms_tail_append(struct ms_writer *writer, struct ms_record_template *record, int64_t bytes)
{
    if (bytes + MS_BLANK_BYTES > ms_tail_room(writer) && ms_tail_roll(writer) != 0)
        return -EIO;
    uint8_t *place = take_place(writer, bytes);
    if (place == NULL)
        return -EIO;
    record->physical_offset = writer->position;
    ms_record_encode(place, record);
    MS_FAILPOINT("tail_record_encoded");
    writer->position += bytes;
    return 0;
}

int ms_tail_copy(struct ms_writer *writer, const uint8_t *from, int64_t bytes)
{
    while (bytes > 0) {
        /* A blank may be as long as a segment, longer than the stage. */
        int64_t piece = is_written(writer) && bytes > writer->stage_bytes_max ? writer->stage_bytes_max : bytes;
        uint8_t *place = take_place(writer, piece);
        if (place == NULL)
            return -EIO;
        memcpy(place, from, (size_t)piece);
        writer->position += piece;
        from += piece;
        bytes -= piece;
    }
    return 0;
}
