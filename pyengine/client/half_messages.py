"""Half messages: transactions as RocketMQ's broker stores them, and the check-back of undecided ones.

A half message is in RMQ_SYS_TRANS_HALF_TOPIC with its real topic as a property. A commit first stores the message in its real
topic; then an op message with the half message's queue offset ends the transaction, for a commit and for a rollback. RocketMQ 4.9.8:
TransactionalMessageBridge, EndTransactionProcessor, TransactionalMessageServiceImpl.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

from pyengine.client.outgoing import RawMessage, body_bytes, map_text, raw_of, result_of
from pyengine.engine_config import EngineConfig
from pyengine.errors import EngineError, UsageError
from pyengine.formats import constants
from pyengine.formats.delayed_message import OF_TIMED, timed_properties
from pyengine.formats.paths import StorePaths
from pyengine.formats.record import Message, decode_properties
from pyengine.formats.small_file import PARSE_ERRORS
from pyengine.ipc.live_reader import DISPATCH_S, LiveStoreReader
from pyengine.results import PutError, PutResult, ReadLevel
from pyengine.storage.config_table import TopicConfig, TopicConfigs
from pyengine.storage.consumer_offset import ConsumerOffsets
from pyengine.storage.durable_file import opened_to_lock
from pyengine.storage.engine_id import read_epoch
from pyengine.storage.file_system import HeldStore
from pyengine.storage.message_getter import Wanted
from pyengine.storage.ofd_lock import try_lock
from pyengine.storage.store_reader import FETCH_BYTES_MAX

Outcome = Literal["commit", "rollback"]
"""How a transaction ends."""
REMOVE_TAG = "d"
READ_MESSAGES = 256
FLUSHED_WAIT_S = 5.0
FLUSHED_POLL_INTERVAL_S = 0.01
AGE_MAX_MS = 72 * 3_600_000  # RocketMQ: fileReservedTime; but a message that is put back outlives its segment
SEEN_MAX = 1000         # newest ends of a queue that are all remembered
LOCK_NAME = "transactions.lock"
LOCK_BYTES_MAX = 1 << 20
LOCK_GROUPS_MAX = 1000  # in the lock file: more than are asked within an interval
PUT_BACK = "\x01"       # in the lock file, before a group whose messages were put back uncounted; no property has it
_LOG = logging.getLogger("pyengine.client.half_messages")


# ---- the stored messages -------------------------------------------------------------


def half_of(message: RawMessage) -> RawMessage:
    """Return the half message of a message with TRAN_MSG and PGROUP. RocketMQ: parseHalfMessageInner.

    A delay becomes properties, which the commit goes by. A broker that commits a message with a time puts it into TIMER_TOPIC.
    """
    topic, queue_id, text, level = message.topic, message.queue_id, message.properties_text, message.delay_level
    if message.deliver_at_ms:
        text = timed_properties(text, topic, queue_id, message.deliver_at_ms)
        topic, queue_id, level = constants.TIMER_TOPIC, 0, 10  # with two digits, so that the commit has room for its level
    properties = decode_properties(text) | {constants.PROPERTY_REAL_TOPIC: topic, constants.PROPERTY_REAL_QUEUE_ID: str(queue_id)}
    if level:
        properties[constants.PROPERTY_DELAY] = str(level)
    return replace(message, topic=constants.TRANSACTION_HALF_TOPIC, queue_id=0, properties_text=map_text(properties), delay_level=0,
                   sys_flag=message.sys_flag & ~constants.SYS_FLAG_TRANSACTION_MASK, deliver_at_ms=0)


def commit_of(half: Message) -> RawMessage:
    """Return what a commit stores in the real topic, with REAL_TOPIC and TRAN_MSG as by the broker. UsageError without a topic."""
    topic, queue_id = real_queue(half)
    properties = dict(half.properties)
    level, at_ms = _number(properties.get(constants.PROPERTY_DELAY, ""), 0), 0
    if properties.get(constants.PROPERTY_REAL_TOPIC) == constants.TIMER_TOPIC:
        level, at_ms = 0, _number(properties.get(constants.PROPERTY_DELIVER_AT, ""), 0)
        properties |= {constants.PROPERTY_REAL_TOPIC: topic, constants.PROPERTY_REAL_QUEUE_ID: str(queue_id)}
        for name in (constants.PROPERTY_DELAY, *OF_TIMED):
            properties.pop(name, None)
    return replace(raw_of(half, properties), topic=topic, queue_id=queue_id, delay_level=level, deliver_at_ms=at_ms,
                   sys_flag=half.sys_flag & ~constants.SYS_FLAG_TRANSACTION_MASK | constants.SYS_FLAG_TRANSACTION_COMMIT,
                   prepared_transaction_offset=half.physical_offset)


def op_of(half: Message, queue_offset: int, now_ms: int, host: str) -> RawMessage:
    """Return the op message that ends the half message at `queue_offset`. `host`: the store host."""
    return RawMessage(
        constants.TRANSACTION_OP_TOPIC, str(queue_offset).encode(), queue_id=half.queue_id, born_timestamp_ms=now_ms,
        born_host=host, store_host=host, wait_store_msg_ok=False,
        properties_text=map_text({constants.PROPERTY_TAGS: REMOVE_TAG, constants.PROPERTY_WAIT: "true"}))


def real_queue(half: Message) -> tuple[str, int]:
    """Return the (topic, queue id) that a half message is meant for; UsageError if it has no topic."""
    topic, queue = half.properties.get(constants.PROPERTY_REAL_TOPIC, ""), half.properties.get(constants.PROPERTY_REAL_QUEUE_ID, "")
    if topic == constants.TIMER_TOPIC:
        topic, queue = half.properties.get(constants.PROPERTY_TIMED_TOPIC, ""), half.properties.get(constants.PROPERTY_TIMED_QUEUE_ID, "")
    if not topic or not (queue.isascii() and queue.isdecimal()):
        raise UsageError(f"{half.msg_id} names no topic and queue: it is not a half message")
    return topic, int(queue)


class HalfMessages:
    """The half messages of one store. Thread-safe.

    `put_raw(message, timeout_s)` is a producer's, and `settings()` those of its engine; `host` is its store host, for op messages.
    """

    def __init__(self, root: str | os.PathLike[str], put_raw: Callable[[RawMessage, float | None], PutResult],
                 settings: Callable[[], EngineConfig], host: str | None = None) -> None:
        self._store = HeldStore(root)  # what is written below config/ stays in this store, whatever happens to its folder
        self.root = self._store.root
        self._settings = settings
        self.now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
        self.steady_ms: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000
        self._put_raw = put_raw
        self._given_host = host
        self.last_put_end = 0
        """Offset at which the last one ends that was put back or discarded."""
        self.lock = threading.RLock()
        self._reader: LiveStoreReader | None = None
        self._entered: set[str] = set()

    @property
    def config(self) -> EngineConfig:
        return self._settings()

    @property
    def _host(self) -> str:
        return self._given_host or self.config.store_host

    def prepare(self, message: RawMessage, timeout_s: float | None = None) -> tuple[PutResult, Message | None]:
        """Store the half message of `message`; return (the result, the stored half message, None if it was not stored)."""
        half = half_of(message)
        self.enter(half.topic)
        result = self._put_raw(half, timeout_s)
        if not result.stored:
            return result, None
        return result, Message(
            half.topic, body_bytes(half.body), half.queue_id, result.queue_offset, result.physical_offset, result.size_bytes,
            half.properties_text, half.flag, half.sys_flag, half.born_timestamp_ms, half.born_host, result.store_timestamp_ms,
            half.store_host or self._host, half.reconsume_times)

    def find(self, physical_offset: int, topic: str = constants.TRANSACTION_HALF_TOPIC) -> Message | None:
        """Return the half message that begins at this offset, None if there is none."""
        with self.lock:
            found = self.reader().message_at(physical_offset, ReadLevel.COMMITTED)
        return found if found is not None and found.topic == topic else None

    def end(self, half: Message, outcome: Outcome, timeout_s: float | None = None) -> PutResult:
        """Commit or roll back; return the result of the commit, or of the op message. `half` may have been put back meanwhile.

        A commit that repeats one that is dispatched, perhaps another process's, stores the message no second time.
        """
        if outcome not in ("commit", "rollback"):
            raise UsageError(f"{outcome!r} ends no transaction: give 'commit' or 'rollback'")
        offsets = {half.queue_offset}
        done = None
        if half.uniq_key and self._may_be_put_back(half):
            with self.lock:
                copies = self._copies_of(constants.TRANSACTION_HALF_TOPIC, half)
                offsets |= {copy.queue_offset for copy in copies if copy.queue_id == half.queue_id}
                done = self._committed(half) if outcome == "commit" else None
        if outcome == "commit":
            done = done or self._put_raw(commit_of(half), timeout_s)
            if not done.stored:
                return done
        results = [self._put_raw(op_of(half, offset, self.now_ms(), self._host), timeout_s) for offset in sorted(offsets)]
        return done or results[0]

    def _may_be_put_back(self, half: Message) -> bool:
        """Whether a round may have asked about the half message by now, or has: it is a copy."""
        immunity_s, age_ms = _number(half.properties.get(constants.PROPERTY_CHECK_IMMUNITY_TIME, ""), -1), _age_ms(half, self.now_ms())
        return (constants.PROPERTY_TRANSACTION_CHECK_TIMES in half.properties or age_ms < 0
                or age_ms >= (self.config.transaction_timeout_ms if immunity_s < 0 else immunity_s * 1000))

    def put_back(self, half: Message, more: dict[str, str]) -> Message:
        """Store a half message again at the end of the half topic, with further properties. PutError if it is not stored.

        RocketMQ: renewHalfMessageInner.
        """
        raw = replace(raw_of(half, half.properties | more), wait_store_msg_ok=False)
        result = self._put(raw, f"put half message {half.msg_id} back")
        return replace(half, raw_properties=raw.properties_text, queue_offset=result.queue_offset,
                       physical_offset=result.physical_offset, size_bytes=result.size_bytes,
                       store_timestamp_ms=result.store_timestamp_ms)

    def discard(self, half: Message) -> None:
        """Store a half message in TRANS_CHECK_MAX_TIME_TOPIC. PutError if it is not stored."""
        self.enter(constants.TRANSACTION_DISCARD_TOPIC)
        self._put(replace(raw_of(half, half.properties), topic=constants.TRANSACTION_DISCARD_TOPIC, queue_id=0),
                  f"move half message {half.msg_id} to {constants.TRANSACTION_DISCARD_TOPIC}")

    def _put(self, message: RawMessage, what: str) -> PutResult:
        result = self._put_raw(message, None)
        if not result.stored:
            raise PutError._of(result, f"cannot {what}: it is checked in the next round ({result.status.name}: {result.reason})")
        self.last_put_end = max(self.last_put_end, result.physical_offset + result.size_bytes)
        return result

    def resume(self, discarded: Message) -> None:
        """Put a message of TRANS_CHECK_MAX_TIME_TOPIC back into the half topic, with no check-back counted; PutError.

        RocketMQ: AdminBrokerProcessor.resumeCheckHalfMessage.
        """
        self.enter(constants.TRANSACTION_HALF_TOPIC)
        self.put_back(replace(discarded, topic=constants.TRANSACTION_HALF_TOPIC, queue_id=0),
                      {constants.PROPERTY_TRANSACTION_CHECK_TIMES: "0"})

    def enter(self, topic: str) -> None:
        """Ensure that the topic is in topics.json, with one queue as the broker enters it."""
        if topic not in self._entered:
            TopicConfigs(self.root).ensure(TopicConfig(topic, 1, 1))
            self._entered.add(topic)

    def reader(self) -> LiveStoreReader:
        """Return the store, open for reading; one thread at a time."""
        if self._reader is None:
            self._reader = LiveStoreReader(self.root)
        return self._reader

    def flushed_end(self) -> int | None:
        """Return the flushed offset; -1 while it is unknown, None once the files are closed."""
        with self.lock:
            try:
                return None if self._reader is None else self._reader.max_physical_offset(ReadLevel.FLUSHED)
            except EngineError:  # the engine is being restarted
                return -1

    def close(self) -> None:
        with self.lock:
            reader, self._reader = self._reader, None
            if reader is not None:
                reader.close()
            self._store.close()

    @contextmanager
    def lock_check(self) -> Iterator[int | None]:
        """Lock the check of half messages for the block; yields the lock file, None if another process has the lock."""
        path = StorePaths(self.root).config / LOCK_NAME
        with opened_to_lock(path) as descriptor:
            yield descriptor if try_lock(descriptor, 0, path) else None

    def _committed(self, half: Message) -> PutResult | None:
        """Return the commit of a half message from the index, whichever copy of it was committed; None if there is none."""
        topic, _ = real_queue(half)
        topics = (topic, constants.SCHEDULE_TOPIC, constants.TIMER_TOPIC) if constants.PROPERTY_DELAY in half.properties else (topic,)
        for found in chain.from_iterable(self._copies_of(each, half) for each in topics):
            if found.transaction_type == constants.SYS_FLAG_TRANSACTION_COMMIT:
                return result_of(found)
        return None

    def _copies_of(self, topic: str, half: Message) -> list[Message]:
        """Return the messages in `topic` that, by the index, are copies of the same message as `half`."""
        return [found for found in self.reader().query_message(topic, half.uniq_key or "", level=ReadLevel.COMMITTED)
                if found.born_timestamp_ms == half.born_timestamp_ms]


# ---- the check -----------------------------------------------------------------------


@dataclass(slots=True)
class _RoundProgress:
    """The progress of a round: the next offset of each (topic, queue), to be stored once the log is flushed up to `log_end`."""

    epoch: int
    offsets: dict[tuple[str, int], int] = field(default_factory=dict)
    log_end: int = 0


class PreparedCheck:
    """Reads the half messages of a store in rounds. RocketMQ: TransactionalMessageServiceImpl.check."""

    def __init__(self, halves: HalfMessages) -> None:
        self._halves = halves
        self._offsets = ConsumerOffsets(halves.root)
        self._reached = _RoundProgress(0)
        self._recent: set[str] = set()  # groups that are not asked in this round, or after PUT_BACK not put back
        self._done: set[str] = set()    # what this round adds to them
        self._again_after_ms = 0
        self._seen: dict[int, list[tuple[int, int]]] = {}  # queue -> its ends, each with the steady time of the first round that saw it
        self.not_asked: set[int] = set()
        """Physical offsets of what the last round returned in vain: that try does not count."""

    def round(self, can_ask: Callable[[Message], bool], again_after_ms: int = 0) -> list[Message]:
        """Run a round: return the half messages whose producers must be asked now, put back with the check counted.

        `can_ask(half)`: whether this process can ask a producer about the message; others are put back uncounted.
        A group that this or another process has asked within `again_after_ms` is asked in a later round, and a message that cannot be
        asked about is not put back sooner: otherwise several processes would use up the tries, and store a copy each. Offsets are
        stored once the log is flushed up to the copies: otherwise a power cut could lose copies whose originals are not read again.
        Empty while another process runs a round, and while the log is not dispatched to its end. PutError.
        """
        with self._halves.lock_check() as lock:
            if lock is None:
                return []
            self._store_reached(0.0)
            asked: list[Message] = []
            start_ms, times_ms = self._halves.now_ms(), _read_times(lock)
            self._again_after_ms, self._done = again_after_ms, set()
            self._recent = {group for group, time_ms in times_ms.items() if 0 <= start_ms - time_ms < again_after_ms}
            try:
                with self._halves.lock:
                    reader = self._halves.reader()
                    # Otherwise a transaction that has ended would be checked and committed again.
                    if reader._wait_for_dispatch(reader.max_physical_offset(ReadLevel.COMMITTED), DISPATCH_S):
                        for queue_id in reader.queue_ids(constants.TRANSACTION_HALF_TOPIC):
                            self._check_queue(queue_id, can_ask, asked)
            finally:
                if self._done:
                    _write_times(lock, times_ms | dict.fromkeys(self._done, start_ms))
                self._store_reached(FLUSHED_WAIT_S)
            return asked

    def _store_reached(self, wait_s: float) -> None:
        """Store the offsets of finished rounds once the log is flushed; after `wait_s` they stay in memory for the next round.

        After a recovery, which may have truncated the log, they are dropped: the next round begins at the stored offsets.
        """
        reached, deadline_s = self._reached, time.monotonic() + wait_s
        while reached.offsets and read_epoch(self._halves.root) == reached.epoch:
            flushed_end = self._halves.flushed_end()
            if flushed_end is not None and flushed_end >= reached.log_end:
                for (topic, queue_id), offset in reached.offsets.items():
                    if offset > self._stored_offsets(topic).get(queue_id, 0):  # another process may have stored a later one
                        self._offsets.commit(topic, constants.TRANSACTION_GROUP, {queue_id: offset})
                break
            if flushed_end is None or time.monotonic() >= deadline_s:
                return
            time.sleep(FLUSHED_POLL_INTERVAL_S)
        self._reached = _RoundProgress(read_epoch(self._halves.root))
        if self._reached.epoch != reached.epoch:
            self._seen.clear()

    def _check_queue(self, queue_id: int, can_ask: Callable[[Message], bool], asked: list[Message]) -> None:
        reader = self._halves.reader()
        first, half_end = reader.queue_range(constants.TRANSACTION_HALF_TOPIC, queue_id, ReadLevel.COMMITTED)
        start_ms = self._halves.now_ms()  # all below half_end are older, or the clock was set back
        seen = self._seen.setdefault(queue_id, [])
        if not seen or half_end > seen[-1][0]:
            seen.append((half_end, self._halves.steady_ms()))
            for at in range(len(seen) - SEEN_MAX, 0, -1):  # the messages between the two that stay become younger, by a twentieth
                if 20 * (seen[at + 1][1] - seen[at - 1][1]) < seen[-1][1] - seen[at + 1][1]:
                    del seen[at]
        begin = min(max(self._begin(constants.TRANSACTION_HALF_TOPIC, queue_id, first), first), half_end)
        op_begin = self._begin(constants.TRANSACTION_OP_TOPIC, queue_id, 0)
        ended, done_ops, op_begin = self._read_ops(queue_id, op_begin)
        offset = begin
        try:
            while offset < half_end:
                if offset in ended:
                    offset += 1
                    continue
                found = reader.get_message(constants.TRANSACTION_HALF_TOPIC, queue_id, offset, 1, level=ReadLevel.COMMITTED)
                if not found.messages or found.messages[0].queue_offset != offset:
                    offset = max(offset + 1, found.next_begin_offset)  # deleted, or damaged
                    continue
                half = found.messages[0]
                try:
                    if not self._has_ended(half, ended) and not self._resolve_half(half, start_ms, can_ask, asked):
                        break
                except PutError as error:
                    if not error.result.status.is_lasting:
                        raise
                    self._give_up(half, error)
                offset += 1
            passed = {each for each in ended if each < offset}
            needed = self._originals(queue_id, offset, half_end, ended) if passed else set()
            done_ops.update(chain.from_iterable(ended[each] for each in passed - needed))
        finally:
            op_end = op_begin
            while op_end in done_ops:
                op_end += 1
            reached = self._reached
            reached.log_end = max(reader.max_physical_offset(ReadLevel.COMMITTED), self._halves.last_put_end)
            if offset != begin:
                reached.offsets[constants.TRANSACTION_HALF_TOPIC, queue_id] = offset
            if op_end != op_begin:
                reached.offsets[constants.TRANSACTION_OP_TOPIC, queue_id] = op_end

    def _give_up(self, half: Message, error: PutError) -> None:
        """Move a half message that can never be put back out of the way of those after it. PutError if that is refused for now.

        The properties of a check may not fit into its own, for example.
        """
        try:
            self._halves.discard(half)
        except PutError as refused:
            if not refused.result.status.is_lasting:
                raise
            _LOG.error("half message %s can neither be put back nor moved to %s: it is never committed (%s)", half.msg_id,
                       constants.TRANSACTION_DISCARD_TOPIC, refused)
        else:
            _LOG.error("half message %s can never be put back, so its producer is not asked, and it is moved to %s (%s)", half.msg_id,
                       constants.TRANSACTION_DISCARD_TOPIC, error)

    def _has_ended(self, half: Message, ended: Mapping[int, list[int]]) -> bool:
        """Whether a message that was put back within its immunity time has ended as what it was at first."""
        first = _original(half)
        if first not in ended:
            return False
        found = self._halves.reader().get_message(half.topic, half.queue_id, first, 1, level=ReadLevel.COMMITTED).messages
        return not found or found[0].uniq_key == half.uniq_key  # otherwise a salvage has numbered the queue anew

    def _originals(self, queue_id: int, at: int, end: int, ended: Mapping[int, list[int]]) -> set[int]:
        """Return what undecided messages from `at` on were at first: the next round needs the ops of these."""
        found: set[int] = set()
        while at < end:
            read = self._halves.reader()._fetch(
                constants.TRANSACTION_HALF_TOPIC, queue_id, at, READ_MESSAGES, Wanted(), ReadLevel.COMMITTED, FETCH_BYTES_MAX)
            found.update(_original(half) for half in read.messages if half.queue_offset not in ended)
            at = max(at + 1, read.next_begin_offset)
        return found

    def _resolve_half(self, half: Message, start_ms: int, can_ask: Callable[[Message], bool], asked: list[Message]) -> bool:
        """Put an undecided message back, or discard it; return whether the round may continue after it. PutError."""
        times, config = _number(half.properties.get(constants.PROPERTY_TRANSACTION_CHECK_TIMES, "0"), 0), self._halves.config
        times -= half.physical_offset in self.not_asked
        age_ms = self._age_ms(half, start_ms)
        if times >= config.transaction_check_max or age_ms > AGE_MAX_MS:
            self._halves.discard(half)
            _LOG.error("half message %s was checked %d times and is moved to %s", half.msg_id, times, constants.TRANSACTION_DISCARD_TOPIC)
            return True
        immunity = half.properties.get(constants.PROPERTY_CHECK_IMMUNITY_TIME)
        if immunity is not None:
            seconds = _number(immunity, -1)
            if age_ms < (config.transaction_timeout_ms if seconds < 0 else seconds * 1000):
                first = half.properties.get(constants.PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET, str(half.queue_offset))
                self._halves.put_back(half, {constants.PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET: first})
                return True
        elif age_ms < config.transaction_timeout_ms:
            return False
        group = half.properties.get(constants.PROPERTY_PRODUCER_GROUP, "")
        if can_ask(half):
            if group in self._recent:
                return False
            asked.append(self._halves.put_back(half, {constants.PROPERTY_TRANSACTION_CHECK_TIMES: str(times + 1)}))
            self._done.add(group)
        elif (PUT_BACK + group in self._recent if half.store_timestamp_ms > start_ms  # the store's clock is ahead and does not move
              else start_ms - half.store_timestamp_ms < self._again_after_ms):  # put back by another process, or it can wait
            return False
        else:
            self._halves.put_back(half, {constants.PROPERTY_TRANSACTION_CHECK_TIMES: str(times)})
            self._done.add(PUT_BACK + group)
        return True

    def _age_ms(self, half: Message, start_ms: int) -> int:
        """Return the age of a half message. One that is ahead of the clock, which was set back, ages since a round first saw it.

        It may be of before that, or a new one: the log's clock stays where it was, and another host's producer has the right time.
        A copy that a check stored was old enough before.
        """
        age_ms = _age_ms(half, start_ms)
        if age_ms >= 0:
            return age_ms
        if constants.PROPERTY_TRANSACTION_CHECK_TIMES in half.properties:
            return AGE_MAX_MS
        first = _original(half)
        seen, offset = self._seen[half.queue_id], half.queue_offset if first < 0 else min(first, half.queue_offset)
        return self._halves.steady_ms() - seen[bisect_right(seen, offset, key=lambda one: one[0])][1]

    def _read_ops(self, queue_id: int, op_begin: int) -> tuple[dict[int, list[int]], set[int], int]:
        """Return (half offset -> offsets of its op messages, what ends no half message, the first op)."""
        reader = self._halves.reader()
        first, end = reader.queue_range(constants.TRANSACTION_OP_TOPIC, queue_id, ReadLevel.COMMITTED)
        at = op_begin = min(max(op_begin, first), end)
        ended: dict[int, list[int]] = {}
        done: set[int] = set()
        while at < end:
            found = reader._fetch(
                constants.TRANSACTION_OP_TOPIC, queue_id, at, READ_MESSAGES, Wanted(), ReadLevel.COMMITTED, FETCH_BYTES_MAX)
            following = found.next_begin_offset if found.next_begin_offset > at else at + 1
            seen = set(range(at, min(following, end)))
            for message in found.messages:
                half_offset = _number(message.body.decode("ascii", "replace"), -1)
                if message.tags == REMOVE_TAG and half_offset >= 0:
                    ended.setdefault(half_offset, []).append(message.queue_offset)
                    seen.discard(message.queue_offset)
            done |= seen  # other messages, deleted ones
            at = following
        return ended, done, op_begin

    def _begin(self, topic: str, queue_id: int, without: int) -> int:
        return max(self._stored_offsets(topic).get(queue_id, without), self._reached.offsets.get((topic, queue_id), 0))

    def _stored_offsets(self, topic: str) -> dict[int, int]:
        return self._offsets.read(topic, constants.TRANSACTION_GROUP)


def _read_times(lock: int) -> dict[str, int]:
    """Return group -> the time at which it was asked, or put back, last, from the lock file; nothing from a file with other content."""
    with suppress(OSError, *PARSE_ERRORS):
        return {group: int(time_ms) for group, time_ms in json.loads(os.pread(lock, LOCK_BYTES_MAX, 0) or b"{}").items()}
    return {}


def _write_times(lock: int, times_ms: dict[str, int]) -> None:
    """Write what _read_times() reads, the groups asked last; without it groups are asked sooner."""
    newest = sorted(times_ms.items(), key=lambda item: item[1])[-LOCK_GROUPS_MAX:]
    with suppress(OSError):
        os.ftruncate(lock, 0)
        os.pwrite(lock, json.dumps(dict(newest)).encode(), 0)


def _age_ms(half: Message, now_ms: int) -> int:
    """Return the time since a half message was born, or since it was stored if its producer's clock is ahead; below 0 if both are.

    RocketMQ asks about a message of such a producer at once, during its transaction: producer and checker would commit it.
    """
    age_ms = now_ms - half.born_timestamp_ms
    return age_ms if age_ms >= 0 else now_ms - half.store_timestamp_ms


def _original(half: Message) -> int:
    """Return the offset that a message had before it was put back within its immunity time, -1 if it was not."""
    return _number(half.properties.get(constants.PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET, ""), -1)


def _number(text: str, otherwise: int) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else otherwise
