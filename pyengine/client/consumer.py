"""`pyengine.consume`: read a topic, alone or together with the other members of a group (docs/consumers.md).

Further topics, and the retry topic of the group, have inner consumers of their own.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import threading
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, TypeVar, Unpack

from pyengine import arguments
from pyengine.client.consumer_groups import (
    PLACE,
    QueueLag,
    Start,
    check_offset,
    check_start,
    different_filters,
    is_offset,
    lack_of_queues,
    queue_lags,
    reaches,
    start_offset,
)
from pyengine.client.group_session import (
    PATIENCE_S,
    AssignedQueue,
    GroupSession,
    HistoryChangedError,
    SharedAssignment,
    SharedFlight,
    SharedSession,
    TurnTakenError,
    begin_all,
    commit_all,
    note_stored,
    unsaved,
)
from pyengine.client.outgoing import deliver_at_ms, seconds_ms
from pyengine.client.retries import MAX_RECONSUME_TIMES, RetriedMessage, Retries, check_group, retry_topic
from pyengine.engine_config import EngineSettings
from pyengine.errors import EngineError, StoreBusyError, UsageError, did_you_mean, passing
from pyengine.formats.constants import SCHEDULE_TOPIC, TRANSACTION_DISCARD_TOPIC
from pyengine.formats.consume_queue import ENTRY
from pyengine.formats.paths import StorePaths
from pyengine.formats.record import LightMessage, Message
from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.live_reader import DISPATCH_S, LiveStoreReader, Look, Readiness, open_store
from pyengine.ipc.session_client import CONNECT_TIMEOUT_S, until_ready
from pyengine.ipc.store_lock import read_holder
from pyengine.native.waiting import BEAT_CHANGED, BEAT_INTERVAL_S, ITS_NAMES, Beat, Names, Pulse, Sleeper, arrived_ends
from pyengine.results import GetResult, GetStatus, Level, PutError, PutResult, ReadLevel
from pyengine.storage.acknowledgements import InFlight, PassedOverError, suspicious_deliveries
from pyengine.storage.config import check_keywords
from pyengine.storage.consumer_offset import ConsumerOffsets, group_key
from pyengine.storage.engine_id import read_epoch
from pyengine.storage.message_getter import Wanted
from pyengine.storage.store_reader import FETCH_BYTES_MAX

if TYPE_CHECKING:
    import pyarrow

POLL_INTERVAL_S = BEAT_INTERVAL_S  # interval at which a member looks again that has something to wait for
REST_S_MAX = 60.0              # longest time without a look at everything
FETCH_MESSAGES = 32            # least number of messages of a fetch; if the program asks for fewer, within the store's transfer limits
FETCH_MESSAGES_MAX = 1024
READ_AHEAD_MESSAGES = 256      # most messages, and most bytes, that are read ahead of a queue whose fetches are full
READ_AHEAD_BYTES = 1 << 20
LOOP_TURN_S = 0.005            # longest time in which pull_async() takes messages without a turn of the event loop
NOTES_MAX = 100
MAX_SPAN = 2_000               # DefaultMQPushConsumer.consumeConcurrentlyMaxSpan
MAX_DELIVERIES = 16            # a message that was delivered so often, and that no member has finished, is a dead letter
_LOG = logging.getLogger("pyengine.client.consumer")
_Made = TypeVar("_Made")
_NOTHING_YET = (GetStatus.OFFSET_OVERFLOW_ONE, GetStatus.OFFSET_OVERFLOW_BADLY, GetStatus.NO_MESSAGE_IN_QUEUE)

_NO_PROGRAMS_TOPICS = ("%", "RMQ_SYS_", SCHEDULE_TOPIC, TRANSACTION_DISCARD_TOPIC)  # how the names of groups' and the system's begin

class _Pulse:
    """The thread of this process that sends the heartbeats of all its consumers, and wakes the thread of one that has more to do.

    It sleeps and beats in C: nothing that it does needs the interpreter while nothing changes.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler in a thread that has it may close a consumer
        self._consumers: weakref.WeakSet[Consumer] = weakref.WeakSet()
        self._is_running = False
        self.beats = Pulse()

    def add(self, consumer: Consumer) -> None:
        with self._lock:
            self._consumers.add(consumer)
            if not self._is_running:
                threading.Thread(target=self._run, name="pyengine-consumers", daemon=True).start()
                self._is_running = True

    def remove(self, consumer: Consumer) -> None:
        with self._lock:
            self._consumers.discard(consumer)

    def _run(self) -> None:
        while self._has_consumers():
            self.beats.wait(REST_S_MAX / 2)
            self._look()

    def _look(self) -> None:  # a call of its own, so that no variable of the thread keeps a consumer
        with self._lock:
            consumers = list(self._consumers)
        for consumer in consumers:
            consumer._look()

    def _has_consumers(self) -> bool:
        with self._lock:
            self._is_running = bool(self._consumers)
            return self._is_running


_pulse = _Pulse()


def _housekeeping_loop(living: weakref.ref[Consumer], is_due: threading.Event, closing: threading.Event) -> None:
    """A consumer's own thread, which does not keep it: a program may drop it without close()."""
    while is_due.wait():
        is_due.clear()  # before the look at what close() has set first
        if closing.is_set() or (consumer := living()) is None:
            return
        consumer._housekeep_once()
        del consumer


def _free(owned: ExitStack, pid: int) -> None:
    if pid == os.getpid():  # what a forked child drops is the parent's
        owned.close()


def _after_fork_in_child() -> None:
    global _pulse
    _pulse = _Pulse()


os.register_at_fork(after_in_child=_after_fork_in_child)


Sharing = Literal["queues", "messages"]
Topics = str | Sequence[str] | Mapping[str, int] | re.Pattern[str]
"""What a consumer reads: a topic, several, several with weights, or all that match a pattern, also those that come later."""


class ConsumeOptions(EngineSettings, total=False):
    """The keywords of run_consumer(), for type checkers and editors."""

    tags: str | None
    sql: str | None
    from_: Start
    queues: Sequence[int] | None
    level: Level | None
    commit_interval_s: float
    session_timeout_s: float
    max_reconsume_times: int
    max_deliveries: int | None
    max_span: int
    sharing: Sharing
    timeout_s: float


class RetryOptions(TypedDict, total=False):
    """The keywords of Consumer.retry()."""

    delay_s: float | None
    at: datetime | timedelta | int | None
    reason: str
    timeout_s: float | None


def consume(
    path: str | os.PathLike[str],
    topic: Topics,
    *,
    group: str | None = None,
    tags: str | None = None,
    sql: str | None = None,
    from_: Start = "first",
    queues: Sequence[int] | None = None,
    level: Level | None = None,
    auto_commit: bool = True,
    commit_interval_s: float = 1.0,
    session_timeout_s: float = 30.0,
    max_reconsume_times: int = MAX_RECONSUME_TIMES,
    max_deliveries: int | None = MAX_DELIVERIES,
    max_span: int = MAX_SPAN,
    sharing: Sharing = "queues",
    timeout_s: float = CONNECT_TIMEOUT_S,
    **settings: Unpack[EngineSettings],
) -> Consumer:
    """Consume `topic`, or several (docs/consumers.md), with or without an engine; waits `timeout_s` for a store.

    Members of a `group`, in any processes, share the queues; without one all queues are read, and no offset is stored. `tags`
    (`a || b`) and `sql` are the same for all members. `from_` is where a new group, or none, starts.

    With `auto_commit` a message is done when the next one is asked for, otherwise after ack(), retry() or commit(). A member
    without a heartbeat for `session_timeout_s` loses its queues. A message given back `max_reconsume_times` times, or delivered
    `max_deliveries` times without an end, becomes a dead letter. A queue pauses while more than `max_span` messages lie between
    its oldest open and its newest delivered one and some of them are done.

    NotAStoreError, UsageError; StoreBusyError while it is recovered or, with a group, open in a broker.
    """
    timeout_s = arguments.number(timeout_s, "timeout_s")
    check_keywords(consume, settings)
    choice = _Choice.of(topic)
    options = _Options(Wanted.of(tags, sql), check_start(from_), None if queues is None else arguments.queue_ids(queues),
                       None if level is None else ReadLevel.of(level), auto_commit,
                       arguments.number(commit_interval_s, "commit_interval_s"), arguments.number(session_timeout_s, "session_timeout_s"),
                       max_reconsume_times, max_deliveries, max_span, sharing)
    if queues is not None and not choice.is_one:
        raise UsageError("queues belong to one topic: leave out `queues`, or consume that topic alone")

    return _after_recovery(path, lambda: Consumer(path, choice, group, options, settings), timeout_s)


def _after_recovery(path: str | os.PathLike[str], attempt: Callable[[], _Made], timeout_s: float) -> _Made:
    """Return what `attempt` makes; it is tried again for up to `timeout_s` while an engine starts or recovers the store."""
    def try_now(left_s: float) -> _Made:
        try:
            return attempt()
        except StoreBusyError as error:
            if read_holder(path).kind != "foreign":
                passing(error)
            raise

    return until_ready(try_now, timeout_s)


