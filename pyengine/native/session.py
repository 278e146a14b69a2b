"""One producer's session object, its guard in the writer, and the count of producers (csrc/session.cdef.h and others)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pyengine import arguments
from pyengine._native import ffi, lib
from pyengine.errors import UsageError
from pyengine.native.control import raise_layout_error

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pyengine._native import CData, ms_session

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
    raise_layout_error("the session object", lib.ms_session_check(session, mapped_bytes))


def install_guard(elsewhere: CData = ffi.NULL) -> None:
    """Take SIGBUS for this process: a fault inside a guarded session lays zeros over it, any other goes on as before.

    Those others are counted in `elsewhere`, a `uint64_t *` that outlives the process.
    """
    code = lib.ms_session_guard_install(elsewhere)
    if code:
        raise OSError(-code, os.strerror(-code))


def guard(slot: int, memory: CData, size_bytes: int) -> None:
    """Guard `slot`'s session, a cffi pointer to its mapping's first byte."""
    lib.ms_session_guard_add(slot, ffi.cast("void *", memory), size_bytes)


def unguard(slot: int) -> None:
    """Forget it, before it is unmapped."""
    lib.ms_session_guard_remove(slot)


def is_broken(slot: int) -> bool:
    """Whether the session's memory was taken away and private zeros are there now."""
    return bool(lib.ms_session_guard_broken(slot))


def count_producer(semaphore_id: int, by: int) -> None:
    """Count this process in (1) or out (-1); the kernel counts it out if it dies. OSError if that fails."""
    code = lib.ms_attach_count_add(semaphore_id, by)
    if code:
        raise OSError(-code, os.strerror(-code))


def producer_count(semaphore_id: int) -> int:
    """The number of living producers. OSError if there is no such semaphore."""
    value = lib.ms_attach_count_get(semaphore_id)
    if value < 0:
        raise OSError(-value, os.strerror(-value))
    return value
