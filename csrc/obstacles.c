#include "obstacles.h"

#include <errno.h>
#include <string.h>

#include "atomics.h"

#define TRIES 1000

void ms_obstacles_format(struct ms_obstacles *obstacles)
{
    obstacles->layout_version = MS_OBSTACLES_LAYOUT_VERSION;
    ms_store_release(&obstacles->magic, MS_OBSTACLES_MAGIC);
}

int ms_obstacles_check(const struct ms_obstacles *obstacles, int64_t mapped_bytes)
{
    if (mapped_bytes < (int64_t)offsetof(struct ms_obstacles, worker))
        return -EMSGSIZE;
    if (ms_load_acquire(&obstacles->magic) != MS_OBSTACLES_MAGIC)
        return -EPROTO;
    if (obstacles->layout_version != MS_OBSTACLES_LAYOUT_VERSION)
        return -EBADMSG;
    return mapped_bytes < (int64_t)sizeof *obstacles ? -EMSGSIZE : 0;
}

void ms_obstacle_say(struct ms_obstacles *obstacles, uint32_t kind, const char *text)
{
    struct ms_obstacle *line = &obstacles->worker[kind];
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

void ms_obstacle_read(const struct ms_obstacles *obstacles, uint32_t kind, char *into)
{
    const struct ms_obstacle *line = &obstacles->worker[kind];
    for (int i = 0; i < TRIES; i++) {
        const uint32_t before = ms_load_acquire(&line->changes);
        memcpy(into, line->text, sizeof line->text);
        ms_fence_acquire();
        if (!(before & 1) && ms_load_relaxed(&line->changes) == before)
            break;
    }
    into[sizeof line->text - 1] = 0;
}
