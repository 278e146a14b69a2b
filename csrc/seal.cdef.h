/* The seal of what goes over an authenticated replication link: eight bytes after each part. A part is a frame's header,
 * its body, or a report.
 *
 * Who: the replicator of a master and of a slave, one `struct ms_seal` for each direction of a link, in private memory, under
 * the lock of that link. Blocks on: nothing. After a crash: nothing is left; the next link has keys of its own.
 *
 * The seal is SipHash-2-4 under a key that only both ends of this link know (docs/decisions/0198), over the number of the
 * part in its direction and its bytes: bits that flipped, a part that is left out, repeated, or comes from another link,
 * and one that a stranger made all differ in it. A header has a seal of its own, so that no length is believed unproven.
 */
#define MS_SEAL_BYTES 8

struct ms_seal {
    uint64_t key[2];
    uint64_t sequence;           /* parts in this direction so far */
};

/* SipHash-2-4 of `sequence`, eight bytes with the lowest first, and then `length` bytes. */
uint64_t ms_seal_of(const struct ms_seal *seal, uint64_t sequence, const uint8_t *from, int64_t length);
/* Bytes that a seal takes: MS_SEAL_BYTES; 0 where `seal` is NULL, of a link without seals. */
int64_t ms_seal_room(const struct ms_seal *seal);
/* Write the seal of a part after its `length` bytes: of the next one, or of the one `ahead` parts after it. The caller counts
 * the parts once they are on their way. Nothing where `seal` is NULL. */
void ms_seal_put(const struct ms_seal *seal, uint64_t ahead, uint8_t *part, int64_t length);
/* 1 if a part, the next one or one `ahead`, is followed by its seal; also where `seal` is NULL. */
int ms_seal_fits(const struct ms_seal *seal, uint64_t ahead, const uint8_t *part, int64_t length);
/* So many parts went, or came; nothing where `seal` is NULL. */
void ms_seal_count(struct ms_seal *seal, uint64_t parts);
