"""A master's connections to its slaves (csrc/ha_links.cdef.h): ordinary frames and reports in C, all else in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine._native import ffi, lib
from pyengine.native.replication import LINKS_MAX

if TYPE_CHECKING:
    from pyengine._native import ms_control, ms_ha_link, ms_link, ms_seal
    from pyengine.native.recorder import Recorder
    from pyengine.native.waiting import Latch

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
        """A test's clock stands at `now_ns`."""
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
