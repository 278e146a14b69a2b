"""Reading `config/*.json` so that a bad file never keeps anybody from starting (docs/formats.md section 12).

A power cut under RocketMQ may leave such a file empty or garbled, and its broker then
does not start. Here the `.bak` of the last write stands in, then nothing at all; what
happened is told in a sentence. Writing is `new_file.write_config`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from pyengine.errors import FormatError, disk_error
from pyengine.formats.small_file import read_small_file

Value = TypeVar("Value")


class ReadConfig(NamedTuple, Generic[Value]):
    """What a file says, or None; a sentence about what was wrong; whether `.bak` said it.

    Where it did, the next write must not make the bad file the `.bak`: a crash between
    its two renames would leave two bad files (`write_config(..., keep_backup=False)`).
    """

    value: Value | None
    said: str = ""
    from_backup: bool = False


def read_config(path: str | os.PathLike[str], decode: Callable[[str], Value]) -> ReadConfig[Value]:
    """What the file says, else its `.bak`; None where neither can be used.

    `decode` raises FormatError for a text of another shape. The sentence is empty when the
    file was good, or when neither file is there.
    """
    path = Path(path)
    backup = path.with_name(path.name + ".bak")
    value, why = _read(path, decode)
    if not why:
        return ReadConfig(value)
    old_value, old_why = _read(backup, decode)
    if not old_why:
        return ReadConfig(old_value, f"{path} {why}: {backup.name}, what it said before its last change, is used instead", True)
    if why == old_why == _MISSING:
        return ReadConfig(None)
    return ReadConfig(None, f"{path} {why} and {backup.name} {old_why}: nothing of it is used")


def read_note(path: Path) -> bytes | None:
    """All of a note that the engine keeps for itself; None without one. DiskError when the file cannot be read now."""
    try:
        return read_small_file(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise disk_error(error, "read", path) from error


_MISSING = "is not there"


def _read(path: Path, decode: Callable[[str], Value]) -> tuple[Value | None, str]:
    """(value, why not); an empty file counts as damaged: RocketMQ never writes one on purpose."""
    try:
        text = read_small_file(path).decode()
    except FileNotFoundError:
        return None, _MISSING
    except OSError as error:
        return None, f"cannot be read ({error.strerror})"
    except UnicodeDecodeError:
        return None, "is no text"
    if not text.strip("\0 \t\r\n"):
        return None, "is empty"
    try:
        return decode(text), ""
    except FormatError as error:
        return None, f"is damaged ({error})"
