"""How many producers live, by a SysV semaphore's id (csrc/attach_count.cdef.h)."""

from __future__ import annotations

import os

from pyengine._native import lib


def add(semaphore_id: int, by: int) -> None:
    """Count this process in (1) or out (-1); the kernel counts it out if it dies. OSError if that fails."""
    code = lib.ms_attach_count_add(semaphore_id, by)
    if code:
        raise OSError(-code, os.strerror(-code))


def get(semaphore_id: int) -> int:
    """The number of living producers. OSError if there is no such semaphore."""
    value = lib.ms_attach_count_get(semaphore_id)
    if value < 0:
        raise OSError(-value, os.strerror(-value))
    return value
