"""A slave's input: the connection to its master, frames from bytes, complete records from frames, the master's tables.

    cutter = FrameCutter(segment_bytes)  # feed(bytes, seal) if the link has seals
    stream = RecordStream(begin, own_end, log, segment_bytes, entry_bytes_max)
    for offset, piece in cutter.feed(bytes off the wire): stream.take(offset, piece)
    while (run := stream.whole()): append it ...; stream.drop(run.end)

FrameCutter and RecordStream use no socket and no clock, and only read the store's own log. RecordStream compares bytes below the
log's end with it, and keeps later bytes until they are complete records: lengths, CRC and offset are right, no record crosses a
segment boundary, and a blank fills its segment. Other bytes are an error, and do not reach the writer.

    master   once a second: TableSource.reload() reads the files that were changed, HAConnection sends them as messages
    slave    TableSink.take(kind, content, position) keeps them, apply() makes them durable

A table belongs to the master's log up to its end at that moment: it is sent after those bytes, and the slave writes it once it has
them on its disk. Otherwise a promoted slave could count a delayed message as delivered without having the delivered record. What a
slave keeps of its own: docs/replication.md.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import NamedTuple, NoReturn

from pyengine.errors import EngineError, FormatError, os_error_sentence
from pyengine.events import Event, Report
from pyengine.formats.ha_wire import (
    HEADER,
    HEADER_BYTES,
    OFFER,
    REPORT,
    SEALED,
    Introduction,
    is_hello,
    unpack_header,
)
from pyengine.formats.paths import StorePaths
from pyengine.formats.record import BEGIN, CaseLabel
from pyengine.formats.small_file import read_or_none, read_small_file
from pyengine.native.replication import Seal
from pyengine.native.scan import walk
from pyengine.services.replication.ha_handshake import HandshakeError, PlainPeers, Seals, Secret, slave_handshake
from pyengine.services.service import BlockedReason
from pyengine.settings import split_address
from pyengine.storage import config_table, consumer_offset, queue_ends
from pyengine.storage.commit_log import CommitLog
from pyengine.storage.consumer_offset import ConsumerOffsets, decode_offsets
from pyengine.storage.durable_file import ConfigFile, exclusive
from pyengine.storage.durable_writes import LOCK_MODE, write_config
from pyengine.storage.message_store import MessageStore

BUFFER_BYTES_FIRST = 1 << 20
RUN_BYTES = 1 << 20  # submitted to the writer at once, and up to one record more
CONNECT_TIMEOUT_S = 5.0
READ_BYTES = 512 << 10


class BadStreamError(EngineError):
    """The master sends bytes that do not continue the log."""


class LogsDifferError(EngineError):
    """The master's log differs from `offset` on, or from an earlier offset on."""

    def __init__(self, offset: int) -> None:
        super().__init__(f"the master's log differs from offset {offset} on")
        self.offset = offset


class SentRun(NamedTuple):
    """Whole records [offset, end) of one segment; `records` has their bytes until the next call."""

    offset: int
    end: int
    records: memoryview


