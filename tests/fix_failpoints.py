"""Failpoints of this process, where a test wants to know or to raise instead of a kill."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest.mock import patch

from pyengine.native import failpoints

RECOVERYS = ("recovery_", "quarantine_", "cut_", "zeros_")


class Interrupted(Exception):
    """Thrown at a failpoint."""


@contextlib.contextmanager
def at_failpoints(reached: Callable[[str], object]) -> Iterator[None]:
    """Inside the block call `reached` with the name of each step of a recovery that this process reaches, as a kill would come."""
    library = SimpleNamespace(ms_failpoint_reach=lambda name: reached(name.decode()) if name.decode().startswith(RECOVERYS) else None)
    with patch.object(failpoints, "_is_used", True), patch.object(failpoints, "lib", library):
        yield


@contextlib.contextmanager
def interrupted_at(number: int) -> Iterator[list[str]]:
    """Raise Interrupted at the step of this number inside the block; yields the names of the steps, as they are reached."""
    seen: list[str] = []

    def reached(name: str) -> None:
        seen.append(name)
        if len(seen) == number + 1:
            raise Interrupted(name)

    with at_failpoints(reached):
        yield seen
