"""Every error that pyengine raises on purpose; those of a put are in pyengine/results.py, beside the result that they carry.

A command that one of them ends has its `exit_code`. InvariantError is apart: pyengine itself broke a promise. The process stops,
and the next start recovers.
"""

from __future__ import annotations

import contextlib
import enum
import errno as codes
import os
import re
from collections.abc import Iterable, Iterator
from typing import TypeVar

_Error = TypeVar("_Error", bound="EngineError")


_HELD = re.compile(r"/proc/self/fd/[0-9]+")
_names: dict[str, str] = {}


def show_as(held: str, name: str) -> None:
    """Show the folder that this process holds open at `held` (/proc/self/fd/N) by `name` in all texts for people; "" ends that."""
    if name:
        _names[held] = name
    else:
        _names.pop(held, None)


def shown(text: str) -> str:
    """Return a text for a person: held folders (HeldStore in storage/file_system.py) have the names by which that person knows them."""
    return _HELD.sub(lambda found: _names.get(found[0], found[0]), text) if _names else text


class ExitCode(enum.IntEnum):
    """Exit codes of every command."""

    OK = 0
    FAILED = 1
    """What was asked for failed."""
    USAGE = 2
    """The call or a setting is wrong."""
    CORRUPTION = 3
    """Damage was found."""
    REPAIRED = 4
    """Damage was repaired."""
    BUSY = 5
    """Another process has the store."""
    DEGRADED = 6
    """The engine takes no puts."""
    INTERRUPTED = 130
    """Ctrl-C."""


class EngineError(Exception):
    """The base of all but InvariantError."""

    exit_code: ExitCode = ExitCode.FAILED
    may_pass = False  # whether the same call may succeed later by itself: see until_ready() in ipc/session_client.py

    def __init__(self, message: str = "") -> None:
        super().__init__(shown(message))


class UsageError(EngineError):
    """The call or settings are wrong."""

    exit_code = ExitCode.USAGE


class ConfigError(UsageError):
    """A setting is unknown or out of range."""


class NotAStoreError(UsageError):
    """The path does not hold a store."""


class CorruptionError(EngineError):
    """Damage was found; nothing was changed."""

    exit_code = ExitCode.CORRUPTION


class FormatError(CorruptionError):
    """Bytes are not a valid structure, for example a text that is not a message id."""


class StoreRefusedError(CorruptionError):
    """The store cannot be opened as it is, for example for a segment of wrong length."""


class StoreBusyError(EngineError):
    """Another process owns the store."""

    exit_code = ExitCode.BUSY


class DegradedError(EngineError):
    """The engine runs, but read-only or without some of its promises."""

    exit_code = ExitCode.DEGRADED


class EngineUnavailableError(EngineError):
    """No running engine at this path, or it went away."""


class OtherLayoutError(EngineUnavailableError):
    """The engine is of another version of pyengine: its shared memory has another layout."""


class BadMessageError(EngineError):
    """A handler that raises this makes the message a dead letter at once, with the text as the reason."""


class DiskError(EngineError):
    """A system call on the store's files failed; `errno`, `path`."""

    def __init__(self, message: str, *, errno: int = 0, path: str | None = None) -> None:
        super().__init__(message)
        self.errno = errno
        self.path = path


class FlushError(DiskError):
    """A sync failed. Never retried: the kernel has dropped the pages."""


class DiskFullError(DiskError):
    """No room on the disk; the store resumes by itself."""


class InvariantError(Exception):
    """pyengine broke a promise of its own: a defect. The process must stop; the next start recovers."""


def passing(error: _Error) -> _Error:
    """Return the error, marked as one that passes when an engine starts or has started: a call with a timeout waits for that."""
    error.may_pass = True
    return error


def require_extra(*packages: str, name: str = "spark") -> None:
    """UsageError unless these packages, which the extra `name` brings, are installed; imports none of them."""
    from importlib.util import find_spec

    for package in packages:
        if find_spec(package) is None:
            raise UsageError(f"{package} is not installed: it comes with an extra, pip install 'pyengine-store[{name}]'")


def disk_error(error: OSError, doing: str, path: object, advice: str = "") -> DiskError:
    """The DiskError that says "cannot `doing` `path`", why, and `advice`; a DiskFullError where the disk is full."""
    is_full = error.errno in (codes.ENOSPC, codes.EDQUOT)
    usual = "; make room on that disk" if is_full else ""
    if error.errno == codes.EMFILE:
        usual = "; raise the limit of open files (ulimit -n, LimitNOFILE)"
    kind = DiskFullError if is_full else DiskError
    return kind(f"cannot {doing} {path}: {error.strerror or error}{advice or usual}", errno=error.errno or 0, path=str(path))


@contextlib.contextmanager
def disk_errors(doing: str, path: object, advice: str = "") -> Iterator[None]:
    """Raise an OSError of the block as disk_error() names it."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, doing, path, advice) from error


def flush_error(error: OSError, call: str, path: object) -> FlushError:
    """The FlushError that says which sync of `path` failed, and why."""
    return FlushError(f"{call} of {path} failed: {error.strerror}", errno=error.errno or 0, path=str(path))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """" (did you mean X?)" with the nearest of the known names, in any case; "" where none is near."""
    from difflib import get_close_matches

    by_name = {one.lower(): one for one in known}
    near = get_close_matches(name.lower(), by_name, n=1)
    return f" (did you mean {by_name[near[0]]}?)" if near else ""


def command(*words: object) -> str:
    """`pyengine` with these words in backticks, as a shell takes it, whatever a path holds: for a sentence that says what to do."""
    from shlex import join

    return f"`{join(['pyengine', *(shown(str(word)) for word in words)])}`"


def os_error_sentence(error: OSError) -> str:
    """What the system refused and where, for a person."""
    if isinstance(error, FileNotFoundError) and not error.filename:
        try:
            os.getcwd()
        except FileNotFoundError:
            return "the current directory was removed: change into one that exists"
    where = f"{error.filename}: " if error.filename else ""
    return shown(f"{where}{error.strerror or error}")
