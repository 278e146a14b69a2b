#pragma once

#include "control.h"
#include "record.h"
#include "session.cdef.h"

#define MS_SESSION_MAGIC 0x4d5353455353494fULL /* "MSSESSIO" */

/* Return where the ring begins; not read from the object, which its producer can overwrite. */
static inline uint64_t ms_session_ring_at(void)
{
    return (sizeof(struct ms_session) + 4095) & ~4095ULL;
}

static inline uint8_t *ms_session_ring(struct ms_session *session)
{
    return (uint8_t *)session + ms_session_ring_at();
}

static inline uint64_t ms_align8(uint64_t bytes)
{
    return (bytes + 7) & ~7ULL;
}

/* Return where an entry's payload begins: after its header, topic and properties. */
static inline uint64_t ms_entry_payload_at(uint32_t topic_bytes, uint32_t properties_bytes)
{
    return ms_align8(sizeof(struct ms_entry) + (uint64_t)topic_bytes + properties_bytes);
}
