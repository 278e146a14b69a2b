"""The control block as Python sees it (csrc/control.cdef.h).

A mapped block is a cffi pointer whose fields may be *named* here, but a shared
field is read with load() and written with store(), which carry the memory order.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from pyengine._native import ffi, lib
from pyengine.errors import EngineUnavailableError, OtherLayoutError

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pyengine._native import Struct, ms_control, ms_position

CONTROL_BYTES: int = ffi.sizeof("struct ms_control")
LAYOUT_VERSION: int = lib.MS_CONTROL_LAYOUT_VERSION
SESSION_SLOTS: int = lib.MS_SESSION_SLOTS
POOL_BUFFERS_MAX: int = lib.MS_POOL_BUFFERS_MAX

WORKER_KINDS: int = lib.MS_WORKER_KINDS
SUPERVISOR = lib.MS_SUPERVISOR
WRITER = lib.MS_WRITER
COMMITTER = lib.MS_COMMITTER
FLUSHER = lib.MS_FLUSHER
REPUTTER = lib.MS_REPUTTER
ALLOCATOR = lib.MS_ALLOCATOR
CHECKPOINTER = lib.MS_CHECKPOINTER
CLEANER = lib.MS_CLEANER
SCHEDULER = lib.MS_SCHEDULER
REPLICATOR = lib.MS_REPLICATOR
GATEWAY = lib.MS_GATEWAY

STATE_STOPPED = lib.MS_STATE_STOPPED
STATE_RECOVERING = lib.MS_STATE_RECOVERING
STATE_RUNNING = lib.MS_STATE_RUNNING
STATE_READ_ONLY = lib.MS_STATE_READ_ONLY
STATE_DEGRADED = lib.MS_STATE_DEGRADED
STATE_STOPPING = lib.MS_STATE_STOPPING

MODE_MAPPED = lib.MS_MODE_MAPPED
MODE_POOL = lib.MS_MODE_POOL
MODE_SYNC = lib.MS_MODE_SYNC

ASYNC_MASTER = lib.MS_ROLE_ASYNC_MASTER
SYNC_MASTER = lib.MS_ROLE_SYNC_MASTER
SLAVE = lib.MS_ROLE_SLAVE

WORKER_ABSENT = lib.MS_WORKER_ABSENT
WORKER_STARTING = lib.MS_WORKER_STARTING
WORKER_READY = lib.MS_WORKER_READY
WORKER_STOPPING = lib.MS_WORKER_STOPPING
WORKER_FAILED = lib.MS_WORKER_FAILED

SESSION_FREE = lib.MS_SESSION_FREE
SESSION_OPEN = lib.MS_SESSION_OPEN
SESSION_DEAD = lib.MS_SESSION_DEAD

REFUSE_STOPPING = 1
REFUSE_DISK_FULL = 2
REFUSE_SLAVE = 4
REFUSE_UNWRITABLE = 8
REFUSE_FENCED = 16


def view_control(memory: Buffer) -> ms_control:
    """`struct ms_control *` over a mapping (mmap or buffer), not yet checked.

    The caller keeps `memory` alive as long as the pointer is used.
    """
    return ffi.cast("struct ms_control *", ffi.from_buffer(memory))


def index_progress_copy(control: ms_control) -> bytes:
    """The undo of the index put under way, of a reputter that is dead: a copy, for recovery."""
    return bytes(ffi.buffer(control.index_progress))


def check_control(control: ms_control, mapped_bytes: int) -> None:
    """Raise EngineUnavailableError, naming what is wrong, unless this is a published block of our layout."""
    code = lib.ms_control_check(control, mapped_bytes)
    if code == -errno.EBADMSG:
        raise OtherLayoutError(
            f"the engine was started by another version of pyengine (its control block has layout {control.identity.layout_version}, "
            f"this version's is {lib.MS_CONTROL_LAYOUT_VERSION}): use that version, or stop the engine and start it with this one"
        )
    raise_layout_error("the control block", code)


def publish(control: ms_control) -> None:
    """From here on others can attach: version and magic are stored last."""
    lib.ms_control_publish(control)


def used_sessions(control: ms_control, slots: int) -> list[int]:
    """Which of the first `slots` session slots are not free."""
    used = ffi.new("uint32_t[]", SESSION_SLOTS)
    return list(used[0:lib.ms_control_used_sessions(control, slots, used)])


def load_position(position: ms_position) -> int:
    """Acquire-load of a `struct ms_position`: everything below the value is readable."""
    return lib.ms_load_i64(ffi.addressof(position, "value"))


def store_position(position: ms_position, value: int) -> None:
    """Release-store; the one writing process of the position calls it."""
    lib.ms_store_i64(ffi.addressof(position, "value"), value)


def load(struct: Struct, field: str) -> int:
    """Acquire-load of a 32- or 64-bit field by name."""
    address = ffi.addressof(struct, field)
    if ffi.sizeof(ffi.typeof(address).item) == 4:
        value = lib.ms_load_u32(ffi.cast("uint32_t *", address))
        return value if ffi.typeof(address).item.cname.startswith("uint") else (value ^ 0x80000000) - 0x80000000
    value = lib.ms_load_i64(ffi.cast("int64_t *", address))
    return value if not ffi.typeof(address).item.cname.startswith("uint") else value & 0xFFFFFFFFFFFFFFFF


def store(struct: Struct, field: str, value: int) -> None:
    """Release-store of a 32- or 64-bit field by name."""
    address = ffi.addressof(struct, field)
    if ffi.sizeof(ffi.typeof(address).item) == 4:
        lib.ms_store_u32(ffi.cast("uint32_t *", address), value & 0xFFFFFFFF)
    else:
        if value >= 1 << 63:
            value -= 1 << 64
        lib.ms_store_i64(ffi.cast("int64_t *", address), value)


def loader(struct: Struct, field: str) -> Callable[[], int]:
    """load() of an int64 or uint32 field as a call of its own, for loops: the address is looked up once."""
    address = ffi.addressof(struct, field)
    if ffi.sizeof(ffi.typeof(address).item) == 4:
        return partial(lib.ms_load_u32, ffi.cast("uint32_t *", address))
    return partial(lib.ms_load_i64, ffi.cast("int64_t *", address))


def storer(struct: Struct, field: str) -> Callable[[int], None]:
    """store() of an int64 or uint32 field as a call of its own, for loops."""
    address = ffi.addressof(struct, field)
    if ffi.sizeof(ffi.typeof(address).item) == 4:
        return partial(lib.ms_store_u32, ffi.cast("uint32_t *", address))
    return partial(lib.ms_store_i64, ffi.cast("int64_t *", address))


def compare_and_swap(struct: Struct, field: str, expected: int, value: int) -> bool:
    """True when the field held `expected` and now holds `value`."""
    address = ffi.addressof(struct, field)
    if ffi.sizeof(ffi.typeof(address).item) == 4:
        return bool(lib.ms_cas_u32(ffi.cast("uint32_t *", address), expected, value))
    return bool(lib.ms_cas_i64(ffi.cast("int64_t *", address), expected, value))


def add(struct: Struct, field: str, by: int = 1) -> int:
    """Atomic add to an unsigned 32-bit field; the new value."""
    return lib.ms_add_u32(ffi.cast("uint32_t *", ffi.addressof(struct, field)), by)


def increment(struct: Struct, field: str, by: int = 1) -> None:
    """Add to a counter that this process alone writes."""
    store(struct, field, load(struct, field) + by)


def refuse_puts(control: ms_control, bits: int, on: bool = True) -> None:
    """Set or clear REFUSE_ bits; several processes own one each, so never by load and store."""
    while True:
        before = load(control.state, "refuse_puts")
        after = before | bits if on else before & ~bits
        if after == before or compare_and_swap(control.state, "refuse_puts", before, after):
            return


def committed_slot(control: ms_control) -> tuple[int, int]:
    """(wrote, store time in ms of the last record below it), one consistent picture."""
    pair = ffi.new("int64_t[2]")
    lib.ms_control_committed_slot(control, pair, pair + 1)
    return pair[0], pair[1]


def flush_pair(control: ms_control) -> tuple[int, int]:
    """(flushed, store time in ms of the last record below it), one consistent picture."""
    pair = ffi.new("int64_t[2]")
    lib.ms_control_flush_pair(control, pair, pair + 1)
    return pair[0], pair[1]


def publish_flushed(control: ms_control, flushed: int, store_timestamp_ms: int) -> None:
    """The flusher: publish the pair, move `flushed`, raise flush_seq, wake its sleepers."""
    lib.ms_control_publish_flushed(control, flushed, store_timestamp_ms)


def publish_confirm(control: ms_control, confirm: int) -> None:
    """The replicator: move `confirm`, raise confirm_seq, wake the puts that wait for it."""
    lib.ms_control_publish_confirm(control, confirm)


def freeze(control: ms_control, kind: int, error_number: int, reason: str) -> bool:
    """Turn the store read-only in every process, for good; True when this call was the first to do so.

    The first failed sync freezes `flushed` (docs/promises.md, 2): no retry.
    """
    return bool(lib.ms_control_freeze(control, kind, error_number, reason.encode()[:240]))


def set_reason(control: ms_control, text: str) -> None:
    """The supervisor, before the block is published: why the store comes up degraded."""
    data = text.encode()[:255].decode("utf-8", "ignore").encode()
    ffi.memmove(control.state.reason, data + b"\0", len(data) + 1)


def reason(control: ms_control) -> str:
    """Why the store is frozen, read-only or degraded; empty when it is not."""
    return ffi.string(ffi.cast("char *", control.state.reason), 255).decode("utf-8", "replace")


def raise_layout_error(what: str, code: int) -> None:
    """EngineUnavailableError that names `what`, for the answer of a ms_*_check function; nothing for 0."""
    if code == -errno.EPROTO:
        raise EngineUnavailableError(f"{what}: not published yet, or not ours (wrong magic)")
    if code == -errno.EBADMSG:
        raise OtherLayoutError(f"{what}: another layout than this version's: use the version of the running engine")
    if code:
        raise EngineUnavailableError(f"{what}: too short")
