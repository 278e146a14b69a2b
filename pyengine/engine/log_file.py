"""The engine's log: STORE/engine.log, which is the stderr of its processes and is rotated, or the journal of systemd.

Each line is an event (pyengine/events.py) of one process. If stderr is the journal of systemd, the event is sent as a record with fields.

The supervisor renames a log that has grown large to engine.log.1, which replaces the previous one. Each process notices, by the
path of its own stderr, that the log was renamed or removed (by the supervisor, by logrotate or by hand), and reopens
STORE/engine.log. It needs no other process for that, so a dead or stopped process does not prevent rotation.
Lines written between the rename and the next check are in the renamed file, so that no line is lost. If stderr is not the log
(but the journal, a terminal, a pipe), nothing is rotated.

A process also tells its service manager that it is ready, that it is alive, and why it waits before it ends.
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

from pyengine.errors import shown
from pyengine.events import Event
from pyengine.formats.small_file import open_regular, opened
from pyengine.ipc.shared_objects import KIND_NAMES
from pyengine.storage.durable_writes import open_given

NAME = "engine.log"
BYTES_MAX = 16 << 20
LAST_BYTES = 4096
CHECK_INTERVAL_S = 1.0  # interval at which a process checks its own stderr
JOURNAL = "/run/systemd/journal/socket"
_STDOUT, _STDERR = 1, 2


def log_event(kind: int, root: Path | None, event: Event, text: str) -> None:
    """Write an event to stderr as one line: time, process, event, text.

    The journal adds time and process itself: it gets a record with the fields MESSAGE, PRIORITY, EVENT, WORKER and, if `root`
    is known, STORE.
    """
    text = shown(text)
    if _stderr_is_journal():
        if _send_to_journal(kind, root, event, text):
            return
        lines = f"<{event.level}>" + text.replace("\n", f"\n<{event.level}>")
    else:
        lines = log_line(KIND_NAMES[kind], f"{event.name} {text}")
    with contextlib.suppress(OSError):  # a log that cannot be written, for example on a full disk, must not stop the process
        print(lines, file=sys.stderr, flush=True)


def log_line(who: str, text: str) -> str:
    """Format a line of the engine's log: time, process, pid, text."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime())}Z {who}[{os.getpid()}] {text}"


def _stderr_is_journal() -> bool:
    """Whether stderr is the journal itself, as the service manager connected it, and not a pipe of another process."""
    stream = os.environ.get("JOURNAL_STREAM", "")
    try:
        found = os.fstat(_STDERR)
    except OSError:
        return False
    return stream == f"{found.st_dev}:{found.st_ino}"


def _send_to_journal(kind: int, root: Path | None, event: Event, text: str) -> bool:
    """Send the event to the journal; False if the journal is full, absent or not reachable from this process."""
    fields = {"MESSAGE": text, "PRIORITY": str(event.level), "SYSLOG_IDENTIFIER": f"pyengine-{KIND_NAMES[kind]}",
              "EVENT": event.name, "WORKER": KIND_NAMES[kind]}
    if root is not None:
        fields["STORE"] = shown(str(root))
    record = b""
    for name, value in fields.items():  # the form with a length, since a value may contain a line end
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
    """Open STORE/engine.log to append to it, after rotating one that has grown large."""
    path = root / NAME
    with contextlib.suppress(OSError):
        _turn(path, path.stat().st_size)
    return open(_open(path), "ab")


def length(root: Path) -> int:
    """Return the length of the store's log; 0 if there is none."""
    with contextlib.suppress(OSError):
        return os.stat(root / NAME).st_size
    return 0


def last_lines(root: Path, count: int, since: int = 0) -> list[str]:
    """Return the last lines of the store's log that are not empty; of those after length `since`, unless it was rotated."""
    lines: list[str] = []
    with contextlib.suppress(OSError), open(open_regular(root / NAME), "rb") as log:
        size = os.fstat(log.fileno()).st_size
        log.seek(max(since if since <= size else 0, size - LAST_BYTES))
        lines = log.read(LAST_BYTES).decode(errors="replace").split("\n")
    return [line for line in lines if line.strip()][-count:]


class LogFile:
    """The log of this process, if its stderr is STORE/engine.log."""

    def __init__(self, root: Path, *, turns: bool = False) -> None:
        """`turns`: this process rotates a large log. One process of each store does."""
        self._path = root / NAME
        self._turns = turns
        self._is_ours = False
        self._due_s = 0.0
        self.check()

    def tick(self) -> None:
        """Call check(), at most once in CHECK_INTERVAL_S."""
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + CHECK_INTERVAL_S
            self.check()

    def check(self) -> None:
        """Rotate a large log if that is this process's task, and reopen one that was renamed; after a failure the next call tries again."""
        with contextlib.suppress(OSError):
            target, path = _target(_STDERR), os.path.realpath(self._path)  # each time: the folder may be renamed
            self._is_ours = self._is_ours or _is_log(target, path)
            if not self._is_ours:
                return
            if self._turns and target == path:
                _turn(self._path, os.fstat(_STDERR).st_size)
                target = _target(_STDERR)
            if target != path:
                self._follow(target)

    def _follow(self, old: str) -> None:
        with opened(_open(self._path)) as descriptor:
            if _target(_STDOUT) == old:
                os.dup2(descriptor, _STDOUT)
            os.dup2(descriptor, _STDERR)


def _target(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


def _is_log(target: str, path: str) -> bool:
    """Whether `target` is the log or a former log: engine.log.1, engine.log-20261124, engine.log (deleted)."""
    return target == path or target.startswith((f"{path}.", f"{path}-", f"{path} ("))


def _turn(path: Path, size_bytes: int) -> None:
    if size_bytes > BYTES_MAX:
        path.replace(path.with_name(f"{NAME}.1"))


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    descriptor = open_given(path, flags | os.O_NONBLOCK)  # a FIFO without a reader fails at once instead of blocking
    os.set_blocking(descriptor, True)
    return descriptor


SHORT_LIFE_S = 10.0
RESTART_PAUSE_S = 5.0


def pause_before_restart(lived_s: float) -> None:
    """Delay the end of a process that ends soon after its start for lack of disk space, descriptors or memory.

    The service manager restarts it at once, and gives up on a process that ends too often.
    """
    if not os.environ.get("NOTIFY_SOCKET") or lived_s >= SHORT_LIFE_S:
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # a signal to stop ends the pause
    notify(f"STATUS=cannot work now, ends in {RESTART_PAUSE_S:g} s, and is then started again")
    time.sleep(RESTART_PAUSE_S)


def notify(*lines: str) -> None:
    """Send `READY=1`, `WATCHDOG=1`, `STOPPING=1` or `STATUS=...` to the service manager, if there is one that can be reached."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        channel.sendto("\n".join(lines).encode("utf-8", "surrogateescape"), address)  # a path in the text may hold any bytes


def watchdog_interval_s() -> float | None:
    """Return half the watchdog interval that systemd gave this process; None if it gave none."""
    if os.environ.get("WATCHDOG_PID") not in (None, str(os.getpid())):
        return None
    try:
        return int(os.environ["WATCHDOG_USEC"]) / 2e6
    except (KeyError, ValueError):
        return None
