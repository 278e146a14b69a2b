"""Watching a position in short naps (csrc/nap.cdef.h)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pyengine._native import ffi, lib

if TYPE_CHECKING:
    from pyengine._native import ms_position


def poll_until_above(position: ms_position, value: int, timeout_ns: int, nap_ns: int) -> bool:
    """True as soon as the `struct ms_position` is above `value`, False after the timeout."""
    return lib.ms_nap_until_above(ffi.addressof(position), value, timeout_ns, nap_ns) == 1


def once(nap_ns: int) -> None:
    """Sleep for that long."""
    time.sleep(nap_ns / 1e9)


def precisely() -> None:
    """Let this process's sleeps end when asked, not up to 50 us later."""
    lib.ms_nap_precisely()