@dataclass(frozen=True, slots=True)
class _Choice:
    """The topics that a consumer reads: those of `weights`, and all that match `pattern`."""

    weights: Mapping[str, int]
    pattern: re.Pattern[str] | None = None
    is_over: Callable[[], bool] = bool  # whether no more of them are to be read

    @classmethod
    def of(cls, topics: Topics | _Choice) -> _Choice:
        """Return the choice of consume(); UsageError for one that names no topic, or is none."""
        if isinstance(topics, _Choice):
            return topics
        if isinstance(topics, re.Pattern):
            return cls({}, topics)
        if isinstance(topics, Mapping):
            for topic, weight in topics.items():
                if arguments.integer(weight, f"the weight of {topic}") < 1:
                    raise UsageError(f"the weight of {topic} is {weight}; give 1 or more")
            weights = dict(topics)
        else:
            several: Sequence[Any] = topics  # Any: what is no text is refused below
            if isinstance(topics, str | bytes) or not isinstance(topics, Iterable):
                several = [topics]
            weights = dict.fromkeys(several, 1)
        if not weights:
            raise UsageError("there is no topic to consume: name one")
        for topic in weights:
            arguments.topic_name(topic)
        return cls(weights)

    @property
    def is_one(self) -> bool:
        """Whether it is one topic, for good."""
        return self.pattern is None and len(self.weights) == 1


def topics_until(is_over: Callable[[], bool], topics: Topics) -> Any:
    """Return what consume() takes for these topics, of which it joins no more once `is_over`."""
    return replace(_Choice.of(topics), is_over=is_over)


@dataclass(frozen=True, slots=True)
class _Options:
    wanted: Wanted
    start: Start
    queues: list[int] | None
    level: ReadLevel | None
    auto_commit: bool
    commit_interval_s: float
    session_timeout_s: float
    max_reconsume_times: int
    max_deliveries: int | None
    max_span: int
    sharing: Sharing

    def __post_init__(self) -> None:
        if self.sharing not in ("queues", "messages"):
            raise UsageError(f"sharing is {self.sharing!r}; give \"queues\" or \"messages\"")
        if self.sharing == "messages" and self.queues is not None:
            raise UsageError("a member that shares messages reads all queues: leave out `queues`")
        for name in ("max_deliveries", "max_span"):
            if (value := getattr(self, name)) is not None and arguments.integer(value, name) < 1:
                raise UsageError(f"{name} is {value}; give 1 or more")
        arguments.truth(self.auto_commit, "auto_commit")
        if self.session_timeout_s < 4 * BEAT_INTERVAL_S:
            raise UsageError(f"session_timeout_s is {self.session_timeout_s:g}; give at least {4 * BEAT_INTERVAL_S:g}")
        if arguments.integer(self.max_reconsume_times, "max_reconsume_times") < 0:
            raise UsageError(f"max_reconsume_times is {self.max_reconsume_times}; give 0 or more")


