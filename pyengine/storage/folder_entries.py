"""What stands in a folder, whatever was put there: a link that leads nowhere, or round in a circle, is nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from pyengine.formats.paths import is_index_name

_NOTHING = (errno.ELOOP, errno.ENOENT, errno.ENOTDIR)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder, or a link to one. OSError when that cannot be told now."""
    return _told(entry.is_dir)


def is_plain_file(entry: os.DirEntry[str]) -> bool:
    """Whether it is a file of bytes, or a link to one. OSError when that cannot be told now."""
    return _told(entry.is_file)


def _told(look: Callable[[], bool]) -> bool:
    try:
        return look()
    except OSError as error:
        if error.errno in _NOTHING:
            return False
        raise


def index_file_names(folder: Path | str) -> list[str]:
    """Names of the index files, sorted; anything else is passed over, as RocketMQ does. FileNotFoundError without a folder."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if is_index_name(entry.name) and is_plain_file(entry))
