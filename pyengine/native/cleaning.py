"""The cleaner's shared object: what is being deleted, disk usage, requests of `pyengine clean` (csrc/cleaning.cdef.h)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine._native import ffi, lib
from pyengine.native.control import SharedStruct, padded, unpadded

if TYPE_CHECKING:
    from pyengine._native import ms_cleaning

_SHARED: SharedStruct[ms_cleaning] = SharedStruct("the cleaner's shared object", "struct ms_cleaning", magic=b"MSCLEANS",
                                                  version=lib.MS_CLEANING_LAYOUT_VERSION)
view, check = _SHARED.view, _SHARED.check
private = _SHARED.private  # for work on a store that no process has open
CLEANING_BYTES = _SHARED.size_bytes


def format_cleaning(block: ms_cleaning) -> None:
    """Initialize a zeroed block, without requests. For the supervisor."""
    block.used_percent = block.queue_used_percent = -1
    _SHARED.publish(block)


def set_reason(cleaning: ms_cleaning, text: str) -> None:
    """Publish why the cleaner has puts refused; "" if it does not."""
    ffi.memmove(cleaning.reason, padded(text, lib.MS_CLEANING_REASON_BYTES), lib.MS_CLEANING_REASON_BYTES)


def reason(cleaning: ms_cleaning) -> str:
    """Return why puts are refused and what to do; "" if they are not."""
    return unpadded(bytes(ffi.buffer(cleaning.reason)))
