"""The shared control block (csrc/control.cdef.h), and why each worker is blocked (csrc/blocked_reasons.cdef.h).

A mapped block is a cffi pointer. Read its shared fields with load() and write them with store(), which carry the
memory order.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from pyengine._native import ffi, lib
from pyengine.errors import EngineUnavailableError, OtherLayoutError, shown

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pyengine._native import CData, Struct, ms_blocked_reasons, ms_control, ms_identity, ms_position

_S = TypeVar("_S", bound="Struct")

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
GRPC = lib.MS_GRPC

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

REFUSE_STOPPING = lib.MS_REFUSE_PUTS_STOPPING
REFUSE_DISK_FULL = lib.MS_REFUSE_PUTS_DISK_FULL
REFUSE_SLAVE = lib.MS_REFUSE_PUTS_SLAVE
REFUSE_UNWRITABLE = lib.MS_REFUSE_PUTS_UNWRITABLE
REFUSE_FENCED = lib.MS_REFUSE_PUTS_FENCED
REFUSE_LOST = lib.MS_REFUSE_PUTS_LOST
publish = lib.ms_control_publish  # let other processes attach: store the version and the magic, last of all fields
# Move `confirm`, raise confirm_seq and wake the puts that wait for it; called by the replicator.
publish_confirm = lib.ms_control_publish_confirm


class SharedStruct(Generic[_S]):
    """The struct of one kind of shared object; `what` names the object in errors.

    `check`: its ms_*_check function; without one the object has a `magic` and a layout `version`, and no more is checked.
    """

    def __init__(self, what: str, struct: str, check: Callable[[_S, int], int] | None = None, *, magic: bytes = b"",
                 version: int = 0) -> None:
        self.size_bytes: int = ffi.sizeof(struct)
        self._what, self._pointer = what, f"{struct} *"
        self._head = int.from_bytes(magic, "big"), version
        self._check = check or (lambda object, mapped_bytes: lib.ms_layout_check(object, mapped_bytes, *self._head, self.size_bytes))

    def publish(self, struct: _S) -> None:
        """Store version and magic, last of all: from then on other processes accept the object."""
        lib.ms_layout_publish(struct, *self._head)

    def private(self) -> _S:
        """Return the struct, all zeros, in private memory, for a process that cannot have the shared one."""
        return cast(_S, ffi.new(self._pointer))

    def view(self, memory: Buffer) -> _S:
        """Return an unchecked pointer to the struct over a mapping, which the caller keeps alive."""
        return cast(_S, ffi.cast(self._pointer, ffi.from_buffer(memory)))

    def check(self, struct: _S, mapped_bytes: int) -> None:
        """Raise EngineUnavailableError, which names the fault, unless the object is complete and of this build's layout."""
        code = self._check(struct, mapped_bytes)
        if code == -errno.EPROTO:
            raise EngineUnavailableError(f"{self._what}: not published yet, or not one of pyengine (wrong magic)")
        if code == -errno.EBADMSG:
            raise OtherLayoutError(f"{self._what}: another layout than this version's: use the version of the running engine")
        if code:
            raise EngineUnavailableError(f"{self._what}: too short")


_SHARED: SharedStruct[ms_control] = SharedStruct("the control block", "struct ms_control", lib.ms_control_check)
view_control = _SHARED.view


def copy_identity(control: ms_control) -> ms_identity:
    """Return a copy of the identity in private memory."""
    copy = ffi.new("struct ms_identity *")
    ffi.memmove(copy, ffi.addressof(control, "identity"), ffi.sizeof("struct ms_identity"))
    return copy


def has_identity(control: ms_control, copy: ms_identity) -> bool:
    """Whether no byte of the identity differs from the copy."""
    return bool(ffi.buffer(ffi.addressof(control, "identity"))[:] == ffi.buffer(copy)[:])


def index_progress_copy(control: ms_control) -> bytes:
    """Return a copy of a dead reputter's undo record of an unfinished index put, for recovery."""
    return bytes(ffi.buffer(control.index_progress))


