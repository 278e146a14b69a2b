#include "base.h"
#include "shared_text.cdef.h"

#define TRIES 1000

void ms_text_write(uint32_t *changes, int8_t *text, const char *from, int64_t bytes)
{
    const uint32_t before = ms_load_relaxed(changes) | 1u; /* odd already if its writer was killed in between */
    ms_store_relaxed(changes, before);
    ms_fence();
    MS_FAILPOINT("text_begun");
    memcpy(text, from, (size_t)bytes);
    MS_FAILPOINT("text_filled");
    ms_store_release(changes, before + 1u);
}

int ms_text_read(const uint32_t *changes, const int8_t *text, char *to, int64_t bytes)
{
    int is_whole = 0;
    for (int i = 0; i < TRIES && !is_whole; i++) {
        const uint32_t before = ms_load_acquire(changes);
        memcpy(to, text, (size_t)bytes);
        ms_fence_acquire();
        is_whole = (before & 1u) == 0 && ms_load_relaxed(changes) == before;
    }
    to[bytes - 1] = 0;
    return is_whole;
}
