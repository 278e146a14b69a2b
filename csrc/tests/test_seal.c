/* The seal: the published vectors of SipHash-2-4, and every flipped bit. */

#include "check.h"
#include "../seal.cdef.h"

int main(void)
{
    /* Key 00..0f, message 00..0e and 00..07, from the paper and the authors' table. */
    const struct ms_seal seal = {.key = {0x0706050403020100u, 0x0f0e0d0c0b0a0908u}, .sequence = 0};
    const uint8_t rest[7] = {8, 9, 10, 11, 12, 13, 14};
    CHECK(ms_seal_of(&seal, 0x0706050403020100u, rest, 7) == 0xa129ca6149be45e5u);
    CHECK(ms_seal_of(&seal, 0x0706050403020100u, rest, 0) == 0x93f5f5799a932462u);

    struct ms_seal own = {.key = {3, 4}, .sequence = 9};
    uint8_t frame[64];
    for (int length = 0; length <= 56; length++) {
        for (int i = 0; i < length; i++)
            frame[i] = (uint8_t)(i * 37);
        ms_seal_put(&own, 0, frame, length);
        CHECK(ms_seal_fits(&own, 0, frame, length));
        CHECK(!ms_seal_fits(&own, 1, frame, length));
        for (int bit = 0; bit < (length + MS_SEAL_BYTES) * 8; bit++) {
            frame[bit / 8] ^= (uint8_t)(1 << bit % 8);
            CHECK(!ms_seal_fits(&own, 0, frame, length));
            frame[bit / 8] ^= (uint8_t)(1 << bit % 8);
        }
    }
    ms_seal_count(&own, 1);
    CHECK(own.sequence == 10);

    memset(frame, 7, sizeof frame);
    ms_seal_put(NULL, 0, frame, 16); /* a link without seals */
    CHECK(frame[16] == 7 && ms_seal_fits(NULL, 0, frame, 16) && ms_seal_room(NULL) == 0 && ms_seal_room(&own) == MS_SEAL_BYTES);
    ms_seal_count(NULL, 2);
    return 0;
}
