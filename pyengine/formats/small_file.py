"""Opens files; reads small ones whole (config/*, checkpoint, notes); their checksum and their JSON (section 12).

Reads are bounded and never wait: a named pipe waits for a writer, and a device may have no end, so anything but a regular file is refused.

config/*.json is fastjson text, whose integer keys have no quotes. Reading accepts both forms; writing produces strict JSON, which RocketMQ
reads too. One flipped bit can turn a number into another, so a sealed file ends with a line of 32 blanks and tabs that encode a CRC-32,
which RocketMQ ignores. A file without that line was written by RocketMQ or an editor, and is accepted.

The checkpoint file: three store times in the first 24 of 4096 bytes (section 11). A broker's settings are Java properties.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import stat
import struct
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from pyengine.errors import EngineError, FormatError, disk_errors
from pyengine.formats.constants import CHECKPOINT_BYTES, CHECKPOINT_MARGIN_MS, Readable

SMALL_FILE_BYTES_MAX = 256 << 20
TRANSIENT_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # of open(): the process lacks a resource, the file may be fine
_PIECE_BYTES = 1 << 20


def keep_standard_descriptors() -> None:
    """Open /dev/null as each of the descriptors 0 to 2 that is closed, so that no file gets what a library prints."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def open_standard_streams() -> None:
    """Like keep_standard_descriptors(), for a program of pyengine: its sys.stdin, stdout and stderr exist too."""
    keep_standard_descriptors()
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))


