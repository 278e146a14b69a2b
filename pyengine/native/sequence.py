"""A number that many processes sleep on until it moves (csrc/sequence.cdef.h).

    seen = load(sequence)            # before looking
    if not there_yet():
        wait(sequence, seen, sleepers, timeout_s)
"""

from __future__ import annotations

from pyengine._native import ffi, lib


def load(sequence) -> int:
    """The number now; take it before looking at what it announces."""
    return lib.ms_sequence_load(ffi.addressof(sequence))


def raise_(sequence, sleepers) -> None:
    """Say "look again" after publishing; a system call only if somebody sleeps."""
    lib.ms_sequence_raise(ffi.addressof(sequence), ffi.addressof(sleepers))


def shout(sequence) -> None:
    """Say "look again" to all, whatever the count of sleepers says."""
    lib.ms_sequence_shout(ffi.addressof(sequence))


def wait(sequence, seen: int, sleepers, timeout_s: float) -> bool:
    """Sleep until the number differs from `seen` (True) or until the timeout or a signal (False).

    `sleepers` is the doorbell that counts sleepers, or None for a process that
    cannot write it: its sleep is made of short steps.
    """
    bell = ffi.NULL if sleepers is None else ffi.addressof(sleepers)
    return lib.ms_sequence_wait(ffi.addressof(sequence), seen, bell, max(0, int(timeout_s * 1e9))) == 1
