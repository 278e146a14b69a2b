"""The times that retention depends on, in one place, so that tests can turn them."""

from __future__ import annotations

import time

from pyengine.native.flush import monotonic_ns


class CleaningClock:
    """The system's clocks."""

    def now_ms(self) -> int:
        """Wall clock, against the files' modification times."""
        return time.time_ns() // 1_000_000

    def hour(self) -> int:
        """Hour of the day in the local time zone, 0..23."""
        return time.localtime().tm_hour

    def monotonic_ns(self) -> int:
        """For pauses and waits."""
        return monotonic_ns()
