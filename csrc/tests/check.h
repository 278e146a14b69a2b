/* Shared by the C tests: assertions with file and line, seeded random numbers, memory that ends at a guard page. */
#pragma once

#include "../base.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

static uint64_t dice_state;

#define CHECK(condition)                                                                       \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            fprintf(stderr, "%s:%d: not so: %s (seed %llu)\n", __FILE__, __LINE__, #condition, \
                    (unsigned long long)start_seed);                                           \
            abort();                                                                           \
        }                                                                                      \
    } while (0)

static uint64_t start_seed;

/* CHECK_SEED repeats a run; every test prints its seed. */
static inline void dice_begin(const char *name)
{
    const char *wanted = getenv("CHECK_SEED");
    start_seed = wanted != NULL ? strtoull(wanted, NULL, 10) : (uint64_t)getpid() * 2654435761u;
    dice_state = start_seed | 1;
    printf("%s: seed %llu\n", name, (unsigned long long)start_seed);
}

static inline uint64_t dice(uint64_t sides)
{
    dice_state ^= dice_state << 13;
    dice_state ^= dice_state >> 7;
    dice_state ^= dice_state << 17;
    return dice_state % sides;
}

/* Bytes between two pages without access; they end where the second one begins. */
struct guarded {
    uint8_t *at;
    int64_t bytes;
    uint8_t *mapping;
    size_t mapping_bytes;
};

static inline struct guarded guarded_new(int64_t bytes)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t room = ((size_t)bytes + page - 1) / page * page;
    struct guarded memory = {.bytes = bytes, .mapping_bytes = room + 2 * page};
    memory.mapping = mmap(NULL, memory.mapping_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory.mapping != MAP_FAILED);
    CHECK(mprotect(memory.mapping, page, PROT_NONE) == 0);
    CHECK(mprotect(memory.mapping + page + room, page, PROT_NONE) == 0);
    memory.at = memory.mapping + page + room - bytes;
    return memory;
}

static inline struct guarded guarded_copy(const uint8_t *from, int64_t bytes)
{
    struct guarded memory = guarded_new(bytes);
    if (bytes > 0)
        memcpy(memory.at, from, (size_t)bytes);
    return memory;
}

static inline void guarded_free(struct guarded *memory)
{
    munmap(memory->mapping, memory->mapping_bytes);
}