class FrameCutter:
    """Divides a stream of bytes into frames. With a seal it returns a frame only whole, and only if the seal is right.

    `_head` is the received part of a header or, with a seal, of a body, each with its seal.
    """

    def __init__(self, segment_bytes: int) -> None:
        self._segment_bytes = segment_bytes
        self._head = bytearray()
        self._offset = 0
        self._left = 0  # missing bytes of the body

    @property
    def is_between_frames(self) -> bool:
        """Whether the received bytes end at the end of a frame."""
        return not self._left and not self._head

    def feed(self, data: memoryview, seal: Seal | None = None) -> Iterator[tuple[int, memoryview]]:
        """Yield (offset, bytes) of each piece of a body, in order; an empty piece is a heartbeat, an offset below 0 a whole table.

        BadStreamError for a wrong header, after which the stream cannot be decoded.
        """
        seal_bytes = 0 if seal is None else Seal.BYTES
        at = 0
        while at < len(data):
            if self._left and seal is None:
                piece = data[at : at + self._left]
                offset = self._offset
                self._offset += len(piece)
                self._left -= len(piece)
                at += len(piece)
                yield offset, piece
                continue
            size_bytes = (self._left or HEADER_BYTES) + seal_bytes
            part: memoryview
            if not self._head and len(data) - at >= size_bytes:
                part = data[at : at + size_bytes]
                at += size_bytes
            else:
                wanted = size_bytes - len(self._head)
                self._head += data[at : at + wanted]
                at += wanted
                if len(self._head) < size_bytes:
                    return
                part, self._head = memoryview(self._head), bytearray()
            if seal is not None and not seal.take(part):
                raise BadStreamError("a frame did not come as it was sent: its seal does not fit")
            if self._left:
                self._left = 0
                yield self._offset, part[:-seal_bytes]
                continue
            self._offset, self._left = self._header(part, may_be_table=seal is not None)
            if not self._left:
                yield self._offset, data[:0]

    def _header(self, head: memoryview, *, may_be_table: bool) -> tuple[int, int]:
        if may_be_table:
            offset, size_bytes = HEADER.unpack_from(head)
            if offset < 0:
                if not 0 < size_bytes <= TABLE_BYTES_MAX:
                    raise BadStreamError(f"a table of {size_bytes} bytes: no master sends that")
                return offset, size_bytes
        try:
            offset, size_bytes = unpack_header(head)
        except FormatError as error:
            raise BadStreamError(str(error)) from None
        if offset % self._segment_bytes + size_bytes > self._segment_bytes:
            raise BadStreamError(
                f"a frame of {size_bytes} bytes at {offset} crosses the end of a segment: are the master's segments of "
                f"another size than {self._segment_bytes} (mapped_file_size_commit_log_bytes)?")
        return offset, size_bytes


