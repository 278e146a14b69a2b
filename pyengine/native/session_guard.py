"""A session object cut short by its producer costs that session, not the writer (csrc/session_guard.cdef.h)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pyengine._native import ffi, lib

if TYPE_CHECKING:
    from pyengine._native import CData


def install(elsewhere: CData = ffi.NULL) -> None:
    """Take SIGBUS for this process: a fault inside a guarded session lays zeros over it, any other goes on as before.

    Those others are counted in `elsewhere`, a `uint64_t *` that outlives the process.
    """
    code = lib.ms_session_guard_install(elsewhere)
    if code:
        raise OSError(-code, os.strerror(-code))


def add(slot: int, memory: CData, size_bytes: int) -> None:
    """Guard `slot`'s session, a cffi pointer to its mapping's first byte."""
    lib.ms_session_guard_add(slot, ffi.cast("void *", memory), size_bytes)


def remove(slot: int) -> None:
    """Forget it, before it is unmapped."""
    lib.ms_session_guard_remove(slot)


def is_broken(slot: int) -> bool:
    """Whether the session's memory was taken away and private zeros stand there now."""
    return bool(lib.ms_session_guard_broken(slot))
