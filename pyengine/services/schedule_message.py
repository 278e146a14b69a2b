"""ScheduleMessageService: deliver delayed messages when they are due (docs/delayed.md).

The entries in the queue of a level have the due time instead of a tag hash. The scheduler puts a message that is due once more, into
its real topic (formats/delayed_message.py), through a session like any producer's. A message whose put is refused for the moment (a
full disk) comes after later ones that were accepted.

RocketMQ polls each level every 100 ms. Here the head of a queue says when it is due, and an empty queue is polled at a part of its
level's delay: a message that is put meanwhile is not due before.

`config/delayOffset.json` counts a message as delivered only when the delivered record is flushed, so neither kill -9 nor a power cut
loses one.

The store's time is the wall clock, but never before the newest store time, from which due times are counted. When the wall clock was
set back, a steady clock measures the waits (StalledClock): deliveries may be late then, never early. A due time further ahead than its
level's delay is a mistake, for this service as for RocketMQ, and the message is due at once. Messages that a broker moved to
TIMER_TOPIC while it had the store open are delivered after the start. The scheduler notes which messages it takes, reads the cancels
that came before that note (DelayCancels), and puts the others. An engine that replays a clock (`replay_clock`) delivers no message,
and neither does a slave.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass, field

from pyengine.client.outgoing import RawMessage
from pyengine.client.pending_puts import PutFuture
from pyengine.client.producer import Producer
from pyengine.errors import DiskError, EngineError, StoreBusyError, UsageError
from pyengine.events import Event
from pyengine.formats.constants import SCHEDULE_TOPIC, TIMER_GROUP, TIMER_TOPIC
from pyengine.formats.consume_queue import ConsumeQueueEntry, is_ext_address, is_filler
from pyengine.formats.delayed_message import UNKNOWN_LEVEL_DELAY_MS, DelayedId, delivery_of
from pyengine.formats.record import Message
from pyengine.ipc.control_block import EngineMemory, now_ms
from pyengine.ipc.sessions import ended_sessions
from pyengine.native import control as native
from pyengine.native.failpoints import failpoint
from pyengine.native.flush import monotonic_ns
from pyengine.native.waiting import queue_limit
from pyengine.results import PutResult, ReadLevel
from pyengine.services.service import BlockedReason, Service, ServiceContext
from pyengine.storage.config import EngineConfig
from pyengine.storage.consume_queue import ConsumeQueue
from pyengine.storage.consumer_offset import ConsumerOffsets, DelayCancels, DelayOffsets
from pyengine.storage.store_reader import StoreReader

BATCH_MESSAGES = 64            # most unanswered puts of one level, before the other levels have their turn
ANSWER_WAIT_S_MAX = 1.0        # longest wait for an answer in one round, so that the worker records a heartbeat
POLL_NS_MIN = 50_000_000       # of an empty level
POLL_NS_MAX = 5_000_000_000
PAUSE_S_MAX = 1.0              # the wall clock may be set during a sleep
RETRY_NS = 100_000_000         # after a put that was refused for the moment
SESSION_AHEAD_MS = 1500         # a session is opened this long before it is needed: that takes longer than a put
SESSION_IDLE_NS = 10_000_000_000
DRAIN_NS = 2_000_000_000       # longest wait of an orderly stop for the last deliveries to be flushed
DRAIN_POLL_INTERVAL_S = 0.02
NEVER_NS = (1 << 63) - 1
TIMER = 0                      # in place of a level: the queue of TIMER_TOPIC, into which a broker moves messages with a delivery time
STALLED_SAMPLE_NS = 1_000_000_000
NOT_WITH_A_REPLAYED_CLOCK = "delayed messages and retries wait, as replay_clock is true: leave it out at the next start to deliver them"


class DispatchedWatermark:
    """The scheduler's read level: the committed log, and of the queues the dispatched entries."""

    def __init__(self, memory: EngineMemory) -> None:
        self._control = memory.control

    def limit(self, level: ReadLevel) -> int:
        return native.load_position(self._control.committed)

    def queue_limit(self, level: ReadLevel) -> int:
        return queue_limit(self._control, self._control.committed)


@dataclass(slots=True)
class _Step:
    """A step from one queue offset to `next_offset`: a put without an answer yet, or an offset that is skipped."""

    next_offset: int
    future: PutFuture[PutResult] | None = None
    end: int = 0          # without a future: the step counts once the log is flushed up to here
    reason: str = ""      # why the message can never be delivered


