"""A number that many processes sleep on until it moves (csrc/sequence.cdef.h).

    seen = load(sequence)            # before looking
    if not there_yet():
        wait(sequence, seen, timeout_s)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine._native import ffi, lib

if TYPE_CHECKING:
    from pyengine._native import ms_sequence


def load(sequence: ms_sequence) -> int:
    """The number now; take it before looking at what it announces."""
    return lib.ms_sequence_load(ffi.addressof(sequence))


def raise_(sequence: ms_sequence) -> None:
    """Say "look again" to all sleepers, after publishing."""
    lib.ms_sequence_raise(ffi.addressof(sequence))


def wait(sequence: ms_sequence, seen: int, timeout_s: float) -> bool:
    """Sleep until the number differs from `seen` (True) or until the timeout or a signal (False)."""
    return lib.ms_sequence_wait(ffi.addressof(sequence), seen, max(0, int(timeout_s * 1e9))) == 1
