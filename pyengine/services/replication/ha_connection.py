"""HAConnection: one slave that follows this master (formats/ha_wire.py has the wire protocol).

The slave's first report is the offset at which to begin; the master sends nothing before it. Then the master sends committed bytes
in frames, several in one system call; the kernel's buffer is the only queue. Later reports are the offsets that the slave has:
each must be at least the previous one and not beyond what was sent, otherwise the connection ends. A first report, and its
repetition, sets the position and confirms nothing: a report confirms if it is beyond the offset at which this connection began
(docs/design/05-replication.md). Only a complete report counts as a heartbeat.

With a `handshake` the peer is unidentified until it has proven that it has the secret, or has used RocketMQ's own protocol from an
allowed address; until then the handshake gets its bytes (ha_handshake.py). Frames and reports of a link that began with a handshake,
or with a slave's offer, have seals.

The object owns a non-blocking socket and does nothing by itself: its owner calls `on_readable`, `transfer` and `tick`, and closes
it when `ended` has a reason. `native` is its struct for C (csrc/ha_links.cdef.h): while no frame or report is incomplete, C sends
and receives without a call of the owner.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import socket
from collections.abc import Mapping, Sequence

from pyengine.errors import DiskError, FormatError, disk_error
from pyengine.formats import ha_wire
from pyengine.formats.ha_wire import Introduction
from pyengine.formats.small_file import opened
from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.replication import Link
from pyengine.native import control as native
from pyengine.native import replication
from pyengine.native.failpoints import failpoint
from pyengine.native.replication import LINK_SHUTDOWN, LINK_TRANSFER, Seal
from pyengine.services.replication.ha_handshake import HandshakeError, MasterHandshake, Seals, SecretError
from pyengine.services.replication.ha_stream import MasterTable
from pyengine.storage.config import EngineConfig
from pyengine.storage.message_store import MessageStore

BUFFER_BYTES = 512 << 10  # most bytes of frames in one system call
FRAMES_MAX = 1024  # of short ones: the most buffers that preadv() fills (IOV_MAX)
HANDSHAKE_NS = 5_000_000_000  # longest handshake of a peer
REFUSAL_NS = 2_000_000_000  # longest wait for a slave to read why it is refused
_READ_BYTES = 4096
END_TIMES_MAX = 4096


class HAConnection:
    """One slave's connection.

    `acked`: the last report that confirms, -1 without one; `reported`: the last report, -1 before the first; `positioned`: its
    first report could be served; `blocked`: the socket is full until it is writable again; `ended`: why it has ended, "" while it is
    open; `peer`: its proven identity, None before that and for a peer that uses RocketMQ's own protocol.
    """

    def __init__(self, connected: socket.socket, address: str, source: TransferSource, link: Link, config: EngineConfig,
                 now_ns: int, handshake: MasterHandshake | None = None) -> None:
        """`address`: the peer's host:port. Without a `handshake` it may use RocketMQ's own protocol."""
        connected.setblocking(False)
        if connected.family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError):  # it has disconnected already
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connected
        self.address = address
        self.host = address.rpartition(":")[0].strip("[]")  # which may have several connections
        self._batch_bytes = config.ha_transfer_batch_size_bytes
        self._heartbeat_ns = config.ha_send_heartbeat_interval_ms * 1_000_000
        self._housekeeping_ns = config.ha_housekeeping_interval_ms * 1_000_000
        self.native = replication.HALink(link.row, connected.fileno(), self._batch_bytes, now_ns)
        self._fields = self.native.fields
        self.has_reported = False  # a complete report has arrived, with any content
        self.was_refused = False   # while unidentified, before any byte of the log was sent
        self.positioned = False
        self.blocked = False
        self.ended = ""
        self._source = source
        self._link = link
        self._refused_until_ns = 0
        self._half_report = b""
        self.peer: Introduction | None = None
        self._fields.next = -1    # everything below is in the buffer or sent
        self._buffer = memoryview(b"")
        self._buffer_start = 0    # physical offset of the buffer's first body
        self._pushed = self._filled = self._frames = 0
        self._refusal = ""
        self._announced_end = False     # the slave knows where this log ends
        self._handshake = handshake
        self._handshake_until_ns = now_ns + HANDSHAKE_NS
        self._head_bytes = ha_wire.HEADER_BYTES  # of a frame, before its body, with its seal
        self._tail_bytes = 0                     # the body's seal
        self._report_bytes = ha_wire.REPORT_BYTES
        self._seals = Seals()
        self._tables_due: dict[int, MasterTable] = {}
        self._tables_sent: dict[int, MasterTable] = {}
        self._update_turn()

    @property
    def is_unidentified(self) -> bool:
        """Whether it must prove that it has the secret, and has not done so yet."""
        return self._handshake is not None and not self._handshake.may_be_plain

    @property
    def counts_as(self) -> str:
        """The identity of the slave: links with the same text, a proven store UUID or an address, are of the same slave."""
        return self.peer.store_uuid.hex() if self.peer is not None else self.host

    @property
    def acked(self) -> int:
        return self._fields.acked

    @property
    def reported(self) -> int:
        return self._fields.reported

    def _update_turn(self) -> None:
        """Let C serve the connection if nothing is incomplete or due; otherwise Python does."""
        if self.ended or not self.positioned or self._refused_until_ns or self.blocked:
            self._fields.turn = replication.QUIET
        elif self._pushed == self._filled and self._announced_end and not self._half_report:
            self._fields.turn = replication.PLAIN
        else:
            self._fields.turn = replication.PYTHON

    def _take_half_frame(self) -> None:
        """Continue a frame that C has sent in part."""
        frame, sent = self.native.take_half_frame()
        if frame:
            size = len(frame) - self._head_bytes - self._tail_bytes
            self._buffer = memoryview(bytearray(frame))
            self._buffer_start = self._fields.next - size
            self._pushed, self._filled, self._frames = sent, len(frame), 1

    # ---- reports ----------------------------------------------------------------

    def on_readable(self, now_ns: int) -> None:
        """Take the reports that have arrived; `acked` and `ended` have the result."""
        self._take_half_frame()
        self._receive(now_ns)
        self._update_turn()

    def _receive(self, now_ns: int) -> None:
        data = self.native.take_input()
        try:
            if isinstance(data, int):
                raise OSError(data, os.strerror(data))
            if data is None:
                data = self.socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.end(f"the connection broke: {error.strerror}")
            return
        if not data:
            self.end(self._refusal or "the slave closed the connection")
            return
        if self._refused_until_ns:
            return
        data = self._half_report + data
        if self._handshake is not None:
            self._half_report, data = b"", self._shake_hands(self._handshake, data)
            if self._handshake is not None or self.ended:
                self._half_report = data
                return
        step = self._report_bytes
        whole = len(data) - len(data) % step
        self._half_report = data[whole:]
        if whole:
            self._fields.read_ns = now_ns
            self.has_reported = True
        try:
            for at in range(0, whole, step):
                if self._seals.into is not None and not self._seals.into.take(data[at:at + step]):
                    self.end("a report did not come as it was sent: its seal does not fit")
                    return
                self._take(ha_wire.unpack_report(data, at), now_ns)
                if self._refused_until_ns or self.ended:
                    return
        except FormatError as error:
            self.end(str(error))

    def _shake_hands(self, handshake: MasterHandshake, data: bytes) -> bytes:
        """Pass bytes to the handshake; return the unused ones. Afterwards the handshake is None, or `ended` says why it failed."""
        try:
            while not handshake.is_finished:
                answer, rest = handshake.take(data)
                if len(rest) == len(data) and not handshake.is_finished:
                    return data
                data = rest
                if answer and self.socket.send(answer) != len(answer):
                    raise HandshakeError("it does not read the greeting's answers")
        except (HandshakeError, SecretError) as error:
            self._refuse_unidentified(str(error))
            return b""
        except OSError as error:
            self.end(f"the connection broke: {error.strerror}")
            return b""
        self._handshake = None
        self.peer, self._seals = handshake.peer, handshake.seals
        self.native.seal(*self._seals)
        if self._seals.out is not None:
            self._head_bytes += Seal.BYTES
            self._tail_bytes = Seal.BYTES
            self._report_bytes += Seal.BYTES
        return data

    def _take(self, report: int, now_ns: int) -> None:
        if not self.positioned:
            self._position(report, now_ns)
            return
        what = self.native.take_report(report, self.sent)
        if what == replication.SHORTER:
            self.end(f"the slave has {report} after {self.reported}: its log became shorter")
        elif what == replication.UNSENT:
            self.end(f"the slave has {report}, but only {self.sent} was sent")

    def _position(self, report: int, now_ns: int) -> None:
        """Begin at the reported offset (HAConnection.slaveRequestOffset); refuse one that this log cannot serve."""
        end, low = self._source.end(), self._source.min_offset()
        start = report
        if report == ha_wire.REPORT_LAST_SEGMENT:
            start = end - end % self._source.segment_bytes
        if start > end:
            self._refuse(end, now_ns, f"the slave has {report} bytes, this log ends at {end}")
        elif start < low:
            self._refuse(low, now_ns, f"the slave has {report} bytes, this log begins at {low}: what lies between is deleted")
        else:
            self.positioned = True
            self._fields.reported = min(report, start)
            self._fields.start = self._fields.next = self._buffer_start = start
            failpoint("link_positioned")
            self._link.start(start)
            self._link.state(LINK_TRANSFER)

    def _refuse(self, offset: int, now_ns: int, why: str) -> None:
        """Send one heartbeat with an offset from which this log can serve, then nothing; it shows a slave that its end is wrong."""
        self._refused_until_ns = now_ns + REFUSAL_NS
        self._link.state(LINK_SHUTDOWN, why)
        self._refusal = why
        try:
            frame = ha_wire.HEADER.pack(offset, 0)
            self.socket.send(frame if self._seals.out is None else self._seals.out.sealed(frame))
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.end(why)

    def note_lag(self, ends: EndTimes) -> None:
        """Note since when it lacks bytes."""
        if self.positioned:
            self._link.caught_up(ends.last_at_or_below(self.reported))

    # ---- frames -----------------------------------------------------------------

    @property
    def sent(self) -> int:
        """The end of the bytes that were passed to the kernel; -1 before it is positioned."""
        if self._pushed == self._filled:
            return self._fields.next
        frames, rest = divmod(self._pushed, self._head_bytes + self._batch_bytes + self._tail_bytes)
        size = min(max(0, rest - self._head_bytes), self._batch_bytes)
        return min(self._fields.next, self._buffer_start + frames * self._batch_bytes + size)

    def transfer(self, end: int, now_ns: int) -> bool:
        """Send committed bytes, one buffer at most; return True if there are more and the socket may take them."""
        self._take_half_frame()
        more = self._transfer(end, now_ns)
        self._update_turn()
        return more

    def _transfer(self, end: int, now_ns: int) -> bool:
        if not self.positioned or self.ended or self._refused_until_ns:
            return False
        if self._pushed < self._filled and not self._push(now_ns):
            return False
        if self._fields.next < end:
            self._fill(end)
            if self.ended or not self._push(now_ns):
                return False
        if self._fields.next < end:
            return True
        if not self._announced_end:
            self._announced_end = True
            self._send_apart(self._fields.next, b"", now_ns)
        return False

    def _fill(self, end: int) -> None:
        """Fill the buffer with frames of the next bytes, all of one segment."""
        batch, segment = self._batch_bytes, self._source.segment_bytes
        position = self._buffer_start = self._fields.next
        stop = min(end, position - position % segment + segment)
        buffer = self._room_for(stop - position)
        room = len(buffer)
        views: list[memoryview] = []
        at, bodies = 0, []
        while position < stop:
            size = min(batch, stop - position)
            if at + self._head_bytes + size + self._tail_bytes > room or len(views) == FRAMES_MAX:
                break
            ha_wire.HEADER.pack_into(buffer, at, position, size)
            body = at + self._head_bytes
            views.append(buffer[body:body + size])
            bodies.append((at, body, size))
            at = body + size + self._tail_bytes
            position += size
        try:
            if not self._source.read(self._buffer_start, views):
                self.end(f"what the slave needs at {self._buffer_start} was deleted before it was sent")
        except DiskError as error:
            self.end(str(error))
        if self._seals.out is not None:
            for head, body, size in bodies:
                self._seals.out.put(buffer, head, ha_wire.HEADER_BYTES)
                self._seals.out.put(buffer, body, size)
        failpoint("frames_filled")
        self._fields.next = position
        self._pushed, self._filled, self._frames = 0, at, len(views)

    def _room_for(self, size_bytes: int) -> memoryview:
        """Return a buffer of at least this size; a slave without lag needs only a small one."""
        frame = self._head_bytes + self._batch_bytes + self._tail_bytes
        most = max(1, BUFFER_BYTES // frame) * frame
        wanted = most if size_bytes > self._batch_bytes else frame
        if len(self._buffer) < wanted:
            self._buffer = memoryview(bytearray(wanted))
        return self._buffer

    def _push(self, now_ns: int) -> bool:
        """Pass the buffer to the kernel; return True if the kernel took all."""
        while self._pushed < self._filled:
            try:
                self._pushed += self.socket.send(self._buffer[self._pushed:self._filled])
            except (BlockingIOError, InterruptedError):
                self.blocked = True
                return False
            except OSError as error:
                self.end(f"the connection broke: {error.strerror}")
                return False
            self._fields.written_ns = now_ns
        self.blocked = False
        failpoint("frames_sent")
        if self._frames:
            self._link.sent(self._fields.next, self._fields.next - self._buffer_start, self._frames)
            self._frames = 0
        return True

    @property
    def is_all_sent(self) -> bool:
        """Whether the kernel has all frames and tables that were to be sent."""
        return self._pushed == self._filled and not self._tables_due

    def send_tables(self, tables: Mapping[int, MasterTable], now_ns: int) -> None:
        """Send new tables to a slave with the secret, each after the bytes of the log to which it belongs."""
        is_open = self.positioned and not self.ended and not self._refused_until_ns
        if self._seals.out is None or self.peer is None or not is_open or not self._announced_end:
            return
        self._take_half_frame()
        for kind, table in dict(tables).items():  # another thread may add to them
            if self._tables_sent.get(kind) is not table:
                self._tables_due.setdefault(kind, table)  # an older one stays: its bytes are sent earlier
        for kind, table in list(self._tables_due.items()):
            if self._pushed < self._filled or self._fields.next < table.end:
                break
            self._tables_sent[kind] = self._tables_due.pop(kind)
            self._send_apart(-1 - kind, table.content, now_ns)
        self._update_turn()

    def _send_apart(self, offset: int, body: bytes, now_ns: int) -> None:
        """Send a frame with no bytes of the log: a table, or without a body a heartbeat."""
        head = self._head_bytes
        self._buffer = memoryview(bytearray(head + (len(body) + self._tail_bytes if body else 0)))
        ha_wire.HEADER.pack_into(self._buffer, 0, offset, len(body))
        self._buffer[head:head + len(body)] = body
        if self._seals.out is not None:
            self._seals.out.put(self._buffer, 0, ha_wire.HEADER_BYTES)
            if body:
                self._seals.out.put(self._buffer, head, len(body))
        self._buffer_start = self._fields.next
        self._pushed, self._filled = 0, len(self._buffer)
        self._push(now_ns)

    # ---- time -------------------------------------------------------------------

    def tick(self, now_ns: int) -> None:
        """Send due heartbeats, and end a silent connection."""
        self._take_half_frame()
        self._check_deadlines(now_ns)
        self._update_turn()

    def _check_deadlines(self, now_ns: int) -> None:
        if self._refused_until_ns:
            if now_ns >= self._refused_until_ns:
                self.end(self._refusal)
        elif self.is_unidentified and now_ns > self._handshake_until_ns:
            self._refuse_unidentified(f"it has proven nothing within {HANDSHAKE_NS / 1e9:g} s")
        elif now_ns - self._fields.read_ns > self._housekeeping_ns:
            self.end(f"the slave sent nothing for {(now_ns - self._fields.read_ns) / 1e9:.0f} s")
        elif (self.positioned and self._pushed == self._filled
              and now_ns - self._fields.written_ns >= self._heartbeat_ns):
            self._send_apart(self._fields.next, b"", now_ns)

    def due_ns(self) -> int:
        """Return when tick() must be called next."""
        if self._refused_until_ns:
            return self._refused_until_ns
        if self.is_unidentified:
            return self._handshake_until_ns + 1
        silence_ns = self._fields.read_ns + self._housekeeping_ns + 1
        if self.positioned and self._pushed == self._filled:
            return min(silence_ns, self._fields.written_ns + self._heartbeat_ns)
        return silence_ns

    # ---- end --------------------------------------------------------------------

    def _refuse_unidentified(self, why: str) -> None:
        self.was_refused = True
        self.end(f"refused: {why}")

    def end(self, why: str) -> None:
        """End the connection, for the first reason that is given."""
        self.ended = self.ended or why

    def close(self) -> None:
        """Close the socket and release the link; `ended` stays readable."""
        with contextlib.suppress(OSError):
            self.socket.close()
        self._link.close(self.ended)


class EndTimes:
    """Keeps samples of the log's end with their times, for the lag of slaves.

    The distance between two samples is at most a hundredth of their age, so that years of samples need little memory.
    """

    def __init__(self) -> None:
        self._times_ns: list[int] = []
        self._ends: list[int] = []

    def note(self, now_ns: int, end: int) -> None:
        """Add a sample; neither the clock nor the end may decrease."""
        if self._ends and self._ends[-1] == end:
            self._times_ns[-1] = now_ns
            return
        if len(self._ends) >= END_TIMES_MAX:
            self._drop_old(now_ns)
        self._times_ns.append(now_ns)
        self._ends.append(end)

    def _drop_old(self, now_ns: int) -> None:
        kept, later_ns = [0], now_ns
        for at in range(len(self._ends) - 1, 0, -1):
            time_ns = self._times_ns[at]
            if (later_ns - time_ns) * 256 >= now_ns - time_ns:
                kept.append(at)
                later_ns = time_ns
        kept.sort()
        self._times_ns = [self._times_ns[at] for at in kept]
        self._ends = [self._ends[at] for at in kept]

    def last_at_or_below(self, offset: int) -> int:
        """Return the time (ns) of the last sample at or below `offset`; of the first sample if there is none, which makes the lag
        look shorter than it is; 0 without samples."""
        at = bisect.bisect_right(self._ends, offset)
        return self._times_ns[max(0, at - 1)] if self._ends else 0


class TransferSource:
    """Reads one store's log for its slaves: raw bytes below `committed`. Used by one thread at a time.

    It copies the bytes, and then reads the log's minimum before they are sent, as every short reader does: a segment that is deleted
    meanwhile yields zeros, which must not be sent. Reading through a descriptor takes one system call for many frames and no page
    faults, and a truncated file is an error instead of a signal.
    """

    def __init__(self, memory: EngineMemory, store: MessageStore) -> None:
        self.end = native.loader(memory.control.committed, "value")  # everything below is in the files, and may be sent
        self.min_offset = native.loader(memory.control.min_offset, "value")  # everything below is deleted
        self._store = store
        self.segment_bytes = store.segment_bytes

    def read(self, offset: int, views: Sequence[memoryview]) -> bool:
        """Fill the views with the bytes from `offset` on, all of one segment and below end().

        Return False if they are deleted by now, with undefined views. DiskError.
        """
        base = offset - offset % self.segment_bytes
        wanted = sum(len(view) for view in views)
        try:
            with opened(os.open(self._store.commit_log_segment(base), os.O_RDONLY | os.O_CLOEXEC)) as descriptor:
                got = os.preadv(descriptor, views, offset - base)
            failpoint("source_read")
        except OSError as error:
            if self.min_offset() > offset:
                return False
            raise disk_error(error, "read", self._store.commit_log_segment(base)) from error
        if self.min_offset() > offset:
            return False
        if got != wanted:
            raise DiskError(f"{self._store.commit_log_segment(base)} is shorter than a segment: {got} bytes instead of "
                            f"{wanted} at {offset}", path=str(self._store.commit_log_segment(base)))
        return True
