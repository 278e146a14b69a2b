"""The replicator's C: links in shared memory, a master's connections, a slave's rounds (csrc/replication, ha_links, ha_follow .cdef.h).

A master's ordinary frames and reports are made in C, all else in Python. A slave's round is: receive, append, report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine._native import ffi, lib
from pyengine.native.control import raise_layout_error

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pyengine._native import ms_control, ms_ha_follow, ms_ha_link, ms_link, ms_replication, ms_seal
    from pyengine.native.recorder import Recorder
    from pyengine.native.session import ProducerSession
    from pyengine.native.waiting import Latch

REPLICATION_BYTES: int = ffi.sizeof("struct ms_replication")
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


PYTHON: int = lib.MS_HA_PYTHON
PLAIN: int = lib.MS_HA_PLAIN
QUIET: int = lib.MS_HA_QUIET

CONFIRMS: int = lib.MS_HA_CONFIRMS
SHORTER: int = lib.MS_HA_SHORTER
UNSENT: int = lib.MS_HA_UNSENT


class Seal:
    """The seals of one direction of a link (csrc/seal.cdef.h); used under the lock of that link."""

    BYTES: int = lib.MS_SEAL_BYTES
    KEY_BYTES = 16

    def __init__(self, key: bytes) -> None:
        self.pointer: ms_seal = ffi.new("struct ms_seal *")
        for place in range(2):
            self.pointer.key[place] = int.from_bytes(key[8 * place : 8 * place + 8], "little")

    def put(self, buffer: memoryview, at: int, size_bytes: int) -> None:
        """Seal the part of that size at `at`, and count it; the seal goes right after it."""
        part = ffi.from_buffer("uint8_t[]", buffer[at : at + size_bytes + self.BYTES], require_writable=True)
        lib.ms_seal_put(self.pointer, 0, part, size_bytes)
        lib.ms_seal_count(self.pointer, 1)

    def sealed(self, part: bytes) -> bytes:
        """The part and its seal; it is counted."""
        room = bytearray(part) + bytes(self.BYTES)
        self.put(memoryview(room), 0, len(part))
        return bytes(room)

    def take(self, sealed: memoryview | bytes) -> bool:
        """Whether the next part came as it was sent, `sealed` being the part and its seal; then it is counted."""
        part = ffi.from_buffer("uint8_t[]", sealed)
        fits: bool = lib.ms_seal_fits(self.pointer, 0, part, len(sealed) - self.BYTES) != 0
        if fits:
            lib.ms_seal_count(self.pointer, 1)
        return fits


class HALink:
    """One connection's `struct ms_ha_link`, as `fields`; used under the lock of its HALinks."""

    def __init__(self, row: ms_link, fd: int, batch_bytes: int, now_ns: int) -> None:
        self.fields: ms_ha_link = ffi.new("struct ms_ha_link *")
        self._frame = ffi.new("uint8_t[]", batch_bytes + lib.MS_HA_HEADER_BYTES + 2 * Seal.BYTES)
        self._seals: tuple[Seal | None, Seal | None] = None, None
        fields = self.fields
        fields.row, fields.frame, fields.fd = ffi.addressof(row), self._frame, fd
        fields.start = fields.reported = fields.acked = -1
        fields.read_ns = fields.written_ns = now_ns

    def seal(self, out: Seal | None, into: Seal | None) -> None:
        """From now on frames are sealed with `out`, and reports must fit `into`."""
        self._seals = out, into
        self.fields.seal_out = ffi.NULL if out is None else out.pointer
        self.fields.seal_in = ffi.NULL if into is None else into.pointer

    def take_report(self, report: int, sent: int) -> int:
        """Below `sent` all was sent: CONFIRMS, SHORTER, UNSENT, or 0 where the report says nothing new."""
        return lib.ms_ha_take_report(self.fields, report, sent)

    def take_input(self) -> bytes | int | None:
        """What C received and left to Python: bytes, empty at the connection's end; an errno; None for nothing."""
        if not self.fields.has_input:
            return None
        self.fields.has_input = 0
        count = self.fields.input_bytes
        return -count if count < 0 else bytes(ffi.buffer(self.fields.input, count))

    def take_half_frame(self) -> tuple[bytes, int]:
        """The frame of which C could send a part, and how much of it; (b"", 0) for none."""
        size, self.fields.frame_bytes = self.fields.frame_bytes, 0
        return (bytes(ffi.buffer(self._frame, size)), self.fields.frame_sent) if size else (b"", 0)