class Consumer:
    """Reads topics: a context manager, an iterator and an async iterator of messages.

    One thread or task at a time asks for messages; other methods may be called from any. Not for a forked child. To settle
    messages without a group is UsageError.
    """

    def __init__(self, path: str | os.PathLike[str], choice: _Choice, group: str | None, options: _Options, settings: EngineSettings, *,
                 outer: Consumer | None = None) -> None:
        # outer: the consumer that this one belongs to, whose reader, threads and calls it uses.
        path = arguments.local_path(path).absolute()
        self._is_outer = outer is None
        if (module := threading.get_ident.__module__) != "_thread":  # its thread would wait in C, and let no greenlet run
            raise UsageError(f"threads are greenlets in this process ({module}), and a consumer needs one for its heartbeats: patch with "
                             "monkey.patch_all(thread=False), or consume in another process")
        if group is not None and self._is_outer:
            check_group(group)
        self.group = group
        self.notes: list[str] = [] if outer is None else outer.notes
        self._missed = 0
        self._choice = choice
        self._parts: dict[str, Consumer] = {}  # of the further topics
        self._credit = 0                       # of its weight, while it waits for its turn
        self._options = options
        self._held: dict[int, AssignedQueue] = {}
        self._settles_each: threading.Event = threading.Event() if outer is None else outer._settles_each  # beside commit()
        self._has_suspects = False  # messages that were delivered twice, and never finished, may come
        # One of any topic may have come last: what is done is stored before what follows it, too.
        self._gave_suspects: threading.Event = threading.Event() if outer is None else outer._gave_suspects
        self._paused: set[int] = set()
        self._all_paused: set[int] | None = None  # the queues that it knows since pause() of all, which holds for later ones too
        self._pauses_new = False  # that holds for topics that come later, too
        self._retried: Consumer | None = None  # reads the retry topic, once that exists
        self._retry_topic = None if group is None or outer is not None else retry_topic(group)
        self._are_parts_due = self._is_first_find = True
        self._empty: dict[int, tuple[int, Look]] = {}  # by queue: the position at which a look found no message
        self._quiet: tuple[int, list[Look | None]] | None = None  # the sleeper's stirs before a look that found nothing, and its looks
        self._sleeper: Sleeper = Sleeper() if outer is None else outer._sleeper
        self._readiness: Readiness | None = None  # made once the program waits in an event loop
        self._loop_due_s = math.inf       # when the event loop is to have a turn at the latest
        self._turn = 0
        self._asked: Call | None = None  # what has delivered the last messages, unless all of them are done
        self._is_first_take = True
        self._warned: set[str] = set()  # what it has warned of once
        self._background_error: BaseException | None = None
        self._commit_due_s = time.monotonic() + options.commit_interval_s
        self._is_settled = False  # each queue that is this member's is held, and no other
        self._kept_in: EngineMemory | None = None  # the engine at the last housekeeping
        self._is_due: threading.Event = threading.Event() if outer is None else outer._is_due  # that the thread does its work, or ends
        self._looked_s = 0.0              # when that was
        self._leaving: threading.Event = threading.Event() if outer is None else outer._leaving
        self._closing = threading.Event()
        self._is_closed = False
        self._state = arguments.inherited_lock()    # guards the queues that are held; no thread waits while it has it
        # One change of claims or offsets at a time, and one commit is of all topics; locked before _state.
        self._work: threading.RLock = arguments.inherited_lock() if outer is None else outer._work
        self._pulling = arguments.inherited_lock()  # one thread asks for messages at a time; locked before both
        self._pid = os.getpid()
        self._is_made = False
        self._owned = ExitStack()  # what ends with it, also if the program only drops it: then nothing is stored
        self._free = weakref.finalize(self, _free, self._owned, self._pid)
        self._free.atexit = False
        self._reader: LiveStoreReader = open_store(path, **settings) if outer is None else outer._reader
        if self._is_outer:
            self._owned.callback(self._reader.close)
        self._session: GroupSession | None = None
        try:
            if self._is_outer and not self._has_begun():
                self._reach(options.start)
            self.topic = self._first_topic()
            self._weight = choice.weights.get(self.topic, 1)
            if outer is None:
                self._reader._closed = f"this consumer of {self.topic} is closed: make another one with pyengine.consume()"
            self._beat: Beat = Beat(_pulse.beats) if outer is None else outer._beat
            path = self._reader.root  # from here on this one store, even if another one comes to be at its path
            self._retries = None if group is None or outer is not None else Retries(
                path, group, max_reconsume_times=options.max_reconsume_times, **settings)
            if self._is_outer:
                self._owned.callback(self._beat.close)
                _pulse.add(self)  # before it joins, so that heartbeats follow
            timeout_s, pulse, wanted = options.session_timeout_s, _pulse.beats, options.wanted.number
            if group is not None and options.sharing == "messages":
                self._session = SharedSession(path, self.topic, group, session_timeout_s=timeout_s, clock=pulse, wanted=wanted)
            elif group is not None:
                self._session = GroupSession(
                    path, self.topic, group, queue_ids=options.queues, session_timeout_s=timeout_s, clock=pulse, wanted=wanted)
            elif options.sharing == "messages":
                raise UsageError("there is no group to share messages with: give consume() one")
            if self._session is not None:
                self._owned.callback(self._session.close)
            if outer is None:  # it is the outer one's, whose thread would come again at once if this one cannot begin
                self._owned.callback(self._is_due.set)
            self._owned.callback(self._closing.set)
            self._epoch = self._session.epoch if self._session else read_epoch(path)
            self._begin()
            self._housekeep()
        except BaseException:
            for one in reversed(self._consumers):
                one._end()
            raise
        self._thread = threading.Thread(target=_housekeeping_loop, args=(weakref.ref(self), self._is_due, self._closing),
                                        name=f"pyengine-consumer-{self.topic}", daemon=True)
        if self._is_outer:
            self._thread.start()
        self._is_made = True

    # -- its topics ---------------------------------------------------------------

    @property
    def topics(self) -> list[str]:
        return [self.topic, *self._parts]

    @property
    def missed(self) -> int:
        """Messages that it could not read."""
        return sum(one._missed for one in self._consumers)

    def part(self, topic: str) -> Consumer:
        """Return what reads one topic; close() ends all."""
        if topic not in self.topics:
            raise UsageError(f"this consumer does not read {topic!r}, but {', '.join(self.topics)}")
        return self if self._choice.is_one else _Part(self._parts.get(topic, self), self)

    @property
    def _names_queues(self) -> bool:
        """Whether a queue id names a queue: one topic is read."""
        return self._choice.is_one

    def _require_one_topic(self, call: str) -> None:
        if not self._names_queues:
            raise UsageError(f"this consumer is one of several topics, to one of which a queue or an offset belongs: part(topic).{call}")

    @property
    def _consumers(self) -> list[Consumer]:
        """Itself, those of the further topics, and that of the retry topic."""
        return [self, *self._parts.values(), *(() if self._retried is None else (self._retried,))]

    def _first_topic(self) -> str:
        found = self._found()
        for topic, error in found.items():
            if error is None:
                return topic
        pattern = "" if self._choice.pattern is None else self._choice.pattern.pattern
        why = f" that a group can read: {next(iter(found.values()))}" if found else ": put a message"
        raise passing(EngineError(f"no topic of {self._reader.name} matches {pattern!r} yet{why}"))

    def _reach(self, start: Start) -> None:
        """Wait until the queues have what was put before, where a start can lie after it."""
        if not reaches(self._reader, start, DISPATCH_S):
            self._note("queues lack messages that were put before: they count as new ones")

    def _has_begun(self) -> bool:
        """Whether its group has offsets of all its topics, so that it does not count where a new one starts."""
        if self.group is None or self._choice.pattern is not None:
            return False
        rows, queues = ConsumerOffsets(self._reader.root), set(self._options.queues or ())
        return all((row := rows.read(topic, self.group)) and row.keys() >= queues for topic in self._choice.weights)

    def _found(self) -> dict[str, UsageError | None]:
        """Return the topics to read now, with why its group cannot read one; those of groups and of the system match no pattern."""
        pattern = self._choice.pattern
        if pattern is None:
            return dict.fromkeys(self._choice.weights)
        found: dict[str, UsageError | None] = {}
        for topic in self._reader._topics(lambda topic: pattern.fullmatch(topic) and not topic.startswith(_NO_PROGRAMS_TOPICS)):
            found[topic] = None
            try:
                if self.group is not None:
                    group_key(topic, self.group)
            except UsageError as error:
                found[topic] = error
        return found

    def _find_parts(self) -> None:
        """Read the further topics, and those that have come to match the pattern."""
        if not self._are_parts_due:
            return
        self._are_parts_due = False  # before the look
        options = self._options if self._is_first_find else replace(self._options, start="first")  # all of one that comes later is new
        try:
            found, known = self._found(), {*self.topics}
            for topic, error in found.items():
                if error is not None and topic not in self._warned:
                    self._warned.add(topic)
                    self._note(f"not read: {error}")
            new = [topic for topic, error in found.items() if error is None and topic not in known]
            if self.group is not None:
                begin_all(self._reader.root, {group_key(topic, self.group): partial(self._starts, topic, options.start) for topic in new})
            for topic in new:
                if self._closing.is_set() or self._choice.is_over():
                    return
                choice = _Choice({topic: self._choice.weights.get(topic, 1)})
                part = Consumer(self._reader.root, choice, self.group, options, {}, outer=self)
                with self._state:
                    if self._pauses_new:
                        part.pause()
                    self._parts = {**self._parts, topic: part}
                self._stir()
        except BaseException:
            self._are_parts_due = True
            raise
        self._is_first_find = False

    def _split(self, messages: Message | Iterable[Message]) -> dict[Consumer, list[Message]]:
        """Divide messages into those of each topic and of the retry topic."""
        found: dict[Consumer, list[Message]] = {}
        for message in arguments.one_or_several(messages, "messages", Message):
            topic = message.queue_topic if isinstance(message, LightMessage) else message.topic
            one = self._retried if isinstance(message, RetriedMessage) else self._parts.get(topic, self)
            if one is not None:
                found.setdefault(one, []).append(message)
        return found

    # -- ask for messages ---------------------------------------------------------

    def pull(self, max_messages: int = 32, timeout_s: float | None = 1.0) -> list[Message]:
        """Return up to `max_messages`, once there is one; none after `timeout_s` (None: never), though more may follow, or close().

        Raises the background thread's errors.
        """
        return self._pull(max_messages, timeout_s, list)

    def _pull(self, max_messages: int, timeout_s: float | None, give: Callable[[list[Message]], _Made],
              kept: Iterable[Message] = ()) -> _Made:
        """Return what `give` makes of the messages of a pull(); if an exception ends the call they come again, but for `kept`."""
        deadline_s, call = _deadline_s(max_messages, timeout_s), Call()
        try:
            with self._pulling:
                try:
                    found = give(self._next_or_wait(max_messages, deadline_s, call))
                except BaseException:
                    call.undo(kept)  # before the thread that closes what a signal handler has interrupted
                    raise
        except BaseException:  # also of a signal handler, at the very end: the program does not get them
            call.undo(kept)
            raise
        call.taken, call.has_ended = [], True
        return found

    def _next_or_wait(self, max_messages: int, deadline_s: float | None, call: Call) -> list[Message]:
        """Return what pull() does; the caller, which has `_pulling`, ends `call`, or undoes it."""
        with suppress(TurnTakenError):
            if messages := self._next(max_messages, call)[0]:  # the common case: no preparation for a sleep
                return messages
        while not self._closing.is_set():
            try:
                found, left_s, stirs = self._try_pull(max_messages, call, deadline_s)
            except TurnTakenError as other:
                if not self._await_turn(other.session, deadline_s):
                    return []
                continue
            if found is not None:
                return found
            if left_s:
                self._wait(left_s, stirs)
        self._require_open()
        return []

    def _try_pull(self, max_messages: int, call: Call, deadline_s: float | None, is_committed: bool = False,
                  ) -> tuple[list[Message] | None, float, int]:
        """Return (what a pull returns now, None to continue; how long to wait for more; the sleeper's stirs before)."""
        self._require_open()
        stirs = self._sleeper.stirs
        messages, has_moved = self._next(max_messages, call, is_committed=is_committed)
        left_s = math.inf if deadline_s is None else deadline_s - time.monotonic()
        # Past entries that do not match it goes on for a moment, so that a pull without a timeout finds what comes after a few of them.
        if messages or left_s <= (-POLL_INTERVAL_S if has_moved else 0):
            if not messages:
                if has_moved:
                    self._stir()
                self._arm(stirs)
            return messages, 0.0, stirs
        if not has_moved:
            self._arm(stirs)
        return None, 0.0 if has_moved else left_s, stirs

    def _await_turn(self, session: SharedSession, deadline_s: float | None) -> bool:
        """Wait for the other members that share messages; False if the pull is to end, since one has stopped and the deadline is over."""
        try:
            session.wait_for_turn()
        except StoreBusyError as error:
            self._note(str(error))
            return deadline_s is None or time.monotonic() < deadline_s
        return True

    def __iter__(self) -> Iterator[Message]:
        """Yield messages as they arrive, one by one, until close()."""
        return self._each_of(self.pull)

    def _each_of(self, pull: Callable[[int, None], Iterable[_Made]]) -> Iterator[_Made]:
        while not self._closing.is_set():
            try:
                found = pull(1, None)
            except UsageError:  # it was closed just now
                if self._closing.is_set():
                    return
                raise
            yield from found

    async def pull_async(self, max_messages: int = 32, timeout_s: float | None = 1.0) -> list[Message]:
        """Like pull(), for asyncio. A cancelled call loses no message."""
        call = Call()
        try:
            found = await self._pull_async(max_messages, timeout_s, call)
        except BaseException:  # as in pull()
            call.undo()
            raise
        call.taken, call.has_ended = [], True
        return found

    async def _pull_async(self, max_messages: int, timeout_s: float | None, call: Call) -> list[Message]:
        """Return what pull_async() does; the caller ends `call`, or undoes it."""
        deadline_s = _deadline_s(max_messages, timeout_s)
        loop = arguments.event_loop()
        readiness = self._ready()
        while not self._closing.is_set():
            try:
                if time.monotonic() >= self._loop_due_s:
                    self._begin_call()
                    await asyncio.sleep(0)  # before any message is taken, which a cancellation would have to take back
                    self._loop_due_s = math.inf
                most = max_messages
                if self._gave_suspects.is_set() or self._expects_suspects:
                    self._begin_call()  # here: another thread goes on after a cancellation, when more may be delivered
                    most = await arguments.called(partial(self._commit_before_suspects, max_messages))
                found, left_s, _ = self._try_pull(most, call, deadline_s, is_committed=True)
            except TurnTakenError as other:
                if not await arguments.called(partial(self._await_turn, other.session, deadline_s)):
                    return []
                continue
            except UsageError:  # another thread closes it
                if self._closing.is_set():
                    break
                raise
            if found is not None:
                self._loop_due_s = min(self._loop_due_s, time.monotonic() + LOOP_TURN_S)
                return found
            if left_s:
                await _readable(loop, readiness, left_s)
            else:
                await asyncio.sleep(0)
            self._loop_due_s = math.inf
        return []

    def fileno(self) -> int:
        """Return a descriptor that is readable when pull(timeout_s=0) may return something, or after close()."""
        return self._ready().descriptor

    def _ready(self) -> Readiness:
        with self._state:
            self._require_open()
            if self._readiness is None:
                self._readiness = self._sleeper.watched = Readiness()
                self._owned.callback(self._readiness.leave)
                self._readiness.raise_now()
            return self._readiness

    def _arm(self, stirs: int) -> None:
        """After a look that found nothing: let what comes after it raise the descriptor."""
        readiness = self._readiness
        if readiness is None:
            return
        readiness.disarm()
        looks, memory = self._all_looks(), self._reader._engine_memory()
        with self._state:
            self._require_open()  # with the reader that the looks are of
            readiness.arm(memory, looks)
            if not readiness.is_armed_in(memory):
                self._beat.rouse()
        if self._sleeper.stirs != stirs:  # before it was cleared
            readiness.raise_now()

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Yield messages as they arrive, one by one, until close()."""
        while not self._closing.is_set():
            for message in await self.pull_async(1, timeout_s=None):
                yield message

    def pull_arrow(self, max_rows: int = 10_000, timeout_s: float | None = 1.0, *, columns: Sequence[str] | None = None,
                   decompress: bool = False) -> pyarrow.Table:
        """Like pull(), but return rows of an Arrow table; needs pyarrow.

        `columns` and `decompress` as in scan. commit() settles all rows. After an error the next call delivers the same again.
        """
        rows = self._reader._named_rows(None if columns is None else tuple(columns), arguments.truth(decompress, "decompress"))

        def table_of(messages: list[Message]) -> pyarrow.Table:
            table = rows([(one.physical_offset, ENTRY.pack(one.physical_offset, one.size_bytes, 0)) for one in messages])
            if missing := len(messages) - table.num_rows:
                self._missed += missing
                self._note(f"{missing} messages were removed before they were read")
            return table

        return self._pull(max_rows, timeout_s, table_of)

    def _take_back(self, messages: Iterable[Message]) -> None:
        """Undo the delivery of these messages, which the program did not get."""
        for consumer, its in self._split(messages).items():
            consumer._take_own_back(its)

    def _take_own_back(self, messages: Collection[Message]) -> None:
        if not messages:
            return
        for queue_id in {message.queue_id for message in messages}:
            mine = [message for message in messages if message.queue_id == queue_id]
            with self._state:
                held = self._held.get(queue_id)
                if held is not None and held.claim is not None:
                    held.flight.take_back(mine)
                elif held is not None:
                    first = min(message.queue_offset for message in mine)
                    held.restore(first, first, min(first, held.done), {})
                self._quiet = None
        self._stir()

    # -- acknowledge, seek, report ------------------------------------------------

    def commit(self, messages: Message | Iterable[Message] | None = None) -> dict[int, int]:
        """Store durably that these messages (None: all delivered), and all before them in their queues, are done.

        Returns queue id -> next offset; of several topics nothing.
        """
        self._require_group()
        given: Mapping[Consumer, list[Message] | None] = dict.fromkeys(self._consumers) if messages is None else self._split(messages)
        with self._work:
            for one, its in given.items():
                with one._state:
                    one._require_open()
                    waited = any(held.flight.exceeds(self._options.max_span) for held in one._held.values())
                    one._finish(its)
                if waited:
                    self._stir()
            self._commit_done()
            with self._state:
                return {queue_id: held.committed for queue_id, held in self._held.items() if self._names_queues}

    def ack(self, messages: Message | Iterable[Message]) -> None:
        """Say that these messages are done, in any order; with auto_commit it only warns."""
        self._require_group()
        self._require_open()
        if self._options.auto_commit:
            if "ack" not in self._warned:
                self._warned.add("ack")
                warnings.warn("ack() does nothing with auto_commit, where a message is done when the program asks for the next one: leave "
                              "it out, or consume with auto_commit=False", stacklevel=2)
            return
        if isinstance(messages, Message) and self._choice.is_one and not isinstance(messages, RetriedMessage):  # the common case
            with self._state:
                self._require_open()
                self._acknowledge([messages])
            return
        for consumer, its in self._split(messages).items():
            with consumer._state:
                self._require_open()
                consumer._acknowledge(its)

    def retry(self, message: Message, delay_level: int | None = None, *, delay_s: float | None = None,
              at: datetime | timedelta | int | None = None, reason: str = "", timeout_s: float | None = None) -> PutResult:
        """Give a message back: the group gets it again after a delay.

        By default the delay is level 3 (10 s) the first time and one level more each time; `at` is as `deliver_at` of a put. After
        max_reconsume_times, or with a negative level, it becomes a dead letter, whose property __PYENGINE_REASON is `reason`
        (docs/retries.md). PutError, EngineUnavailableError: not done.
        """
        self._require_group()
        self._require_open()
        if self._retries is None:
            raise UsageError("a part of a consumer gives no messages back: retry() belongs to the consumer of all topics")
        given = [name for name, value in (("delay_level", delay_level), ("delay_s", delay_s), ("at", at)) if value is not None]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} exclude each other: give one")
        due_ms = seconds_ms(delay_s) if delay_s is not None else None if at is None else deliver_at_ms(at, "at")
        result = self._retries.put(arguments.instance(message, "message", Message), delay_level, deliver_at_ms=due_ms,
                                   reason=arguments.text(reason, "reason"), timeout_s=timeout_s)
        if not self._options.auto_commit:
            self.ack(message)
        return result

    def requeue(self, messages: Message | Iterable[Message]) -> None:
        """Give messages back without a delay."""
        self._require_group()
        self._settles_each.set()
        for consumer, given in self._split(messages).items():
            with consumer._state:
                self._require_open()
                for message in given:
                    held = consumer._held.get(message.queue_id)
                    if held is not None:
                        held.flight.give_back(message)
        self._beat.rouse()
        self._stir()

    async def retry_async(self, message: Message, delay_level: int | None = None, *, delay_s: float | None = None,
                          at: datetime | timedelta | int | None = None, reason: str = "", timeout_s: float | None = None) -> PutResult:
        """Like retry(), for asyncio."""
        return await arguments.called(lambda: self.retry(message, delay_level, delay_s=delay_s, at=at, reason=reason, timeout_s=timeout_s))

    def seek(self, queue_id: int | None, to: int | datetime | Literal["first", "last"]) -> None:
        """Continue at an offset, the first or last message, or a time; durable from the next commit on; None: all queues.

        Messages delivered before count as done. UsageError for another member's queue.
        """
        if isinstance(self._session, SharedSession):
            raise UsageError(f"members of {self.group} share messages, so none of them can seek: ConsumerGroups.reset() sets all of them")
        self._require_open()
        if queue_id is not None or is_offset(to):
            self._require_one_topic("seek()")
        if not is_offset(to) and (queue_id is None or queue_id in self._queues):  # in another's it is refused at once
            start = check_start(to, "to", PLACE)
            _after_recovery(self._reader.root, lambda: self._in_history(lambda: self._reach(start)), CONNECT_TIMEOUT_S)
        for part in () if self._names_queues else self._parts.values():
            part._seek(None, to)
        self._seek(queue_id, to)

    def _seek(self, queue_id: int | None, to: int | datetime | Literal["first", "last"]) -> None:
        chosen = self._queues if queue_id is None else [arguments.integer(queue_id, "queue_id")]

        def place(queue_id: int) -> int:
            if not is_offset(to):
                return start_offset(self._reader, self.topic, queue_id, check_start(to, "to", PLACE))
            end = self._reader.queue_end(self.topic, queue_id)
            return self._within(queue_id, check_offset(to.__index__(), queue_id, end), end)

        offsets = _after_recovery(self._reader.root, lambda: self._in_history(lambda: {each: place(each) for each in chosen}),
                                  CONNECT_TIMEOUT_S)
        with self._state:
            self._require_open()
            for each in chosen:
                held = self._held.get(each)
                if held is None or held.releasing_since_s is not None:
                    raise UsageError(f"this consumer does not own queue {each} of {self.topic} now; it owns {self._queues}")
            for each, offset in offsets.items():
                self._held[each].seek(offset)
        self._beat.rouse()
        self._stir()

    def pause(self, queues: Iterable[int] | None = None) -> None:
        """Deliver nothing of these queues (None: all, and retries) until resume(), and keep them."""
        self._require_open()
        if queues is not None:
            self._require_one_topic("pause()")
        chosen = self._reader.queue_ids(self.topic) if queues is None else arguments.queue_ids(queues)
        with self._state:
            self._require_open()
            if queues is None:
                self._pauses_new = True
                self._all_paused = {*chosen, *self._held}
                self._paused |= self._all_paused
            self._paused.update(chosen)
            for queue_id in self._paused & self._held.keys():
                self._held[queue_id].put_back()
        for inner in self._consumers[1:] if queues is None else ():
            inner.pause()

    def resume(self, queues: Iterable[int] | None = None) -> None:
        """End pause()."""
        if queues is not None:
            self._require_one_topic("resume()")
        chosen = None if queues is None else arguments.queue_ids(queues)
        with self._state:
            self._require_open()
            self._paused.difference_update(self._paused.copy() if chosen is None else chosen)
            if chosen is None:
                self._pauses_new, self._all_paused = False, None
            self._has_suspects = self._has_suspects or self._reads_suspects()
        for inner in self._consumers[1:] if queues is None else ():
            inner.resume()
        self._stir()

    @property
    def paused(self) -> list[int]:
        self._require_one_topic("paused")
        with self._state:
            return sorted(self._paused)

    def total_lag(self) -> int:
        """Return how many messages of its topics and retry topic are not committed."""
        return sum(queue.lag for one in self._consumers for queue in one._lag().values())

    def lag(self) -> dict[int, QueueLag]:
        """Return the lag by queue id; of several topics total_lag()."""
        self._require_one_topic("lag()")
        return self._lag()

    def _lag(self) -> dict[int, QueueLag]:
        self._require_open()
        offsets = self._session.stored() if self._session else self._positions
        return queue_lags(self._reader, self.topic, offsets, self._options.level, self.group)

    @property
    def assignment(self) -> list[int]:
        self._require_one_topic("assignment")
        return self._queues

    @property
    def _queues(self) -> list[int]:
        with self._state:
            return sorted(queue_id for queue_id, held in self._held.items() if held.releasing_since_s is None)

    @property
    def positions(self) -> dict[int, int]:
        """Queue id -> the next offset to read."""
        self._require_one_topic("positions")
        return self._positions

    @property
    def _positions(self) -> dict[int, int]:
        with self._state:
            return {queue_id: held.next_offset for queue_id, held in sorted(self._held.items())}

    # -- end ----------------------------------------------------------------------

    def close(self) -> None:
        """Store the offsets (with auto_commit) and leave the group."""
        self._close(_asker_now())

    def _leave(self) -> None:
        """Leave the queues to other members, each once the program has no message of it. It asks for no more until _stay()."""
        self._leaving.set()
        self._is_due.set()

    def _stay(self) -> None:
        """End a _leave()."""
        if self._leaving.is_set():
            self._leaving.clear()
            self._housekeep_once()

    def __repr__(self) -> str:
        group = f"group {self.group!r}" if self.group is not None else "no group"
        state = "closed" if self._is_closed else f"queues {self._queues}" if self._names_queues else "open"
        return f"Consumer({self.topics if self._parts else self.topic!r}, {group}, {state}, {str(self._reader.name)!r})"

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close the consumer; if the block ends by an exception, the messages delivered last are not done and are delivered again."""
        self._close(_asker_now() if kind is None else None)

    async def __aenter__(self) -> Self:
        arguments.event_loop()  # as arguments.AsyncBlock
        return self.__enter__()

    async def __aexit__(self, kind: object, *_: object) -> None:
        await arguments.in_thread(partial(self._close, _asker_now() if kind is None else None))

    def _close(self, closer: _Asker | None) -> None:
        """With auto_commit, messages count as done only if they were delivered to `closer`."""
        if self._pid != os.getpid():
            return
        for one in self._consumers:
            one._closing.set()
        self._is_due.set()
        self._stir()
        turns = [one._session._turn for one in self._consumers if isinstance(one._session, SharedSession)]
        locks = [*turns, self._work, *(lock for one in self._consumers for lock in (one._state, one._pulling))]
        if any(lock._is_owned() for lock in locks):  # type: ignore[attr-defined]
            # A signal handler has interrupted a call, which another thread waits for: what that delivers, no program may have got.
            threading.Thread(target=self._close, args=(None,), name="pyengine-consumer-close").start()
            return
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()
        asking = [one._pulling for one in self._consumers]
        releases = map(methodcaller("release"), filter(methodcaller("_is_owned"), asking))
        try:  # around each, since an exception of a signal handler may follow it at once
            for lock in asking:  # of the calls that ask these for messages, which may wait for `_work`
                lock.acquire()
            with self._work:
                self._close_now(closer, time.monotonic() + CONNECT_TIMEOUT_S)
        finally:
            any(releases)  # all, in one call, in which no signal handler runs

    def _close_now(self, closer: _Asker | None, until_s: float) -> None:
        """Close with the locks of _close(); `until_s`: to when to wait for a recovery."""
        if self._is_closed:
            return
        with ExitStack() as rest:  # each of these, whichever fails
            rest.callback(self._end)
            for inner in self._consumers[1:]:
                rest.callback(inner._close_now, closer, until_s)
            if self._retries is not None:
                rest.callback(self._retries.close)
            if self._session is not None:
                for one in self._consumers if self._options.auto_commit else ():
                    if _has_all(closer, one._asked):
                        with one._state:
                            one._finish(None)
                _after_recovery(self._reader.root, lambda: self._give_back(list(self._held.values())),
                                max(0.0, until_s - time.monotonic()))

    def _end(self) -> None:
        with self._state:
            self._is_closed = True
            self._held.clear()
            self._empty.clear()
            self._quiet = self._kept_in = None
            if self._is_outer:
                _pulse.remove(self)
            self._free()
            if self._readiness is not None:
                self._readiness.raise_now()

    # -- fetch and deliver --------------------------------------------------------

    def _next(self, max_messages: int, call: Call, *, is_committed: bool = False) -> tuple[list[Message], bool]:
        """Return (messages, whether entries were read, even if filtered), from topics and retry topic in turn.

        It waits for nothing but the disk, and for that not if `is_committed`: what is done was stored before suspects.
        """
        call.taken.clear()
        is_one = self._retried is None and not self._parts  # the common case
        if not is_committed and (self._gave_suspects.is_set() or (self._has_suspects if is_one else self._expects_suspects)):
            self._begin_call()
            max_messages = self._commit_before_suspects(max_messages)
        if is_one:
            return self._next_own(max_messages, call)
        asked = self._begin_turn()
        has_moved, weights = False, sum(one._weight for one in asked)
        busy: TurnTakenError | None = None
        in_turn = iter(asked)
        for consumer in in_turn:
            try:
                messages, moved = consumer._next_own(max_messages, call)
            except TurnTakenError as error:  # the others are asked; it saves nothing for later, and is not paid for
                busy = error
                consumer._credit -= consumer._weight
                weights -= consumer._weight
                continue
            has_moved = has_moved or moved
            if messages:  # from one of them at a time, so that an error of the other loses no message
                consumer._credit -= weights
                for other in in_turn:
                    other._tell_ended()
                return [RetriedMessage.of(message) for message in messages] if consumer is self._retried else messages, True
            consumer._credit = 0  # it has no message in its turn, saves none for later, and is not paid for
            weights -= consumer._weight
        if busy is not None:
            raise busy
        return [], has_moved

    def _begin_call(self) -> None:
        """With auto_commit, note that what all consumers have delivered is done."""
        self._require_open()
        for consumer in self._consumers if self._options.auto_commit else ():
            if consumer._asked is not None:
                with consumer._state:
                    consumer._asked = None
                    consumer._finish(None)

    def _begin_turn(self) -> list[Consumer]:
        """Return the consumers to ask, in their order: smooth weighted round-robin, where the one that delivers pays."""
        self._begin_call()
        stirs, memory = self._sleeper.stirs, self._reader._engine_memory()
        ends = None if memory is None else arrived_ends(memory.control)
        asked = [one for one in self._consumers if not one._is_quiet(stirs, memory, ends)]
        for consumer in asked:
            consumer._credit += consumer._weight
        return sorted(asked, key=lambda one: (not one._has_suspects, -one._credit))

    def _is_quiet(self, stirs: int, memory: EngineMemory | None, ends: Any) -> bool:
        """Whether nothing has come since a look that found nothing: it need not be asked."""
        quiet = self._quiet
        if quiet is None or quiet[0] != stirs:
            return False
        for look in quiet[1]:
            if look is None or look.memory is not memory or ends[look.queue.slot] > look.queue.end:
                return False
        return True

    def _commit_before_suspects(self, max_messages: int) -> int:
        """Return how many messages may be delivered now: one, if it may kill the process, and what is done is stored before.

        Otherwise messages that were finished just before each kill would be taken for the ones that kill, and become dead letters.
        """
        with self._work:
            self._require_open()
            is_open = self._has_suspect_open()  # before the commit: what ends after it is not stored yet
            with suppress(EngineError):  # the thread reports it
                self._commit_done()
                if not is_open:
                    self._gave_suspects.clear()
            if not self._expects_suspects:
                return max_messages
            self._gave_suspects.set()
            return 1

    def _has_suspect_open(self) -> bool:
        """Look whether a suspect of any topic is to come; return whether one is, or was delivered and is not done."""
        is_open = False
        for one in self._consumers:
            with one._state:
                one._has_suspects = one._reads_suspects()
                is_open = is_open or one._has_suspects or any(
                    offset not in held.flight.dead and one._is_suspect(message)
                    for held in one._held.values() for offset, message in held.flight.open.items())
        return is_open

    def _reads_suspects(self) -> bool:
        """Whether a queue that is read has messages that were delivered twice and never finished."""
        return any(held.releasing_since_s is None and held.queue_id not in self._paused
                   and held.flight.is_suspicious(self._options.max_deliveries) for held in self._held.values())

    @property
    def _expects_suspects(self) -> bool:
        """Whether a message may come that was delivered twice and never finished: it comes by itself."""
        return any(one._has_suspects for one in self._consumers)

    def _is_suspect(self, message: Message) -> bool:
        """Whether a message was delivered so often, without an end, that it may be what killed its readers."""
        return message.delivery_count > suspicious_deliveries(self._options.max_deliveries)

    def _spare(self, messages: Iterable[Message]) -> None:
        """Let the kills that follow count for all open messages except these, which run beside a suspect."""
        spared = self._split(messages)
        for consumer in self._consumers:
            with consumer._state:
                for held in consumer._held.values():
                    held.flight.spared = {message.queue_offset for message in spared.get(consumer, ()) if message.queue_id == held.queue_id}

    def _next_own(self, max_messages: int, call: Call) -> tuple[list[Message], bool]:
        """Like _next(), from this consumer's own topic only."""
        with self._state:
            self._require_open()
            error, self._background_error = self._background_error, None
            if error is not None:
                raise error
            self._asked, self._quiet, stirs = call, None, self._sleeper.stirs
            if self._options.auto_commit:
                self._finish(None)
            if isinstance(self._session, SharedSession):
                return self._next_shared(self._session, max_messages, call)
            if self._reader._is_past(self._epoch):
                self._await_comparison()
                return [], False
            messages: list[Message] = []
            call.taken.append((self, messages))
            has_moved = False
            before = []
            try:
                for held in self._queues_in_turn():
                    if held.releasing_since_s is not None or held.queue_id in self._paused:
                        continue
                    if held.claim is not None and not self._group_session.holds(held.claim):
                        self._revoke(held)
                        continue
                    before.append((held, held.before()))
                    has_moved = self._deliver(held, max_messages, messages) or has_moved
                    if len(messages) >= max_messages:
                        break
                self._has_suspects = self._has_suspects and self._reads_suspects()
                if messages or has_moved:
                    self._beat.rouse()
                elif not self._has_suspects:
                    self._quiet = stirs, self._looks()
                return messages, has_moved
            except BaseException:  # of a disk or a signal handler: the program does not get `messages`
                for held, was in before:
                    held.restore(*was)
                messages.clear()
                self._quiet = None  # a signal handler's own pull has looked after these
                raise

    def _next_shared(self, session: SharedSession, max_messages: int, call: Call) -> tuple[list[Message], bool]:
        """Like _next_own(), of all queues, together with the other members."""
        queues = [held for held in self._queues_in_turn() if isinstance(held, SharedAssignment)]
        flights = [held.shared for held in queues]
        read = [held for held in queues if held.queue_id not in self._paused and self._has_news(held)]
        messages: list[Message] = []
        call.taken.append((self, messages))
        has_moved = False
        if not read and not any(flight.has_notes for flight in flights):
            return messages, has_moved
        self._beat.rouse()

        def take() -> None:
            nonlocal has_moved
            for held in read:
                has_moved = self._take_shared(held, max_messages, messages) or has_moved
                if len(messages) >= max_messages:
                    break

        try:
            self._require_history()
            session.turn(flights, take, PATIENCE_S, self._require_history)
            self._has_suspects = self._reads_suspects()
        except TurnTakenError:  # before anything was taken
            raise
        except BaseException as error:
            for held in queues:
                held.shared.undo()
                held.shared.take_back(each for each in messages if each.queue_id == held.queue_id)  # a signal came when the turn had ended
                held.drop_buffer()  # it lacks what was taken
            messages.clear()
            if isinstance(error, PassedOverError | HistoryChangedError):  # they count for nothing
                return [], isinstance(error, PassedOverError)
            raise
        return messages, has_moved

    def _tell_ended(self) -> None:
        """Tell the members that it shares messages with, as it does when it takes some, what of its own is done."""
        if isinstance(self._session, SharedSession):
            with self._state, suppress(TurnTakenError, PassedOverError, StoreBusyError):  # in a later turn
                if any(flight.has_notes for flight in self._flights):
                    self._session.turn(self._flights, lambda: None, PATIENCE_S, self._require_history)

    @property
    def _flights(self) -> list[SharedFlight]:
        return [held.shared for held in self._held.values() if isinstance(held, SharedAssignment)]

    def _has_news(self, held: SharedAssignment) -> bool:
        """Whether a member may find a message in a queue; without a lock."""
        state = held.shared.state
        at, look = self._empty.get(held.queue_id, (-1, None))
        return (state is None or bool(state.free) or state.end != held.position or bool(held.buffer) or at != held.position
                or look is None or self._reader._has_arrived(look))

    def _take_shared(self, held: SharedAssignment, max_messages: int, messages: list[Message]) -> bool:
        """Add messages of one queue to `messages`, those that were given back first; return whether any was passed."""
        flight, most = held.shared, self._options.max_deliveries
        table, least = flight.table, suspicious_deliveries(most)
        before = table.end

        def must_wait(offset: int) -> bool:  # a suspect comes by itself, after what is done was stored
            return table.deliveries(offset) >= least and (bool(messages) or not self._has_suspects)

        held.follow()
        for offset in sorted(table.free):
            if len(messages) >= max_messages:
                break
            if not must_wait(offset):
                messages += [taken for message in self._given_back(held, offset) if (taken := flight.take(message, most)) is not None]
        while len(messages) < max_messages and (held.buffer or self._fetch(held, max_messages - len(messages))):
            if must_wait(held.buffer[0].queue_offset):
                break
            if (taken := flight.take(held.buffer.popleft(), most)) is not None:
                messages.append(taken)
        flight.take_until(held.next_offset)
        return held.next_offset != before

    def _given_back(self, held: SharedAssignment, offset: int) -> list[Message]:
        """Return a message that was given back; none if it does not exist any more, or cannot be read now."""
        try:
            found = self._in_history(lambda: self._reader.get_message(self.topic, held.queue_id, offset, 1, level=ReadLevel.WRITTEN))
        except StoreBusyError:  # the store is being recovered
            return []
        messages = [message for message in found._placed(self.topic, held.queue_id) if message.queue_offset == offset]
        if not messages and found.status not in _NOTHING_YET:
            held.shared.skip(offset)
            self._missed += 1
            self._note(f"queue {held.queue_id}: message {offset} was removed before it was delivered again")
        return messages

    def _queues_in_turn(self) -> list[AssignedQueue]:
        """Return the queues, the one whose turn it is first; a turn ends when the fetched messages of the queue are delivered."""
        queues = [self._held[queue_id] for queue_id in sorted(self._held)]
        if not queues:
            return []
        at = self._turn % len(queues)
        if not queues[at].buffer:
            self._turn = at = (at + 1) % len(queues)
        in_turn = queues[at:] + queues[:at]
        if self._has_suspects:
            in_turn.sort(key=lambda held: not held.flight.is_suspicious(self._options.max_deliveries))
        return in_turn

    def _deliver(self, held: AssignedQueue, max_messages: int, messages: list[Message]) -> bool:
        """Add messages of one queue to `messages`, up to `max_messages`; return whether its position moved."""
        before, flight, most = held.position, held.flight, self._options.max_deliveries
        if flight.again:
            self._beat.rouse()
            for message in flight.deliver_again(max_messages - len(messages), most):
                self._group_session.note_delivery(held.grant, flight, message)
                messages.append(message)
        if self._is_spread_out(held):
            return False
        marked = flight.delivered_end
        while len(messages) < max_messages:
            if not held.buffer and not self._fetch(held, max_messages - len(messages)):
                break
            messages += held.deliver(max_messages - len(messages), most)
        if flight.delivered_end != marked and held.claim is not None:
            self._group_session.mark(held.claim, flight)
        return held.position != before

    def _is_spread_out(self, held: AssignedQueue) -> bool:
        """Whether a queue waits for its oldest message because too many after it were acknowledged."""
        if not held.flight.exceeds(self._options.max_span):
            return False
        if "span" not in self._warned:
            self._warned.add("span")
            self._note(f"queue {held.queue_id}: message {held.done} is not done, and more than {self._options.max_span} after it were "
                       "delivered: no more are before it is (max_span)")
        return True

    def _fetch(self, held: AssignedQueue, wanted: int) -> bool:
        """Fetch the next messages of a queue into its buffer, past filtered entries; return whether there were any.

        One get costs as much as reading a hundred small messages.
        """
        at, seen = self._empty.get(held.queue_id, (-1, None))
        if at == held.position and seen is not None and not self._reader._has_arrived(seen):
            return False
        look = self._reader._look(self.topic, held.queue_id, self._options.level)
        options, count = self._options, max(FETCH_MESSAGES, min(wanted, FETCH_MESSAGES_MAX), held.read_ahead)
        if wanted >= count:
            bytes_max: int | None = FETCH_BYTES_MAX
        else:
            bytes_max = None if count == FETCH_MESSAGES else READ_AHEAD_BYTES

        def read() -> tuple[bool, GetResult, int, Sequence[Message]]:
            before = held.flight.last if held.last is None else None  # what earlier holders have delivered last
            is_same = before is None or held.is_there(self._reader, self.topic, before)
            found = self._reader._fetch(self.topic, held.queue_id, held.position, count, options.wanted, options.level, bytes_max)
            is_beyond = found.status is GetStatus.OFFSET_OVERFLOW_BADLY  # perhaps only of what this level reaches now
            passed: Sequence[Message] = ()
            if held.claim is None and found.next_begin_offset > held.position and not found.queue_offsets:
                last = found.next_begin_offset - 1
                passed = self._reader.get_message(self.topic, held.queue_id, last, 1, level=ReadLevel.WRITTEN).messages
            return is_same, found, self._reader.queue_end(self.topic, held.queue_id) if is_beyond else held.position, passed

        try:
            is_same, found, end, passed = self._in_history(read)
        except StoreBusyError:  # the store is being recovered: a later call succeeds
            return False
        if not is_same:
            held.flight.forget()
            if isinstance(held, SharedAssignment):  # in the next turn
                self._stir()
                return False
        following = found.next_begin_offset
        if found.status in _NOTHING_YET:
            if end < held.position:
                held.seek(self._within(held.queue_id, held.position, end))
            if look is not None:
                self._empty[held.queue_id] = held.position, look
            return False
        if found.status in (GetStatus.OFFSET_TOO_SMALL, GetStatus.OFFSET_FOUND_NULL):
            if lost := held.flight.unread(held.position, following):
                count = sum(end - start for start, end in lost)
                self._missed += count
                self._note(f"queue {held.queue_id}: {count} messages from {lost[0][0]} to {lost[-1][1] - 1} were removed "
                           f"before the group came to them")
        elif options.wanted == Wanted() and len(found.messages) < following - held.position:
            unread = {offset for run in held.flight.unread(held.position, following) for offset in range(*run)}
            if missing := unread.difference(found.queue_offsets):
                self._missed += len(missing)
                self._note(f"queue {held.queue_id}: {len(missing)} messages from {min(missing)} on cannot be read: "
                           f"removed just now, or damaged (`pyengine check` tells)")
        messages = held.flight.unacknowledged(found._placed(self.topic, held.queue_id))
        held.read_ahead = min(2 * len(messages), READ_AHEAD_MESSAGES)
        held.position = following
        held.buffer.extend(messages)
        if messages:
            held.last, held.passed = messages[-1], None
        elif passed:
            held.passed = passed[-1]
        held.settle()
        return bool(messages)

    def _within(self, queue_id: int, offset: int, end: int) -> int:
        """Return the offset, or the queue's end if it is after that, which a note says."""
        if offset > end:
            self._note(f"queue {queue_id}: offset {offset} is after the end {end}; the consumer continues at the end")
        return min(offset, end)

    def _finish(self, messages: Iterable[Message] | None) -> None:
        """Note that these messages, and all before them, are done; None: all that were delivered. Not what a call may yet undo."""
        taken = () if self._asked is None else self._asked.taken
        kept = {message.physical_offset for _, its in taken for message in its}
        if messages is None:
            for queue in self._held.values():
                if queue.flight.is_outstanding:
                    self._beat.rouse()
                    queue.finish(None, kept)
            return
        self._beat.rouse()
        for message in messages:
            held = self._held.get(message.queue_id)
            if held is not None:
                held.finish(message, kept)

    def _acknowledge(self, messages: Iterable[Message]) -> None:
        """Note that each of these messages is done, whatever came before it."""
        self._beat.rouse()
        for message in messages:
            held = self._held.get(message.queue_id)
            if held is not None:
                waited = held.flight.exceeds(self._options.max_span)
                held.acknowledge(message)
                self._settles_each.set()
                if waited and not held.flight.exceeds(self._options.max_span):
                    self._stir()

    def _wait(self, timeout_s: float, stirs: int) -> None:
        """Sleep until a message arrives in a queue that is read, until _stir(), or until the timeout."""
        looks = self._all_looks()
        known = [look for look in looks if look is not None]
        if len(known) < len(looks):  # of one that could not be read just now
            timeout_s = min(timeout_s, POLL_INTERVAL_S)
        self._reader._wait_for_queues(known, timeout_s, self._sleeper, stirs)

    def _all_looks(self) -> list[Look | None]:
        """Return the last look at each queue that is read, which found nothing; None for a queue that was not looked at."""
        looks: list[Look | None] = []
        for one in self._consumers:
            with one._state:
                looks += one._looks()
        return looks

    def _looks(self) -> list[Look | None]:
        looks: list[Look | None] = []
        for held in self._held.values():
            is_read = held.releasing_since_s is None and held.queue_id not in self._paused
            if is_read and not held.flight.exceeds(self._options.max_span):
                at, look = self._empty.get(held.queue_id, (-1, None))
                looks.append(look if at == held.position else None)
        return looks

    def _stir(self) -> None:
        """End a sleep of the thread that asks for messages: there may be messages to read, or an error to raise."""
        self._sleeper.stir()

    # -- the threads: members and their queues --------------------------------------

    def _look(self) -> None:
        """In the process's thread, after a beat: wake this consumer's own thread if there is something to do, or may be."""
        if not self._is_made:
            return
        found = self._beat.take()
        has_changed = any([found & BEAT_CHANGED, *(one._session.has_changed() for one in self._consumers if one._session is not None),
                           time.monotonic() >= self._looked_s + REST_S_MAX])
        if not found and not has_changed or self._closing.is_set():
            return
        self._beat.rest()  # before the look at what rouses it
        if has_changed:
            self._reader._look_again()
            self._are_parts_due = True
        elif self._work.acquire(blocking=False):
            try:
                memory = self._engine_now()
                has_changed = any(one._is_unsettled(memory) for one in self._consumers)
                if not has_changed and self._may_rest():
                    return
            except Exception:  # noqa: BLE001 - the other thread meets it again, and tells the program
                has_changed = True
            finally:
                self._work.release()
        else:  # a call of the program has it: the other thread waits for its turn
            has_changed = True
        self._beat.rouse()
        if has_changed:
            self._is_due.set()

    def _engine_now(self) -> EngineMemory | None:
        """Return the memory of the running engine; end the waits for messages of another one."""
        memory, waits_in = self._reader._engine_memory(), self._sleeper.waits_in
        if waits_in is not None and waits_in is not memory:
            self._stir()
        if self._readiness is not None and not self._readiness.is_armed_in(memory):
            self._readiness.raise_now()
        return memory

    def _is_unsettled(self, memory: EngineMemory | None) -> bool:
        """Whether the last housekeeping has left something to do, or the program has since then that is due."""
        if memory is None or memory is not self._kept_in or not self._is_settled:
            return True
        with self._state:
            return any(held.flight.dead for held in self._held.values()) or self._is_commit_due()

    def _may_rest(self) -> bool:
        """Whether nothing is to be looked for until something changes."""
        is_armed = self._readiness is None or self._readiness.is_armed_in(self._kept_in)
        return is_armed and self._reader._is_in_place and not any(one._has_unstored() for one in self._consumers)

    def _has_unstored(self) -> bool:
        """Whether the thread is to store what is done, soon or now."""
        if self._session is None or not (self._options.auto_commit or self._settles_each.is_set()):
            return False
        with self._state:
            return self._session.has_unstored(self._held.values())

    def _watched_names(self) -> Names:
        """Return what changes once there is something to do that neither a message nor the program tells."""
        queues = StorePaths(self._reader.root).consume_queue
        names = {} if self._kept_in is None else {**self._reader._names(self._kept_in)}
        for one in self._consumers:
            names[str(queues / one.topic)] = ITS_NAMES
            names.update({} if one._session is None else one._session.names)
        if self._retried is None and self._retry_topic is not None:
            names[str(queues / self._retry_topic)] = ITS_NAMES
        if self._choice.pattern is not None:
            names[str(queues)] = ITS_NAMES
        return names

    def _is_commit_due(self) -> bool:
        return time.monotonic() >= self._commit_due_s and self._has_unstored()

    def _housekeep_once(self) -> None:
        try:
            self._housekeep()
            if not any(one._has_unstored() for one in self._consumers):
                self._background_error = None  # of before: all is stored by now
        except StoreBusyError as error:  # it is recovered, or a broker has it open: a later try may succeed
            self._note(str(error))
        except Exception as error:  # noqa: BLE001 - the program gets any error, and the thread tries again
            self._background_error = error
            self._stir()

    def _housekeep(self) -> None:
        """Check for a recovery of the store and for changes of the members, commit what is due."""
        with self._work:
            self._is_settled, self._kept_in = False, self._engine_now()
            if self._session is not None and self._session.rejoin_if_removed():
                with self._state:
                    self._held.clear()
            self._follow_history()
            is_settled = self._rebalance()
            if isinstance(self._session, SharedSession):
                self._tend(self._session)
            self._bury()
            if self._is_outer and any(one._is_commit_due() for one in self._consumers):
                for one in self._consumers:
                    one._commit_due_s = time.monotonic() + self._options.commit_interval_s
                self._commit_done()
            for inner in self._consumers[1:]:
                inner._housekeep()
            for one in self._consumers if self._are_parts_due else ():
                one._compare_members()
            self._find_parts()
            if self._retried is None and self._retry_topic is not None and self._reader.queue_ids(self._retry_topic):
                # from its first message on
                options = replace(self._options, wanted=Wanted(), start="first", queues=None)
                retried = Consumer(self._reader.root, _Choice({self._retry_topic: 1}), self.group, options, {}, outer=self)
                with self._state:
                    if self._pauses_new:
                        retried.pause()
                    self._retried = retried
                self._stir()
            if self._is_outer:
                self._beat.watch(self._watched_names())
                self._looked_s = time.monotonic()
            self._is_settled = is_settled

    def _tend(self, session: SharedSession) -> None:
        """Follow what the other members have done, and give back what dead ones had."""
        session.tend()
        with self._state:
            self._has_suspects = self._reads_suspects()
            if any(flight.state is not None and flight.state.free for flight in self._flights):
                self._stir()

    def _bury(self) -> None:
        """Make dead letters of the messages that were delivered too often; without an engine they wait, and with them their offsets."""
        for consumer in self._consumers if self._retries is not None else ():
            with consumer._state:
                dead = [held.flight.open[offset] for held in consumer._held.values() for offset in held.flight.dead]
            for message in dead:
                reason = f"was delivered {message.delivery_count} times and never finished"
                what = f"{message.msg_id} of {message.topic} {reason}"
                try:
                    assert self._retries is not None
                    self._retries.put(RetriedMessage.of(message) if consumer is self._retried else message, -1,
                                      reason=f"it {reason} (max_deliveries)")
                    self._note(f"{what}: it is a dead letter of {self.group} (max_deliveries)")
                except EngineError as error:
                    if not isinstance(error, PutError) or not error.result.status.is_lasting:
                        self._note(f"{what}: it cannot be a dead letter now, and waits for that: {error}")
                        return
                    _LOG.error("%s, and it can never be a dead letter of %s, so it counts as done: %s", what, self.group, error)
                with consumer._state:
                    consumer._acknowledge([message])
                consumer._commit_due_s = 0.0  # a kill before that makes another dead letter of it

    @property
    def _group_session(self) -> GroupSession:
        """Return the session of a consumer that has a group."""
        assert self._session is not None
        return self._session

    def _begin(self) -> None:
        if self._session is None:
            return
        queue_ids = self._in_history(lambda: self._reader.queue_ids(self.topic)) if self._options.queues is None else self._options.queues
        topics = () if queue_ids else self._reader.topics()
        if topics and self.topic not in topics and (near := did_you_mean(self.topic, topics)):
            self._note(f"{self._reader.name} has no topic {self.topic!r}{near}: it is read once it comes")
        for note in self._session.begin(lambda: {queue_id: self._start(queue_id) for queue_id in queue_ids}):
            self._note(note)

    def _starts(self, topic: str, start: Start) -> dict[int, int]:
        return self._in_history(lambda: {
            queue_id: start_offset(self._reader, topic, queue_id, start) for queue_id in self._reader.queue_ids(topic)})

    def _start(self, queue_id: int) -> int:
        return self._in_history(lambda: start_offset(self._reader, self.topic, queue_id, self._options.start))

    def _rebalance(self) -> bool:
        """Claim and release what the members' shares say; return whether that was nothing, and nothing is to come."""
        queue_ids = self._in_history(lambda: self._reader.queue_ids(self.topic))
        if self._session is None:
            self._take_all(queue_ids if self._options.queues is None else self._options.queues)
            return True
        is_leaving = self._leaving.is_set()
        wanted = set(self._session.share(queue_ids, is_leaving))
        if not wanted and not is_leaving and "idle" not in self._warned and self._retry_topic is not None:
            sentence = lack_of_queues(self._reader.root, self.topic, self.group or "", self._session.members, len(queue_ids))
            if sentence:
                self._warned.add("idle")
                self._note(sentence)
                warnings.warn(sentence, stacklevel=1)
        with self._state:
            for held in list(self._held.values()):
                if not self._group_session.holds(held.grant):
                    self._revoke(held)
                elif held.queue_id in wanted:
                    if held.releasing_since_s is not None:
                        held.releasing_since_s = None
                        self._has_suspects = self._has_suspects or self._reads_suspects()
                        self._stir()
                elif held.releasing_since_s is None:
                    held.releasing_since_s = _pulse.beats.ran_s()
                    held.put_back()
            oldest_s = _pulse.beats.ran_s() - self._options.session_timeout_s
            # A queue is released once the program has no unfinished message of it or, if only commit() tells, after the timeout.
            only_commits = not self._options.auto_commit and not self._settles_each.is_set()
            leaving = [held for held in self._held.values() if held.releasing_since_s is not None and (
                not held.flight.is_outstanding or only_commits and held.releasing_since_s <= oldest_s)]
            missing = wanted - self._held.keys()
            is_settled = not missing and all(held.releasing_since_s is None for held in self._held.values())
        if leaving:
            self._give_back(leaving)
        if missing:
            self._take(missing)
        return is_settled

    def _compare_members(self) -> None:
        """Warn once if members of the group want other messages: RocketMQ's consistent subscription."""
        if self._session is not None and "wanted" not in self._warned:
            sentence = different_filters(self.topic, self.group or "", self._session.living())
            if sentence:
                self._warned.add("wanted")
                self._note(sentence)

    def _take(self, queue_ids: Iterable[int]) -> None:
        for queue_id, (claim, stored, flight) in self._group_session.take(queue_ids).items():
            make = SharedAssignment if isinstance(flight, SharedFlight) else AssignedQueue
            self._hold(make(queue_id, claim, flight.done, flight, -1 if stored is None else stored))

    def _take_all(self, queue_ids: Iterable[int]) -> None:
        is_first, self._is_first_take = self._is_first_take, False
        for queue_id in queue_ids:
            if queue_id not in self._held:
                # All messages of a queue that was created later are new: deleted ones count as missed.
                position = self._start(queue_id) if is_first else 0
                self._hold(AssignedQueue(queue_id, None, position, InFlight(position)))

    def _hold(self, held: AssignedQueue) -> None:
        """Read a queue from here on."""
        with self._state:
            if self._all_paused is not None and held.queue_id not in self._all_paused:
                self._all_paused.add(held.queue_id)
                self._paused.add(held.queue_id)
            self._held[held.queue_id] = held
            self._has_suspects = self._has_suspects or self._reads_suspects()
        self._stir()

    def _give_back(self, queues: Collection[AssignedQueue]) -> None:
        """Store the offsets and acknowledgements of these queues and release them."""
        with self._state:
            for held in queues:
                if isinstance(held, SharedAssignment):
                    held.shared.give_all_back()
        self._commit_done()
        self._group_session.release([held.grant for held in queues])
        with self._state:
            for held in queues:
                self._held.pop(held.queue_id, None)

    def _commit_done(self) -> None:
        """Store what is done of all topics; once more if a recovery of the store has come between."""
        self._reader._require_open()  # and the store is at its place
        with self._work:
            try:
                self._commit_all()
            except HistoryChangedError:
                for one in self._consumers:
                    one._follow_history()
                self._commit_all()

    def _commit_all(self) -> None:
        commits = []
        for one in self._consumers:
            if isinstance(one._session, SharedSession):
                one._commit_shared(one._session)
                continue
            with one._state:
                offsets = {held.grant: held.done for held in one._held.values() if held.done != held.committed}
                states = unsaved(one._held.values())
            if offsets or states:
                commits.append((one, one._group_session, offsets, states))
        # States are synced in a file of each topic, for which no other process should wait longer than for one.
        for together in [commit for commit in commits if not commit[3]], *([commit] for commit in commits if commit[3]):
            stored = commit_all([(session, offsets, states) for _, session, offsets, states in together])
            for (one, _, offsets, states), kept in zip(together, stored):
                with one._state:
                    for held in note_stored(one._held, offsets, states, kept):
                        one._revoke(held)

    def _commit_shared(self, session: SharedSession) -> None:
        with self._state:
            flights = self._flights
        offsets = session.store(flights)
        with self._state:
            for held in self._held.values():
                held.committed = offsets.get(held.queue_id, held.committed)

    def _revoke(self, held: AssignedQueue) -> None:
        """Drop a queue whose hold was ended by another member or by a reset."""
        self._note(f"queue {held.queue_id} was taken over: its new holder gets what was not committed")
        self._group_session.drop(held.grant)
        self._held.pop(held.queue_id, None)

    # -- the store's history ------------------------------------------------------
    #
    # Positions hold in the history in which they were read: until the next recovery, whose number tells histories apart. What the files
    # show counts only if that is still the same after they were read, and no recovery has begun. Otherwise no position moves and nothing
    # is stored until the thread has compared.

    def _in_history(self, read: Callable[[], _Made], history: int | None = None) -> _Made:
        """Return what `read` returns of the files of a history, by default that of the positions.

        HistoryChangedError, also for any error of `read`, if they are of another one.
        """
        try:
            found = read()
        except Exception:
            self._require_history(history)
            raise
        self._require_history(history)
        return found

    def _require_history(self, history: int | None = None) -> None:
        if self._reader._history() != (self._epoch if history is None else history):
            self._await_comparison()
            raise HistoryChangedError(self._reader.name)

    def _await_comparison(self) -> None:
        self._empty.clear()  # looks into the memory of an ended engine would end each wait at once
        self._quiet = None
        self._is_due.set()

    def _follow_history(self) -> None:
        """After a recovery of the store go back in each queue to before what the log has lost. HistoryChangedError while there is one."""
        history = self._reader._history()
        if history == self._epoch:
            return
        if history is None:
            raise HistoryChangedError(self._reader.name)
        stored = self._session.stored() if self._session else None
        with self._state:
            read = self._in_history(lambda: [
                (held, held.kept_end(self._reader, self.topic), self._reader.queue_range(self.topic, held.queue_id)[0],
                 self._reader.queue_end(self.topic, held.queue_id)) for held in self._held.values()], history)
            for held, kept_end, first, end in read:
                held.go_back(kept_end, first, end, None if stored is None else stored.get(held.queue_id, -1))
            self._epoch = history
        if self._session is not None:
            self._session.epoch = history
        self._stir()

    # -- helpers ------------------------------------------------------------------

    def _require_group(self) -> None:
        if self._session is None:
            raise UsageError("there is no group to remember offsets for: give consume() one")

    def _require_open(self) -> None:
        if self._is_closed:
            raise UsageError(self._reader._closed)
        if self._pid != os.getpid():
            raise UsageError("this consumer was made before a fork: make a new one in the child")

    def _note(self, sentence: str) -> None:
        if sentence not in self.notes[-3:]:
            self.notes.append(sentence)
            del self.notes[:-NOTES_MAX]
            _LOG.warning("%s", sentence)


