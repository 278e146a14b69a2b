"""Watching a position in short naps (csrc/nap.cdef.h)."""

from __future__ import annotations

import os

from pyengine._native import ffi, lib

NAP_NS = 20_000


def until_above(position, value: int, timeout_ns: int, nap_ns: int = NAP_NS) -> bool:
    """True as soon as the `struct ms_position` is above `value`, False after the timeout."""
    return lib.ms_nap_until_above(ffi.addressof(position), value, timeout_ns, nap_ns) == 1


def precisely() -> None:
    """Let this process's sleeps end when asked, not up to 50 us later."""
    lib.ms_nap_precisely()


def behind_the_puts() -> None:
    """Let this process wait for a free CPU instead of taking one from a putting producer or the writer.

    SCHED_BATCH: a woken process runs at once on an idle CPU, but does not interrupt a busy one (docs/decisions/0014).
    """
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:
        pass  # forbidden here: only slower
