"""The file `abort` (docs/formats.md section 13): there while the store is open, so after a crash the next start knows.

RocketMQ removes it only after an orderly stop with nothing left to dispatch; found
at load it means the abnormal recovery path.
"""

from __future__ import annotations

import os
from pathlib import Path

from pyengine.errors import disk_error, disk_errors
from pyengine.formats.paths import StorePaths
from pyengine.native.failpoint import failpoint
from pyengine.storage.new_file import sync_folder


def abort_file_exists(root: Path | str) -> bool:
    """True when the store was not stopped in an orderly way, or is open now."""
    return StorePaths(root).abort.exists()


def create_abort_file(root: Path | str) -> None:
    """Leave an empty `abort`, durable before this returns; an existing one stays as it is."""
    path = StorePaths(root).abort
    with disk_errors("create", path):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644))
    failpoint("abort_created")
    sync_folder(path.parent)


def remove_abort_file(root: Path | str) -> None:
    """Remove `abort`, the last step of an orderly stop; its absence is durable before this returns."""
    path = StorePaths(root).abort
    try:
        path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise disk_error(error, "remove", path) from error
    failpoint("abort_removed")
    sync_folder(path.parent)
