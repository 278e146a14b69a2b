"""A checksum that JSON readers do not see: a last line of 32 blanks and tabs (section 12).

RocketMQ's config files have no place for a checksum, and one flipped bit can turn a
number into another. Blanks behind a document mean nothing in JSON, so RocketMQ and
everybody else reads a sealed file as it is. A file without that line has no seal and is
taken as it is: RocketMQ wrote it, or a person's editor did.
"""

from __future__ import annotations

import re
import zlib

from pyengine.errors import FormatError

_BITS = 32
_ZERO, _ONE = " ", "\t"
_SEAL = re.compile(rb"\n([ \t]{32})\n?\Z")


def seal(text: str) -> str:
    """`text`, which ends with a newline, and the line that holds the CRC-32 of its UTF-8 bytes, high bit first."""
    number = zlib.crc32(text.encode("utf-8"))
    return text + "".join(_ONE if number >> bit & 1 else _ZERO for bit in reversed(range(_BITS))) + "\n"


def check_seal(content: bytes) -> bool:
    """Whether the bytes carry a seal; FormatError when it is not theirs."""
    found = _SEAL.search(content)
    if found is None:
        return False
    number = sum(1 << bit for bit, sign in zip(reversed(range(_BITS)), found[1], strict=True) if sign == ord(_ONE))
    if zlib.crc32(content[: found.start() + 1]) != number:
        raise FormatError("the checksum in the file's last line does not fit its text")
    return True
