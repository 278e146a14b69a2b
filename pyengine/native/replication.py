"""The replicator's links in shared memory (csrc/replication.cdef.h)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine._native import ffi, lib
from pyengine.native.control import raise_layout_error

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pyengine._native import ms_link, ms_replication

REPLICATION_BYTES: int = lib.ms_replication_bytes()
LAYOUT_VERSION: int = lib.MS_REPLICATION_LAYOUT_VERSION
LINKS_MAX: int = lib.MS_LINKS_MAX

LINK_NONE: int = lib.MS_LINK_NONE
LINK_CONNECTING: int = lib.MS_LINK_CONNECTING
LINK_READY: int = lib.MS_LINK_READY
LINK_HANDSHAKE: int = lib.MS_LINK_HANDSHAKE
LINK_TRANSFER: int = lib.MS_LINK_TRANSFER
LINK_SHUTDOWN: int = lib.MS_LINK_SHUTDOWN

_TRIES = 100


def view(memory: Buffer) -> ms_replication:
    """`struct ms_replication *` over a mapping, which the caller keeps alive; not yet checked."""
    return ffi.cast("struct ms_replication *", ffi.from_buffer(memory))


def private() -> ms_replication:
    """A block of this process alone: a replicator counts in it where the shared one cannot be had."""
    block = ffi.new("struct ms_replication *")
    lib.ms_replication_format(block, 0)
    return block


def format_replication(replication: ms_replication, epoch: int) -> None:
    """The supervisor, over zeros: no link yet."""
    lib.ms_replication_format(replication, epoch)


def check(replication: ms_replication, mapped_bytes: int) -> None:
    """EngineUnavailableError, naming what is wrong, unless this is a whole object of our layout."""
    raise_layout_error("the replicator's shared object", lib.ms_replication_check(replication, mapped_bytes))


def clear(replication: ms_replication) -> None:
    """The replicator, first of all: whatever a dead one left is gone."""
    lib.ms_replication_clear(replication)


def write_texts(owner: ms_replication | ms_link, address: str, said: str) -> None:
    """The replicator: `address` and `said` of a link or of the whole block; longer ones are cut."""
    lib.ms_replication_write_texts(ffi.addressof(owner, "text_seq"), owner.address, owner.said,
                                   _fitting(address, lib.MS_LINK_ADDRESS_BYTES), _fitting(said, lib.MS_LINK_SAID_BYTES))


def read_texts(owner: ms_replication | ms_link) -> tuple[str, str]:
    """(address, said) as they were at one moment; both empty when their writer died over them."""
    address = ffi.new("char[]", lib.MS_LINK_ADDRESS_BYTES)
    said = ffi.new("char[]", lib.MS_LINK_SAID_BYTES)
    for _ in range(_TRIES):
        if lib.ms_replication_read_texts(ffi.addressof(owner, "text_seq"), owner.address, owner.said, address, said) == 0:
            return ffi.string(address).decode("utf-8", "replace"), ffi.string(said).decode("utf-8", "replace")
    return "", ""


def _fitting(text: str, room_bytes: int) -> bytes:
    return text.replace("\0", " ").encode()[: room_bytes - 1].decode("utf-8", "ignore").encode()
