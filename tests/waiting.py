"""Tests wait for conditions, never for a time."""

from __future__ import annotations

import time


def eventually(condition, what: str, timeout_s: float = 30.0):
    """Wait for a condition, with a deadline; its value."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline_s, f"did not happen within {timeout_s:g} s: {what}"
        time.sleep(0.005)
