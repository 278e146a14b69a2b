"""The markers of recovery and rebuild in config/, by which the next recovery continues an unfinished one.

`config/recovery` is written before the first change and removed after the last. If a recovery is killed, the marker makes
the next one read from the same offsets again, although the abort file, the number of segments or the queues' ends
would now lead to others. It only makes the next recovery read more; the end of the log is found again from the files, so
an old marker does no harm in a store to which another program has written since.

`config/recovered` remains: in a store without pyengine's watermark the last recovery has kept everything from this offset
on, and has not read what is before it. After an orderly stop RocketMQ reads the last three segments, which may begin
earlier than the recovery after a crash did, or than the last three segments did before a truncation. Without this offset a
second recovery could find damage there that the first has not read, and truncate what the first has kept.

`config/rebuild`: queues or index are moved away and rebuilt from the log. It is written before the first of them is
moved and removed when all are complete; `config/recovery` makes any recovery in between dispatch the whole log.
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
    """The offsets from which the unfinished recovery has read."""

    path: RecoveryPath
    scan_from: int
    dispatch_from: int


@dataclass(frozen=True, slots=True)
class RebuildMarker:
    """`folder`: a name in quarantine/; `pieces`: paths relative to the root, and relative to that folder after the move.

    `is_made`: the pieces are rebuilt, durably, up to where the log ended: no piece is moved any more.
    """

    folder: str
    pieces: tuple[str, ...]
    is_made: bool = False

    def moved_path(self, root: Path, piece: str) -> Path:
        """Return the path of a piece after its move."""
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
    """Return the marker, None if there is none. A damaged one counts as a marker to read everything again."""
    found = _RECOVERY.read(root)
    return RecoveryMarker(RecoveryPath.ABNORMAL, 0, 0) if found.damage else found.record


def write_marker(root: Root, marker: RecoveryMarker) -> None:
    """Write the marker, durable before this returns. An equal one is kept, since a full disk may have no space for another."""
    if read_marker(root) == marker:
        sync_folder(_RECOVERY.path(root).parent)
    else:
        _RECOVERY.write(root, marker)


def remove_marker(root: Root) -> None:
    """Remove the marker, if it exists; its absence is durable before this returns."""
    _RECOVERY.remove(root)


def read_recovered_from(root: Root) -> int | None:
    """Return the physical offset in config/recovered; None if the file does not exist or is damaged."""
    try:
        return _RECOVERED.read(root).record
    except DiskError:
        return None


def write_recovered_from(root: Root, offset: int) -> None:
    """Write config/recovered, durable before this returns."""
    if read_recovered_from(root) != offset:
        _RECOVERED.write(root, offset)


def read_rebuild_marker(root: Root) -> RebuildMarker | None:
    """Return the marker; None if there is none or it is damaged: then only `config/recovery` counts."""
    return _REBUILD.read(root).record


def write_rebuild_marker(root: Root, marker: RebuildMarker) -> None:
    """Write the marker, durable before this returns."""
    _REBUILD.write(root, marker)


def remove_rebuild_marker(root: Root) -> None:
    """Remove the marker, if it exists; its absence is durable before this returns."""
    _REBUILD.remove(root)
