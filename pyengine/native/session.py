"""One producer's session object (csrc/session.cdef.h)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine import arguments
from pyengine._native import ffi, lib
from pyengine.errors import EngineUnavailableError, UsageError

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pyengine._native import ms_session

RING_BYTES_MIN = 64 * 1024
RING_BYTES_MAX = 1 << 30


def check_ring_bytes(ring_bytes: int) -> None:
    """UsageError for what is no size of a ring."""
    if not RING_BYTES_MIN <= arguments.integer(ring_bytes, "ring_bytes") <= RING_BYTES_MAX or ring_bytes & (ring_bytes - 1):
        raise UsageError(f"ring_bytes = {ring_bytes}: give a power of two from {RING_BYTES_MIN} to {RING_BYTES_MAX}")


def session_bytes(ring_bytes: int) -> int:
    """Size of the object of a session with a ring of `ring_bytes` (a power of two)."""
    return lib.ms_session_bytes(ring_bytes)


def view(memory: Buffer) -> ms_session:
    """`struct ms_session *` over a writable mapping that the caller keeps alive."""
    return ffi.cast("struct ms_session *", ffi.from_buffer(memory))


def format_session(session: ms_session, ring_bytes: int, slot: int, generation: int, epoch: int) -> None:
    """Make zeroed memory a session; readers accept it from here on."""
    lib.ms_session_format(session, ring_bytes, slot, generation, epoch)


def check_session(session: ms_session, mapped_bytes: int) -> None:
    """Raise EngineUnavailableError unless this is a session object of our layout."""
    code = lib.ms_session_check(session, mapped_bytes)
    if code:
        raise EngineUnavailableError(f"the session object is not usable (code {code}): connect again")
