"""The cleaner's shared object: holds on segments, the disk probe, the request by hand (csrc/cleaning.cdef.h)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine._native import ffi, lib
from pyengine.native.control import raise_layout_error

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pyengine._native import ms_cleaning

CLEANING_BYTES: int = ffi.sizeof("struct ms_cleaning")
LAYOUT_VERSION: int = lib.MS_CLEANING_LAYOUT_VERSION
HOLDS_MAX: int = lib.MS_HOLDS_MAX


def view(memory: Buffer) -> ms_cleaning:
    """`struct ms_cleaning *` over a writable mapping, which the caller keeps alive; not yet checked."""
    return ffi.cast("struct ms_cleaning *", ffi.from_buffer(memory))


def private() -> ms_cleaning:
    """A block of this process alone, for work on a store that no process has open."""
    block = ffi.new("struct ms_cleaning *")
    lib.ms_cleaning_format(block, 0)
    return block


def format_cleaning(cleaning: ms_cleaning, epoch: int) -> None:
    """The supervisor, over zeros: nothing held, nothing asked."""
    lib.ms_cleaning_format(cleaning, epoch)


def check(cleaning: ms_cleaning, mapped_bytes: int) -> None:
    """EngineUnavailableError, naming what is wrong, unless this is a whole object of our layout."""
    raise_layout_error("the cleaner's shared object", lib.ms_cleaning_check(cleaning, mapped_bytes))


def owner_mark(pid: int, start_time_ms: int) -> int:
    """How a process signs its holds: pid, and the low half of its start time, since pids come back."""
    return pid << 32 | start_time_ms & 0xFFFFFFFF


def owner_of(mark: int) -> tuple[int, int]:
    """(pid, low half of its start time) of a signature."""
    return mark >> 32, mark & 0xFFFFFFFF


def take(cleaning: ms_cleaning, owner: int, segment: int) -> int:
    """The slot of a new hold, or -ENOENT: it is being deleted, -EAGAIN: no slot is free."""
    return lib.ms_hold_take(cleaning, owner, segment)


def release(cleaning: ms_cleaning, slot: int, owner: int) -> None:
    """Give a hold back."""
    lib.ms_hold_release(cleaning, slot, owner)


def shut(cleaning: ms_cleaning, end: int) -> None:
    """The cleaner: no process gets a new hold below `end`; afterwards every older hold can be seen."""
    lib.ms_cleaning_shut(cleaning, end)


def find(cleaning: ms_cleaning, from_slot: int, end: int = -1) -> int:
    """The first owned slot from `from_slot` on, of a hold below `end` if that is given; -1 without one."""
    return lib.ms_hold_find(cleaning, from_slot, end)


def reap(cleaning: ms_cleaning, slot: int, owner: int) -> bool:
    """Clear the hold of a dead owner; False when it was given back meanwhile."""
    return bool(lib.ms_hold_reap(cleaning, slot, owner))


def set_reason(cleaning: ms_cleaning, text: str) -> None:
    """The cleaner: why puts are refused; "" when they are not."""
    data = text.encode()[: lib.MS_CLEANING_REASON_BYTES - 1].decode("utf-8", "ignore").encode()
    ffi.memmove(cleaning.reason, data + b"\0", len(data) + 1)


def reason(cleaning: ms_cleaning) -> str:
    """Why puts are refused, and what to do; "" when they are not."""
    return ffi.string(ffi.cast("char *", cleaning.reason), lib.MS_CLEANING_REASON_BYTES - 1).decode("utf-8", "replace")
