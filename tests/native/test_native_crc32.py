"""The CRC equals zlib's: every small size, any alignment, in pieces."""

from __future__ import annotations

import random
import zlib

import pytest

from pyengine._native import ffi, lib

SEED = 20240611


@pytest.fixture(scope="module")
def noise() -> bytes:
    return random.Random(SEED).randbytes(2_000_003)


def test_all_small_sizes_at_all_alignments(noise):
    source = ffi.from_buffer("uint8_t[]", noise)
    for size in range(301):
        for at in range(4):
            assert lib.ms_crc32(0, source + at, size) == zlib.crc32(noise[at : at + size]), (size, at)


def test_the_crc_of_large_ranges_is_zlibs(noise):
    source = ffi.from_buffer("uint8_t[]", noise)
    dice = random.Random(SEED)
    for _ in range(40):
        at = dice.randrange(64)
        size = dice.randrange(len(noise) - at)
        assert lib.ms_crc32(0, source + at, size) == zlib.crc32(noise[at : at + size]), (size, at)


def test_the_crc_of_pieces_is_that_of_the_whole(noise):
    source = ffi.from_buffer("uint8_t[]", noise)
    dice = random.Random(SEED)
    for _ in range(200):
        cuts = sorted(dice.randrange(1000) for _ in range(3))
        state = 0
        for start, end in zip([0, *cuts], [*cuts, 1000], strict=True):
            state = lib.ms_crc32(state, source + start, end - start)
        assert state == zlib.crc32(noise[:1000]), cuts


def test_a_copy_is_whole_and_has_the_crc_of_its_bytes(noise):
    source = ffi.from_buffer("uint8_t[]", noise)
    dice = random.Random(SEED)
    copy = ffi.new("uint8_t[]", len(noise) + 1)
    for size in [*range(301), *(dice.randrange(len(noise) - 64) for _ in range(20))]:
        at = dice.randrange(64)
        copy[size] = 0xEE
        assert lib.ms_crc32_copy(copy, source + at, size) == zlib.crc32(noise[at : at + size]), (size, at)
        assert ffi.buffer(copy, size)[:] == noise[at : at + size] and copy[size] == 0xEE, (size, at)


def test_the_published_check_value():
    assert lib.ms_crc32(0, b"123456789", 9) == 0xCBF43926
    assert lib.ms_record_body_crc(b"123456789", 9) == 1274296614  # without the sign bit
