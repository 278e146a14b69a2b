#include "base.h"
#include "session.h"

#include "layout.h"

int64_t ms_session_bytes(uint64_t ring_bytes)
{
    return (int64_t)(ms_session_ring_at() + ring_bytes);
}

void ms_session_format(struct ms_session *session, uint64_t ring_bytes, uint32_t slot, uint32_t generation, uint64_t epoch)
{
    session->layout_version = MS_SESSION_LAYOUT_VERSION;
    session->slot = slot;
    session->generation = generation;
    session->completions = MS_COMPLETIONS;
    session->epoch = epoch;
    session->ring_bytes = ring_bytes;
    session->ring_at = ms_session_ring_at();
    ms_store_release(&session->magic, MS_SESSION_MAGIC);
}

int ms_session_check(const struct ms_session *session, int64_t mapped_bytes)
{
    const int error = ms_layout_check(session, mapped_bytes, MS_SESSION_MAGIC, MS_SESSION_LAYOUT_VERSION, sizeof *session);
    if (error != 0)
        return error;
    const uint64_t ring_bytes = session->ring_bytes;
    if (ring_bytes < 4096 || (ring_bytes & (ring_bytes - 1)) != 0 || ring_bytes > (uint64_t)mapped_bytes ||
        mapped_bytes < ms_session_bytes(ring_bytes))
        return -EMSGSIZE;
    return 0;
}
