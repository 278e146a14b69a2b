"""One writer at a time for `config/consumerOffset.json`, whichever process dies or hangs in the middle.

`config/consumers/lock` holds a generation and a ticket; the writer holds an exclusive
open-file-description lock on the byte of that generation, which the kernel drops when it
dies. A writer that neither dies nor goes on (SIGSTOP, a stalled disk) is passed over
after TIMEOUT_S: a waiting process takes the byte of the next generation and writes that
number down. Why the old one can do no harm when it wakes:

    writer     makes its unfinished file, named after its generation
               looks whether that is still the present one; if not, it gives up
               renames the file into place
    successor  writes its generation down
               removes every unfinished file but its own
               reads the table

If the old writer's file was made before the successor's removal, its rename comes before
that removal, and the successor reads what it wrote, or it finds the file gone. If it was
made after, the look in between finds the newer generation. Either way it raises
LockPassedOnError, and its change is made again on what is there then.

The generation may be any number, also one that a damaged lock file holds.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pyengine.errors import FlushError, disk_error
from pyengine.storage.new_file import make_folders, sync_folder
from pyengine.storage.ofd_lock import try_lock, unlock

TIMEOUT_S = 10.0
_NAP_FIRST_S, _NAP_LAST_S = 0.0005, 0.02
_STATE = struct.Struct("<QQ")  # generation, ticket of the present writer
_GENERATIONS = 1 << 40
_TRIES_AHEAD = 16
_FULL = (errno.ENOSPC, errno.EDQUOT)


class LockPassedOnError(Exception):
    """Another process is the writer now: nothing was changed, begin again."""


class OffsetLock:
    """The right to replace one file, between processes. Holds nothing open between uses.

    `while_waiting` is called between looks, for a process that must show that it lives.
    """

    def __init__(
        self, target: Path, folder: Path, *, timeout_s: float = TIMEOUT_S, while_waiting: Callable[[], object] | None = None,
    ) -> None:
        self._target = target
        self._folder = folder
        self._path = folder / "lock"
        self._patience_s = timeout_s
        self._while_waiting = while_waiting or (lambda: None)

    @contextlib.contextmanager
    def held(self) -> Iterator[Writer]:
        """Be the one writer inside the block. Waits as long as others go on writing."""
        make_folders(self._folder)
        while True:
            descriptor = self._open()
            try:
                generation = self._acquire(descriptor)
                if not _is_at(descriptor, self._path):  # another process removed it: others lock another file
                    continue
                try:
                    writer = Writer(self._target, descriptor, generation)
                    writer.remove_unfinished()
                    yield writer
                    return
                finally:
                    unlock(descriptor, generation, 1)  # a child forked meanwhile has the descriptor too
            finally:
                os.close(descriptor)

    def _open(self) -> int:
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise disk_error(error, "open", self._path) from error

    def _acquire(self, descriptor: int) -> int:
        seen: tuple[int, int] | None = None
        since_s = 0.0
        nap_s = _NAP_FIRST_S
        while True:
            state = _read(descriptor)
            if try_lock(descriptor, state[0], self._path):
                if _read(descriptor)[0] == state[0]:
                    _write(descriptor, state[0], self._path)
                    return state[0]
                unlock(descriptor, state[0], 1)
                continue
            now_s = time.monotonic()
            if state != seen:
                seen, since_s = state, now_s
            elif now_s - since_s >= self._patience_s:
                following = self._pass_over(descriptor, state[0])
                if following is not None:
                    return following
                seen = None
            self._while_waiting()
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _NAP_LAST_S)

    def _pass_over(self, descriptor: int, generation: int) -> int | None:
        """Take a later generation; None when another process has just done so, or the writer went on."""
        for ahead in range(1, _TRIES_AHEAD):
            following = (generation + ahead) % _GENERATIONS
            if try_lock(descriptor, following, self._path):
                if _read(descriptor)[0] == generation:
                    _write(descriptor, following, self._path)
                    return following
                unlock(descriptor, following, 1)
                return None
        return None


class Writer:
    """The one writer, until it leaves the block or is passed over."""

    def __init__(self, target: Path, descriptor: int, generation: int) -> None:
        self._target = target
        self._descriptor = descriptor
        self._generation = generation

    def check(self) -> None:
        """LockPassedOnError when this is the writer no more."""
        if _read(self._descriptor)[0] != self._generation:
            raise LockPassedOnError

    def replace(self, content: bytes, *, keep_as: str) -> None:
        """Make `content` the file's, durable, whole or not at all; what was there stays as `<name>.<keep_as>`.

        The file exists at every moment once it has existed. LockPassedOnError, or
        DiskFullError, DiskError, FlushError: the old file is then still in place.
        """
        unfinished = self._unfinished("")
        try:
            self._write(unfinished, content)
            self._keep_old(keep_as)
            self.check()
            os.rename(unfinished, self._target)
        except FileNotFoundError:
            raise LockPassedOnError from None
        except OSError as error:
            raise disk_error(error, "write", self._target) from error
        finally:
            with contextlib.suppress(OSError):  # still there only if something failed
                os.unlink(unfinished)
        sync_folder(self._target.parent)

    def remove_unfinished(self) -> None:
        """Remove what writers have left that died or were passed over, so that they cannot finish it."""
        for path in self._target.parent.glob(f"{self._target.name}.*.tmp"):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def _unfinished(self, kind: str) -> Path:
        return self._target.with_name(f"{self._target.name}.{kind}{self._generation}.tmp")

    def _write(self, path: Path, content: bytes) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(descriptor, rest):]
            _sync(descriptor, self._target)
        finally:
            os.close(descriptor)

    def _keep_old(self, suffix: str) -> None:
        """Leave the present content under another name too: a second name for the same file, so nothing is torn."""
        spare = self._unfinished("old-")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(spare)
        try:
            descriptor = os.open(self._target, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                _sync(descriptor, self._target)  # a broker does not sync what it writes
            try:
                os.link(self._target, spare)
            except FileNotFoundError:
                raise
            except OSError:  # no hard links here
                self._write(spare, os.pread(descriptor, os.fstat(descriptor).st_size, 0))
        finally:
            os.close(descriptor)
        os.rename(spare, self._target.with_name(f"{self._target.name}.{suffix}"))
        with contextlib.suppress(FileNotFoundError):  # rename() does nothing when both already are one file
            os.unlink(spare)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _read(descriptor: int) -> tuple[int, int]:
    found = os.pread(descriptor, _STATE.size, 0).ljust(_STATE.size, b"\0")
    generation, ticket = _STATE.unpack(found)
    return generation % _GENERATIONS, ticket


def _write(descriptor: int, generation: int, path: Path) -> None:
    try:
        os.pwrite(descriptor, _STATE.pack(generation, secrets.randbits(64)), 0)
    except OSError as error:
        raise disk_error(error, "write", path) from error


def _sync(descriptor: int, path: Path) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno in _FULL:
            raise
        raise FlushError(f"fsync of {path} failed: {error.strerror}", errno=error.errno or 0, path=str(path)) from error
