"""HAClient: a slave that follows its master (formats/ha_wire.py has the wire protocol).

    connect -> report a record boundary below the own end -> compare up to the own end -> append later bytes -> report

It submits complete records to the writer, one entry at a time, through a session like a producer's, and reports them once the
writer has appended them, or once they are flushed (`ack_level`). So a report is a record boundary below which the log equals the
master's, and an incomplete record is dropped with its connection. If the writer refuses an entry for the moment (a full disk, a
read-only store), it submits it again; it skips no record, and reports nothing meanwhile.

If the master's log differs, or ends before this one's, it closes the link, `status` says why, and the next start of this slave
truncates the part that differs (ha_join.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pyengine.errors import EngineError
from pyengine.events import Event
from pyengine.formats.ha_wire import Introduction
from pyengine.ipc.control_block import read_masters
from pyengine.ipc.replication import Link, Replication
from pyengine.ipc.session_client import OpenSession
from pyengine.native import control as native
from pyengine.native import replication
from pyengine.native import session as producing
from pyengine.native.failpoints import failpoint
from pyengine.native.flush import monotonic_ns
from pyengine.native.replication import LINK_CONNECTING, LINK_HANDSHAKE, LINK_TRANSFER, FollowLoop
from pyengine.native.writer import REFUSALS, REFUSED_OFFSET, REFUSED_RAW
from pyengine.results import PutStatus
from pyengine.services.replication.ha_handshake import (
    HandshakeError,
    PlainPeers,
    Secret,
    SecretError,
    require_followable,
)
from pyengine.services.replication.ha_notes import ReplicationNotes
from pyengine.services.replication.ha_stream import (
    READ_BYTES,
    RUN_BYTES,
    BadStreamError,
    FrameCutter,
    LinkLostError,
    LogsDifferError,
    MasterCall,
    MasterLink,
    RecordStream,
    TableSink,
)
from pyengine.services.service import BlockedReason, Service, ServiceContext
from pyengine.storage.commit_log import CommitLog

RING_BYTES_MIN = 16 << 20
ENTRY_HEAD_BYTES = 4096
BACKLOG_BYTES = 2 << 20        # with so many bytes waiting for the writer it stops reading, and the master's socket fills
PAUSES_S = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0)  # before each try to connect, the last one from then on
READ_WAIT_S_MAX = 0.2                      # longest wait of one round
ANSWER_WAIT_NS = 5_000_000                 # one wait for the writer or the flusher, while no bytes arrive
REFUSED_PAUSE_NS = 200_000_000
ANSWER_NS_MAX = 1_000_000_000  # longest wait of an orderly stop for the pending entry
HEALTHY_NS = 10_000_000_000     # a link that lasted so long, or delivered records, is retried at once
LOOK_NS = 500_000_000           # between two looks where name servers say that the master is
NEVER_NS = 1 << 62
UNKNOWN = "unknown"             # the address of a master that no name server has told yet
REJOIN = "restart this slave: it cuts what its master does not have"
MASTER_LOST = ("this slave has reported more than that, so the master has lost it: promote this slave (pyengine promote), or "
               "restart it with ha_cut=any to lose it here too")


def ring_bytes(record_bytes_max: int) -> int:
    """Return the size of a session's ring, a power of two, with room for one run and a longest record."""
    size = RING_BYTES_MIN
    while size // 2 < RUN_BYTES + record_bytes_max + ENTRY_HEAD_BYTES:
        size *= 2
    return size


class _ReconnectError(EngineError):
    """The link must begin again at once; the master is fine."""


