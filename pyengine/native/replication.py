"""The replicator's C loops: a master's connections, a slave's rounds (csrc/replication, ha_links, ha_follow .cdef.h).

C sends a master's ordinary frames and takes ordinary reports; Python does the rest. A slave's round is: receive, append,
report. The links are in shared memory, for `status`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine._native import ffi, lib
from pyengine.native.control import SharedStruct, padded, read_text, store, unpadded, write_text
from pyengine.native.failpoints import failpoint

if TYPE_CHECKING:
    from pyengine._native import ms_control, ms_ha_follow, ms_ha_link, ms_link, ms_replication, ms_seal
    from pyengine.native.recorder import Recorder
    from pyengine.native.session import ProducerSession
    from pyengine.native.waiting import Latch

_SHARED: SharedStruct[ms_replication] = SharedStruct("the replicator's shared object", "struct ms_replication", magic=b"MSREPLIC",
                                                     version=lib.MS_REPLICATION_LAYOUT_VERSION)
view, check = _SHARED.view, _SHARED.check
private = _SHARED.private  # for a replicator that cannot have the shared block
REPLICATION_BYTES = _SHARED.size_bytes
LINKS_MAX: int = lib.MS_LINKS_MAX

LINK_NONE: int = lib.MS_LINK_NONE
LINK_CONNECTING: int = lib.MS_LINK_CONNECTING
LINK_READY: int = lib.MS_LINK_READY
LINK_HANDSHAKE: int = lib.MS_LINK_HANDSHAKE
LINK_TRANSFER: int = lib.MS_LINK_TRANSFER
LINK_SHUTDOWN: int = lib.MS_LINK_SHUTDOWN
_ADDRESS_BYTES, _DETAIL_BYTES = lib.MS_LINK_ADDRESS_BYTES, lib.MS_LINK_DETAIL_BYTES  # one follows the other
format_replication = _SHARED.publish  # initialize a zeroed block without links; for the supervisor


def write_texts(owner: ms_replication | ms_link, address: str, detail: str) -> None:
    """Publish `address` and `detail` of a link or of the whole block; texts that are too long are truncated."""
    write_text(owner, "text_seq", owner.address, padded(address, _ADDRESS_BYTES) + padded(detail, _DETAIL_BYTES))


def read_texts(owner: ms_replication | ms_link) -> tuple[str, str]:
    """Return a consistent (address, detail); both are empty if their writer died while it wrote them."""
    texts, are_whole = read_text(owner, "text_seq", owner.address, _ADDRESS_BYTES + _DETAIL_BYTES)
    return (unpadded(texts[:_ADDRESS_BYTES]), unpadded(texts[_ADDRESS_BYTES:])) if are_whole else ("", "")


def clear(block: ms_replication) -> None:
    """Remove the links of a dead replicator; a new replicator calls this first."""
    for link in block.links:
        store(link, "state", LINK_NONE)
        failpoint("link_cleared")
        write_texts(link, "", "")
    store(block, "listening_port", 0)
    if block.text_seq & 1:
        write_texts(block, "", "")


PYTHON: int = lib.MS_HA_PYTHON
PLAIN: int = lib.MS_HA_PLAIN
QUIET: int = lib.MS_HA_QUIET

SHORTER: int = lib.MS_HA_SHORTER
UNSENT: int = lib.MS_HA_UNSENT


class Seal:
    """Makes and checks the seals of one direction of a link (csrc/seal.cdef.h), under that link's lock."""

    BYTES: int = lib.MS_SEAL_BYTES
    KEY_BYTES = 16

    def __init__(self, key: bytes) -> None:
        self.pointer: ms_seal = ffi.new("struct ms_seal *")
        for place in range(2):
            self.pointer.key[place] = int.from_bytes(key[8 * place : 8 * place + 8], "little")

    def put(self, buffer: memoryview, at: int, size_bytes: int) -> None:
        """Write the seal of the part at `at` directly after the part, and count it."""
        part = ffi.from_buffer("uint8_t[]", buffer[at : at + size_bytes + self.BYTES], require_writable=True)
        lib.ms_seal_put(self.pointer, 0, part, size_bytes)
        lib.ms_seal_count(self.pointer, 1)

    def sealed(self, part: bytes) -> bytes:
        """Return the part followed by its seal, and count it."""
        room = bytearray(part) + bytes(self.BYTES)
        self.put(memoryview(room), 0, len(part))
        return bytes(room)

    def take(self, sealed: memoryview | bytes) -> bool:
        """Return whether `sealed` is the next part with its right seal; if so, count it."""
        part = ffi.from_buffer("uint8_t[]", sealed)
        fits: bool = lib.ms_seal_fits(self.pointer, 0, part, len(sealed) - self.BYTES) != 0
        if fits:
            lib.ms_seal_count(self.pointer, 1)
        return fits


