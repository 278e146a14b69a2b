/* Texts in shared memory that one process replaces and others read whole. Beside a text is a number, which is odd while the text
 * is being written.
 *
 * Who: a worker, of its blocked reason; the replicator, of addresses and details of links; any process reads. Blocks on: nothing.
 * After a crash: the number of a writer that was killed stays odd until its successor writes.
 */
/* Replace all `bytes` of a text. */
void ms_text_write(uint32_t *changes, int8_t *text, const char *from, int64_t bytes);
/* Copy all `bytes` of a text, and end the copy with a NUL: 1, or 0 if its writer died, or was stopped, while it wrote; then the copy
 * is the text as it is. */
int ms_text_read(const uint32_t *changes, const int8_t *text, char *to, int64_t bytes);
