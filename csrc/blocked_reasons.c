#include "blocked_reasons.h"

#include <string.h>

#include "atomics.h"
#include "layout.h"

#define TRIES 1000

void ms_blocked_reasons_format(struct ms_blocked_reasons *blocked_reasons)
{
    blocked_reasons->layout_version = MS_BLOCKED_REASONS_LAYOUT_VERSION;
    ms_store_release(&blocked_reasons->magic, MS_BLOCKED_REASONS_MAGIC);
}

int ms_blocked_reasons_check(const struct ms_blocked_reasons *blocked_reasons, int64_t mapped_bytes)
{
    return ms_layout_check(blocked_reasons, mapped_bytes, MS_BLOCKED_REASONS_MAGIC, MS_BLOCKED_REASONS_LAYOUT_VERSION,
                           sizeof *blocked_reasons);
}

void ms_blocked_reason_write(struct ms_blocked_reasons *blocked_reasons, uint32_t kind, const char *text)
{
    struct ms_blocked_reason *line = &blocked_reasons->worker[kind];
    const uint32_t before = ms_load_relaxed(&line->changes) & ~1u; /* it is odd if a predecessor died while it wrote */
    ms_store_relaxed(&line->changes, before + 1);
    ms_fence();
    size_t bytes = strlen(text);
    if (bytes >= sizeof line->text)
        bytes = sizeof line->text - 1;
    memset(line->text, 0, sizeof line->text);
    memcpy(line->text, text, bytes);
    ms_store_release(&line->changes, before + 2);
}

void ms_blocked_reason_read(const struct ms_blocked_reasons *blocked_reasons, uint32_t kind, char *into)
{
    const struct ms_blocked_reason *line = &blocked_reasons->worker[kind];
    for (int i = 0; i < TRIES; i++) {
        const uint32_t before = ms_load_acquire(&line->changes);
        memcpy(into, line->text, sizeof line->text);
        ms_fence_acquire();
        if (!(before & 1) && ms_load_relaxed(&line->changes) == before)
            break;
    }
    into[sizeof line->text - 1] = 0;
}
