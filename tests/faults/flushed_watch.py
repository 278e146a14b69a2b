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
        self._tell = tell
        self._flushed = 0
        self._engine = CrashWatch(store)
        self._stop = threading.Event()
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> FlushedWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._engine.close()
        if self._failed:
            raise self._failed

    def _run(self) -> None:
        try:
            while not self._stop.wait(PAUSE_S):
                self.look()
        except Exception as error:  # what it would have told is missing: so is the run
            self._failed = error

    def look(self) -> None:
        """Once."""
        flushed = self._engine.positions().flushed
        if flushed > self._flushed:
            self._flushed = flushed
            self._tell(json.dumps({"flushed": flushed}).encode() + b"\n")
