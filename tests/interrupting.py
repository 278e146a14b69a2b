"""An exception of a signal handler at each place where Python calls one: as a function begins, and after each call of C."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator


class Interrupt(Exception):
    """What such a handler raises."""


def interrupted_at_each_place(call: Callable[[], object]) -> Iterator[None]:
    """Call it again and again, each time interrupted one place later than before, until it ends by itself. Yields after each time."""
    place = seen = 0

    def profile(_frame: object, event: str, _argument: object) -> None:
        nonlocal seen
        seen += event in ("call", "c_return")
        if seen == place:
            sys.setprofile(None)
            raise Interrupt

    while seen == place:
        place, seen = place + 1, 0
        sys.setprofile(profile)
        try:
            call()
        except Interrupt:
            pass
        finally:
            sys.setprofile(None)
        yield