class HALinks:
    """All connections of one master. A lock for `with`: held while anything here, or a HALink in it, is changed."""

    def __init__(self, control: ms_control, latch: Latch, reputter: Latch | None, *, segment_bytes: int, batch_bytes: int,
                 counts_one: bool, epoll_fd: int, recorder: Recorder) -> None:
        """`reputter`: its latch, where it waits for `confirm`. `counts_one`: any one slave confirms. `recorder` keeps waits for
        slaves that took long."""
        self._links = ffi.new("struct ms_ha_links *")
        self._kept: dict[int, HALink] = {}
        self._outliving = latch, reputter, recorder
        links = self._links
        links.control, links.semaphore = control, latch.semaphore
        links.reputter_semaphore = ffi.NULL if reputter is None else reputter.semaphore
        links.segment_bytes, links.batch_bytes = segment_bytes, batch_bytes
        links.segment_base = links.all_sent = links.segment_fd = -1
        links.counts_one, links.epoll_fd = counts_one, epoll_fd
        links.recorder = recorder.hand

    def __enter__(self) -> None:
        lib.ms_ha_links_lock(self._links)

    def __exit__(self, *exception: object) -> None:
        lib.ms_ha_links_unlock(self._links)

    def use_clock(self, now_ns: int) -> None:
        """For tests: the clock shows `now_ns` from now on."""
        self._links.now_ns = now_ns

    def use_segment(self, base: int, fd: int) -> None:
        """The file of the segment that begins at `base`; -1, -1: the one before may be closed."""
        self._links.segment_base, self._links.segment_fd = base, fd

    @property
    def segment_base(self) -> int:
        """Of the segment that is open; -1 for none."""
        return self._links.segment_base

    def add(self, link: HALink) -> None:
        """Serve one more; there are never more than LINKS_MAX."""
        self._kept[link.fields.fd] = link
        self._renew()

    def remove(self, fd: int) -> None:
        """Serve it no more."""
        if self._kept.pop(fd, None) is not None:
            self._renew()

    def _renew(self) -> None:
        assert len(self._kept) <= LINKS_MAX
        for place, link in enumerate(self._kept.values()):
            self._links.link[place] = link.fields
        self._links.count = len(self._kept)

    def send_again(self) -> None:
        """Not every slave has been given all that is committed."""
        self._links.all_sent = -1

    def sent(self, end: int) -> None:
        """Every slave that can take bytes has been given all below `end`."""
        self._links.all_sent = end

    def send(self, until_ns: int = 0, *, may_sleep: bool = False) -> bool:
        """Send what is committed, until CLOCK_MONOTONIC `until_ns`; True when Python has to send something.

        `may_sleep`: wait on the latch, which is armed, where all is sent.
        """
        return lib.ms_ha_links_send(self._links, until_ns, may_sleep) != 0

    def listen(self, until_ns: int) -> list[tuple[int, int]]:
        """Take reports until CLOCK_MONOTONIC `until_ns`, or until there are events for Python: descriptors and masks."""
        count = lib.ms_ha_links_listen(self._links, until_ns)
        return [(self._links.event_fd[at], self._links.event_mask[at]) for at in range(count)]

    def confirm(self, confirmed: int) -> None:
        """Move `confirm`, and wake those that wait for it."""
        lib.ms_ha_confirm(self._links, confirmed)


IDLE: int = lib.MS_FOLLOW_IDLE
TAKE: int = lib.MS_FOLLOW_TAKE
UNDER_WAY: int = lib.MS_FOLLOW_UNDER_WAY
LOST: int = lib.MS_FOLLOW_LOST
REPORT: int = lib.MS_FOLLOW_REPORT


class FollowLoop:
    """One `struct ms_ha_follow`, as `fields`, and what it points to."""

    def __init__(self, control: ms_control, session: ProducerSession, *, segment_bytes: int, buffer_bytes: int,
                 acks_flushed: bool) -> None:
        """Appends through `session`. `acks_flushed`: reports only what is flushed."""
        self.fields: ms_ha_follow = ffi.new("struct ms_ha_follow *")
        self._buffer = ffi.new("uint8_t[]", buffer_bytes)
        self._kept = session
        self._seals: tuple[Seal | None, Seal | None] = None, None
        fields = self.fields
        fields.control, fields.producer = control, session.pointer
        fields.buffer, fields.buffer_bytes = self._buffer, buffer_bytes
        fields.segment_bytes, fields.acks_flushed = segment_bytes, acks_flushed

    def seal(self, out: Seal | None, into: Seal | None) -> None:
        """The seals of the connection from now on: of reports, and of frames."""
        self._seals = out, into
        self.fields.seal_out = ffi.NULL if out is None else out.pointer
        self.fields.seal_in = ffi.NULL if into is None else into.pointer

    @property
    def unsent(self) -> bytes:
        """The last bytes of the last report, which did not go."""
        size = self.fields.report_bytes
        return bytes(ffi.buffer(self.fields.report, size))[size - self.fields.unsent_bytes :]

    def run(self, fd: int, row: ms_link | None, end: int, until_ns: int) -> int:
        """Follow until CLOCK_MONOTONIC `until_ns`, from the own end `end` on, all of which is reported; IDLE, TAKE, UNDER_WAY,
        LOST or REPORT."""
        fields = self.fields
        fields.fd, fields.row = fd, ffi.NULL if row is None else ffi.addressof(row)
        fields.end = fields.acked = end
        fields.has_heard = fields.has_appended = fields.has_reported = fields.unsent_bytes = 0
        return lib.ms_ha_follow_run(fields, until_ns)

    @property
    def received(self) -> memoryview:
        """TAKE, UNDER_WAY: what came and was not taken, valid until the next call."""
        return memoryview(ffi.buffer(self._buffer, self.fields.got)).cast("B")
