"""How long messages have waited while the store's clock stands.

The store's clock never goes back. Where the wall clock was ahead and is set right, each record bears the time of
the last one until the wall clock has passed it, after a year perhaps, and due times say nothing until then. But
what the log held when this process looked has waited since, and a steady clock measures that: never too
long, too short by LOOK_NS at most, and for what was there before this process by the time before it.
"""

from __future__ import annotations

from bisect import bisect_right

LOOK_NS = 1_000_000_000


class StalledClock:
    """How far the log reached at which times of a steady clock, as far back as somebody asks."""

    def __init__(self, longest_ns: int) -> None:
        """`longest_ns` is the longest wait that is ever asked for."""
        self._longest_ns = longest_ns
        self._seen: list[tuple[int, int]] = []  # (time, end of the log), once in LOOK_NS

    def look(self, stands: bool, now_ns: int, end: int) -> None:
        """Whether the store's clock stands now, and how far the log reaches."""
        if not stands:
            self._seen.clear()
        elif not self._seen or now_ns >= self._seen[-1][0] + LOOK_NS:
            self._seen.append((now_ns, end))
            # One that is older than the longest wait answers for all before it.
            del self._seen[: max(0, self._number_until(now_ns - self._longest_ns) - 1)]

    def waited_end(self, now_ns: int, wait_ns: int) -> int:
        """Records that begin below this offset have waited at least `wait_ns`; 0 where none is known to have."""
        number = self._number_until(now_ns - wait_ns)
        return self._seen[number - 1][1] if number else 0

    def _number_until(self, time_ns: int) -> int:
        return bisect_right(self._seen, time_ns, key=lambda seen: seen[0])
