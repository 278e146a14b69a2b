/* Seals (authentication codes) of an authenticated replication link: eight bytes after each part. A part is a frame's
 * header, its body, or a report.
 *
 * Who: the replicator of a master and of a slave, one `struct ms_seal` for each direction of a link, in private memory, under
 * the lock of that link. Blocks on: nothing. After a crash: nothing remains; the next link has other keys.
 *
 * The seal is SipHash-2-4 with a key that only both ends of this link know (docs/design/05-replication.md), over the number of the
 * part in its direction and its bytes. So it detects flipped bits, parts that are missing, repeated or of another link, and
 * forged ones. A header has a seal of its own, so that no length is used before it is authenticated.
 */
#pragma once

#define MS_SEAL_BYTES 8

struct ms_seal {
    uint64_t key[2];
    uint64_t sequence;           /* parts in this direction so far */
};

/* SipHash-2-4 of `sequence`, eight bytes with the lowest first, and then `length` bytes. */
uint64_t ms_seal_of(const struct ms_seal *seal, uint64_t sequence, const uint8_t *from, int64_t length);
/* Return the bytes of a seal: MS_SEAL_BYTES, or 0 if `seal` is NULL, for a link without seals. */
int64_t ms_seal_room(const struct ms_seal *seal);
/* Write the seal of a part after its `length` bytes: of the next part, or of the one `ahead` parts later. The caller counts
 * the parts once they are sent. No effect if `seal` is NULL. */
void ms_seal_put(const struct ms_seal *seal, uint64_t ahead, uint8_t *part, int64_t length);
/* Return 1 if the right seal follows a part, the next one or one `ahead`; also if `seal` is NULL. */
int ms_seal_fits(const struct ms_seal *seal, uint64_t ahead, const uint8_t *part, int64_t length);
/* Count parts that were sent or received; no effect if `seal` is NULL. */
void ms_seal_count(struct ms_seal *seal, uint64_t parts);
