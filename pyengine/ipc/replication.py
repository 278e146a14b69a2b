"""The replicator's links in shared memory: peer, time of connection, positions. For `status`.

    supervisor   create_replication(folder)
    replicator   Replication(folder, writable=True) ... link = replication.open_link(address) ... link.close(detail)
    status       with Replication(folder) as replication: replication.links()

A master has one link for each slave, a slave has one, to its master. No process decides
anything by this object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
_NEW_LINK = {"since_ms": 0, "start": -1, "sent": -1, "acked": -1, "acked_ms": 0, "bytes": 0, "frames": 0, "caught_up_ns": 0}


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
        for field, value in (_NEW_LINK | {"since_ms": now_ms(), "state": state}).items():
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

    def links(self) -> list[dict[str, Any]]:
        """Return every open link. A position is -1 until the peer has reported it; `caught_up_ns` is monotonic, 0: unknown."""
        found = []
        for block in self.block.links:
            if (state := native_control.load(block, "state")) in LINK_STATE_NAMES:
                address, detail = native.read_texts(block)
                numbers = {field: native_control.load(block, field) for field in _NEW_LINK}
                found.append({"address": address, "state": LINK_STATE_NAMES[state], **numbers, "detail": detail})
        return found

    def totals(self) -> dict[str, Any]:
        """Return the totals of all links since the engine started, and why the last link ended."""
        address, detail = native.read_texts(self.block)
        numbers = {field: native_control.load(self.block, field) for field in ("connections", "refused", "closed", "listening_port")}
        closed = {"address": address, "detail": detail, "at_ms": native_control.load(self.block, "detail_ms")} if detail else None
        return numbers | {"listening_port": numbers["listening_port"] or None, "last_closed": closed}

    def close(self) -> None:
        if self._shared is not None:
            del self.block  # a pointer into the mapping
            self._shared.close()
            self._shared = None
