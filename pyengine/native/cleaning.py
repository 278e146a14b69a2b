"""The cleaner's shared object: holds on segments, disk usage, requests of `pyengine clean` (csrc/cleaning.cdef.h)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine._native import ffi, lib
from pyengine.native.control import SharedStruct, encoded

if TYPE_CHECKING:
    from pyengine._native import ms_cleaning

_SHARED: SharedStruct[ms_cleaning] = SharedStruct("the cleaner's shared object", "struct ms_cleaning", lib.ms_cleaning_check)
view, check = _SHARED.view, _SHARED.check
CLEANING_BYTES = _SHARED.size_bytes
HOLDS_MAX: int = lib.MS_HOLDS_MAX
format_cleaning = lib.ms_cleaning_format  # initialize a zeroed block without holds and requests; called by the supervisor
take = lib.ms_hold_take  # take a hold on a segment; return its slot, -ENOENT if the segment is being deleted, -EAGAIN if no slot is free
release = lib.ms_hold_release  # release a hold
refuse_holds = lib.ms_cleaning_refuse_holds  # refuse new holds below `end`; afterwards the cleaner, which calls it, sees every older hold


def private() -> ms_cleaning:
    """Return a block in private memory, for work on a store that no process has open."""
    block = ffi.new("struct ms_cleaning *")
    lib.ms_cleaning_format(block, 0)
    return block


def owner_mark(pid: int, start_time_ms: int) -> int:
    """Return the mark of a hold's owner: its pid, and the low half of its start time, since pids are reused."""
    return pid << 32 | start_time_ms & 0xFFFFFFFF


def owner_of(mark: int) -> tuple[int, int]:
    """Return (pid, low half of its start time) from an owner's mark."""
    return mark >> 32, mark & 0xFFFFFFFF


def find(cleaning: ms_cleaning, from_slot: int, end: int = -1) -> int:
    """Return the first owned slot from `from_slot` on whose hold is below `end`, if given; -1 if there is none."""
    return lib.ms_hold_find(cleaning, from_slot, end)


def reap(cleaning: ms_cleaning, slot: int, owner: int) -> bool:
    """Clear the hold of a dead owner; return False if it was released in the meantime."""
    return bool(lib.ms_hold_reap(cleaning, slot, owner))


def set_reason(cleaning: ms_cleaning, text: str) -> None:
    """Publish why the cleaner has puts refused; "" if it does not."""
    data = encoded(text, lib.MS_CLEANING_REASON_BYTES) + b"\0"
    ffi.memmove(cleaning.reason, data, len(data))


def reason(cleaning: ms_cleaning) -> str:
    """Return why puts are refused and what to do; "" if they are not."""
    return ffi.string(ffi.cast("char *", cleaning.reason), lib.MS_CLEANING_REASON_BYTES - 1).decode("utf-8", "replace")