@contextlib.contextmanager
def opened(descriptor: int) -> Iterator[int]:
    """Close this descriptor at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def closed_on_error(descriptor: int) -> Iterator[int]:
    """Close this descriptor if the block fails; else its user does."""
    try:
        yield descriptor
    except BaseException:
        os.close(descriptor)
        raise


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open a regular file for reading, without waiting; return a descriptor. OSError if it does not exist or is not regular."""
    with closed_on_error(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as descriptor:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
        return descriptor


def open_private(path: str | os.PathLike[str], what: str, setting: str, refused: type[EngineError]) -> BinaryIO:
    """Open a file that holds a secret; OSError as open_regular(), and `refused` if another user can read it."""
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
    """Return the whole content; OSError, also if the file is not regular or longer than `bytes_max` (`strerror` says so)."""
    return read_open_file(open_regular(path), path, bytes_max)


def read_or_none(path: str | os.PathLike[str]) -> bytes | None:
    """Return the whole content, None without such a file. DiskError if it cannot be read now."""
    with disk_errors("read", path), contextlib.suppress(FileNotFoundError):
        return read_small_file(path)
    return None


def read_open_file(descriptor: int, path: str | os.PathLike[str], bytes_max: int = SMALL_FILE_BYTES_MAX) -> bytes:
    """Read a regular file whole, as read_small_file(), and close it."""
    found, room = bytearray(), bytes_max + 1
    with open(descriptor, "rb", buffering=0) as file:
        while room and (piece := file.read(min(room, _PIECE_BYTES))):  # in pieces: read(room) would allocate `room` bytes
            found += piece
            room -= len(piece)
    if not room:
        raise OSError(errno.EFBIG, f"it is longer than {bytes_max:,} bytes", os.fspath(path))
    return bytes(found)


def file_stamp(status: os.stat_result) -> tuple[int, ...]:
    """Return what changes with a file's content; the first is the time of change in ns."""
    return status.st_mtime_ns, status.st_ctime_ns, status.st_dev, status.st_ino, status.st_size


def path_stamp(path: str | os.PathLike[str]) -> int:
    """Return a number that differs when a file that is replaced as a whole has changed; 0 if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return 0
    return hash((found.st_mtime_ns, found.st_ino, found.st_size))


def read_small_text(path: str | os.PathLike[str]) -> str:
    """Return the whole content as UTF-8 text with \\n line ends; OSError as read_small_file(), or UnicodeDecodeError."""
    return io.TextIOWrapper(io.BytesIO(read_small_file(path)), encoding="utf-8").read()


_SEAL = re.compile(rb"\n([ \t]{32})\n?\Z")


def seal(text: str) -> str:
    """Return `text`, which ends with a newline, and a line that encodes the CRC-32 of its UTF-8 bytes, high bit first."""
    return f"{text}{_blanks(text.encode('utf-8'))}\n"


def _blanks(content: bytes) -> str:
    return f"{zlib.crc32(content):032b}".replace("0", " ").replace("1", "\t")


def check_seal(content: bytes) -> bool:
    """Return whether the bytes have a seal; FormatError if it does not match them."""
    found = _SEAL.search(content)
    if found is None:
        return False
    if found[1].decode() != _blanks(content[: found.start() + 1]):
        raise FormatError("the checksum in the file's last line does not fit its text")
    return True


# What a damaged or forged document raises: it is not JSON, has other types, deep nesting or very long numbers.
PARSE_ERRORS = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
# A string; a comment; a comma before a bracket; or an unquoted integer key after { or , and before a colon.
_LENIENT = re.compile(r'"(?:[^"\\]|\\.)*"|\'([^"\'\\]*)\'|/\*.*?(?:\*/|\Z)|//[^\n]*|,(?=\s*[}\]])|([{,]\s*)(-?\d+)(?=\s*:)', re.DOTALL)


def _strict(found: re.Match[str]) -> str:
    single, before, key = found.groups()
    if key is not None:
        return f'{before}"{key}"'
    return f'"{single}"' if single is not None else found[0] if found[0][0] == '"' else ""


def decode_config(text: str) -> Any:
    """Decode JSON or what fastjson reads: a BOM, comments, commas before brackets, single quotes, integer keys without quotes.

    Every key becomes text. FormatError if it is neither.
    """
    with contextlib.suppress(ValueError, RecursionError):  # nearly always it is strict JSON
        return json.loads(text)
    text = _LENIENT.sub(_strict, text.removeprefix("\ufeff"))
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    try:
        return json.loads(_LENIENT.sub(_strict, text))  # a comma or a key that was next to a comment
    except (ValueError, RecursionError) as error:  # RecursionError: brackets that are nested too deeply
        raise FormatError(f"not the text of a config file: {error}") from error


def encode_config(value: Any) -> str:
    """Encode strict JSON, indented with tabs like RocketMQ's files, with a newline at the end."""
    return json.dumps(value, indent="\t", ensure_ascii=False) + "\n"


_TIMES = struct.Struct(">qqq")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Store times in ms: older records are on the disk. Each may be too small, none too large."""

    physic_msg_timestamp_ms: int = 0
    logics_msg_timestamp_ms: int = 0
    index_msg_timestamp_ms: int = 0

    @property
    def min_timestamp_ms(self) -> int:
        """Return StoreCheckpoint.getMinTimestamp: 3 s before the smaller time of log and queues, at least 0."""
        return max(0, min(self.physic_msg_timestamp_ms, self.logics_msg_timestamp_ms) - CHECKPOINT_MARGIN_MS)

    @property
    def min_timestamp_index_ms(self) -> int:
        """Return StoreCheckpoint.getMinTimestampIndex."""
        return min(self.min_timestamp_ms, self.index_msg_timestamp_ms)


def pack_checkpoint(checkpoint: Checkpoint) -> bytes:
    """Return the 4096 bytes of the file."""
    return _TIMES.pack(
        checkpoint.physic_msg_timestamp_ms, checkpoint.logics_msg_timestamp_ms, checkpoint.index_msg_timestamp_ms
    ).ljust(CHECKPOINT_BYTES, b"\0")


def unpack_checkpoint(data: Readable) -> Checkpoint:
    """Return the three times; FormatError if the file is too short for them."""
    try:
        return Checkpoint(*_TIMES.unpack_from(data))
    except struct.error as error:
        raise FormatError(f"a checkpoint of {len(data)} bytes is too short") from error


def parse_properties(text: str) -> dict[str, str]:
    """Parse Java's properties format: comments with # or !, keys up to =, : or blanks, lines joined by \\, and escapes."""
    found: dict[str, str] = {}
    lines = iter(text.splitlines())
    for line in lines:
        line = line.lstrip()
        if not line or line[0] in "#!":
            continue
        while len(line) - len(line.rstrip("\\")) & 1:
            line = line[:-1] + next(lines, "").lstrip()
        key, value = _PROPERTY.fullmatch(line).groups()  # type: ignore[union-attr]  # it matches every line
        found[_unescaped(key)] = _unescaped(value).rstrip()
    return found


_PROPERTY = re.compile(r"((?:\\.|[^\\=:\s])*)\s*[=:]?\s*(.*)", re.S)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.S)
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def _unescaped(text: str) -> str:
    def one(found: re.Match[str]) -> str:
        mark = found[1]
        return chr(int(mark[1:], 16)) if len(mark) == 5 else _ESCAPES.get(mark, mark)

    return _ESCAPE.sub(one, text)
