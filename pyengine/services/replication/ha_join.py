"""The start of a slave: ask its master where a new log begins, and compare both logs.

    new store        `origin`: where its log begins (sync_from: the master's last segment, or its first)
    other stores     `cut_at`: the last record boundary below which both logs are equal, if the master has other bytes
                     there or none; None if the own log is a prefix of the master's

Bring-up calls it after recovery and before the engine runs, when no process reads or writes the store. This module changes
nothing. Confirmed records are not truncated unless `ha_cut=any` allows it; a log that has nothing in common with its master's is
not truncated at all.

The protocol has no queries, only an offset to begin at (formats/ha_wire.py), so the slave concludes from the bytes that
it receives. RocketMQ sends from any offset that it has, and for others only a heartbeat every 5 s with the same offset. This
engine's master instead sends its own end (or begin), and closes. One heartbeat may mean that the master was slow; two without
bytes in between mean that its log ends there. The protocol has no checksum either, so a cut needs two comparisons with the same
result.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from pyengine.errors import CorruptionError, EngineError, EngineUnavailableError
from pyengine.formats.ha_wire import Introduction
from pyengine.native.flush import monotonic_ns
from pyengine.services.replication.ha_handshake import PlainPeers, Secret, require_followable
from pyengine.services.replication.ha_stream import (
    BadStreamError,
    FrameCutter,
    LinkLostError,
    LogsDifferError,
    MasterCall,
    MasterLink,
    RecordStream,
)
from pyengine.storage.commit_log import CommitLog
from pyengine.storage.config import EngineConfig
from pyengine.storage.engine_id import ensure_engine_id
from pyengine.storage.message_store import MessageStore
from pyengine.storage.replication_state import ROLES, ReplicationState, ReplicationStateFile, second_master_sentence

STEP_BACK = 8        # each probe without equal bytes begins so many times farther below the end
PROBES_MAX = 40
RATE_MIN = 8192      # bytes per second, since a slower master would delay the start
PEER_TIMEOUT_S = 2.0
_FIRST = 1           # a report that requests a log's first bytes; 0 requests the last segment


@dataclass(frozen=True, slots=True)
class Join:
    """The result for this store. `origin` is for a new one; `notes` are sentences for the report.

    `presence` is an idle connection to the master: while it exists, puts to a RocketMQ SYNC_MASTER wait for this slave's
    replicator, instead of failing for a missing slave. The caller closes it once the replicator is connected.
    """

    origin: int | None = None
    cut_at: int | None = None
    notes: tuple[str, ...] = ()
    presence: MasterLink | None = field(default=None, compare=False)


class JoinRefusedError(CorruptionError):
    """This store cannot follow that master; nothing was changed."""


def join(store: MessageStore, config: EngineConfig, min_offset: int, end_offset: int,
         remembered: int = 0) -> Join:
    """Ask the master at `config.ha_master_address`. The store's log is [min_offset, end_offset), as recovery has left it.

    `remembered`: the confirmed offset in a dead engine's memory, which may be newer than the note; 0 if there is none.

    EngineUnavailableError if the master of a new store cannot be reached. A store that has a log starts without its master; its
    replicator compares the logs when it has connected. JoinRefusedError.
    """
    call = MasterCall(Secret(store.root, config), PlainPeers(config), lambda: _introduce(store.root, is_master=False),
                      lambda master: _check_peer(store.root, config, master))
    try:
        presence = MasterLink(config.ha_master_address, call)
    except LinkLostError as error:
        if end_offset == 0:
            raise _not_reached(config, error) from None
        return Join(notes=(f"the log was not compared with the master's: {error}",))
    try:
        found = _new_store(config, call) if end_offset == 0 else _old_store(
            store, config, call, max(0, min_offset), end_offset, remembered)
    except BaseException:
        presence.close()
        raise
    return replace(found, presence=presence)


def _introduce(root: str | os.PathLike[str], *, is_master: bool) -> Introduction:
    state = ReplicationStateFile(root).read().state or ReplicationState(ROLES[0], 0)
    term = state.term if is_master else state.known_term
    return Introduction(ensure_engine_id(root).uuid.bytes, term, is_master, is_master and state.is_fenced)


def _check_peer(root: str | os.PathLike[str], config: EngineConfig, master: Introduction) -> None:
    """Store the master's term, as a slave, before this store uses its log.

    A store that was a master stays a fenced one until its replicator follows (ReplicationNotes.follow): a start
    that is refused, or killed, must not leave a master of the new term.
    """
    file = ReplicationStateFile(root)
    state = file.read().state or ReplicationState(config.broker_role, 0)
    require_followable(master, state.known_term)
    if state.role != "SLAVE":
        if master.term > state.known_term:
            file.write(replace(state, fenced_by=master.term))
    elif master.term > state.term:
        file.write(replace(state, term=master.term))


def ask_peers(root: str | os.PathLike[str], config: EngineConfig) -> tuple[str, ...]:
    """Store a higher term if one of `ha_peers` has it, as a master before the first put; return sentences for the report.

    Of two that were promoted to one term this one, which asks, yields: its operator, or the other's, decides which goes on.
    """
    notes = []
    if config.ha_peers and not config.ha_secret_file and config.broker_role != "SLAVE":
        notes.append("ha_peers says where another master may be, but without ha_secret_file none is asked")
    for address in config.ha_peer_list:
        try:
            with contextlib.closing(call_peer(root, config, address, lambda: _introduce(root, is_master=True))) as link:
                peer = link.peer
        except EngineError as error:
            notes.append(f"it is unknown whether another master has replaced this one: {error}")
            continue
        file = ReplicationStateFile(root)
        state = file.read().state or ReplicationState(config.broker_role, 0)
        if peer is not None and peer.term > state.known_term:
            file.write(replace(state, fenced_by=peer.term))
            notes.append(f"{address} knows a master of term {peer.term}, and this one is of term {state.term}: it takes no puts")
        elif peer is not None and state.term and not state.is_fenced and peer.is_second(ensure_engine_id(root).uuid.bytes, state.term):
            file.write(replace(state, second_master=address))
            notes.append(second_master_sentence(address))
    return tuple(notes)


def call_peer(root: str | os.PathLike[str], config: EngineConfig, address: str, introduce: Callable[[], Introduction]) -> MasterLink:
    """Connect to another master and exchange introductions. LinkLostError."""
    call = MasterCall(Secret(root, config), PlainPeers(EngineConfig()), introduce, lambda _: None)
    return MasterLink(address, call, PEER_TIMEOUT_S)


def _old_store(store: MessageStore, config: EngineConfig, call: MasterCall, low: int, end_offset: int, remembered: int) -> Join:
    if end_offset == low:
        return Join()  # its origin is known, and there is nothing to compare
    log = CommitLog(store.root, config.mapped_file_size_commit_log_bytes)
    try:
        cut_at, why = _Comparison(config, call, log, low, end_offset).run()
    except (LinkLostError, BadStreamError) as error:
        return Join(notes=(f"the log was not compared with the master's: {error}",))
    finally:
        log.close()
    if cut_at is None:
        return Join()
    _check_floor(store, config, cut_at, end_offset, remembered, why)
    return Join(cut_at=cut_at, notes=(why,))


def _check_floor(store: MessageStore, config: EngineConfig, cut_at: int, end_offset: int, remembered: int,
                 why: str) -> None:
    """Raise JoinRefusedError if confirmed bytes would be truncated."""
    state, problem = ReplicationStateFile(store.root).read()
    floor = min(end_offset, max(remembered, state.confirm if state is not None else 0))
    if problem and state is None:
        floor = end_offset  # the confirmed offset is unknown
    if cut_at < floor and config.ha_cut != "any":
        raise JoinRefusedError(
            f"{why}; but this store had confirmed its log up to {floor}, {floor - cut_at:,} bytes more, and those are not cut. Is "
            f"{config.ha_master_address} the right master? To cut these bytes, start with ha_cut=any: they are kept in "
            "quarantine")


# ---- a new store --------------------------------------------------------------------


def _new_store(config: EngineConfig, call: MasterCall) -> Join:
    address = config.ha_master_address
    try:
        if config.sync_from == "first":
            origin = _first_offset(config, call)
        else:
            origin = _begin_of_last_segment(config, call)
    except (LinkLostError, BadStreamError) as error:
        raise _not_reached(config, error) from None
    size = config.mapped_file_size_commit_log_bytes
    if origin % size:
        raise JoinRefusedError(
            f"the master's log begins at {origin}, which is not a multiple of {size}: give this store the size of the master's "
            "segments (mapped_file_size_commit_log_bytes)")
    lacks = ": what lies before is not here, although its master counts it as confirmed from now on" if origin else ""
    return Join(origin=origin, notes=(f"new slave of {address}: the log begins at {origin}{lacks}",))


def _not_reached(config: EngineConfig, error: EngineError) -> EngineUnavailableError:
    unknown = "" if config.ha_secret_file else "; without ha_secret_file a master takes only slaves that its ha_allow_plain names"
    return EngineUnavailableError("a new slave asks its master where to begin, and must reach it once: "
                                  f"{error} (ha_master_address = {config.ha_master_address}{unknown})")


def _first_offset(config: EngineConfig, call: MasterCall) -> int:
    """Return the start of the master's whole log."""
    with contextlib.closing(_Probe(config, call, _FIRST)) as probe:
        first = probe.first_offset()
        if first != _FIRST:
            return first  # this engine's master sends its begin, or is empty
        if probe.sends_something():
            return 0
    if _begin_of_last_segment(config, call) == 0:
        return 0
    raise JoinRefusedError(
        f"{config.ha_master_address} does not hold its log from the first byte on any more and cannot say where it begins: "
        "use sync_from=last, or copy its store")


