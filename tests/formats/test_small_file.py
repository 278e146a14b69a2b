"""A checksum that JSON readers do not see."""

from __future__ import annotations

import json

import pytest

from pyengine.errors import FormatError
from pyengine.formats.small_file import check_seal, parse_properties, seal

TEXT = '{\n\t"offsetTable": {"orders@\u00e9": {"0": 123}}\n}\n'


def test_a_sealed_text_is_the_same_document():
    sealed = seal(TEXT)
    assert sealed.startswith(TEXT) and sealed[len(TEXT):].isspace()
    assert json.loads(sealed) == json.loads(TEXT)
    assert check_seal(sealed.encode())


def test_a_text_without_a_seal_is_taken_as_it_is():
    assert not check_seal(TEXT.encode())
    assert not check_seal(b"")
    assert not check_seal((TEXT + "   \n").encode())


def test_no_single_bit_can_change_what_a_sealed_text_says():
    sealed = seal(TEXT).encode()
    for bit in range(len(sealed) * 8):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            check_seal(bytes(changed))
            assert json.loads(changed.decode()) == json.loads(TEXT), bit
        except (FormatError, ValueError):
            pass


def test_a_seal_of_another_text_is_refused():
    sealed = seal(TEXT)
    with pytest.raises(FormatError):
        check_seal(sealed.replace("123", "124").encode())


def test_a_properties_file_is_read_as_java_reads_it():
    text = "a=1\n b : two words \nc\\ d=e\\=f\n\\u0041=\\t\\\\x\nempty=\nlast\\\n   =joined\\\n  on"
    assert parse_properties(text) == {"a": "1", "b": "two words", "c d": "e=f", "A": "\t\\x", "empty": "", "last": "joinedon"}
