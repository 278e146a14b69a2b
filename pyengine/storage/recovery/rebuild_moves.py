"""What a rebuild replaces goes to `quarantine/rebuild-N/`, under the same path, before anything is made again."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from pathlib import Path

from pyengine.errors import disk_error
from pyengine.formats.paths import StorePaths
from pyengine.storage.new_file import make_folders, sync_folder, write_config
from pyengine.storage.recovery.markers import RebuildMarker


def move_away(root: Path, marker: RebuildMarker) -> None:
    """Move every piece of `marker`, durable. May be done again: what was made since in a moved piece's place goes."""
    for piece in marker.pieces:
        _move(root, marker, piece)


def _move(root: Path, marker: RebuildMarker, piece: str) -> None:
    """Take `piece` away, durable. What stands in its place although it was moved is half made, and goes."""
    source, target = root / piece, marker.moved_path(root, piece)
    if not source.exists():
        return
    is_topic = source.parent.parent == root
    if is_topic and target.exists():  # queue by queue: not all of them need have been moved
        for queue in list(source.iterdir()):
            _move(root, marker, f"{piece}/{queue.name}")
        source.rmdir()
    elif target.exists():
        shutil.rmtree(source)
    else:
        _write_note(root, marker)
        make_folders(target.parent)
        try:
            os.rename(source, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise disk_error(error, "move", source, f" (to {target})") from error
            _copy_away(source, target)
        sync_folder(target.parent)
    sync_folder(source.parent)


def _copy_away(source: Path, target: Path) -> None:
    """quarantine/ lies on another file system: the copy is complete and durable before it has its name."""
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source, part)
    for path in (part, *part.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    os.rename(part, target)
    shutil.rmtree(source)


def _write_note(root: Path, marker: RebuildMarker) -> None:
    """What the folder in quarantine/ is; beside it, as for everything there."""
    folder = StorePaths(root).quarantine
    path = folder / f"{marker.folder}.json"
    make_folders(folder)
    note = {"from": list(marker.pieces), "reason": "replaced by a rebuild from the log",
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    if not path.exists():
        write_config(path, json.dumps(note, indent=2).encode() + b"\n", keep_backup=False)
