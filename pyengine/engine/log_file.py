"""What processes of an engine say: to STORE/engine.log, which is their stderr, bounded while they run, and to systemd.

Each line is an event (pyengine/events.py) of one process. Where stderr is the journal of systemd, it goes there as a record with fields.

The supervisor sets a log that has grown large aside as engine.log.1, in place of the one before. Each process sees by the name
behind its own stderr that the log was moved or removed, by the supervisor, by logrotate or by hand, and opens
STORE/engine.log anew. Nothing is asked of another process, so none that is dead or stopped keeps a log from being turned.
A line that is written between the move and the next look is in the old file: none is lost. Where stderr is something else
(the journal, a terminal, a pipe), nothing happens.

To its service manager a process also says: readiness, watchdog, pauses between restarts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import BinaryIO

from pyengine.events import Event
from pyengine.ipc.shared_objects import KIND_NAMES

NAME = "engine.log"
BYTES_MAX = 16 << 20
LOOK_S = 1.0  # between two looks of a process at its own stderr
JOURNAL = "/run/systemd/journal/socket"
_STDOUT, _STDERR = 1, 2


def say(kind: int, root: Path | None, event: Event, text: str) -> None:
    """One line on stderr: when, who, which event, what. To the journal, which knows when and who, a record with the fields
    MESSAGE, PRIORITY, EVENT, WORKER and STORE, which is `root` where it is known."""
    if _stderr_is_journal():
        if _send_to_journal(kind, root, event, text):
            return
        lines = f"<{event.level}>" + text.replace("\n", f"\n<{event.level}>")
    else:
        lines = log_line(KIND_NAMES[kind], f"{event.name} {text}")
    with contextlib.suppress(OSError):  # a log that cannot be written, on a full disk perhaps, stops no process
        print(lines, file=sys.stderr, flush=True)


def log_line(who: str, text: str) -> str:
    """A line of the engine's log: when, who, pid, what."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime())}Z {who}[{os.getpid()}] {text}"


def _stderr_is_journal() -> bool:
    """Whether the service manager connected stderr, itself and not through a pipe of another process, to its journal."""
    stream = os.environ.get("JOURNAL_STREAM", "")
    try:
        found = os.fstat(_STDERR)
    except OSError:
        return False
    return stream == f"{found.st_dev}:{found.st_ino}"


def _send_to_journal(kind: int, root: Path | None, event: Event, text: str) -> bool:
    """Whether the journal took the record: it is as full, gone or out of this process's sight as a disk may be."""
    fields = {"MESSAGE": text, "PRIORITY": str(event.level), "SYSLOG_IDENTIFIER": f"pyengine-{KIND_NAMES[kind]}",
              "EVENT": event.name, "WORKER": KIND_NAMES[kind]}
    if root is not None:
        fields["STORE"] = str(root)
    record = b""
    for name, value in fields.items():  # a value that may hold a line end goes with its length
        content = os.fsencode(value)
        record += name.encode() + b"\n" + struct.pack("<Q", len(content)) + content + b"\n"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.setblocking(False)
            channel.sendto(record, JOURNAL)
    except OSError:
        return False
    return True


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


SHORT_LIFE_S = 10.0
RESTART_PAUSE_S = 5.0


def pause_before_restart(lived_s: float) -> None:
    """Wait a while before ending, for a process that ends soon after its start for want of room, descriptors or memory.

    The manager starts what has ended at once, and gives up on what ends again and again.
    """
    if not os.environ.get("NOTIFY_SOCKET") or lived_s >= SHORT_LIFE_S:
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # an order to stop does not wait
    notify(f"STATUS=cannot go on now, ends in {RESTART_PAUSE_S:g} s to be started again")
    time.sleep(RESTART_PAUSE_S)


def notify(*lines: str) -> None:
    """Send `READY=1`, `WATCHDOG=1`, `STOPPING=1` or `STATUS=...` to the service manager, if there is one."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    import socket

    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        try:
            channel.sendto("\n".join(lines).encode(), address)
        except OSError:
            pass  # the manager is gone


def watchdog_interval_s() -> float | None:
    """Half the watchdog time that systemd gave this process, None without one."""
    if os.environ.get("WATCHDOG_PID") not in (None, str(os.getpid())):
        return None
    try:
        return int(os.environ["WATCHDOG_USEC"]) / 2e6
    except (KeyError, ValueError):
        return None
