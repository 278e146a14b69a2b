"""Ctrl-C between two batches instead of inside one: what was begun is answered, then it ends."""

from __future__ import annotations

import signal
from types import FrameType


class StopAtBatchEnd:
    """Inside the block the signals only set a mark; check() at the end of a batch raises KeyboardInterrupt.

    A second signal does not wait for the batch. For the main thread.
    """

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers or (signal.SIGINT,)
        self._before: dict[int, object] = {}
        self._asked = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has come."""
        if self._asked:
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True

    def __enter__(self) -> StopAtBatchEnd:
        self._before = {number: signal.signal(number, self._on_signal) for number in self._numbers}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