def check_control(control: ms_control, mapped_bytes: int) -> None:
    """Raise EngineUnavailableError, which names the fault, unless the block is published and of this build's layout."""
    try:
        _SHARED.check(control, mapped_bytes)
    except OtherLayoutError:
        raise OtherLayoutError(
            f"the engine was started by another version of pyengine (its control block has layout {control.identity.layout_version}, "
            f"this version's is {lib.MS_CONTROL_LAYOUT_VERSION}): use that version, or stop the engine and start it with this one"
        ) from None


def used_sessions(control: ms_control, slots: int) -> list[int]:
    """Return which of the first `slots` session slots are not free."""
    used = ffi.new("uint32_t[]", SESSION_SLOTS)
    return list(used[0:lib.ms_control_used_sessions(control, slots, used)])


def load_position(position: ms_position) -> int:
    """Load a `struct ms_position` with acquire order: everything below the value is readable."""
    return lib.ms_load_i64(ffi.addressof(position, "value"))


def store_position(position: ms_position, value: int) -> None:
    """Store a position with release order; only the one process that writes it may call this."""
    lib.ms_store_i64(ffi.addressof(position, "value"), value)


# How fields are accessed, by their C type: the pointer's type, whether it has 32 bits, whether it is unsigned.
_ACCESS = {"int32_t": ("uint32_t *", True, False), "uint32_t": ("uint32_t *", True, True),
           "int64_t": ("int64_t *", False, False), "uint64_t": ("int64_t *", False, True)}


def _field(struct: Struct, name: str) -> tuple[CData, bool, bool]:
    """Return a field's address, whether it has 32 bits, and whether it is unsigned."""
    address = ffi.addressof(struct, name)
    pointer, is_short, is_unsigned = _ACCESS[ffi.typeof(address).item.cname]
    return ffi.cast(pointer, address), is_short, is_unsigned


def load(struct: Struct, field: str) -> int:
    """Load a 32- or 64-bit field by name, with acquire order."""
    address, is_short, is_unsigned = _field(struct, field)
    if is_short:
        value = lib.ms_load_u32(address)
        return value if is_unsigned else (value ^ 0x80000000) - 0x80000000
    value = lib.ms_load_i64(address)
    return value & 0xFFFFFFFFFFFFFFFF if is_unsigned else value


def store(struct: Struct, field: str, value: int) -> None:
    """Store a 32- or 64-bit field by name, with release order."""
    address, is_short, _ = _field(struct, field)
    if is_short:
        lib.ms_store_u32(address, value & 0xFFFFFFFF)
    else:
        lib.ms_store_i64(address, value - (1 << 64) if value >= 1 << 63 else value)


def loader(struct: Struct, field: str) -> Callable[[], int]:
    """Return a function that loads an int64 or uint32 field, for loops: it looks up the address once."""
    address, is_short, _ = _field(struct, field)
    return partial(lib.ms_load_u32 if is_short else lib.ms_load_i64, address)


def storer(struct: Struct, field: str) -> Callable[[int], None]:
    """Return a function that stores an int64 or uint32 field, for loops."""
    address, is_short, _ = _field(struct, field)
    return partial(lib.ms_store_u32 if is_short else lib.ms_store_i64, address)


def compare_and_swap(struct: Struct, field: str, expected: int, value: int) -> bool:
    """Replace `expected` in the field with `value`; return False, and change nothing, if it holds something else."""
    address, is_short, _ = _field(struct, field)
    return bool((lib.ms_cas_u32 if is_short else lib.ms_cas_i64)(address, expected, value))


def add(struct: Struct, field: str, by: int = 1) -> int:
    """Add to an unsigned 32-bit field atomically; return the new value."""
    return lib.ms_add_u32(ffi.cast("uint32_t *", ffi.addressof(struct, field)), by)


def increment(struct: Struct, field: str, by: int = 1) -> None:
    """Add to a counter that only this process writes."""
    store(struct, field, load(struct, field) + by)


def refuse_puts(control: ms_control, bits: int, on: bool = True) -> None:
    """Set or clear REFUSE_ bits by compare-and-swap, because several processes own one bit each."""
    while True:
        before = load(control.state, "refuse_puts")
        after = before | bits if on else before & ~bits
        if after == before or compare_and_swap(control.state, "refuse_puts", before, after):
            return


