"""Pages that were stored to through mappings, written into the journal of a run as the kernel might write them back.

A `PageWatch` reads the files of the mapped folders again and again and puts each page that has changed into the
journal as a write that no sync covers yet, and how far the engine said that the log is flushed as an acknowledgement.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

from faults.flushed_watch import FlushedWatch
from faults.power_cut import Record, append_record

PAGE_BYTES = 4096


class PageWatch(FlushedWatch):
    """Watches the store of a running engine from its beginning to its end: a context manager."""

    def __init__(self, store: Path, journal: Path, folders: Sequence[str]) -> None:
        super().__init__(store, lambda line: append_record(self.descriptor, Record("A", 0, 0, line, b"")))
        self.folders = [store / folder for folder in folders]
        self.descriptor = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self.pages: dict[tuple[str, int], dict[int, bytes]] = {}

    def __exit__(self, *_: object) -> None:
        try:
            super().__exit__()
        finally:
            os.close(self.descriptor)

    def close(self) -> None:
        """Instead of a run: of a store whose engine is gone."""
        self.engine.close()
        os.close(self.descriptor)

    def look(self) -> None:
        """Once over everything."""
        super().look()
        self.look_at_all()

    def look_at_all(self) -> None:
        """Every page that has changed."""
        for folder in self.folders:
            if folder.is_dir():
                for path in sorted(folder.iterdir()):
                    self.look_at(path)

    def look_at(self, path: Path) -> None:
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)  # a sync that begins now waits: what it finds is newer
        try:
            with open(path, "rb") as file:
                inode, content = os.fstat(file.fileno()).st_ino, file.read()
                known = self.pages.setdefault((path.name, inode), {})
                for at in range(0, len(content), PAGE_BYTES):
                    page = content[at : at + PAGE_BYTES]
                    if page != known.get(at, bytes(len(page))):
                        known[at] = page
                        append_record(self.descriptor, Record("W", inode, at, page, b""))  # open still: no other file has the inode
        except FileNotFoundError:
            pass
        finally:
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
