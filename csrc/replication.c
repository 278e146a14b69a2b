#include "replication.h"

#include <errno.h>
#include <string.h>

#include "atomics.h"
#include "failpoint.h"
#include "layout.h"

void ms_replication_format(struct ms_replication *replication, uint64_t epoch)
{
    replication->epoch = epoch;
    replication->links_max = MS_LINKS_MAX;
    replication->layout_version = MS_REPLICATION_LAYOUT_VERSION;
    ms_store_release(&replication->magic, MS_REPLICATION_MAGIC);
}

int ms_replication_check(const struct ms_replication *replication, int64_t mapped_bytes)
{
    return ms_layout_check(replication, mapped_bytes, MS_REPLICATION_MAGIC, MS_REPLICATION_LAYOUT_VERSION, sizeof *replication);
}

static void copy_text(int8_t *to, size_t room, const char *from)
{
    size_t length = strnlen(from, room - 1);
    memcpy(to, from, length);
    memset(to + length, 0, room - length);
}

void ms_replication_write_texts(uint32_t *text_seq, int8_t *address, int8_t *detail, const char *new_address,
                                const char *new_detail)
{
    uint32_t before = ms_load_relaxed(text_seq) | 1u; /* odd already if its writer was killed in between */
    ms_store_relaxed(text_seq, before);
    ms_fence();
    MS_FAILPOINT("link_texts_begun");
    copy_text(address, MS_LINK_ADDRESS_BYTES, new_address);
    copy_text(detail, MS_LINK_DETAIL_BYTES, new_detail);
    MS_FAILPOINT("link_texts_filled");
    ms_store_release(text_seq, before + 1u);
}

int ms_replication_read_texts(const uint32_t *text_seq, const int8_t *address, const int8_t *detail, char *to_address,
                              char *to_detail)
{
    uint32_t before = ms_load_acquire(text_seq);
    memcpy(to_address, address, MS_LINK_ADDRESS_BYTES);
    memcpy(to_detail, detail, MS_LINK_DETAIL_BYTES);
    ms_fence_acquire();
    to_address[MS_LINK_ADDRESS_BYTES - 1] = to_detail[MS_LINK_DETAIL_BYTES - 1] = '\0';
    return (before & 1u) != 0 || ms_load_relaxed(text_seq) != before ? -EAGAIN : 0;
}

void ms_replication_clear(struct ms_replication *replication)
{
    for (uint32_t i = 0; i < MS_LINKS_MAX; i++) {
        struct ms_link *link = &replication->links[i];
        ms_store_release(&link->state, (uint32_t)MS_LINK_NONE);
        MS_FAILPOINT("link_cleared");
        ms_replication_write_texts(&link->text_seq, link->address, link->detail, "", "");
    }
    ms_store_release(&replication->listening_port, (int64_t)0);
    if ((ms_load_relaxed(&replication->text_seq) & 1u) != 0)
        ms_replication_write_texts(&replication->text_seq, replication->address, replication->detail, "", "");
}
