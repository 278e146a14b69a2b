"""Why each worker is blocked, in shared memory (csrc/blocked_reasons.cdef.h)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine._native import ffi, lib
from pyengine.native.control import encoded, raise_layout_error

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pyengine._native import ms_blocked_reasons

BLOCKED_REASONS_BYTES: int = ffi.sizeof("struct ms_blocked_reasons")
LAYOUT_VERSION: int = lib.MS_BLOCKED_REASONS_LAYOUT_VERSION
TEXT_BYTES: int = lib.MS_BLOCKED_REASON_BYTES


def view(memory: Buffer) -> ms_blocked_reasons:
    """Return an unchecked `struct ms_blocked_reasons *` over a mapping, which the caller keeps alive."""
    return ffi.cast("struct ms_blocked_reasons *", ffi.from_buffer(memory))


def private() -> ms_blocked_reasons:
    """Return a block in private memory, for a worker that finds no shared one."""
    blocked_reasons = ffi.new("struct ms_blocked_reasons *")
    lib.ms_blocked_reasons_format(blocked_reasons)
    return blocked_reasons


def format_blocked_reasons(blocked_reasons: ms_blocked_reasons) -> None:
    """Initialize a zeroed block, with no worker blocked; called by the supervisor."""
    lib.ms_blocked_reasons_format(blocked_reasons)


def check(blocked_reasons: ms_blocked_reasons, mapped_bytes: int) -> None:
    """Raise EngineUnavailableError, which names the fault, unless the object is complete and of this build's layout."""
    raise_layout_error("the workers' blocked reasons", lib.ms_blocked_reasons_check(blocked_reasons, mapped_bytes))


def write(blocked_reasons: ms_blocked_reasons, kind: int, text: str) -> None:
    """Publish why the worker of that kind, which calls this, is blocked; "" if it is not."""
    lib.ms_blocked_reason_write(blocked_reasons, kind, encoded(text, TEXT_BYTES))


def read(blocked_reasons: ms_blocked_reasons, kind: int) -> str:
    """Return the reason that the worker of that kind published last."""
    into = ffi.new("char[]", TEXT_BYTES)
    lib.ms_blocked_reason_read(blocked_reasons, kind, into)
    return ffi.string(into).decode("utf-8", "replace")
