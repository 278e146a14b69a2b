"""A slave's rounds over one connection (csrc/ha_follow.cdef.h): receive, append, report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine._native import ffi, lib

if TYPE_CHECKING:
    from pyengine._native import ms_control, ms_ha_follow, ms_link
    from pyengine.native.ha_links import Seal
    from pyengine.native.producer import ProducerSession

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
