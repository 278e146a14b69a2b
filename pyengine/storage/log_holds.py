"""Holds on the log that survive their process: `config/log-holds/NAME`, one small durable file each.

A backup or a table that is filled from the log needs segments for longer than a reader's hold in shared memory lasts
(ipc/cleaning.py). Its hold has the offset from which on the log is kept, and an expiry time. The cleaner deletes no segment
at or beyond the lowest held offset, unless the disk is fuller than disk_space_clean_forcibly_ratio. The owner renews
its hold while it works; the hold ends at its expiry time even if the owner is dead. A damaged file holds
nothing; one that cannot be read holds everything until it is as old as its hold can last: a backup's ten minutes, another seven days.
`status` names both. Deleting the file ends a hold too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pyengine.errors import DiskError, disk_error
from pyengine.formats.paths import Root, StorePaths
from pyengine.formats.small_file import TRANSIENT_ERRNOS
from pyengine.storage.durable_file import DurableRecord
from pyengine.storage.later_format import require_known_format

FOLDER = "log-holds"
HOLD_MS_MAX = 7 * 24 * 3_600_000  # a hold that expires later than this is a mistake, for example of a wrong clock
CLOCK_GRACE_MS = 3_600_000  # tolerance for different clocks of owner and cleaner, and for an owner that renews late
CLOCK_STEP_MS = 60_000
UNREAD_BACKUP_MS = 600_000  # how long after its last write the file of a backup that cannot be read may hold the log
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass(frozen=True, slots=True)
class LogHold:
    """A hold of `owner` on the log from `offset` on, until the wall clock is `expires_ms`."""

    name: str
    owner: str
    offset: int
    expires_ms: int
    damage: str = ""  # why the file is not believed

    def is_active(self, now_ms: int) -> bool:
        """Whether the cleaner must respect it."""
        return now_ms < self.expires_ms <= now_ms + HOLD_MS_MAX + CLOCK_GRACE_MS


def _record(name: str) -> DurableRecord[LogHold]:
    return DurableRecord(
        f"{FOLDER}/{name}", lambda hold: {key: value for key, value in asdict(hold).items() if key != "damage"},
        lambda fields: LogHold(str(fields["name"]), str(fields["owner"]), int(fields["offset"]), int(fields["expires_ms"])))


def write_log_hold(root: Root, hold: LogHold) -> None:
    """Create or renew the hold, durable before this returns. DiskFullError, DiskError or FlushError."""
    assert _NAME.fullmatch(hold.name), hold.name
    _record(hold.name).write(root, hold)


def remove_log_hold(root: Root, name: str) -> None:
    """End the hold, if it exists."""
    _record(name).remove(root)


def read_log_holds(root: Root) -> list[LogHold]:
    """Return every hold, the lowest offset first, with expired ones and damaged files."""
    folder = StorePaths(root).config / FOLDER
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise disk_error(error, "list", folder) from error
    found = []
    for name in filter(_NAME.fullmatch, names):
        if name.endswith(".tmp"):
            continue
        try:
            hold, damage = _record(name).read(root)
        except DiskError as error:
            longest_ms = UNREAD_BACKUP_MS if name.startswith("backup-") else HOLD_MS_MAX
            found.append(LogHold(name, "an unknown owner", 0, longest_ms + _written_ms(folder / name, error), str(error)))
            continue
        if hold is not None and hold.name == name:
            found.append(hold)
        elif hold is not None or damage:
            found.append(LogHold(name, "", 0, 0, f"config/{FOLDER}/{name} {damage or 'has another name in it'}; it holds nothing"))
    return sorted(found, key=lambda hold: (hold.offset, hold.name))


def _written_ms(path: Path, error: DiskError) -> int:
    """Return when a file was written that cannot be read; now if it may be read later, or that is not known either."""
    with contextlib.suppress(OSError):
        if error.errno not in TRANSIENT_ERRNOS:
            return os.stat(path).st_mtime_ns // 1_000_000
    return _now_ms()


def lowest_log_hold(root: Root, now_ms: int) -> LogHold | None:
    """Return the active hold with the lowest offset, None if there is none. DiskError if they cannot be listed."""
    return next((hold for hold in read_log_holds(root) if hold.is_active(now_ms)), None)


class RenewedHold:
    """A hold of this process, which renew() extends while the process works."""

    def __init__(self, root: Root, name: str, owner: str, duration_ms: int) -> None:
        """Write the hold, from offset 0 on, until move() sets the offset that is needed. Removes holds that expired long ago."""
        require_known_format(root)
        self._root = root
        self._duration_ms = duration_ms
        self._hold = LogHold(name, f"{owner} (pid {os.getpid()})", 0, 0)
        self.is_written = True
        self._write()
        for old in read_log_holds(root) if self.is_written else ():
            # Not at once after they expire: their owner may renew one just before the removal, which would end it.
            if not old.damage and old.expires_ms + CLOCK_GRACE_MS <= _now_ms():
                remove_log_hold(root, old.name)

    def renew(self) -> None:
        """Renew the hold once half of its time is over, or if the clock was set back by more than a minute. Cheap until then."""
        left_ms = self._hold.expires_ms - _now_ms()
        if not self._duration_ms // 2 <= left_ms <= self._duration_ms + CLOCK_STEP_MS:
            self._write()

    def move(self, offset: int) -> None:
        """Hold the log only from `offset` on."""
        self._hold = replace(self._hold, offset=offset)
        self._write()

    def _write(self) -> None:
        self._hold = replace(self._hold, expires_ms=_now_ms() + self._duration_ms)
        try:
            write_log_hold(self._root, self._hold)
        except DiskError as error:
            if error.errno not in _READ_ONLY:
                raise
            self.is_written = False  # the caller decides whether it needs the hold


@contextlib.contextmanager
def held_log(root: Root, name: str, owner: str, duration_ms: int) -> Iterator[RenewedHold]:
    """Hold the log during the block, and remove the hold at its end. After kill -9 it expires within `duration_ms`."""
    hold = RenewedHold(root, name, owner, duration_ms)
    try:
        yield hold
    finally:
        if hold.is_written:
            remove_log_hold(root, name)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
