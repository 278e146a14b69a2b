/* CRC-32/ISO-HDLC: the one of zlib and java.util.zip.
 *
 * Who: writer (encode), every process that scans (recovery, check, readers,
 * Spark workers). Blocks on: nothing; long inputs run at memory speed, so the
 * release of the GIL matters. Crash states: none, no shared data.
 * Uses carry-less multiplication where the CPU has it, else eight tables; both
 * give the same value for every input.
 */

/* Continue `crc` (0 to begin) over `length` bytes. */
uint32_t ms_crc32(uint32_t crc, const uint8_t *from, int64_t length);
/* Copy `length` bytes and return the CRC of the copy, also where another process changes them meanwhile. */
uint32_t ms_crc32_copy(uint8_t *to, const uint8_t *from, int64_t length);
/* The two ways by name, for tests. The folding one falls back where the CPU cannot. */
uint32_t ms_crc32_tables(uint32_t crc, const uint8_t *from, int64_t length);
uint32_t ms_crc32_folding(uint32_t crc, const uint8_t *from, int64_t length);
