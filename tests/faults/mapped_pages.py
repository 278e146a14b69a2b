"""Pages that were stored to through mappings, written into the journal of a run as the kernel might write them back.

A `PageWatch` reads the files of the mapped folders again and again and puts each page that has changed into the
journal as a write that no sync covers yet. It also writes down, as acknowledgements, how far the engine said that
the log is flushed: a promise to every reader at that level (docs/promises.md, 4).
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from crash.watch import EngineWatch
from faults.power_cut import Record, append_record

PAGE_BYTES = 4096
PAUSE_S = 0.005


class PageWatch:
    """Watches the store of a running engine from its beginning to its end: a context manager."""

    def __init__(self, store: Path, journal: Path, folders: Sequence[str]) -> None:
        self._folders = [store / folder for folder in folders]
        self._descriptor = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._pages: dict[tuple[str, int], dict[int, bytes]] = {}
        self._flushed = 0
        self._engine = EngineWatch(store)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> PageWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._engine.close()
        os.close(self._descriptor)

    def _run(self) -> None:
        while not self._stop.wait(PAUSE_S):
            self.look()

    def look(self) -> None:
        """Once over everything."""
        flushed = self._engine.positions().flushed
        if flushed > self._flushed:
            self._flushed = flushed
            append_record(self._descriptor, Record("A", 0, 0, json.dumps({"flushed": flushed}).encode() + b"\n", b""))
        for folder in self._folders:
            if folder.is_dir():
                for path in sorted(folder.iterdir()):
                    self._look_at(path)

    def _look_at(self, path: Path) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)  # a sync that begins now waits: what it finds is newer
        try:
            with open(path, "rb") as file:
                inode, content = os.fstat(file.fileno()).st_ino, file.read()
            known = self._pages.setdefault((path.name, inode), {})
            for at in range(0, len(content), PAGE_BYTES):
                page = content[at : at + PAGE_BYTES]
                if page != known.get(at, bytes(len(page))):
                    known[at] = page
                    append_record(self._descriptor, Record("W", inode, at, page, b""))
        except FileNotFoundError:
            pass
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
