"""Tests wait for conditions, never for a time; and how long they wait at most grows with the load of the machine."""

from __future__ import annotations

import os
import time

SLOWDOWN_MAX = 10.0


def patience(seconds: float) -> float:
    """A deadline that was chosen on a machine of its own, for this one as loaded as it is now: never shorter, at most ten times."""
    return seconds * min(SLOWDOWN_MAX, max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0))))


def eventually(condition, what: str, timeout_s: float = 30.0):
    """Wait for a condition, with a deadline (see `patience`); its value."""
    timeout_s = patience(timeout_s)
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline_s, f"did not happen within {timeout_s:g} s: {what}"
        time.sleep(0.005)