@dataclass
class _Level:
    """One delay level and its queue; or the queue of TIMER_TOPIC, whose messages are all due.

    `offset` is the next queue offset to deliver. `in_flight` has the steps from there on that have no
    answer yet, `ahead` the offsets that were stored although an earlier one was refused
    (offset -> end of the record). `unflushed` has (offset after a delivery, end of its
    record) in the order of offsets; `durable` is the offset up to which deliveries are flushed,
    which the file may name.
    """

    number: int
    delay_ms: int | None                # None: `message_delay_level` has no such level
    offset: int
    durable: int
    due_ms: int = 0                     # of the message at `offset`; 0: not read yet
    head: int = 0                       # physical offset of that message
    poll_ns: int = 0                    # when to read the queue again after it was empty
    in_flight: deque[_Step] = field(default_factory=deque)
    ahead: dict[int, int] = field(default_factory=dict)
    unflushed: deque[tuple[int, int]] = field(default_factory=deque)

    @property
    def topic(self) -> str:
        return TIMER_TOPIC if self.number == TIMER else SCHEDULE_TOPIC

    @property
    def queue_id(self) -> int:
        return 0 if self.number == TIMER else self.number - 1


class ScheduleMessageService(Service):
    """Delivers delayed messages, and writes `delayOffset.json`."""

    KIND = native.SCHEDULER

    def __init__(self, context: ServiceContext, connect: Callable[[], Producer],
                 clock_ms: Callable[[], int] = now_ms, clock_ns: Callable[[], int] = monotonic_ns) -> None:
        """`connect` opens a session; `clock_ms` is the wall clock, `clock_ns` a steady one."""
        super().__init__(context)
        memory, config = context.memory, context.config
        self._connect = connect
        self._clock_ms = clock_ms
        self._clock_ns = clock_ns
        self._is_idle = bool(memory.identity.replay_clock) or memory.identity.role == native.SLAVE
        self._watermark = DispatchedWatermark(memory)
        self._reader = StoreReader(context.store.root, watermark=self._watermark, config=config)
        self._offsets = DelayOffsets(context.store.root)
        self._cancels = DelayCancels(context.store.root)
        self._group_offsets = ConsumerOffsets(context.store.root)
        self._delays_ms = config.delay_levels_ms
        self.take_settings(config)
        self._written: dict[int, int] = {}
        self._timer_offset = 0
        self._last_reported = ""
        self._unsaved = BlockedReason(context.report)  # why delayOffset.json cannot be written
        self._reasons.append(self._unsaved)
        self._producer: Producer | None = None
        self._used_ns = 0
        self._retry_ns = 0
        self._drain_until_ns = 0
        self._queues: dict[int, ConsumeQueue] = {}
        self._levels = [] if self._is_idle else self._load(config)
        self._stalled = StalledClock(max((level.delay_ms or 0 for level in self._levels), default=0) * 1_000_000)

    def _load(self, config: EngineConfig) -> list[_Level]:
        """Return the levels of the setting, further ones that have a queue, and TIMER_TOPIC's queue if a broker put into it."""
        self._written, problem = self._offsets.read()
        if problem:
            self._report(Event.TABLE_UNUSABLE, problem)
        delays = dict(enumerate(config.delay_levels_ms, start=1))
        queues = self._reader.topics().get(SCHEDULE_TOPIC, [])
        levels = []
        for number in sorted(delays.keys() | {queue_id + 1 for queue_id in queues}):
            offset = self._written.get(number, 0)
            low, high = self._range(SCHEDULE_TOPIC, number - 1)
            inside = max(low, min(offset, high))
            if inside != offset:
                noted = f"offset {offset}" if number in self._written else "no offset"
                self._report(Event.DELAY_OFFSET_MOVED,
                             f"delayOffset.json has {noted} for delay level {number}, but its queue reaches from {low} to "
                             f"{high}: continuing at {inside}")
            levels.append(_Level(number, delays.get(number), inside, inside))
        self._cancels.resume({level.number: level.offset for level in levels}, self._clock_ms(), self._log_end())
        low, high = self._range(TIMER_TOPIC, 0)
        self._timer_offset = self._group_offsets.read(TIMER_TOPIC, TIMER_GROUP).get(0, 0)
        offset = max(low, min(self._timer_offset, high))
        return [*levels, _Level(TIMER, None, offset, offset)] if offset < high else levels

    def _range(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Return (first offset, end) of a queue. The end may be beyond what is shown, for what was delivered before
        dispatch_at=replicated was set, or a backup was restored, is delivered.
        """
        return self._reader.queue_range(topic, queue_id)[0], self._reader.queue_end(topic, queue_id)

    # ---- the service ------------------------------------------------------------

    def take_settings(self, config: EngineConfig) -> None:
        """Take the interval between two writes of delayOffset.json; the next one is due at once."""
        self._save_interval_ns = config.flush_delay_offset_interval_ms * 1_000_000
        self._save_due_ns = 0

    def work(self) -> bool:
        """Deliver the messages that are due; True when a level has more of them."""
        if self._is_idle:
            if self._memory.identity.replay_clock and SCHEDULE_TOPIC in self._reader.topics():
                self._blocked.set(NOT_WITH_A_REPLAYED_CLOCK, NOT_WITH_A_REPLAYED_CLOCK)
            return False
        self._stalled.observe(self._clock_ms() < native.committed_slot(self._control)[1], self._clock_ns(), self._log_end())
        more = False
        if self._retry_ns and self._clock_ns() >= self._retry_ns:
            self._retry_ns = 0
        if self._memory.state == native.STATE_RUNNING:
            try:
                more = self._deliver_levels()
                now = self._now_ms()
                if not self._retry_ns and any(level.due_ms and level.due_ms - now <= SESSION_AHEAD_MS for level in self._levels):
                    self._session()
                if not self._retry_ns:
                    self._blocked.clear()
            except EngineError as error:  # for example a folder or a file that cannot be read
                self._retry_later(str(error))
        else:
            self._end_session()
            self._collect_all()
        now_ns = self._clock_ns()
        if now_ns >= self._save_due_ns and self._save():
            self._save_due_ns = now_ns + self._save_interval_ns
        if self._producer is not None and not more and now_ns >= self._used_ns + SESSION_IDLE_NS:
            self._end_session()
        return more and not self._retry_ns

    def pause_s(self) -> float:
        if self._is_idle or self._memory.state != native.STATE_RUNNING:
            return PAUSE_S_MAX
        now, now_ns = self._now_ms(), self._clock_ns()
        if self._retry_ns:
            return max(0.0, min(PAUSE_S_MAX, (self._retry_ns - now_ns) / 1e9))
        waits_s = [(level.poll_ns - now_ns) / 1e9 if not level.due_ms else (level.due_ms - now) / 1000 for level in self._levels]
        return max(0.0, min(PAUSE_S_MAX, *waits_s))

    def drain(self) -> bool:
        """Stop delivering, and note each delivery once it is flushed; give up after DRAIN_NS."""
        self._end_session()
        self._collect_all()
        if self._drain_until_ns == 0:
            self._drain_until_ns = self._clock_ns() + DRAIN_NS
        self._save()
        if not any(level.unflushed for level in self._levels) or self._clock_ns() >= self._drain_until_ns:
            return False
        self._memory.latch(native.SCHEDULER).wait(DRAIN_POLL_INTERVAL_S)
        return True

    def close(self) -> None:
        self._end_session()
        self._queues.clear()
        self._cancels.close()
        self._reader.close()

    def _now_ms(self) -> int:
        return max(self._clock_ms(), native.committed_slot(self._control)[1])

    def _log_end(self) -> int:
        return self._watermark.limit(ReadLevel.COMMITTED)

    # ---- one level --------------------------------------------------------------

    def _collect_all(self) -> None:
        """Take the answers to the puts of a session that has ended, which are all there by then."""
        for level in self._levels:
            self._collect(level)

    def _deliver_levels(self) -> bool:
        more = False
        for level in self._levels:
            if self._retry_ns:
                return False
            more = self._deliver_level(level) or more
        return more

    def _deliver_level(self, level: _Level) -> bool:
        """Put the messages of a level that are due, at most BATCH_MESSAGES; True if there may be more to do."""
        if not level.in_flight:
            is_deleted = level.head < native.load_position(self._control.min_offset)  # that is named before it is due
            is_time = (is_deleted or self._is_due(level, level.due_ms, level.head)) if level.due_ms else self._clock_ns() >= level.poll_ns
            if not is_time:
                return False
            level.due_ms = 0
            queue = self._queue(level)
            if queue is None:
                self._poll_later(level)
            else:
                self._put_due(level, queue)
        return self._collect(level) or (level.due_ms == 0 and level.poll_ns <= self._clock_ns())

    def _put_due(self, level: _Level, queue: ConsumeQueue) -> None:
        """Submit the messages that are due; then `due_ms` says when the next one is, or `poll_ns` when to read the queue again."""
        end = queue.max_offset(self._watermark.queue_limit(ReadLevel.COMMITTED))
        log_min_offset = self._reader.commit_log.min_offset
        cursor, batch = level.offset, list[_Step | ConsumeQueueEntry]()
        while len(batch) < BATCH_MESSAGES:
            if cursor >= end:
                self._poll_later(level)
                break
            entry = queue.entry(cursor, end)
            if entry is None or entry.physical_offset < log_min_offset or is_filler(entry):
                batch.append(step := self._skip_deleted(level, queue, cursor, log_min_offset, end))
                cursor = step.next_offset
                continue
            if cursor not in level.ahead:
                due_ms = self._due_ms(level, queue, entry)
                if not self._is_due(level, due_ms, entry.physical_offset):
                    level.due_ms, level.head = due_ms, entry.physical_offset
                    break
            batch.append(_Step(cursor + 1, end=level.ahead[cursor]) if cursor in level.ahead else entry)
            cursor += 1
        self._put_batch(level, batch, cursor)

    def _put_batch(self, level: _Level, batch: list[_Step | ConsumeQueueEntry], below: int) -> None:
        """Take the messages of these entries, which end before the offset `below`, and submit those that are not cancelled."""
        if not batch:
            return
        next_look = level.due_ms, level.poll_ns
        level.due_ms = level.poll_ns = 0  # at once, unless all are submitted
        newest_ms, now_ms, cursor = native.committed_slot(self._control)[1], self._clock_ms(), level.offset
        self._cancels.take(level.number, below, now_ms, self._log_end(), newest_ms)
        failpoint("deliveries_taken")
        for each in batch:
            step = each if isinstance(each, _Step) else self._put(cursor, each, now_ms)
            if step is None:
                return
            level.in_flight.append(step)
            cursor = step.next_offset
        level.due_ms, level.poll_ns = next_look

    def _collect(self, level: _Level) -> bool:
        """Take the answers in order; True if some puts have no answer yet."""
        while level.in_flight:
            step = level.in_flight[0]
            result = None
            if step.future is not None:
                try:
                    result = step.future.result(ANSWER_WAIT_S_MAX)
                except FutureTimeoutError:
                    return True
                if result.physical_offset < 0 and not result.status.is_lasting:
                    self._retry_refused(level, result)
                    return False
            level.in_flight.popleft()
            failpoint("delivery_answered")
            self._step(level, step, result)
        return False

    def _step(self, level: _Level, step: _Step, result: PutResult | None) -> None:
        end, reason = step.end, step.reason
        if result is not None:
            if result.physical_offset >= 0:
                end = result.physical_offset + result.size_bytes
                self._last_reported = ""
            else:
                reason = result.reason
        if reason:  # the message stays in its queue; later ones do not wait for it
            number = step.next_offset - level.offset
            what, verb = ("the message", "is") if number == 1 else (f"the {number} messages", "are")
            self._report(Event.DELAYED_NOT_DELIVERED, f"{what} at offset {level.offset} of {level.topic} queue {level.queue_id} {verb} "
                                                      f"not delivered: {reason}")
        level.ahead.pop(level.offset, None)
        level.offset = step.next_offset
        level.unflushed.append((level.offset, max(end, level.unflushed[-1][1] if level.unflushed else 0)))

    def _retry_refused(self, level: _Level, result: PutResult) -> None:
        """Try the first put, which was refused for the moment, again later; the puts after it that were stored are not repeated."""
        self._retry_later(f"{result.status.name}: {result.reason}")
        level.due_ms = level.poll_ns = 0
        offset = level.offset
        for step in level.in_flight:
            if step.future is not None:
                try:
                    later = step.future.result(ANSWER_WAIT_S_MAX)
                except FutureTimeoutError:
                    break
                if later.physical_offset >= 0:
                    level.ahead[offset] = later.physical_offset + later.size_bytes
            offset = step.next_offset
        level.in_flight.clear()

    def _skip_deleted(self, level: _Level, queue: ConsumeQueue, cursor: int, log_min_offset: int, end: int) -> _Step:
        """Return the step to the first entry whose message is still in the log, or past a queue file that is missing."""
        offset = queue.min_offset(log_min_offset, end)
        if offset > cursor:
            return _Step(offset, reason="deleted from the log before they were due: it has to keep them longer")
        offset = min(end, queue.next_file_offset(cursor))
        return _Step(offset, reason=f"its queue file is missing, and with it everything before {offset}")

    def _is_due(self, level: _Level, due_ms: int, physical_offset: int) -> bool:
        """Whether a message is due. As in RocketMQ's correctDeliverTimestamp, a time further ahead than the level's delay is due."""
        now = self._now_ms()
        if due_ms <= now or level.delay_ms is None:
            return due_ms <= now
        return (due_ms > now + level.delay_ms
                or physical_offset < self._stalled.waited_end(self._clock_ns(), level.delay_ms * 1_000_000))

    def _poll_later(self, level: _Level) -> None:
        delay_ns = (UNKNOWN_LEVEL_DELAY_MS if level.delay_ms is None else level.delay_ms) * 1_000_000
        level.due_ms = 0
        level.poll_ns = self._clock_ns() + max(POLL_NS_MIN, min(POLL_NS_MAX, delay_ns - delay_ns // 8))

    def _queue(self, level: _Level) -> ConsumeQueue | None:
        queue = self._queues.get(level.number)
        if queue is None:
            queue = self._reader._queue(level.topic, level.queue_id)
            if queue is not None:
                self._queues[level.number] = queue
        return queue

    def _due_ms(self, level: _Level, queue: ConsumeQueue, entry: ConsumeQueueEntry) -> int:
        """Return the due time from the entry or from its extension unit; 1, which is long ago, if it is unknown."""
        if level.number == TIMER:
            return 1
        code = entry.tags_code
        if is_ext_address(code):
            unit = queue.ext_unit(code)
            if unit is None:
                message = self._message(entry)
                delay_ms = UNKNOWN_LEVEL_DELAY_MS if level.delay_ms is None else level.delay_ms
                return 1 if message is None else message.store_timestamp_ms + delay_ms
            code = unit.tags_code
        return max(1, code)

    def _message(self, entry: ConsumeQueueEntry) -> Message | None:
        message = self._reader._message_below(entry.physical_offset, self._watermark.limit(ReadLevel.COMMITTED))
        return message if message is not None and message.size_bytes == entry.size_bytes else None

    # ---- one message ------------------------------------------------------------

    def _put(self, cursor: int, entry: ConsumeQueueEntry, now_ms: int) -> _Step | None:
        """Submit the message of an entry to its real topic; None when no session can be opened."""
        message = self._message(entry)
        if message is None:
            return _Step(cursor + 1, reason=f"there is no whole record at {entry.physical_offset}")
        if self._cancels.is_cancelled(DelayedId.of(message)):
            return _Step(cursor + 1)
        delivery = delivery_of(message, now_ms, self._delays_ms)
        if isinstance(delivery, str):
            return _Step(cursor + 1, reason=delivery)
        producer = self._session()
        if producer is None:
            return None
        try:
            future = producer.put_raw_async(RawMessage(
                delivery.topic, message.body, queue_id=delivery.queue_id, properties_text=delivery.properties_text,
                flag=message.flag, sys_flag=message.sys_flag, born_timestamp_ms=message.born_timestamp_ms,
                born_host=message.born_host, store_host=message.store_host, reconsume_times=message.reconsume_times,
                wait_store_msg_ok=False, delay_level=delivery.delay_level))
        except UsageError as error:  # a field that no put can have, for example a host with a negative port
            return _Step(cursor + 1, reason=str(error))
        failpoint("delivery_submitted")
        return _Step(cursor + 1, future)

    def _retry_later(self, why: str) -> None:
        self._retry_ns = self._clock_ns() + RETRY_NS
        if self._memory.state != native.STATE_RUNNING:
            return
        reason = f"delayed messages wait: {why}"
        self._blocked.set(reason)
        if why != self._last_reported:
            self._last_reported = why
            self._report(Event.WORK_BLOCKED, reason)

    # ---- session ----------------------------------------------------------------

    def _session(self) -> Producer | None:
        """Return the session, opened if necessary; it is open only while there are messages to deliver. None if it cannot be opened."""
        self._used_ns = self._clock_ns()
        if self._producer is None:
            try:
                self._producer = self._connect()
            except EngineError as error:
                self._retry_later(str(error))
        return self._producer

    def _end_session(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()

    # ---- delayOffset.json -------------------------------------------------------

    def _save(self) -> bool:
        """Write the file if further deliveries are durable; return whether it was written."""
        flushed = native.load_position(self._control.flushed)
        for level in self._levels:
            while level.unflushed and level.unflushed[0][1] <= flushed:
                level.durable = level.unflushed.popleft()[0]
        table = self._written | {level.number: level.durable for level in self._levels
                                 if level.number != TIMER and (level.durable or level.number in self._written)}
        if not self._save_timer_offset():
            return False
        if table == self._written:
            return False
        failpoint("deliveries_durable")
        try:
            self._offsets.write(table)
        except DiskError as error:
            self._note_failed(error)
            return False
        failpoint("deliveries_noted")
        self._written = table
        self._unsaved.clear()
        with suppress(EngineError):  # the file stays long until the next time
            self._shorten_cancels()
        return True

    def _shorten_cancels(self) -> None:
        """Drop the marks of messages of which no record waits any more, once the file is long."""
        limit = self._watermark.queue_limit(ReadLevel.COMMITTED)
        done = limit
        for level in self._levels:
            noted = self._timer_offset if level.number == TIMER else self._written.get(level.number, 0)
            queue = self._queue(level)
            if queue is not None and noted < (end := queue.max_offset(limit)):
                entry = queue.entry(noted, end)
                done = min(done, 0 if entry is None else entry.physical_offset)
        is_settled = not any(level.in_flight for level in self._levels) and not ended_sessions(self._memory)
        self._cancels.shorten(done, native.load_position(self._control.wrote) if is_settled else None)

    def _save_timer_offset(self) -> bool:
        """Commit the offset up to which the queue of TIMER_TOPIC is delivered; False if that failed."""
        durable = next((level.durable for level in self._levels if level.number == TIMER), self._timer_offset)
        if durable == self._timer_offset:
            return True
        try:
            self._group_offsets.commit(TIMER_TOPIC, TIMER_GROUP, {0: durable})
        except (DiskError, StoreBusyError) as error:
            self._note_failed(error)
            return False
        self._timer_offset = durable
        return True

    def _note_failed(self, error: EngineError) -> None:
        self._save_due_ns = self._clock_ns() + self._save_interval_ns
        reason = (f"how far delayed messages are delivered cannot be noted: {error}; "
                  "after a crash they are delivered again from the last note on")
        self._unsaved.set(reason, reason)


class StalledClock:
    """Measures how long messages have waited while the store's clock is stalled.

    The store's clock never goes back. If the wall clock was ahead and was corrected, each new record gets the store time of
    the last one until the wall clock has passed that, perhaps after a year, and due times cannot be compared until then.
    So this object notes the end of the log with the time of a steady clock: each record below that end has waited at least
    since then. The measured wait is never too long. It is too short by STALLED_SAMPLE_NS at most, and for records older
    than this process by the time before its start.
    """

    def __init__(self, longest_ns: int) -> None:
        """`longest_ns` is the longest wait that waited_end() is called with."""
        self._longest_ns = longest_ns
        self._seen: list[tuple[int, int]] = []  # (time, end of the log), once in STALLED_SAMPLE_NS

    def observe(self, is_stalled: bool, now_ns: int, end: int) -> None:
        """Note whether the store's clock is stalled now, and the end of the log."""
        if not is_stalled:
            self._seen.clear()
        elif not self._seen or now_ns >= self._seen[-1][0] + STALLED_SAMPLE_NS:
            self._seen.append((now_ns, end))
            # Of the samples older than the longest wait only the newest is needed.
            del self._seen[: max(0, self._number_until(now_ns - self._longest_ns) - 1)]

    def waited_end(self, now_ns: int, wait_ns: int) -> int:
        """Return the offset below which all records have waited at least `wait_ns`; 0 if no record is known to have."""
        number = self._number_until(now_ns - wait_ns)
        return self._seen[number - 1][1] if number else 0

    def _number_until(self, time_ns: int) -> int:
        return bisect_right(self._seen, time_ns, key=lambda seen: seen[0])
