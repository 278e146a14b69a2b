/* What the shared objects have in common: each begins with a magic, which its maker stores last, and the version of its layout.
 *
 * Who: the supervisor publishes them, every process checks those that it maps. Blocks on: nothing. After a crash: an object
 * without a magic is refused.
 */
/* 0, or -EPROTO wrong magic, -EBADMSG other layout, -EMSGSIZE fewer than `bytes` are mapped. */
int ms_layout_check(const void *object, int64_t mapped_bytes, uint64_t magic, uint32_t version, int64_t bytes);
/* Store the version and the magic, with release: from then on other processes accept the object. */
void ms_layout_publish(void *object, uint64_t magic, uint32_t version);
