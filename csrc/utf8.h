/* Decodes UTF-8 one character at a time, and computes Java's String.hashCode of it.
 *
 * Who: dispatch (hashes), the column scanner (repair of invalid text). Header only. Invalid bytes decode to U+FFFD, one for
 * each maximal part that could have begun a character, like Python's "replace" and Java's decoder.
 */
#pragma once

#define MS_REPLACEMENT 0xFFFDu
#define MS_NOT_ASCII 0x8080808080808080ULL

/* Return the character at *at (< end), and move *at after it. Set *bad if the bytes are invalid. */
static inline uint32_t ms_utf8_next(const uint8_t **at, const uint8_t *end, int *bad)
{
    const uint8_t lead = *(*at)++;
    uint8_t low = 0x80, high = 0xBF; /* bounds of the second byte: no overlong form, no surrogate, <= U+10FFFF */
    uint32_t character;
    int more;
    if (lead < 0x80)
        return lead;
    if (lead >= 0xC2 && lead <= 0xDF) {
        more = 1;
        character = lead & 0x1F;
    } else if (lead >= 0xE0 && lead <= 0xEF) {
        more = 2;
        character = lead & 0x0F;
        low = lead == 0xE0 ? 0xA0 : 0x80;
        high = lead == 0xED ? 0x9F : 0xBF;
    } else if (lead >= 0xF0 && lead <= 0xF4) {
        more = 3;
        character = lead & 0x07;
        low = lead == 0xF0 ? 0x90 : 0x80;
        high = lead == 0xF4 ? 0x8F : 0xBF;
    } else {
        *bad = 1;
        return MS_REPLACEMENT;
    }
    for (; more > 0; more--) {
        if (*at == end || **at < low || **at > high) {
            *bad = 1;
            return MS_REPLACEMENT;
        }
        character = character << 6 | (*(*at)++ & 0x3F);
        low = 0x80;
        high = 0xBF;
    }
    return character;
}

/* Return 1 if no byte has its high bit set. Without a loop over single bytes, since most texts are short. */
static inline int ms_is_ascii(const uint8_t *text, int64_t bytes)
{
    uint64_t seen = 0, word;
    uint32_t half;
    if (bytes >= 8) {
        for (int64_t at = 0; at + 8 < bytes; at += 8) {
            memcpy(&word, text + at, 8);
            seen |= word;
        }
        memcpy(&word, text + bytes - 8, 8);
        seen |= word;
    } else if (bytes >= 4) {
        memcpy(&half, text, 4);
        seen = half;
        memcpy(&half, text + bytes - 4, 4);
        seen |= half;
    } else if (bytes > 0) {
        seen = text[0] | text[bytes / 2] | text[bytes - 1];
    }
    return (seen & MS_NOT_ASCII) == 0;
}

/* h = 31 h + c over the UTF-16 units of the text, from the hash of the text before it. */
static inline uint32_t ms_java_hash(uint32_t hash, const uint8_t *text, int64_t bytes)
{
    const uint8_t *at = text, *const end = text + bytes;
    int bad = 0;
    while (at < end) {
        if (end - at >= 8) { /* eight ASCII characters as two independent sums */
            uint64_t word;
            memcpy(&word, at, 8);
            if ((word & MS_NOT_ASCII) == 0) {
                const uint32_t first = at[0] * 29791u + at[1] * 961u + at[2] * 31u + at[3];
                const uint32_t second = at[4] * 29791u + at[5] * 961u + at[6] * 31u + at[7];
                hash = hash * 2487512833u /* 31^8 mod 2^32 */ + first * 923521u + second;
                at += 8;
                continue;
            }
        }
        const uint32_t character = ms_utf8_next(&at, end, &bad);
        if (character >= 0x10000) {
            hash = 31 * hash + (0xD800 + ((character - 0x10000) >> 10));
            hash = 31 * hash + (0xDC00 + ((character - 0x10000) & 0x3FF));
        } else {
            hash = 31 * hash + character;
        }
    }
    return hash;
}
