"""Who shows no sign of life: something that should move has not, for a while that this process was awake."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable


class LivenessTracker:
    """Remembers when it last saw each thing change. The clock is this process's own, so no clocks are compared;
    a process that was stopped itself sees everything moved when it goes on."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._seen: dict[Hashable, tuple[object, float]] = {}

    def is_expired(self, thing: Hashable, state: object) -> bool:
        """Whether `thing` has been in this `state` at each look for the timeout."""
        now_s = self._clock()
        seen, since_s = self._seen.get(thing, (None, 0.0))
        if thing not in self._seen or seen != state:
            self._seen[thing] = (state, now_s)
            return False
        return now_s - since_s >= self._timeout_s

    def forget(self, thing: Hashable) -> None:
        """Begin anew with it."""
        self._seen.pop(thing, None)
