#include "base.h"
#include "crc32.cdef.h"

#if defined(__x86_64__)
#define HAS_FOLDING 1
#include <immintrin.h>
#else
#define HAS_FOLDING 0
#endif
#if defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define HAS_INSTRUCTIONS 1
#include <asm/hwcap.h>
#include <sys/auxv.h>
#pragma GCC push_options
#pragma GCC target("+crc")
#include <arm_acle.h>
#pragma GCC pop_options
#else
#define HAS_INSTRUCTIONS 0
#endif

#define POLYNOMIAL 0xEDB88320u /* reflected */
#define FOLD_BYTES_MIN 64

/* table[k][b]: the effect of byte b followed by k zero bytes. Filled once, when the module is loaded. */
static uint32_t table[8][256];
#if HAS_FOLDING
static int can_fold;
#elif HAS_INSTRUCTIONS
static int has_crc;
#endif

__attribute__((constructor)) static void fill_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t value = byte;
        for (int bit = 0; bit < 8; bit++)
            value = (value >> 1) ^ ((value & 1) ? POLYNOMIAL : 0);
        table[0][byte] = value;
    }
    for (uint32_t byte = 0; byte < 256; byte++)
        for (int zeros = 1; zeros < 8; zeros++)
            table[zeros][byte] = (table[zeros - 1][byte] >> 8) ^ table[0][table[zeros - 1][byte] & 0xFF];
#if HAS_FOLDING
    __builtin_cpu_init();
    can_fold = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
#elif HAS_INSTRUCTIONS
    has_crc = (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#endif
}

/* `state` is the complemented CRC. */
static uint32_t run_tables(uint32_t state, const uint8_t *from, int64_t length)
{
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    while (length >= 8) {
        uint32_t low, high;
        memcpy(&low, from, 4);
        memcpy(&high, from + 4, 4);
        low ^= state;
        state = table[7][low & 0xFF] ^ table[6][(low >> 8) & 0xFF] ^ table[5][(low >> 16) & 0xFF] ^
                table[4][low >> 24] ^ table[3][high & 0xFF] ^ table[2][(high >> 8) & 0xFF] ^
                table[1][(high >> 16) & 0xFF] ^ table[0][high >> 24];
        from += 8;
        length -= 8;
    }
#endif
    while (length-- > 0)
        state = (state >> 8) ^ table[0][(state ^ *from++) & 0xFF];
    return state;
}

#if HAS_FOLDING
#define FOLDS __attribute__((target("pclmul,sse4.1")))