def _begin_of_last_segment(config: EngineConfig, call: MasterCall) -> int:
    with contextlib.closing(_Probe(config, call, 0)) as probe:
        return probe.first_offset()


# ---- a store that has a log -----------------------------------------------------------


class _Outcome(enum.Enum):
    """The outcome of one connection."""

    EQUAL = "equal up to the own end"
    DIFFERS = "other bytes at `at`"
    ENDS = "the master ends at `at`"
    NOTHING = "nothing comes for where it was to begin"
    ELSEWHERE = "this engine's master: its log ends, or begins, at `at`"


class _Comparison:
    """Compares the logs from one record boundary after another until it is known where they differ."""

    def __init__(self, config: EngineConfig, call: MasterCall, log: CommitLog, low: int, end: int) -> None:
        self._config = config
        self._call = call
        self._log = log
        self._low = low
        self._end = end
        self._address = config.ha_master_address

    def run(self) -> tuple[int | None, str]:
        """Return (None, "") if the own log is the beginning of the master's; else (the boundary for the cut, the reason)."""
        span = max(1, self._config.ha_compare_bytes)
        begin = self._boundary(self._end - span)
        announced_end = seen = -1
        for _ in range(PROBES_MAX):
            with contextlib.closing(_Probe(self._config, self._call, begin or _FIRST)) as probe:
                outcome = probe.compare(self._log, self._end, announced_end)
            if outcome is _Outcome.EQUAL:
                return None, ""
            if outcome in (_Outcome.DIFFERS, _Outcome.ENDS):
                boundary = self._log.record_boundary(probe.at, begin)
                if boundary > begin:
                    if boundary == seen:
                        return boundary, self._why(outcome, probe.at)
                    seen = boundary  # one result may be the network's fault: probe again
                    announced_end = probe.at if outcome is _Outcome.ENDS else announced_end
                    continue
                if begin == self._low:
                    raise self._nothing_in_common()
                begin = self._boundary(begin - span)
                span *= STEP_BACK
            elif outcome is _Outcome.NOTHING:
                begin = self._beside(begin)
            elif probe.at < begin:
                if probe.at <= self._low:
                    raise self._nothing_in_common()
                announced_end = probe.at
                begin = self._boundary(probe.at - max(1, self._config.ha_compare_bytes))
            else:
                begin = self._served_from(probe.at)
        raise LinkLostError(f"{self._address} answers something else each time")

    def _beside(self, begin: int) -> int:
        """Return where to compare next if a RocketMQ master sends nothing for `begin`: its log ends there or before, or begins later."""
        last = _begin_of_last_segment(self._config, self._call)
        if last > begin:
            own_last = self._end - self._end % self._log.size_bytes
            return self._served_from(own_last if begin < own_last else last)
        if begin == self._low:
            raise self._nothing_in_common()
        if last < begin:
            return max(self._low, last)
        return self._boundary(begin - max(1, self._config.ha_compare_bytes))  # its log ends exactly here: compare below

    def _served_from(self, offset: int) -> int:
        if offset > self._end:
            raise JoinRefusedError(
                f"the log of {self._address} begins at {offset}, after the end of this one at {self._end}: a log has no holes. "
                "Start this slave anew with an empty directory")
        return offset

    def _boundary(self, offset: int) -> int:
        return self._low if offset <= self._low else max(self._low, self._log.record_boundary(offset))

    def _why(self, outcome: _Outcome, at: int) -> str:
        if outcome is _Outcome.ENDS:
            return f"the log of {self._address} ends at {at}, this one at {self._end}"
        return f"the log of {self._address} has other bytes from {at} on, this one ends at {self._end}"

    def _nothing_in_common(self) -> JoinRefusedError:
        return JoinRefusedError(f"this store's log has nothing in common with that of {self._address}: give the right "
                                "ha_master_address, or start the slave anew with an empty directory")