class _Sealed:
    """What sends and receives under seals."""

    fields: ms_ha_link | ms_ha_follow

    def seal(self, out: Seal | None, into: Seal | None) -> None:
        """Seal what is sent with `out` and check what is received with `into` from now on."""
        self._seals = out, into  # C has pointers to them
        self.fields.seal_out = ffi.NULL if out is None else out.pointer
        self.fields.seal_in = ffi.NULL if into is None else into.pointer


class HALink(_Sealed):
    """One connection, with its `struct ms_ha_link` as `fields`; used under the lock of its HALinks."""

    def __init__(self, row: ms_link, fd: int, batch_bytes: int, now_ns: int) -> None:
        self.fields: ms_ha_link = ffi.new("struct ms_ha_link *")
        self._frame = ffi.new("uint8_t[]", batch_bytes + lib.MS_HA_HEADER_BYTES + 2 * Seal.BYTES)
        fields = self.fields
        fields.row, fields.frame, fields.fd = ffi.addressof(row), self._frame, fd
        fields.start = fields.reported = fields.acked = -1
        fields.read_ns = fields.written_ns = now_ns

    def take_report(self, report: int, sent: int) -> int:
        """Take a report, when everything below `sent` was sent; return SHORTER, UNSENT, 1 if it confirms, or 0 for nothing new."""
        return lib.ms_ha_take_report(self.fields, report, sent)

    def take_input(self) -> bytes | int | None:
        """Return what C received and left to Python: bytes (empty at the connection's end), an errno, or None."""
        if not self.fields.has_input:
            return None
        self.fields.has_input = 0
        count = self.fields.input_bytes
        return -count if count < 0 else bytes(ffi.buffer(self.fields.input, count))

    def take_half_frame(self) -> tuple[bytes, int]:
        """Return the frame that C has sent in part, and the bytes sent; (b"", 0) if there is none."""
        size, self.fields.frame_bytes = self.fields.frame_bytes, 0
        return (bytes(ffi.buffer(self._frame, size)), self.fields.frame_sent) if size else (b"", 0)


