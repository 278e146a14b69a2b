"""A folder in memory: thousands of stores are made, synced and removed there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from faults.mounts import detach, mounted_below


@contextmanager
def memory_folder(otherwise: Path) -> Iterator[Path]:
    """One for this block; `otherwise` where there is no file system in memory."""
    if not os.access("/dev/shm", os.W_OK):
        otherwise.mkdir(parents=True, exist_ok=True)
        yield otherwise
        return
    folder = Path(tempfile.mkdtemp(prefix="pyengine-test-", dir="/dev/shm"))
    try:
        yield folder
    finally:
        for place in mounted_below(folder):  # an interrupt may come between a mount and the unmount
            detach(place)
        shutil.rmtree(folder)