class _Probe:
    """One connection: begin at an offset and compare what the master sends. `at` is the offset of the outcome."""

    def __init__(self, config: EngineConfig, call: MasterCall, report: int) -> None:
        self._report = report
        self._silence_ns = config.ha_housekeeping_interval_ms * 1_000_000
        self._segment_bytes = config.mapped_file_size_commit_log_bytes
        self._link = MasterLink(config.ha_master_address, call)
        self._cutter = FrameCutter(self._segment_bytes)
        self._pieces = self._read()
        self._has_body = False
        self.at = -1

    def first_offset(self) -> int:
        """Return the offset in the first header."""
        self._link.report(self._report)
        self.at, piece = next(self._pieces)
        self._has_body = len(piece) > 0
        return self.at

    def sends_something(self) -> bool:
        """Return whether the master sends bytes after first_offset(), and not only the same heartbeat again."""
        return self._has_body or len(next(self._pieces)[1]) > 0

    def compare(self, log: CommitLog, end: int, announced_end: int) -> _Outcome:
        """Compare the own log up to `end` with the received bytes. `announced_end`: the end that the master has reported before."""
        # Bytes beyond the own end are dropped, so that no record is too long.
        stream = RecordStream(self._report, end, log, self._segment_bytes, end)
        self._link.report(self._report)
        is_first, last_heartbeat = True, announced_end
        for self.at, piece in self._pieces:
            if is_first and self.at != self._report:
                return _Outcome.ELSEWHERE
            is_first = False
            try:
                stream.take(self.at, piece[: max(0, end - self.at)])
            except LogsDifferError as error:
                self.at = error.offset
                return _Outcome.DIFFERS
            if stream.is_equal:
                return _Outcome.EQUAL
            if not len(piece):
                if self.at == last_heartbeat:
                    return _Outcome.NOTHING if self.at == self._report else _Outcome.ENDS
                last_heartbeat = self.at
        raise AssertionError("the pieces end by an error alone")

    def close(self) -> None:
        self._link.close()

    def _read(self) -> Iterator[tuple[int, memoryview]]:
        """Yield pieces of FrameCutter, without end; LinkLostError after a long silence, and for a rate below RATE_MIN."""
        now_ns = monotonic_ns()
        silent_ns = now_ns + self._silence_ns
        # The allowed time: longer than any pause of the master, and the time for the received bytes at the lowest rate.
        deadline_ns = now_ns + 2 * self._silence_ns
        while True:
            data = self._link.receive()
            now_ns = monotonic_ns()
            if now_ns >= deadline_ns:
                raise LinkLostError(f"the master sends less than {RATE_MIN:,} bytes per second")
            if data is not None:
                silent_ns = now_ns + self._silence_ns
                deadline_ns += len(data) * 1_000_000_000 // RATE_MIN
                yield from (piece for piece in self._cutter.feed(data, self._link.seals.into) if piece[0] >= 0)
            elif now_ns >= silent_ns:
                raise LinkLostError(f"the master sends nothing within {self._silence_ns / 1e9:g} s")
            else:
                self._link.wait((min(silent_ns, deadline_ns) - now_ns) / 1e9)
