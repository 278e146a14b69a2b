"""Reading a small file whole: config/*, checkpoint, notes. Never waits for what only looks like a file, never reads without end.

Opening a named pipe waits until somebody writes to it, a device may have no end: whatever is no
regular file is refused before a byte of it is read.
"""

from __future__ import annotations

import errno
import io
import os
import stat

SMALL_FILE_BYTES_MAX = 256 << 20
_PIECE_BYTES = 1 << 20


def open_regular(path: str | os.PathLike[str]) -> int:
    """A descriptor to read from; OSError where there is no file, or something that is no regular one. Never waits."""
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