class _Part(Consumer):
    """One of several topics, for a program: in the state of what reads the topic, without what that has of the others."""

    __slots__ = ("_parts", "_pauses_new", "_retried", "_retries", "_whole")  # its own; `__dict__` is the state

    def __init__(self, one: Consumer, whole: Consumer) -> None:
        self.__dict__ = one.__dict__
        self._parts, self._retried, self._retries, self._pauses_new = {}, None, None, False
        self._whole = whole  # which ends once no program has it, or a part of it

    @property
    def _names_queues(self) -> bool:
        return True

    def _commit_done(self) -> None:
        self._whole._commit_done()

    def _has_suspect_open(self) -> bool:
        return self._whole._has_suspect_open()

    def _close(self, closer: _Asker | None) -> None:
        self._whole._close(closer)


_Asker = tuple[int, "asyncio.Task[Any] | None"]  # a thread, and the task that runs in it


def _asker_now() -> _Asker:
    return threading.get_ident(), None if asyncio._get_running_loop() is None else asyncio.current_task()


class Call:
    """One call that asks for messages. What it has `taken`, by consumer, counts as delivered, but the program has it once `has_ended`.

    The caller sets that just before it returns, where no signal handler can come between, and drops what keeps the consumer.
    """

    __slots__ = ("asker", "has_ended", "taken")

    def __init__(self) -> None:
        self.asker = _asker_now()
        self.taken: list[tuple[Consumer, list[Message]]] = []
        self.has_ended = False

    def undo(self, kept: Iterable[Message] = ()) -> None:
        """Take back what the program does not get, except `kept`."""
        places = {message.physical_offset for message in kept}
        for consumer, messages in self.taken:
            consumer._take_own_back([message for message in messages if message.physical_offset not in places])
        self.taken.clear()


