"""How far a running engine says that its log is flushed: a promise to every reader at that level (docs/promises.md, 4)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

from crash.watch import CrashWatch

PAUSE_S = 0.005


class FlushedWatch:
    """Tells each new position as a line of JSON, from a running engine's beginning to its end: a context manager."""

    def __init__(self, store: Path, tell: Callable[[bytes], object]) -> None:
        self.tell = tell
        self.flushed = 0
        self.engine = CrashWatch(store)
        self.stop = threading.Event()
        self.failed: Exception | None = None
        self.thread = threading.Thread(target=self.run)

    def __enter__(self) -> FlushedWatch:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()
        self.engine.close()
        if self.failed:
            raise self.failed

    def run(self) -> None:
        try:
            while not self.stop.wait(PAUSE_S):
                self.look()
        except Exception as error:  # what it would have told is missing: so is the run
            self.failed = error

    def look(self) -> None:
        """Once."""
        flushed = self.engine.positions().flushed
        if flushed > self.flushed:
            self.flushed = flushed
            self.tell(json.dumps({"flushed": flushed}).encode() + b"\n")
