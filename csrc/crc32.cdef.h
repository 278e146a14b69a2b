/* CRC-32/ISO-HDLC, as in zlib and java.util.zip.
 *
 * Who: the writer, and every process that scans (recovery, check, readers, Spark workers). Blocks on: nothing; long inputs
 * take a while, so cffi's release of the GIL matters. Crash states: none, it has no shared data. It uses carry-less
 * multiplication (x86-64) or CRC instructions (Armv8) if the CPU has them, otherwise eight tables; all return the same value
 * for every input.
 */
#pragma once

/* Continue `crc` (0 to begin) over `length` bytes. */
uint32_t ms_crc32(uint32_t crc, const uint8_t *from, int64_t length);
/* Copy `length` bytes and return the CRC of the copy, even if another process changes the source meanwhile. */
uint32_t ms_crc32_copy(uint8_t *to, const uint8_t *from, int64_t length);
