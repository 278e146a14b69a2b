"""STORE/engine.log: opened by who starts an engine, inherited as stderr by its processes, bounded while it runs.

The supervisor sets a log that has grown large aside as engine.log.1, in place of the one before. Each process sees by the name
behind its own stderr that the log was moved or removed, by the supervisor, by logrotate or by hand, and opens
STORE/engine.log anew. Nothing is asked of another process, so none that is dead or stopped keeps a log from being turned.
A line that is written between the move and the next look is in the old file: none is lost. Where stderr is something else
(the journal, a terminal, a pipe), nothing happens.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import BinaryIO

NAME = "engine.log"
BYTES_MAX = 16 << 20
LOOK_S = 1.0  # between two looks of a process at its own stderr
_STDOUT, _STDERR = 1, 2


def open_log(root: Path) -> BinaryIO:
    """STORE/engine.log to append to; an old one that has grown large is set aside."""
    path = root / NAME
    with contextlib.suppress(OSError):
        _turn(path, path.stat().st_size)
    return open(_open(path), "ab")


class LogFile:
    """The log of the process that has this object, if its stderr is one."""

    def __init__(self, root: Path, *, turns: bool = False) -> None:
        """`turns`: this process sets a large log aside. One of each store does."""
        self._path = os.path.realpath(root / NAME)
        self._turns = turns
        self._is_ours = False
        self._due_s = 0.0
        self.look()

    def tick(self) -> None:
        """look(), unless it was done within LOOK_S."""
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + LOOK_S
            self.look()

    def look(self) -> None:
        """Set a large log aside if that is this process's task, and follow one that was moved. What fails is tried again."""
        with contextlib.suppress(OSError):
            target = _target(_STDERR)
            self._is_ours = self._is_ours or _is_log(target, self._path)
            if not self._is_ours:
                return
            if self._turns and target == self._path:
                _turn(Path(self._path), os.fstat(_STDERR).st_size)
                target = _target(_STDERR)
            if target != self._path:
                self._follow(target)

    def _follow(self, old: str) -> None:
        descriptor = _open(Path(self._path))
        try:
            if _target(_STDOUT) == old:
                os.dup2(descriptor, _STDOUT)
            os.dup2(descriptor, _STDERR)
        finally:
            os.close(descriptor)


def _target(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


def _is_log(target: str, path: str) -> bool:
    """Whether it is the log, or was: engine.log.1, engine.log-20261124, engine.log (deleted)."""
    return target == path or target.startswith((f"{path}.", f"{path}-", f"{path} ("))


def _turn(path: Path, size_bytes: int) -> None:
    if size_bytes > BYTES_MAX:
        path.replace(path.with_name(f"{NAME}.1"))


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)  # a pipe without a reader is refused, not waited for
    os.set_blocking(descriptor, True)
    return descriptor
