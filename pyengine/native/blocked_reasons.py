"""Why each worker is blocked, in shared memory (csrc/blocked_reasons.cdef.h)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine._native import ffi, lib
from pyengine.native.control import SharedStruct, encoded

if TYPE_CHECKING:
    from pyengine._native import ms_blocked_reasons

_SHARED: SharedStruct[ms_blocked_reasons] = SharedStruct(
    "the workers' blocked reasons", "struct ms_blocked_reasons", lib.ms_blocked_reasons_check)
view, check = _SHARED.view, _SHARED.check
BLOCKED_REASONS_BYTES = _SHARED.size_bytes
LAYOUT_VERSION: int = lib.MS_BLOCKED_REASONS_LAYOUT_VERSION
TEXT_BYTES: int = lib.MS_BLOCKED_REASON_BYTES


def private() -> ms_blocked_reasons:
    """Return a block in private memory, for a worker that finds no shared one."""
    blocked_reasons = ffi.new("struct ms_blocked_reasons *")
    lib.ms_blocked_reasons_format(blocked_reasons)
    return blocked_reasons


def format_blocked_reasons(blocked_reasons: ms_blocked_reasons) -> None:
    """Initialize a zeroed block, with no worker blocked; called by the supervisor."""
    lib.ms_blocked_reasons_format(blocked_reasons)


def write(blocked_reasons: ms_blocked_reasons, kind: int, text: str) -> None:
    """Publish why the worker of that kind, which calls this, is blocked; "" if it is not."""
    lib.ms_blocked_reason_write(blocked_reasons, kind, encoded(text, TEXT_BYTES))


def read(blocked_reasons: ms_blocked_reasons, kind: int) -> str:
    """Return the reason that the worker of that kind published last."""
    into = ffi.new("char[]", TEXT_BYTES)
    lib.ms_blocked_reason_read(blocked_reasons, kind, into)
    return ffi.string(into).decode("utf-8", "replace")
