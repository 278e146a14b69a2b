"""What an unfinished recovery or rebuild has noted in config/, so that the next one carries it on.

`config/recovery` is there before the first change and goes after the last. A recovery that was killed leaves it, and
the next one reads from the same offsets again, although the abort file, the number of segments or the queues' ends
would now say otherwise. It only makes the next recovery read more; the end of the log is found anew from the files, so
an old marker does no harm to a store that another program has written to since.

`config/recovered` stays: in a store without our watermark the last recovery kept everything from this offset on and
did not look at what is before it. RocketMQ reads the last three segments after an orderly stop, which may begin
earlier than the recovery after a crash, or than three segments did before some were cut: a second recovery would cut
what the first has kept, at damage that the first has not met.

`config/rebuild`: queues or index are moved away to be made again from the log. It is there before the first of them
is moved and goes when all are made; `config/recovery` beside it makes any recovery dispatch the whole log.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from pyengine.errors import DiskError
from pyengine.formats.paths import Root, StorePaths
from pyengine.storage.durable_file import DurableRecord
from pyengine.storage.durable_writes import sync_folder
from pyengine.storage.recovery.report import RecoveryPath


@dataclass(frozen=True, slots=True)
class RecoveryMarker:
    """Where the unfinished recovery read from."""

    path: RecoveryPath
    scan_from: int
    dispatch_from: int


@dataclass(frozen=True, slots=True)
class RebuildMarker:
    """`folder`: a name in quarantine/; `pieces`: paths under the root that have the same path below it.

    `is_made`: the pieces are made again, durable, up to where the log ended: nothing is moved any more.
    """

    folder: str
    pieces: tuple[str, ...]
    is_made: bool = False

    def moved_path(self, root: Path, piece: str) -> Path:
        """Where a piece is after its move."""
        return StorePaths(root).quarantine / self.folder / piece


_RECOVERY: DurableRecord[RecoveryMarker] = DurableRecord(
    "recovery", asdict, lambda of: RecoveryMarker(RecoveryPath(of["path"]), int(of["scan_from"]), int(of["dispatch_from"])),
    is_sealed=False)
_RECOVERED: DurableRecord[int] = DurableRecord(
    "recovered", lambda offset: {"kept_from": offset}, lambda of: int(of["kept_from"]), is_sealed=False)
_REBUILD: DurableRecord[RebuildMarker] = DurableRecord(
    "rebuild", asdict, lambda of: RebuildMarker(str(of["folder"]), tuple(map(str, of["pieces"])), of.get("is_made") is True),
    is_sealed=False, indent=1)


def read_marker(root: Root) -> RecoveryMarker | None:
    """The marker; None without one. One that is unreadable asks for the most: everything is read again."""
    found = _RECOVERY.read(root)
    return RecoveryMarker(RecoveryPath.ABNORMAL, 0, 0) if found.damage else found.record


def write_marker(root: Root, marker: RecoveryMarker) -> None:
    """Durable before this returns. One that says the same already stays: it needs no room again on a full disk."""
    if read_marker(root) == marker:
        sync_folder(_RECOVERY.path(root).parent)
    else:
        _RECOVERY.write(root, marker)


def remove_marker(root: Root) -> None:
    """Durable before this returns; nothing happens without one."""
    _RECOVERY.remove(root)


def read_kept_from(root: Root) -> int | None:
    """The physical offset in config/recovered; None without the file, or when it is unreadable."""
    try:
        return _RECOVERED.read(root).record
    except DiskError:
        return None


def write_kept_from(root: Root, offset: int) -> None:
    """Durable before this returns."""
    if read_kept_from(root) != offset:
        _RECOVERED.write(root, offset)


def read_rebuild_marker(root: Root) -> RebuildMarker | None:
    """The marker; None without one, or with one that is damaged: then `config/recovery` alone counts."""
    return _REBUILD.read(root).record


def write_rebuild_marker(root: Root, marker: RebuildMarker) -> None:
    """Durable before this returns."""
    _REBUILD.write(root, marker)


def remove_rebuild_marker(root: Root) -> None:
    """Durable before this returns; nothing happens without one."""
    _REBUILD.remove(root)