def _has_all(closer: _Asker | None, asked: Call | None) -> bool:
    """Whether the one that closes is the one that asked last, or its task that has ended well: it is done with its messages.

    A task that returns something may have handed them over before it ended, as that of asyncio.wait_for in Python 3.11 does.
    """
    if closer is None or asked is None or not asked.has_ended or closer[0] != asked.asker[0]:
        return False
    task = asked.asker[1]
    return task in (None, closer[1]) or (
        task.done() and not task.cancelled() and not task.cancelling() and task._exception is None and task.result() is None)


def _deadline_s(max_messages: int, timeout_s: float | None) -> float | None:
    """When a pull must return; None for no timeout. UsageError unless it asks for a message."""
    if arguments.integer(max_messages, "max_messages") < 1:
        raise UsageError(f"max_messages is {max_messages}; ask for at least one")
    return None if timeout_s is None else time.monotonic() + arguments.number(timeout_s, "timeout_s", -math.inf)


async def _readable(loop: asyncio.AbstractEventLoop, readiness: Readiness, timeout_s: float) -> None:
    """Wait until the descriptor is readable, or until the timeout, by a copy of it that the program cannot have in this loop itself."""
    woken = loop.create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    copy = readiness.copy()
    try:
        loop.add_reader(copy, wake)
        timer = None if math.isinf(timeout_s) else loop.call_later(timeout_s, wake)
        try:
            await woken
        finally:
            loop.remove_reader(copy)
            if timer is not None:
                timer.cancel()
    finally:
        os.close(copy)