class HALinks:
    """All connections of one master, and their lock: hold it (`with`) while you change this object or one of its links."""

    def __init__(self, control: ms_control, latch: Latch, reputter: Latch | None, *, batch_bytes: int, epoll_fd: int,
                 recorder: Recorder) -> None:
        """`reputter`: the reputter's latch, if it waits for `confirm`. `recorder` records long waits for slaves."""
        self._links = ffi.new("struct ms_ha_links *")
        self._by_fd: dict[int, HALink] = {}
        self._outliving = latch, reputter, recorder
        links = self._links
        links.control, links.semaphore = control, latch.semaphore
        links.reputter_semaphore = ffi.NULL if reputter is None else reputter.semaphore
        links.segment_bytes, links.batch_bytes = control.identity.segment_bytes, batch_bytes
        links.segment_base = links.all_sent = links.segment_fd = -1
        links.counts_one, links.epoll_fd = control.identity.min_in_sync_replicas <= 1, epoll_fd
        links.recorder = recorder.handle

    def __enter__(self) -> None:
        lib.ms_ha_links_lock(self._links)

    def __exit__(self, *exception: object) -> None:
        lib.ms_ha_links_unlock(self._links)

    def use_clock(self, now_ns: int) -> None:
        """Stop the clock at `now_ns`, for tests."""
        self._links.now_ns = now_ns

    def use_segment(self, base: int, fd: int) -> None:
        """Set the file of the segment that begins at `base`; with (-1, -1) the caller may close the previous one."""
        self._links.segment_base, self._links.segment_fd = base, fd

    @property
    def segment_base(self) -> int:
        """The start of the open segment, -1 for none."""
        return self._links.segment_base

    def add(self, link: HALink) -> None:
        """Serve one more link; the caller keeps them at LINKS_MAX at most."""
        self._by_fd[link.fields.fd] = link
        self._renew()

    def remove(self, fd: int) -> None:
        """Stop serving the link."""
        if self._by_fd.pop(fd, None) is not None:
            self._renew()

    def _renew(self) -> None:
        assert len(self._by_fd) <= LINKS_MAX
        for place, link in enumerate(self._by_fd.values()):
            self._links.link[place] = link.fields
        self._links.count = len(self._by_fd)

    def resume_sending(self) -> None:
        """Note that some slave still lacks committed bytes."""
        self._links.all_sent = -1

    def sent(self, end: int) -> None:
        """Note that everything below `end` was sent to every slave that can take bytes."""
        self._links.all_sent = end

    def send(self, until_ns: int = 0, *, may_sleep: bool = False) -> bool:
        """Send what is committed until CLOCK_MONOTONIC `until_ns`; return True when Python must send something.

        With `may_sleep` wait on the armed latch when everything is sent.
        """
        return lib.ms_ha_links_send(self._links, until_ns, may_sleep) != 0

    def listen(self, until_ns: int) -> list[tuple[int, int]]:
        """Take reports until CLOCK_MONOTONIC `until_ns` or until Python must act; return its events: (descriptor, mask)."""
        count = lib.ms_ha_links_listen(self._links, until_ns)
        return [(self._links.event_fd[at], self._links.event_mask[at]) for at in range(count)]

    def confirm(self, confirmed: int) -> None:
        """Move `confirm` and wake the processes that wait for it."""
        lib.ms_ha_confirm(self._links, confirmed)


TAKE: int = lib.MS_FOLLOW_TAKE
SUBMITTED: int = lib.MS_FOLLOW_SUBMITTED
LOST: int = lib.MS_FOLLOW_LOST


class FollowLoop(_Sealed):
    """Receives, appends and reports as a slave; owns one `struct ms_ha_follow`, as `fields`, and what it points to."""

    def __init__(self, control: ms_control, session: ProducerSession, *, buffer_bytes: int, acks_flushed: bool) -> None:
        """Append through `session`. `acks_flushed`: report only what is flushed."""
        self.fields: ms_ha_follow = ffi.new("struct ms_ha_follow *")
        self._buffer = ffi.new("uint8_t[]", buffer_bytes)
        self._references = session
        fields = self.fields
        fields.control, fields.producer = control, session.pointer
        fields.buffer, fields.buffer_bytes = self._buffer, buffer_bytes
        fields.segment_bytes, fields.acks_flushed = control.identity.segment_bytes, acks_flushed

    @property
    def unsent(self) -> bytes:
        """Return the rest of the last report that the socket did not take."""
        size = self.fields.report_bytes
        return bytes(ffi.buffer(self.fields.report, size))[size - self.fields.unsent_bytes :]

    def run(self, fd: int, row: ms_link, end: int, until_ns: int) -> int:
        """Follow until CLOCK_MONOTONIC `until_ns`; return TAKE, SUBMITTED, LOST or another number.

        `end` is the own log's end, up to which everything is reported."""
        fields = self.fields
        fields.fd, fields.row = fd, ffi.addressof(row)
        fields.end = fields.acked = end
        fields.has_received = fields.has_appended = fields.has_reported = fields.unsent_bytes = 0
        return lib.ms_ha_follow_run(fields, until_ns)

    @property
    def received(self) -> memoryview:
        """Return the received bytes that C did not take (TAKE, SUBMITTED), valid until the next call."""
        return memoryview(ffi.buffer(self._buffer, self.fields.got)).cast("B")