def committed_slot(control: ms_control) -> tuple[int, int]:
    """Return a consistent pair: `wrote`, and the store time in ms of the last record below it."""
    found = ffi.new("struct ms_commit_totals *")
    lib.ms_control_committed_slot(control, found)
    return found.wrote, found.store_timestamp_ms


def put_totals(control: ms_control) -> tuple[int, int]:
    """Return (messages, bytes) put since the engine's start, both as of the same committed pass."""
    found = ffi.new("struct ms_commit_totals *")
    lib.ms_control_committed_slot(control, found)
    return found.put_messages, found.put_bytes


def freeze(control: ms_control, kind: int, error_number: int, reason: str) -> bool:
    """Make the store read-only in every process, permanently; return whether this call was the first to do so.

    The first failed sync freezes `flushed`: it is never retried (docs/promises.md, 2).
    """
    return bool(lib.ms_control_freeze(control, kind, error_number, encoded(reason, lib.MS_REASON_BYTES)))


def set_reason(control: ms_control, text: str) -> None:
    """Set why the store starts degraded; called by the supervisor before it publishes the block."""
    ffi.memmove(control.state.reason, padded(text, lib.MS_REASON_BYTES), lib.MS_REASON_BYTES)


def reason(control: ms_control) -> str:
    """Return why the store is frozen, read-only or degraded; "" if it is not."""
    return unpadded(bytes(ffi.buffer(control.state.reason)))


_BLOCKED: SharedStruct[ms_blocked_reasons] = SharedStruct(
    "the workers' blocked reasons", "struct ms_blocked_reasons", magic=b"MSBLOCKD", version=lib.MS_BLOCKED_REASONS_LAYOUT_VERSION)
view_blocked_reasons, check_blocked_reasons = _BLOCKED.view, _BLOCKED.check
publish_blocked_reasons = _BLOCKED.publish
BLOCKED_REASONS_BYTES = _BLOCKED.size_bytes
private_blocked_reasons = _BLOCKED.private  # for a worker that finds no shared block
BLOCKED_REASON_BYTES: int = lib.MS_BLOCKED_REASON_BYTES


def write_blocked_reason(block: ms_blocked_reasons, kind: int, text: str) -> None:
    """Publish why the worker of that kind, which calls this, is blocked; "" if it is not."""
    line = block.worker[kind]
    write_text(line, "changes", line.text, padded(text, BLOCKED_REASON_BYTES))


def read_blocked_reason(block: ms_blocked_reasons, kind: int) -> str:
    """Return the reason that the worker of that kind published last."""
    line = block.worker[kind]
    return unpadded(read_text(line, "changes", line.text, BLOCKED_REASON_BYTES)[0])


def write_text(owner: Struct, changes: str, place: CData, text: bytes) -> None:
    """Replace a text that others read whole (csrc/shared_text.cdef.h); `changes`: the field of `owner` with its number."""
    lib.ms_text_write(ffi.addressof(owner, changes), place, text, len(text))


def read_text(owner: Struct, changes: str, place: CData, size_bytes: int) -> tuple[bytes, bool]:
    """Return such a text as it is, and whether it is whole: not if its writer died while it wrote."""
    copy = ffi.new("char[]", size_bytes)
    is_whole = lib.ms_text_read(ffi.addressof(owner, changes), place, copy, size_bytes)
    return bytes(ffi.buffer(copy)), is_whole != 0


def encoded(text: str, room_bytes: int) -> bytes:
    """Return as much of the text as fits into a C string of `room_bytes`; "?" replaces what a path has beside UTF-8."""
    return shown(text).replace("\0", " ").encode("utf-8", "replace")[: room_bytes - 1].decode("utf-8", "ignore").encode()


def padded(text: str, room_bytes: int) -> bytes:
    """Return encoded() with NULs to `room_bytes`."""
    return encoded(text, room_bytes).ljust(room_bytes, b"\0")


def unpadded(text: bytes) -> str:
    """Decode a C string of shared memory."""
    return text.partition(b"\0")[0].decode("utf-8", "replace")


def raise_os_error(code: int, path: str | None = None) -> None:
    """Raise the OSError of a negative `code`; do nothing for others."""
    if code < 0:
        raise OSError(-code, os.strerror(-code), path)
