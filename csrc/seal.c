#include "base.h"
#include "seal.cdef.h"

#define ROTATE(value, bits) (((value) << (bits)) | ((value) >> (64 - (bits))))

struct state {
    uint64_t v0, v1, v2, v3;
};

static inline void mix(struct state *s)
{
    s->v0 += s->v1;
    s->v1 = ROTATE(s->v1, 13) ^ s->v0;
    s->v0 = ROTATE(s->v0, 32);
    s->v2 += s->v3;
    s->v3 = ROTATE(s->v3, 16) ^ s->v2;
    s->v0 += s->v3;
    s->v3 = ROTATE(s->v3, 21) ^ s->v0;
    s->v2 += s->v1;
    s->v1 = ROTATE(s->v1, 17) ^ s->v2;
    s->v2 = ROTATE(s->v2, 32);
}

static inline void take(struct state *s, uint64_t word)
{
    s->v3 ^= word;
    mix(s);
    mix(s);
    s->v0 ^= word;
}

/* SipHash's words are little-endian. */
static inline uint64_t word_at(const uint8_t *from)
{
    return __builtin_bswap64((uint64_t)ms_get_i64(from));
}

uint64_t ms_seal_of(const struct ms_seal *seal, uint64_t sequence, const uint8_t *from, int64_t length)
{
    struct state s = {
        .v0 = seal->key[0] ^ 0x736f6d6570736575u,
        .v1 = seal->key[1] ^ 0x646f72616e646f6du,
        .v2 = seal->key[0] ^ 0x6c7967656e657261u,
        .v3 = seal->key[1] ^ 0x7465646279746573u,
    };
    take(&s, sequence);
    int64_t at = 0;
    for (; length - at >= 8; at += 8)
        take(&s, word_at(from + at));
    uint64_t last = (uint64_t)(length + 8) << 56;
    for (int shift = 0; at < length; at++, shift += 8)
        last |= (uint64_t)from[at] << shift;
    take(&s, last);
    s.v2 ^= 0xff;
    for (int i = 0; i < 4; i++)
        mix(&s);
    return s.v0 ^ s.v1 ^ s.v2 ^ s.v3;
}

int64_t ms_seal_room(const struct ms_seal *seal)
{
    return seal != NULL ? MS_SEAL_BYTES : 0;
}

void ms_seal_put(const struct ms_seal *seal, uint64_t ahead, uint8_t *part, int64_t length)
{
    if (seal != NULL)
        ms_put_64(part + length, ms_seal_of(seal, seal->sequence + ahead, part, length));
}

int ms_seal_fits(const struct ms_seal *seal, uint64_t ahead, const uint8_t *part, int64_t length)
{
    return seal == NULL || (uint64_t)ms_get_i64(part + length) == ms_seal_of(seal, seal->sequence + ahead, part, length);
}

void ms_seal_count(struct ms_seal *seal, uint64_t parts)
{
    if (seal != NULL)
        seal->sequence += parts;
}