class HAClient(Service):
    """The replicator of a slave. `open_session` opens a session with a ring of the given size; closing the service closes
    `replication`.
    """

    never_idle = True  # while connected it waits on the socket, not on its latch

    KIND = native.REPLICATOR

    def __init__(self, context: ServiceContext, open_session: Callable[[int], OpenSession], replication: Replication,
                 clock_ns: Callable[[], int] = monotonic_ns) -> None:
        super().__init__(context)
        control, config = self._control, context.config
        self._store_received = native.storer(control.received, "value")
        self._load_flushed = native.loader(control.flushed, "value")
        self._load_confirm = native.loader(control.confirm, "value")
        self._load_linked = native.loader(control.replicator, "linked")
        self._load_master_end = native.loader(control.replicator, "master_end")
        self._store_master_end = native.storer(control.replicator, "master_end")
        self._config = config
        self._address = config.ha_master_address or UNKNOWN
        self._look_ns = 0
        self._call = MasterCall(Secret(context.store.root, config), PlainPeers(config), self._introduce, self._check_peer)
        self._open_session = open_session
        self._clock_ns = clock_ns
        self._heartbeat_ns = config.ha_send_heartbeat_interval_ms * 1_000_000
        self._silence_ns = config.ha_housekeeping_interval_ms * 1_000_000
        self._acks_flushed = config.acks_flushed
        self._log = CommitLog(context.store.root, self._segment_bytes)
        self._tables = TableSink(context.store.root, self._load_flushed, context.report)
        self._notes = ReplicationNotes(context, self._tables.apply)
        self._reasons += [self._notes.blocked, self._tables.blocked]  # `status` shows a missing link elsewhere
        self._notes.note()  # from now on the note says that the store is a slave
        self._notes.start()
        self._replication = replication
        self._status = self._open_status(LINK_CONNECTING)
        if self._address == UNKNOWN:
            self._status.state(LINK_CONNECTING, "no name server has told where the master is")
        self._lost = BlockedReason(context.report)  # why it does not follow, for the log
        self._tries = 0
        self._retry_ns = 0
        self._from_byte_1 = False
        self._session: OpenSession | None = None
        self._writer: producing.ProducerSession | None = None
        self._sequence = 0             # of the entry in flight, 0 none
        self._in_flight = (0, 0)
        self._refused_until_ns = 0
        self._known_boundary: int | None = None
        self._served_from = 0          # the master has deleted what is below
        self._differs_at = -1
        self._follow: FollowLoop | None = None
        self._has_appended = False     # on this connection
        self._linked_ns = NEVER_NS     # when the logs were found equal
        self._link: MasterLink | None = None
        native.store(control.replicator, "linked", 0)  # a killed predecessor may have left it set

    # ---- the service --------------------------------------------------------------

    def work(self) -> bool:
        now_ns = self._clock_ns()
        try:
            if self._memory.state == native.STATE_STOPPING:
                self._finish()
            elif self._has_moved(now_ns) or self._link is None or self._writer is None:
                if now_ns < self._retry_ns or self._address == UNKNOWN or not self._is_settled():
                    return False
                self._connect()
            elif self._follow is not None and self._is_plain(self._link):
                self._follow_in_c(self._link, self._writer, self._follow)
            else:
                self._step(self._link, self._writer)
        except _ReconnectError:
            self._drop("", 0.0)
        except _MasterIsShortError as error:
            self._drop(f"{error}: {self._remedy(error.offset)}", PAUSES_S[-1])
        except LogsDifferError as error:
            if error.offset == self._differs_at:
                self._drop(f"{error}: {self._remedy(error.offset)}", PAUSES_S[-1])
            else:
                self._drop(str(error))  # one failure may be the network's
            self._differs_at = error.offset
        except EngineError as error:
            self._drop(str(error))
        return self._link is not None

    def _remedy(self, offset: int) -> str:
        """Return what the operator can do if the master has no bytes, or different ones, from `offset` on."""
        return REJOIN if offset >= self._load_confirm() else MASTER_LOST

    def pause_s(self) -> float:
        return max(0.01, min(1.0, (self._retry_ns - self._clock_ns()) / 1e9))

    def drain(self) -> bool:
        self._finish()
        return False

    def close(self) -> None:
        self._disconnect()
        self._end_session()
        self._status.close()
        self._replication.close()
        self._notes.close()
        self._log.close()

    def _finish(self) -> None:
        """Finish and report the current entry, then close connection and session, since the engine stops."""
        try:
            if self._link is not None:
                if self._sequence and self._writer is not None:
                    self._collect(self._writer, self._clock_ns() + ANSWER_NS_MAX)
                self._acknowledge(self._link, self._clock_ns())
        except EngineError as error:  # the next start begins with what the log holds, reported or not
            self._report_once(str(error))
        finally:
            if self._link is not None:
                self._disconnect()
                self._status.state(LINK_CONNECTING, "the engine stops")
            self._end_session()

    # ---- connecting -----------------------------------------------------------------

    def _has_moved(self, now_ns: int) -> bool:
        """Return whether the address has changed, as name servers tell it if the settings do not (RocketMQ: updateHaMasterAddress).

        It stays while one of them tells the present one, so that those that disagree for a while do not end the link.
        """
        if not self._config.learns_master or now_ns < self._look_ns:
            return False
        self._look_ns = now_ns + LOOK_NS
        told = read_masters(self._memory.folder)
        if not told or self._address in told:
            return False
        self._drop(f"name servers tell of the master {told[0]}" if self._link is not None else "", 0.0)
        self._status.close()
        self._address = told[0]
        self._status = self._open_status(LINK_CONNECTING)
        self._tries, self._served_from, self._differs_at, self._from_byte_1 = 0, 0, -1, False
        return True

    def _is_settled(self) -> bool:
        """Return whether the own log can be reported: it is all in the files, and as durable as reports promise."""
        if self._memory.state != native.STATE_RUNNING:
            self._retry_ns = self._clock_ns() + REFUSED_PAUSE_NS
            return False
        end = native.committed_slot(self._control)[0]
        reached = native.load_position(self._control.flushed if self._acks_flushed else self._control.committed)
        if reached < end:
            self._retry_ns = self._clock_ns() + ANSWER_WAIT_NS
        return reached >= end

    def _connect(self) -> None:
        if self._writer is None:
            self._begin_session()
            assert self._writer is not None
        end = native.committed_slot(self._control)[0]
        begin = self._begin_of(end)
        try:
            self._link = MasterLink(self._address, self._call)
        except (LinkLostError, SecretError):
            self._replication.count("refused")
            raise
        failpoint("slave_connected")
        self._replication.count("connections")
        self._status.close()
        self._status = self._open_status(LINK_HANDSHAKE)
        self._status.start(begin)
        self._cutter = FrameCutter(self._segment_bytes)
        self._stream = RecordStream(begin, end, self._log, self._segment_bytes,
                                    self._writer.entry_limit - RUN_BYTES - ENTRY_HEAD_BYTES)
        self._begin = begin
        self._is_first_header = True
        self._has_appended = False
        self._linked_ns = NEVER_NS
        self._last_heartbeat = -1
        self._acked = begin if begin != 1 else 0
        self._received_ns = self._sent_ns = self._clock_ns()
        self._link.report(begin)
        failpoint("slave_asked")

    def _introduce(self) -> Introduction:
        return Introduction(self._memory.store_uuid.bytes, self._notes.known_term, is_master=False)

    def _check_peer(self, master: Introduction) -> None:
        require_followable(master, self._notes.known_term)
        self._notes.follow(master.term)
        if self._notes.blocked.text:
            raise HandshakeError(f"its term cannot be noted: {self._notes.blocked.text}")

    def _begin_of(self, end: int) -> int:
        """Return the first report: a record boundary at least `ha_compare_bytes` below the own end; 1 instead of 0."""
        low = max(0, native.load_position(self._control.min_offset), self._served_from)
        if end == 0:
            return 1 if self._from_byte_1 else 0
        target = max(low, end - self._config.ha_compare_bytes)
        known = self._known_boundary
        boundary = max(low, self._log.record_boundary(target, known if known is not None and known <= target else None))
        self._known_boundary = boundary
        return boundary or 1

    def _drop(self, reason: str, pause_s: float | None = None) -> None:
        """Close the connection, report the reason, and decide when to try again."""
        if self._has_appended or self._clock_ns() - self._linked_ns > HEALTHY_NS:
            self._tries = 0
        if pause_s is None:
            pause_s = PAUSES_S[min(self._tries, len(PAUSES_S) - 1)]
            self._tries += 1
        self._retry_ns = self._clock_ns() + int(pause_s * 1e9)
        if self._link is not None:
            self._disconnect()
            self._status.close(reason)
            self._status = self._open_status(LINK_CONNECTING)
        if reason:
            self._report_once(reason)
        self._status.state(LINK_CONNECTING, reason)

    def _disconnect(self) -> None:
        if self._link is not None:
            self._link.close()
            failpoint("slave_disconnected")
            self._link = None
        self._abandon_entry()
        native.store(self._control.replicator, "linked", 0)

    def _open_status(self, state: int) -> Link:
        link = self._replication.open_link(self._address, state)
        assert link is not None, "a slave has one link at a time"
        return link

    def _report_once(self, text: str) -> None:
        self._lost.set(text, f"master {self._address}: {text}", event=Event.MASTER_LOST)

    # ---- one round ------------------------------------------------------------------

    def _is_plain(self, link: MasterLink) -> bool:
        """Return whether no record is incomplete, no entry pending and no report due, so that C can run."""
        return (bool(self._load_linked()) and not self._sequence and not self._stream.waiting_bytes and self._cutter.is_between_frames
                and self._acked == self._stream.own_end and not link.has_unsent)

    def _follow_in_c(self, link: MasterLink, writer: producing.ProducerSession, follow: FollowLoop) -> None:
        """Let C receive, append and report, for a step or until a case that it does not handle; then handle that case."""
        due_ns = self._sent_ns + self._heartbeat_ns - self._clock_ns()
        before = self._stream.own_end
        why = follow.run(link.descriptor, self._status.row, before, monotonic_ns() + max(0, min(int(READ_WAIT_S_MAX * 1e9), due_ns)))
        now_ns = self._clock_ns()
        done = follow.fields
        if done.end > before:
            self._stream.skip_to(done.end)
            self._has_appended = True
        if done.has_received:
            self._received_ns = now_ns
        if done.has_reported:
            self._acked, self._sent_ns = done.acked, now_ns
            link.unsent = follow.unsent
        if why == replication.LOST:
            link.lost(-done.got)
        if why in (replication.TAKE, replication.SUBMITTED):
            self._take(link, follow.received)
        if why == replication.SUBMITTED:  # `done.end` is where the entry begins
            self._sequence, self._in_flight = done.sequence, (done.end, self._stream.position)
            self._collect(writer, now_ns)
        self._acknowledge(link, now_ns)
        self._check_silence(now_ns)

    def _step(self, link: MasterLink, writer: producing.ProducerSession) -> None:
        """Read, submit, take the answer and report, each if it is possible now."""
        now_ns = self._clock_ns()
        has_read = False
        if not self._sequence:
            self._submit(writer, now_ns)
        if self._stream.waiting_bytes < BACKLOG_BYTES or not self._sequence and self._stream.whole() is None:
            is_waiting = self._sequence or self._acked < self._ack_target()
            data = link.receive()
            if data is None and not is_waiting:
                due_s = READ_WAIT_S_MAX if self._is_first_header else (self._sent_ns + self._heartbeat_ns - now_ns) / 1e9
                if link.wait(min(READ_WAIT_S_MAX, max(0.0, due_s))):
                    data = link.receive()
                now_ns = self._clock_ns()
            if data is not None:
                has_read = True
                self._received_ns = now_ns
                self._take(link, data)
        if not self._sequence:
            self._submit(writer, now_ns)
        if self._sequence:
            self._collect(writer, now_ns + (0 if has_read else ANSWER_WAIT_NS))
        elif now_ns < self._refused_until_ns:
            time.sleep(ANSWER_WAIT_NS / 1e9)
        elif not has_read and self._acks_flushed and self._acked < self._ack_target():
            if writer.wait_flushed(self._ack_target(), now_ns + ANSWER_WAIT_NS) not in (0, producing.AGAIN):
                link.wait(READ_WAIT_S_MAX)  # in a frozen store nothing will be flushed any more
        now_ns = self._clock_ns()
        self._acknowledge(link, now_ns)
        self._check_silence(now_ns)

    def _check_silence(self, now_ns: int) -> None:
        """Raise LinkLostError if the master is silent, unless it waits for received bytes to be taken."""
        if now_ns - self._received_ns > self._silence_ns and self._stream.waiting_bytes < BACKLOG_BYTES:
            raise LinkLostError(f"the master was silent for {self._silence_ns / 1e9:g} s")

    def _take(self, link: MasterLink, data: memoryview) -> None:
        frames = 0
        for offset, piece in self._cutter.feed(data, link.seals.into):
            if offset < 0:
                if link.peer is None:
                    raise BadStreamError("it sends tables, and has not proven that it has the secret of this store")
                self._tables.take(-1 - offset, bytes(piece), self._stream.position)
                continue
            frames += 1
            if self._is_first_header:
                self._is_first_header = False
                self._check_first_header(offset)
            self._stream.take(offset, piece)
            if not len(piece):
                self._take_heartbeat(offset)
        position = self._stream.position
        self._store_received(position)
        failpoint("received_moved")
        if position > self._load_master_end():
            self._store_master_end(position)
        self._status.sent(position, len(data), frames)
        if self._stream.is_equal and not self._load_linked():
            self._set_linked(link)

    def _set_linked(self, link: MasterLink) -> None:
        if self._follow is not None:
            self._follow.seal(*link.seals)
        native.store(self._control.replicator, "linked", 1)
        failpoint("slave_linked")
        self._linked_ns = self._clock_ns()
        self._status.state(LINK_TRANSFER)
        self._lost.clear()
        self._report(Event.MASTER_FOLLOWED, f"master {self._address}: follows from {self._stream.own_end}"
                     + ("" if link.seals.into else ", by RocketMQ's own protocol: what is sent has no checksum"))

    def _check_first_header(self, offset: int) -> None:
        """Check the offset of the first header; an offset that was not requested tells why."""
        if offset == self._begin:
            return
        if self._begin == 0:  # it requested the last segment, which is not the first one
            self._from_byte_1 = True
            raise _ReconnectError
        if offset < self._begin:
            self._store_master_end(offset)
            raise _MasterIsShortError(offset, self._stream.own_end)
        if offset <= self._stream.own_end:
            self._served_from = offset
            raise _ReconnectError
        raise BadStreamError(
            f"the master's log begins at {offset}, after the end of this one at {self._stream.own_end}: start this slave anew "
            "with an empty directory")

    def _take_heartbeat(self, offset: int) -> None:
        """Handle a heartbeat: after one the master may be slow; after two without bytes in between its log ends there."""
        if offset != self._last_heartbeat:
            self._last_heartbeat = offset
            self._store_master_end(offset)
            return
        if not self._stream.is_equal:
            end = self._stream.own_end
            last_segment = end - end % self._segment_bytes
            if offset == self._begin < last_segment:
                self._served_from = last_segment  # it may have deleted what is before
                raise _ReconnectError
            if offset == self._begin > 1:
                raise _MasterIsShortError(offset, end, "sends nothing from")
            raise _MasterIsShortError(offset, end)
        if self._begin == offset == 1:
            raise BadStreamError("the master has nothing to send from its log's first byte on: it begins later. Start this slave "
                                 "anew with an empty directory")
        if not self._stream.is_between_records and not self._sequence and self._stream.whole() is None:
            raise BadStreamError(f"the master's log ends at {offset} in the middle of a record")

    # ---- the writer -----------------------------------------------------------------

    def _begin_session(self) -> None:
        wanted = ring_bytes(self._memory.identity.max_message_bytes + (64 << 10))
        self._session = session = self._open_session(wanted)
        failpoint("slave_session_opened")
        self._writer = producing.ProducerSession(session.control, session.session, session.slot, session.generation)
        self._follow = FollowLoop(self._control, self._writer, buffer_bytes=READ_BYTES, acks_flushed=self._acks_flushed)
        self._sequence = 0

    def _end_session(self) -> None:
        session, self._session, self._writer, self._follow = self._session, None, None, None
        self._sequence = 0
        if session is not None:
            session.close()

    def _submit(self, writer: producing.ProducerSession, now_ns: int) -> None:
        if now_ns < self._refused_until_ns:
            return
        run = self._stream.whole()
        if run is None:
            return
        try:
            code = writer.submit_raw(run.records, run.offset, now_ns)
        finally:
            run.records.release()
        if code in (producing.AGAIN, producing.BUSY):
            self._refused_until_ns = now_ns + REFUSED_PAUSE_NS
        elif code:
            self._end_session()
            raise _ReconnectError
        else:
            failpoint("raw_submitted")
            self._refused_until_ns = 0
            self._sequence = writer.sequence
            self._in_flight = (run.offset, run.end)

    def _collect(self, writer: producing.ProducerSession, deadline_ns: int) -> None:
        """Take the answer to the pending entry, if it arrives in time."""
        code, answer = writer.take_answer(self._sequence, deadline_ns)
        if code == producing.AGAIN:
            return
        self._sequence = 0
        if code:
            self._end_session()
            raise _ReconnectError
        _, physical_offset, end_offset, _, _, status, detail, _, _ = answer
        if physical_offset < 0 or status != PutStatus.PUT_OK:
            self._retry_refused(status, detail)
        elif (physical_offset, end_offset) != self._in_flight:
            raise LinkLostError(f"the writer appended [{physical_offset}, {end_offset}) instead of {self._in_flight}")
        else:
            failpoint("raw_answered")
            self._stream.drop(end_offset)
            self._has_appended = True
            if self._lost.text:
                self._lost.clear()
                self._status.state(LINK_TRANSFER)

    def _retry_refused(self, status: int, detail: int) -> None:
        if detail in (REFUSED_OFFSET, REFUSED_RAW):
            raise LinkLostError(f"the writer refused the bytes received for offset {self._in_flight[0]}: {REFUSALS[detail]}")
        self._refused_until_ns = self._clock_ns() + REFUSED_PAUSE_NS
        reason = f"{PutStatus(status).name}: {REFUSALS.get(detail, '')}"
        self._report_once(f"its records wait: {reason}")
        self._status.state(LINK_TRANSFER, reason)

    def _abandon_entry(self) -> None:
        """Forget the pending entry of a connection that ends; if it is appended, the own log's end shows it."""
        if self._sequence and self._writer is not None:
            code, _ = self._writer.take_answer(self._sequence, self._clock_ns() + 100_000_000)
            if code:
                self._end_session()
        self._sequence = 0
        self._refused_until_ns = 0

    # ---- reports --------------------------------------------------------------------

    def _ack_target(self) -> int:
        """Return the offset to report, now or once it is flushed."""
        return self._stream.own_end if self._stream.is_equal else self._acked

    def _acknowledge(self, link: MasterLink, now_ns: int) -> None:
        """Report what was appended, or repeat the last report as a heartbeat.

        It does so only after the master has sent bytes: until then it is unknown whether the master has this log at all.
        """
        goal = self._ack_target()
        if self._acks_flushed:
            goal = min(goal, self._load_flushed())
        if goal > self._acked:
            self._acked = goal
            if goal > self._load_confirm():  # before the report: what a master acknowledges must be confirmed here too
                native.publish_confirm(self._control, goal)
                failpoint("slave_confirmed")
            link.report(goal)
            failpoint("slave_reported")
            self._sent_ns = now_ns
            self._status.acked(goal)
        elif now_ns - self._sent_ns >= self._heartbeat_ns and not self._is_first_header:
            link.report(max(self._acked, self._begin))
            self._sent_ns = now_ns


class _MasterIsShortError(EngineError):
    """The master's log ends, at `offset`, before this store's."""

    def __init__(self, offset: int, own_end: int, seen: str = "ends at") -> None:
        super().__init__(f"the master's log {seen} {offset}, this one ends at {own_end}")
        self.offset = offset
