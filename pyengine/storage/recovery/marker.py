"""The file `config/recovery`: a recovery has begun to change things and has not finished.

It stands before the first change and goes after the last. A recovery that was killed
leaves it, and the next one reads from the same places again, although the abort file,
the number of segments or the queues' ends would now point it elsewhere. It only ever
makes the next recovery read more; where the log ends is found anew from the files, so
that an old marker can do no harm to a store that someone else has written to since.

The file `config/recovered` stays: in a store without our watermark the last recovery kept
everything from this offset on and did not look at what is before it. RocketMQ reads the last
three segments after an orderly stop, which may begin earlier than the recovery after a
crash, or than three segments did before some were cut: a second recovery would cut what
the first has kept, at damage that the first has not met.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pyengine.formats.paths import StorePaths
from pyengine.formats.small_file import PARSE_ERRORS, read_small_file
from pyengine.storage.config_file import read_note
from pyengine.storage.new_file import sync_folder, write_config
from pyengine.storage.recovery.report import RecoveryPath

MARKER_NAME = "recovery"
KEPT_NAME = "recovered"


@dataclass(frozen=True, slots=True)
class RecoveryMarker:
    """Where the unfinished recovery read from."""

    path: RecoveryPath
    scan_from: int
    dispatch_from: int


def read_marker(root: Path | str) -> RecoveryMarker | None:
    """The marker; None without one. One that is unreadable asks for the most: everything is read again."""
    content = read_note(_marker_path(root))
    if content is None:
        return None
    try:
        fields = json.loads(content)
        return RecoveryMarker(RecoveryPath(fields["path"]), int(fields["scan_from"]), int(fields["dispatch_from"]))
    except PARSE_ERRORS:
        return RecoveryMarker(RecoveryPath.ABNORMAL, 0, 0)


def write_marker(root: Path | str, marker: RecoveryMarker) -> None:
    """Durable before this returns. One that says the same already stays: it needs no room again on a full disk."""
    path = _marker_path(root)
    if read_marker(root) == marker:
        sync_folder(path.parent)
    else:
        write_config(path, json.dumps(asdict(marker)).encode() + b"\n", keep_backup=False)


def remove_marker(root: Path | str) -> None:
    """Durable before this returns; nothing happens without one."""
    path = _marker_path(root)
    if path.exists():
        path.unlink()
        sync_folder(path.parent)


def read_kept_from(root: Path | str) -> int | None:
    """The physical offset in config/recovered; None without the file, or when it is unreadable."""
    try:
        return int(json.loads(read_small_file(StorePaths(root).config / KEPT_NAME))["kept_from"])
    except (OSError, *PARSE_ERRORS):
        return None


def write_kept_from(root: Path | str, offset: int) -> None:
    """Durable before this returns."""
    if read_kept_from(root) != offset:
        write_config(StorePaths(root).config / KEPT_NAME, json.dumps({"kept_from": offset}).encode() + b"\n", keep_backup=False)


def _marker_path(root: Path | str) -> Path:
    return StorePaths(root).config / MARKER_NAME
