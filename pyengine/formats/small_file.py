"""Small files read whole (config/*, checkpoint, notes): their bytes, the checksum in them, their JSON (section 12).

Reading never waits and is bounded: opening a named pipe waits until a process writes to it, and a device
may have no end, so anything that is no regular file is refused before a byte of it is read.

config/*.json is fastjson text, whose integer keys have no quotes. Reading accepts both forms; writing
gives strict JSON, which RocketMQ reads too. These files have no place for a checksum, and one flipped
bit can turn a number into another: a sealed file ends with a line of 32 blanks and tabs. Blanks after a
document mean nothing in JSON, so RocketMQ reads a sealed file as it is. A file without that line has no
seal and is accepted: RocketMQ or an editor wrote it.

The checkpoint file: three store times in the first 24 of 4096 bytes (section 11).
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import stat
import struct
import zlib
from dataclasses import dataclass
from typing import Any, BinaryIO

from pyengine.errors import EngineError, FormatError
from pyengine.formats.constants import CHECKPOINT_BYTES, CHECKPOINT_MARGIN_MS, Readable

SMALL_FILE_BYTES_MAX = 256 << 20
TRANSIENT_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # of an open: the process lacks something, nothing is wrong with the file
_PIECE_BYTES = 1 << 20


def open_regular(path: str | os.PathLike[str]) -> int:
    """A descriptor to read from; OSError where there is no file, or none that is regular. Never waits."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_private(path: str | os.PathLike[str], what: str, setting: str, refused: type[EngineError]) -> BinaryIO:
    """A file that holds a secret, open for reading; OSError as above, and `refused` where others than its owner can use the secret."""
    file = open(open_regular(path), "rb")
    status = os.fstat(file.fileno())
    fault = ""
    if stat.S_IMODE(status.st_mode) & 0o077:
        fault = f"{path} has mode {stat.S_IMODE(status.st_mode):04o}, so others than its owner can use {what}: chmod 600 ({setting})"
    elif status.st_uid not in (0, os.geteuid()):
        fault = (f"{path} belongs to the user {status.st_uid}, who can read {what}: give it to the user of the engine, "
                 f"{os.geteuid()} ({setting})")
    if fault:
        file.close()
        raise refused(fault)
    return file


def read_small_file(path: str | os.PathLike[str], bytes_max: int = SMALL_FILE_BYTES_MAX) -> bytes:
    """All of it; OSError, whose `strerror` says why, also for what is no regular file or longer than `bytes_max`."""
    found, room = bytearray(), bytes_max + 1
    with open(open_regular(path), "rb", buffering=0) as file:
        while room and (piece := file.read(min(room, _PIECE_BYTES))):  # memory is taken for what there is, not for what may be
            found += piece
            room -= len(piece)
    if not room:
        raise OSError(errno.EFBIG, f"it is longer than {bytes_max:,} bytes", os.fspath(path))
    return bytes(found)


def read_small_text(path: str | os.PathLike[str]) -> str:
    """All of it as UTF-8 text with \\n at the ends of its lines; OSError as above, or UnicodeDecodeError."""
    return io.TextIOWrapper(io.BytesIO(read_small_file(path)), encoding="utf-8").read()


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


# Raised by reading a damaged or forged document: no JSON, values of other types, nesting or numbers without end.
PARSE_ERRORS = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
# A string (left alone), or an unquoted integer key after { or , and before a colon.
_STRING_OR_KEY = re.compile(r'"(?:[^"\\]|\\.)*"|([{,]\s*)(-?\d+)(?=\s*:)', re.DOTALL)


def _quote_key(found: re.Match[str]) -> str:
    return found[0] if found[2] is None else f'{found[1]}"{found[2]}"'


def decode_config(text: str) -> Any:
    """The value of the text; every key comes as text. FormatError when it is not JSON."""
    try:
        return json.loads(_STRING_OR_KEY.sub(_quote_key, text))
    except (ValueError, RecursionError) as error:  # the latter: brackets nested without end
        raise FormatError(f"not the text of a config file: {error}") from error


def encode_config(value: Any) -> str:
    """Strict JSON, tab-indented like RocketMQ's own files, with a line end."""
    return json.dumps(value, indent="\t", ensure_ascii=False) + "\n"


_TIMES = struct.Struct(">qqq")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Store times in ms: what is older is on the disk. Each may lag, none may be ahead."""

    physic_msg_timestamp_ms: int = 0
    logics_msg_timestamp_ms: int = 0
    index_msg_timestamp_ms: int = 0

    @property
    def min_timestamp_ms(self) -> int:
        """StoreCheckpoint.getMinTimestamp: 3 s before the older of log and queues, never below 0."""
        return max(0, min(self.physic_msg_timestamp_ms, self.logics_msg_timestamp_ms) - CHECKPOINT_MARGIN_MS)

    @property
    def min_timestamp_index_ms(self) -> int:
        """StoreCheckpoint.getMinTimestampIndex."""
        return min(self.min_timestamp_ms, self.index_msg_timestamp_ms)


def pack_checkpoint(checkpoint: Checkpoint) -> bytes:
    """4096 bytes."""
    return _TIMES.pack(
        checkpoint.physic_msg_timestamp_ms, checkpoint.logics_msg_timestamp_ms, checkpoint.index_msg_timestamp_ms
    ).ljust(CHECKPOINT_BYTES, b"\0")


def unpack_checkpoint(data: Readable) -> Checkpoint:
    """The three times; FormatError when the file is shorter than they are."""
    try:
        return Checkpoint(*_TIMES.unpack_from(data))
    except struct.error as error:
        raise FormatError(f"a checkpoint of {len(data)} bytes is too short") from error