/* Move x forward over the distance of `constants` (x^n mod P), and add `next`. */
FOLDS static inline __m128i fold(__m128i x, __m128i constants, __m128i next)
{
    __m128i low = _mm_clmulepi64_si128(x, constants, 0x00);
    __m128i high = _mm_clmulepi64_si128(x, constants, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

FOLDS static inline __m128i load(const uint8_t *from)
{
    return _mm_loadu_si128((const __m128i *)(const void *)from);
}

/* Return the next 16 bytes, which it reads once; copy them to `to` unless that is NULL. */
FOLDS static inline __m128i take(uint8_t *to, const uint8_t *from)
{
    __m128i piece = load(from);
    if (to != NULL) {
        __asm__("" : "+x"(piece)); /* so that the compiler does not load the bytes twice: it must store what it folds */
        _mm_storeu_si128((__m128i *)(void *)to, piece);
    }
    return piece;
}

/* Advance `to` with `from`; NULL stays NULL. */
static inline uint8_t *offset_or_null(uint8_t *to, int64_t bytes) { return to != NULL ? to + bytes : NULL; }

/* Fold whole 16-byte pieces, `length` >= 64; the tables process the rest.
 * The constants are those of the published method for the reflected polynomial
 * (Gopal and others, "Fast CRC Computation Using PCLMULQDQ Instruction"). */
FOLDS static inline __attribute__((always_inline)) uint32_t run_folding(uint32_t state, uint8_t *to, const uint8_t *from,
                                                                        int64_t length)
{
    const __m128i by_64 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);
    const __m128i by_16 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    const __m128i by_8 = _mm_set_epi64x(0, 0x163cd6124);
    const __m128i barrett = _mm_set_epi64x(0x1f7011641, 0x1db710641);
    const __m128i low_32 = _mm_setr_epi32(-1, 0, -1, 0);

    __m128i a = _mm_xor_si128(take(to, from), _mm_cvtsi32_si128((int)state));
    __m128i b = take(offset_or_null(to, 16), from + 16), c = take(offset_or_null(to, 32), from + 32), d = take(offset_or_null(to, 48), from + 48);
    from += 64;
    to = offset_or_null(to, 64);
    length -= 64;
    while (length >= 64) {
        a = fold(a, by_64, take(to, from));
        b = fold(b, by_64, take(offset_or_null(to, 16), from + 16));
        c = fold(c, by_64, take(offset_or_null(to, 32), from + 32));
        d = fold(d, by_64, take(offset_or_null(to, 48), from + 48));
        from += 64;
        to = offset_or_null(to, 64);
        length -= 64;
    }
    a = fold(a, by_16, b);
    a = fold(a, by_16, c);
    a = fold(a, by_16, d);
    while (length >= 16) {
        a = fold(a, by_16, take(to, from));
        from += 16;
        to = offset_or_null(to, 16);
        length -= 16;
    }
    /* Reduce 128 bits to 64, then to 32 and a remainder, then by Barrett reduction. */
    a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by_16, 0x10));
    a = _mm_xor_si128(_mm_srli_si128(a, 4), _mm_clmulepi64_si128(_mm_and_si128(a, low_32), by_8, 0x00));
    __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(a, low_32), barrett, 0x10);
    quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low_32), barrett, 0x00);
    state = (uint32_t)_mm_extract_epi32(_mm_xor_si128(a, quotient), 1);
    if (to != NULL && length > 0) {
        memcpy(to, from, (size_t)length);
        from = to; /* each byte of the source is read once */
    }
    return run_tables(state, from, length);
}

FOLDS static uint32_t fold_bytes(uint32_t state, const uint8_t *from, int64_t length)
{
    return run_folding(state, NULL, from, length);
}

FOLDS static uint32_t fold_copy(uint8_t *to, const uint8_t *from, int64_t length)
{
    return run_folding(~0u, to, from, length);
}
#elif HAS_INSTRUCTIONS
/* Armv8's CRC32 instructions have this polynomial. Each byte is read once, and copied to `to` unless that is NULL. */
__attribute__((target("+crc"))) static uint32_t run_instructions(uint32_t state, uint8_t *to, const uint8_t *from, int64_t length)
{
    for (; length >= 8; from += 8, length -= 8) {
        uint64_t eight;
        memcpy(&eight, from, 8);
        __asm__("" : "+r"(eight)); /* so that the compiler does not load the bytes twice */
        if (to != NULL) {
            memcpy(to, &eight, 8);
            to += 8;
        }
        state = __crc32d(state, eight);
    }
    for (; length > 0; length--) {
        uint32_t one = *from++;
        __asm__("" : "+r"(one));
        if (to != NULL)
            *to++ = (uint8_t)one;
        state = __crc32b(state, (uint8_t)one);
    }
    return state;
}
#endif

uint32_t ms_crc32(uint32_t crc, const uint8_t *from, int64_t length)
{
#if HAS_FOLDING
    if (can_fold && length >= FOLD_BYTES_MIN)
        return ~fold_bytes(~crc, from, length);
#elif HAS_INSTRUCTIONS
    if (has_crc)
        return ~run_instructions(~crc, NULL, from, length);
#endif
    return ~run_tables(~crc, from, length);
}

uint32_t ms_crc32_copy(uint8_t *to, const uint8_t *from, int64_t length)
{
#if HAS_FOLDING
    if (can_fold && length >= FOLD_BYTES_MIN)
        return ~fold_copy(to, from, length);
#elif HAS_INSTRUCTIONS
    if (has_crc)
        return ~run_instructions(~0u, to, from, length);
#endif
    if (length > 0)
        memcpy(to, from, (size_t)length);
    return ~run_tables(~0u, to, length);
}
