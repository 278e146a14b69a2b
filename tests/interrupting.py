"""An exception of a signal handler at each place where Python calls one: as a function begins, and after each call of C."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator


class Interrupt(BaseException):
    """What such a handler raises."""


def interrupt() -> None:
    raise Interrupt


def interrupted_at_each_place(call: Callable[[], object], handler: Callable[[], object] = interrupt, *,
                              last: int | None = None) -> Iterator[None]:
    """Call it again and again, each time interrupted one place later than before, until it ends by itself. Yields after each time.

    With `last` it is interrupted at so many of its last places only, and at first not at all, until one call is as long as the one before.
    """
    place, seen = 1 if last is None else sys.maxsize, 0

    def profile(_frame: object, event: str, _argument: object) -> None:
        nonlocal seen
        seen += event in ("call", "c_return")
        if seen == place:
            sys.setprofile(None)
            handler()

    while True:
        seen = 0
        sys.setprofile(profile)
        try:
            call()
        except Interrupt:
            pass
        finally:
            sys.setprofile(None)
        yield
        if seen >= place:
            place, last = place + 1, None
        elif last is None:
            return
        else:
            place = max(1, seen - last)
