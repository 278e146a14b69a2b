"""Waits for conditions; the timeouts grow with the load of the machine."""

from __future__ import annotations

import os
import time

SLOWDOWN_MAX = 10.0


def scaled_timeout_s(timeout_s: float) -> float:
    """Return the timeout for the machine's present load: 1 to SLOWDOWN_MAX times `timeout_s`, which suits an idle machine."""
    return timeout_s * min(SLOWDOWN_MAX, max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0))))


def eventually(condition, what: str, timeout_s: float = 30.0):
    """Wait until `condition()` is true and return its value; AssertionError after the scaled timeout."""
    timeout_s = scaled_timeout_s(timeout_s)
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline_s, f"did not happen within {timeout_s:g} s: {what}"
        time.sleep(0.005)