class RecordStream:
    """The log of a master from `begin` on, as it arrives.

    `begin` and `own_end` are record boundaries of the own log `log`. A stream may also begin at byte 1, because 0 has another meaning
    in the protocol, and byte 0 of a log is always 0. `record_bytes_max`: the longest record or blank that can be appended.
    """

    def __init__(self, begin: int, own_end: int, log: CommitLog, segment_bytes: int, record_bytes_max: int) -> None:
        self.position = begin
        self.own_end = own_end
        self._log = log
        self._segment_bytes = segment_bytes
        self._record_bytes_max = record_bytes_max
        self._compared_from = 0 if begin == 1 else begin
        self._buffer = bytearray(BUFFER_BYTES_FIRST)
        self._base = max(self._compared_from, own_end)  # offset of the buffer's first byte
        self._checked = self._base                      # whole records up to here
        self._closed = False                            # the record before `_checked` is a blank
        self._filled = self._base
        if begin == 1 and own_end == 0:
            self._filled += 1

    @property
    def waiting_bytes(self) -> int:
        """The bytes that were received and not dropped."""
        return self._filled - self._base

    @property
    def is_equal(self) -> bool:
        """Whether everything below the own end has been compared."""
        return self.position >= self.own_end

    @property
    def is_between_records(self) -> bool:
        """Whether the received bytes end at the end of a record."""
        return self._filled == self._checked

    def take(self, offset: int, piece: memoryview) -> None:
        """Add the next bytes of the stream, none for a heartbeat. BadStreamError, LogsDifferError."""
        if offset != self.position:
            raise BadStreamError(f"the master continues at {offset}, not at {self.position}")
        if offset < self.own_end:
            compared = piece[: self.own_end - offset]
            self._compare(offset, compared)
            self.position += len(compared)
            piece = piece[len(compared) :]
        if len(piece):
            self._append(piece)
            self.position += len(piece)

    def whole(self) -> SentRun | None:
        """Return the next whole records, or some of them; None if more bytes must arrive first. BadStreamError."""
        self._check()
        if self._checked == self._base:
            return None
        return SentRun(self._base, self._checked, memoryview(self._buffer)[: self._checked - self._base])

    def drop(self, end: int) -> None:
        """Drop the bytes of a run that was appended up to `end`, and move `own_end` there."""
        size = end - self._base
        rest = self._filled - end
        self._buffer[:rest] = self._buffer[size : size + rest]
        self._base = self.own_end = end
        self._checked = max(self._checked, end)  # whole() has not checked what C has submitted
        if end == self._checked:
            self._closed = False

    def skip_to(self, end: int) -> None:
        """Skip to `end`, the end of a record: the bytes before it are appended already. No bytes may wait here."""
        assert not self.waiting_bytes
        self.position = self.own_end = self._base = self._checked = self._filled = end
        self._closed = False

    # ---- below the own end ------------------------------------------------------

    def _compare(self, offset: int, piece: memoryview) -> None:
        at = 0
        while at < len(piece):
            own = self._log.piece(offset + at, len(piece) - at)
            theirs = piece[at : at + len(own)]
            if own != theirs:
                different = offset + at + next(number for number, (one, other) in enumerate(zip(own, theirs, strict=True)) if one != other)
                if not self._log.is_filler(different, self._compared_from):
                    raise LogsDifferError(different)
            at += len(own)

    # ---- beyond it --------------------------------------------------------------

    def _append(self, piece: memoryview) -> None:
        used = self._filled - self._base
        if used + len(piece) > len(self._buffer):
            larger = bytearray(max(2 * len(self._buffer), used + len(piece)))
            larger[:used] = memoryview(self._buffer)[:used]
            self._buffer = larger
        self._buffer[used : used + len(piece)] = piece
        self._filled += len(piece)

    def _check(self) -> None:
        """Move `_checked` over whole records, up to the length of a run, a blank, or an incomplete record."""
        start = self._checked
        if self._closed or start - self._base >= RUN_BYTES:
            return
        segment_end = start - start % self._segment_bytes + self._segment_bytes
        end = min(self._filled, segment_end)
        stop = min(end, self._base + RUN_BYTES)
        found = walk(self._buffer, self._base, start, stop, limit=end)
        self._checked = at = found.end_offset
        if segment_end - at < BEGIN.size:
            raise BadStreamError(f"the record before {at} leaves no room for a blank in its segment")
        if found.reason == CaseLabel.RANGE_END:
            return
        if found.reason not in (CaseLabel.OVERRUN, CaseLabel.BLANK):
            raise BadStreamError(f"the bytes received for offset {at} are not a record ({found.reason})")
        size, _ = BEGIN.unpack_from(self._buffer, at - self._base)
        room = segment_end - at
        if found.reason == CaseLabel.BLANK:
            if size != room:
                raise BadStreamError(
                    f"the blank at {at} has {size} bytes, and its segment ends after {room}: are the master's segments of "
                    f"another size than {self._segment_bytes} (mapped_file_size_commit_log_bytes)?")
        elif size > room - BEGIN.size:
            raise BadStreamError(f"the bytes received for offset {at} are not a record: {size} bytes do not fit into its segment")
        if size > self._record_bytes_max:
            raise BadStreamError(f"the record at {at} has {size} bytes, {self._record_bytes_max} can be taken at a time")
        if found.reason == CaseLabel.BLANK and self._filled >= segment_end:
            if at > self._base and segment_end - self._base > self._record_bytes_max:
                self._closed = True  # the blank is a run of its own
            else:
                self._checked, self._closed = segment_end, True


class LinkLostError(EngineError):
    """There is no connection to the master, or not any more."""


class MasterCall(NamedTuple):
    """How a store connects to a master: its secret, the peers that need no proof, its own introduction, and its check of the
    master's; a HandshakeError of `check_peer` ends the link."""

    secret: Secret
    plain_peers: PlainPeers
    introduce: Callable[[], Introduction]
    check_peer: Callable[[Introduction], None]


_lookups: dict[tuple[str, int], Future[list[tuple[str, int]]]] = {}  # that a thread works on
_lookups_lock = threading.Lock()


def look_up(host: str, port: int) -> Future[list[tuple[str, int]]]:
    """Return a future with the addresses of a host; its exception is an OSError, or a UnicodeError for what is no name.

    The system's resolver may hang, and cannot be interrupted. So names are looked up in a thread that ends with the process and that
    no stop waits for, one for each name at a time.
    """
    future: Future[list[tuple[str, int]]] = Future()
    with contextlib.suppress(socket.gaierror, UnicodeError):
        future.set_result(_addresses(host, port, socket.AI_NUMERICHOST))
        return future
    with _lookups_lock:
        if (running := _lookups.get((host, port))) is not None:
            return running
        _lookups[host, port] = future

    def work() -> None:
        try:
            found, error = _addresses(host, port), None
        except (OSError, UnicodeError) as problem:
            found, error = [], problem
        with _lookups_lock:
            del _lookups[host, port]
        if error is None:
            future.set_result(found)
        else:
            future.set_exception(error)

    future.set_running_or_notify_cancel()  # those who wait cannot cancel it for others
    try:
        threading.Thread(target=work, name="lookup", daemon=True).start()
    except RuntimeError as error:  # the system gives no thread at this moment
        with _lookups_lock:
            del _lookups[host, port]
        future.set_exception(OSError(errno.EAGAIN, str(error)))
    return future


