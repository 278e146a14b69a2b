"""The replicator's links in shared memory: peer, time of connection, positions. For `status`.

    supervisor   create_replication(folder)
    replicator   Replication(folder, writable=True) ... link = replication.open_link(address) ... link.close(detail)
    status       with Replication(folder) as replication: replication.links()

A master has one link for each slave, a slave has one, to its master. No process decides
anything by this object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyengine.arguments import Closing
from pyengine.ipc import shared_objects
from pyengine.ipc.control_block import now_ms
from pyengine.ipc.shared_objects import SharedFolder, SharedObject
from pyengine.native import control as native_control
from pyengine.native import replication as native
from pyengine.native.replication import (
    LINK_CONNECTING,
    LINK_HANDSHAKE,
    LINK_NONE,
    LINK_READY,
    LINK_SHUTDOWN,
    LINK_TRANSFER,
)

if TYPE_CHECKING:
    from pyengine._native import ms_link, ms_replication

LINK_STATE_NAMES = {LINK_CONNECTING: "connecting", LINK_READY: "ready", LINK_HANDSHAKE: "handshake",
                    LINK_TRANSFER: "transfer", LINK_SHUTDOWN: "shutdown"}


@dataclass(frozen=True, slots=True)
class LinkSnapshot:
    """A snapshot of one link. A position is -1 until the peer has reported it; times are wall clock ms."""

    address: str
    state: str
    since_ms: int
    start: int
    sent: int
    acked: int
    acked_ms: int
    bytes: int
    frames: int
    caught_up_ns: int  # monotonic; 0: unknown
    detail: str


@dataclass(frozen=True, slots=True)
class ReplicationSnapshot:
    """A snapshot of the totals of all links since the engine started, and why the last link ended."""

    connections: int
    refused: int
    closed: int
    listening_port: int
    last_address: str
    last_detail: str
    last_detail_ms: int


def create_replication(folder: SharedFolder) -> None:
    """Create the shared object; the supervisor calls it before it publishes the control block."""
    with folder.create(shared_objects.REPLICATION, native.REPLICATION_BYTES) as shared:
        native.format_replication(native.view(shared.memory))


class Link:
    """The replicator's handle of one link; `row` is its `struct ms_link`, which C code updates too."""

    def __init__(self, owner: Replication, number: int, address: str, state: int) -> None:
        self._owner = owner
        self._number = number
        self.row: ms_link = owner.block.links[number]
        self.address = address
        native.write_texts(self.row, address, "")
        for field, value in (("since_ms", now_ms()), ("start", -1), ("sent", -1), ("acked", -1), ("acked_ms", 0),
                             ("bytes", 0), ("frames", 0), ("caught_up_ns", 0), ("state", state)):
            native_control.store(self.row, field, value)

    def state(self, state: int, detail: str = "") -> None:
        """Set the state, and a sentence for `status`."""
        native.write_texts(self.row, self.address, detail)
        native_control.store(self.row, "state", state)

    def start(self, offset: int) -> None:
        """Note the offset at which the transfer on this connection begins."""
        native_control.store(self.row, "start", offset)
        native_control.store(self.row, "sent", offset)

    def sent(self, offset: int, size_bytes: int, frames: int) -> None:
        """Note that the log is sent (or received) up to `offset`, and add `size_bytes` and `frames` to the totals."""
        native_control.store(self.row, "sent", offset)
        native_control.increment(self.row, "bytes", size_bytes)
        native_control.increment(self.row, "frames", frames)

    def acked(self, offset: int) -> None:
        """Note the offset that the slave reported last."""
        native_control.store(self.row, "acked", offset)
        native_control.store(self.row, "acked_ms", now_ms())

    def caught_up(self, at_ns: int) -> None:
        """Note that the peer has all that was committed here at the time `at_ns` (monotonic)."""
        native_control.store(self.row, "caught_up_ns", at_ns)

    def close(self, detail: str = "") -> None:
        """Free the link; `detail` is the reason if this process did not close it on purpose."""
        native_control.store(self.row, "state", LINK_NONE)
        self._owner.release(self._number, self.address, detail)


class Replication(Closing):
    """The shared object, mapped in this process; `block` is its `struct ms_replication *`."""

    def __init__(self, folder: SharedFolder | None, *, writable: bool = False) -> None:
        """Without a folder in private memory, for a replicator that cannot open the shared one.

        EngineUnavailableError when the object does not exist, has another layout, or belongs to another user.
        """
        self.block: ms_replication
        self._shared: SharedObject | None = None
        if folder is None:
            self.block = native.private()
        else:
            self._shared, self.block = folder.open_checked(shared_objects.REPLICATION, native.view, native.check, writable=writable)
        self._free = list(range(native.LINKS_MAX - 1, -1, -1))
        if writable:
            native.clear(self.block)

    # ---- the replicator ---------------------------------------------------------

    def open_link(self, address: str, state: int = LINK_READY) -> Link | None:
        """Take a free link; None when all are taken."""
        if not self._free:
            return None
        return Link(self, self._free.pop(), address, state)

    def release(self, number: int, address: str, detail: str) -> None:
        """Free a link, and note why it ended, unless it was closed on purpose; for Link.close()."""
        self._free.append(number)
        if detail:
            self.count("closed")
            native.write_texts(self.block, address, detail)
            native_control.store(self.block, "detail_ms", now_ms())

    def count(self, field: str) -> None:
        """Add 1 to `connections`, `refused` or `closed`."""
        native_control.increment(self.block, field)

    def listening(self, port: int) -> None:
        """Note the port at which a master accepts slaves."""
        native_control.store(self.block, "listening_port", port)

    # ---- `status` --------------------------------------------------------------

    def links(self) -> list[LinkSnapshot]:
        """Return a snapshot of every open link."""
        return [snapshot for block in self.block.links if (snapshot := _snapshot(block)) is not None]

    def snapshot(self) -> ReplicationSnapshot:
        """Return a snapshot of the totals."""
        block = self.block
        address, detail = native.read_texts(block)
        numbers = {field: native_control.load(block, field) for field in ("connections", "refused", "closed", "listening_port")}
        detail_ms = native_control.load(block, "detail_ms")
        return ReplicationSnapshot(**numbers, last_address=address, last_detail=detail, last_detail_ms=detail_ms)

    def close(self) -> None:
        if self._shared is not None:
            del self.block  # a pointer into the mapping
            self._shared.close()
            self._shared = None


def _snapshot(block: ms_link) -> LinkSnapshot | None:
    state = native_control.load(block, "state")
    if state not in LINK_STATE_NAMES:
        return None
    address, detail = native.read_texts(block)
    numbers = {field: native_control.load(block, field)
               for field in ("since_ms", "start", "sent", "acked", "acked_ms", "bytes", "frames", "caught_up_ns")}
    return LinkSnapshot(address=address, state=LINK_STATE_NAMES[state], detail=detail, **numbers)
