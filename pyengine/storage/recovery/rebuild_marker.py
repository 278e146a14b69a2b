"""The file `config/rebuild`: queues or index have been taken away to be made again from the log.

It stands before the first of them is moved and goes when all are made. Whoever finishes
the work (the rebuild run again, or the recovery of the next start) finds in it what was
moved where. `config/recovery` stands beside it and makes any recovery dispatch the whole log.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pyengine.errors import disk_error
from pyengine.formats.paths import StorePaths
from pyengine.formats.small_file import PARSE_ERRORS, read_small_file
from pyengine.storage.new_file import sync_folder, write_config

MARKER_NAME = "rebuild"


@dataclass(frozen=True, slots=True)
class RebuildMarker:
    """`folder`: a name in quarantine/; `pieces`: paths under the root that have the same path below it.

    `is_made`: the pieces are made again, durable, up to where the log ended: nothing is moved any more.
    """

    folder: str
    pieces: tuple[str, ...]
    is_made: bool = False

    def place_of(self, root: Path, piece: str) -> Path:
        """Where a piece stands once it is moved."""
        return StorePaths(root).quarantine / self.folder / piece


def read_rebuild_marker(root: Path | str) -> RebuildMarker | None:
    """The marker; None without one, or with one that says nothing: then `config/recovery` alone counts."""
    path = _path(root)
    try:
        fields = json.loads(read_small_file(path))
        return RebuildMarker(str(fields["folder"]), tuple(map(str, fields["pieces"])), fields.get("is_made") is True)
    except (FileNotFoundError, *PARSE_ERRORS):
        return None
    except OSError as error:
        raise disk_error(error, "read", path) from error


def write_rebuild_marker(root: Path | str, marker: RebuildMarker) -> None:
    """Durable before this returns."""
    write_config(_path(root), json.dumps(asdict(marker), indent=1).encode() + b"\n", keep_backup=False)


def remove_rebuild_marker(root: Path | str) -> None:
    """Durable before this returns; nothing happens without one."""
    path = _path(root)
    if path.exists():
        path.unlink()
        sync_folder(path.parent)


def _path(root: Path | str) -> Path:
    return StorePaths(root).config / MARKER_NAME