def _addresses(host: str, port: int, flags: int = 0) -> list[tuple[str, int]]:
    rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(str(address[0]), port) for _, _, _, _, address in rows]


def _connect(address: str, timeout_s: float) -> socket.socket:
    """Connect to the first address of host:port that answers; OSError, TimeoutError, UnicodeError for what is no name."""
    deadline_s, problem = time.monotonic() + timeout_s, OSError("it has no address")
    for found in look_up(*split_address(address)).result(timeout_s):
        try:
            return socket.create_connection(found, max(0.001, deadline_s - time.monotonic()))
        except OSError as error:
            problem = error
    raise problem


class MasterLink:
    """One connection. `address` is host:port, IPv6 as [::1]:port.

    `peer`: the master's proven identity; None for one that uses RocketMQ's own protocol. The first report offers `seals` to such a
    master; the first received bytes tell whether it uses them.
    """

    def __init__(self, address: str, call: MasterCall | None = None, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Connect, and perform the handshake of `call`; LinkLostError says why that failed."""
        try:
            self._socket = _connect(address, timeout_s)
        except TimeoutError:
            raise LinkLostError(f"{address} does not answer within {timeout_s:g} s") from None
        except OSError as error:
            raise LinkLostError(f"{address}: {os_error_sentence(error)}") from None
        except UnicodeError as error:  # of an invalid host name
            raise LinkLostError(f"{address}: {error}") from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer: Introduction | None = None
        self.seals = Seals()
        try:
            self._shake_hands(address, call, timeout_s)
        except BaseException:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._offered: int | None = None  # the report with an offer that the master has not answered yet
        self._may_offer = self.peer is None
        self._answer = b""      # the received part of the answer to the offer
        self.unsent = b""       # the rest of a report that was sent in part, also by C
        self._waiting: int | None = None  # the newest report of which no byte was sent

    def _shake_hands(self, address: str, call: MasterCall | None, timeout_s: float) -> None:
        if call is None or not call.secret.is_set:
            return
        try:
            if self._socket.getpeername()[0] in call.plain_peers:
                return
            deadline_s = time.monotonic() + timeout_s
            self.peer, self.seals = slave_handshake(lambda words, size: self._exchange(words, size, deadline_s), call.secret.read(),
                                                    call.introduce())
            call.check_peer(self.peer)
        except TimeoutError:
            raise LinkLostError(f"{address} does not answer the handshake within {timeout_s:g} s") from None
        except OSError as error:
            raise LinkLostError(f"the connection broke: {os_error_sentence(error)}") from None
        except HandshakeError as error:
            raise LinkLostError(f"{address}: {error}") from None

    def _exchange(self, words: bytes, size_bytes: int, deadline_s: float) -> bytes:
        """Send `words`, and receive `size_bytes`; only for the handshake."""
        self._socket.sendall(words)
        found = b""
        while len(found) < size_bytes:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._socket.settimeout(left_s)
            piece = self._socket.recv(size_bytes - len(found))
            if not piece:
                raise HandshakeError("it closed the connection during the handshake; its engine.log says why: have both the same secret "
                                     "(ha_secret_file)?")
            found += piece
        return found

    @property
    def descriptor(self) -> int:
        """The descriptor of the socket, which does not block."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether a report was sent in part, or not at all."""
        return bool(self.unsent) or self._waiting is not None

    def report(self, offset: int) -> None:
        """Send one report, after the rest of an incomplete one; of unsent reports only the newest counts."""
        self._waiting = offset
        while self.unsent or self._waiting is not None:
            if not self.unsent:
                self.unsent, self._waiting = self._packed(self._waiting or 0), None
            try:
                sent = self._socket.send(self.unsent)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise LinkLostError(f"the connection broke: {os_error_sentence(error)}") from None
            self.unsent = self.unsent[sent:]

    def _packed(self, offset: int) -> bytes:
        text = REPORT.pack(offset)
        if self._may_offer:
            self._may_offer, self._offered = False, offset
            return OFFER + text
        return text if self.seals.out is None else self.seals.out.sealed(text)

    def _without_answer(self, data: memoryview) -> memoryview:
        """Return the bytes after the answer to the offer; by the first byte, RocketMQ's master sends no answer."""
        if not is_hello(self._answer or data):
            self._offered = None
            return data
        wanted = len(SEALED) - len(self._answer)
        self._answer += data[:wanted]
        if len(self._answer) < len(SEALED):
            return data[:0]
        if self._answer != SEALED:
            raise BadStreamError("the master's answer to the offer of seals did not come as it was sent, or is of another version")
        self.seals = Seals.unkeyed(is_master=False)
        offered, self._offered = self._offered, None
        self.report(offered or 0)
        return data[wanted:]

    def wait(self, timeout_s: float) -> bool:
        """Sleep until bytes arrive, the connection ends, or the timeout."""
        return bool(self._poll.poll(max(0, int(timeout_s * 1000 + 0.999))))

    def receive(self) -> memoryview | None:
        """Return received bytes of frames, valid until the next call, or None; LinkLostError at the connection's end."""
        try:
            count = self._socket.recv_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            raise LinkLostError(f"the connection broke: {os_error_sentence(error)}") from None
        if count == 0:
            self.lost(0)
        data = self._buffer[:count]
        return data if self._offered is None else self._without_answer(data)

    def lost(self, error_number: int) -> NoReturn:
        """Raise LinkLostError for a connection that failed with an errno, or ended (0)."""
        if error_number:
            raise LinkLostError(f"the connection broke: {os.strerror(error_number)}")
        raise LinkLostError("the master closed the connection")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()


TABLE_BYTES_MAX = 16 << 20
WAITING_MAX = 8  # tables of one kind that wait for their bytes of the log to be durable


class MasterTable(NamedTuple):
    """The content of one file of the master. `end`: the end of its log at that time."""

    kind: int
    content: bytes
    end: int


def _offsets(root: str | os.PathLike[str], content: bytes) -> None:
    theirs = decode_offsets(content)
    ConsumerOffsets(root).update(lambda table: table.update(theirs))


def _cancels(root: str | os.PathLike[str], content: bytes) -> None:
    path = StorePaths(root).config / consumer_offset.CANCELS_NAME
    if read_or_none(path) != content:
        write_config(path, content, keep_backup=False, mode=LOCK_MODE)


def _replace(name: str, decode: Callable[[str], object], *, is_shared: bool = True) -> Callable[[str | os.PathLike[str], bytes], None]:
    def write(root: str | os.PathLike[str], content: bytes) -> None:
        text = content.decode()
        decode(text)  # FormatError
        file = ConfigFile(StorePaths(root).config / name, str)
        with exclusive(file.path) if is_shared else contextlib.nullcontext():
            if file.read().value != text:
                file.write(text)
    return write


# By kind in the protocol, whose numbers must not change: the name of the file, and how a slave writes it.
TABLES: tuple[tuple[str, Callable[[str | os.PathLike[str], bytes], None]], ...] = (
    (config_table.TOPICS_NAME, _replace(config_table.TOPICS_NAME, config_table.TOPICS_FORMAT.decode)),
    (config_table.GROUPS_NAME, _replace(config_table.GROUPS_NAME, config_table.GROUPS_FORMAT.decode)),
    (consumer_offset.FILE_NAME, _offsets),
    (consumer_offset.NAME, _replace(consumer_offset.NAME, consumer_offset.decode_delay_offsets, is_shared=False)),
    (consumer_offset.CANCELS_NAME, _cancels),
    (queue_ends.NAME, _replace(queue_ends.NAME, queue_ends.decode_queue_ends, is_shared=False)),
)
QUEUE_ENDS = len(TABLES) - 1


class TableSource:
    """The files of a master, and the ends of its queues; `tables` has the last read content, by kind."""

    def __init__(self, store: MessageStore, load_end: Callable[[], int], load_dispatched: Callable[[], int], report: Report) -> None:
        self._store = store
        self._folder = store.config
        self._load_end = load_end
        self._load_dispatched = load_dispatched
        self._followed_from = -1  # the queues' ends are to be read for a slave whose log may begin here
        self._ends_fault = ""
        self._stamps: dict[int, tuple[int, int, int]] = {}
        self.tables: dict[int, MasterTable] = {}
        self._blocked = BlockedReason(report)
        self._lock = threading.Lock()  # a stop reloads beside the slaves' thread

    def reload(self) -> None:
        """Read the files that have changed since the last call; skip one that does not exist, is empty, or cannot be read now."""
        with self._lock:
            why = self._ends_fault
            for kind, (name, _) in enumerate(TABLES[:QUEUE_ENDS]):
                path = self._folder / name
                try:
                    found = os.stat(path)
                    stamp = (found.st_mtime_ns, found.st_ino, found.st_size)
                    if self._stamps.get(kind) == stamp:
                        continue
                    content = read_small_file(path, TABLE_BYTES_MAX)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    why = f"{name} is not sent to slaves: {error.strerror}"
                    continue
                self._stamps[kind] = stamp  # from before the read: the next call sees a change in between
                if name == consumer_offset.CANCELS_NAME:
                    content = consumer_offset.delay_marks(content)
                    if kind in self.tables and self.tables[kind].content == content:
                        continue
                if content:  # a power cut may empty a broker's file, and the protocol has no empty table
                    self.tables[kind] = MasterTable(kind, content, self._load_end())
            self._blocked.set(why, why, event=Event.TABLE_UNUSABLE)

    def want_queue_ends(self, offset: int) -> None:
        """Let read_queue_ends() read them again, for a slave that follows from this offset on and may know no earlier message."""
        with self._lock:
            self._followed_from = max(self._followed_from, offset)

    def read_queue_ends(self) -> None:
        """Read where the queues end, if that is wanted and they have all messages below that offset. Many queues take long."""
        with self._lock:
            wanted = self._followed_from
            if not 0 <= wanted <= self._load_dispatched():
                return
            self._followed_from, self._ends_fault = -1, ""
        try:
            content = queue_ends.encode_queue_ends(self._store, self._load_end)
            if len(content) > TABLE_BYTES_MAX:
                raise EngineError(f"they have {len(content):,} bytes")
            self.tables[QUEUE_ENDS] = MasterTable(QUEUE_ENDS, content, self._load_end())
        except EngineError as error:  # for example of a file that was deleted meanwhile
            self._ends_fault = f"the ends of queues are not sent to slaves: {error}"
            self.want_queue_ends(wanted)


class TableSink:
    """The files of a slave. The connection's thread calls take(), one that may wait for the disk calls apply()."""

    def __init__(self, root: str | os.PathLike[str], load_flushed: Callable[[], int], report: Report) -> None:
        self._root = root
        self._load_flushed = load_flushed
        self._lock = threading.Lock()
        self._waiting: dict[int, list[MasterTable]] = {}
        self.blocked = BlockedReason(report)

    def take(self, kind: int, content: bytes, position: int) -> None:
        """Keep a table that arrived after the log's bytes below `position`; ignore a kind of a later version."""
        if kind < len(TABLES):
            with self._lock:
                self._waiting.setdefault(kind, []).append(MasterTable(kind, content, position))
                del self._waiting[kind][:-WAITING_MAX]

    def apply(self) -> None:
        """Write the newest table of each kind whose bytes of the log are durable here; retry failed writes."""
        flushed = self._load_flushed()
        for kind, (name, write) in enumerate(TABLES):
            with self._lock:
                due = [table for table in self._waiting.get(kind, ()) if table.end <= flushed]
            if not due:
                continue
            try:
                write(self._root, due[-1].content)
            except (FormatError, UnicodeDecodeError) as error:
                self._block(f"the master's {name} cannot be used: {error}")
            except EngineError as error:
                self._block(f"the master's {name} cannot be written here: {error}")
                continue
            else:
                self.blocked.clear()
            with self._lock:
                self._waiting[kind] = [table for table in self._waiting[kind] if table not in due]

    def _block(self, why: str) -> None:
        self.blocked.set(why, why, event=Event.TABLE_UNUSABLE)
