"""Retries and dead letters: the messages that a consumer group gave back.

    topic, raw, note = sent_back(message, "billing")  # the message that RocketMQ's broker would store, and its topic
    Retries(root, "billing").put(message)           # stores it

A message that is given back is put once more, into the group's retry topic `%RETRY%group`, through the delay schedule; at last into
`%DLQ%group` (docs/retries.md). RocketMQ: SendMessageProcessor.consumerSendMsgBack (4.9.8).

A retry has more properties than the message. Where they do not fit, the broker refuses it each time, and its consumer handles
the message for ever. Here the message becomes a dead letter at once, without the properties that have no room in it.
"""

from __future__ import annotations

import logging
import os
import random
import re
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Unpack

from pyengine import arguments
from pyengine.client.outgoing import RawMessage, delayed, map_text, raw_of
from pyengine.client.producer import SharedProducer, connect_with
from pyengine.engine_config import EngineSettings
from pyengine.errors import UsageError
from pyengine.formats import constants
from pyengine.formats.delayed_message import timed_properties
from pyengine.formats.paths import Root, StorePaths
from pyengine.formats.record import Message
from pyengine.ipc.live_reader import LiveStoreReader, open_store
from pyengine.results import PutError, PutResult
from pyengine.storage.config import check_keywords, load_config
from pyengine.storage.config_table import TopicConfig, TopicConfigs
from pyengine.storage.consumer_offset import ConsumerOffsets
from pyengine.storage.durable_file import opened_to_lock, wait_until_held
from pyengine.storage.ofd_lock import try_lock

MAX_RECONSUME_TIMES = 16  # SubscriptionGroupConfig.retryMaxTimes
FIRST_DELAY_LEVEL = 3
RETRY_QUEUE_NUMS = 1      # SubscriptionGroupConfig.retryQueueNums
DLQ_QUEUE_NUMS = 1
GROUP_BYTES_MAX = constants.TOPIC_BYTES_MAX - len(constants.RETRY_PREFIX)
LOST_NAMES_MAX, LOST_CHARS_MAX = 5, 60  # of the properties that a note names
REASON_CHARS_MAX = 1000
_NO_REASON = re.compile("[\x00-\x02\ud800-\udfff]")  # what the text of properties cannot have
REQUEUE_MESSAGES = 32     # dead letters that are put back between two notes
REQUEUE_LOCK = "requeue.lock"  # whose bytes stand for groups
_KEPT = frozenset((constants.PROPERTY_RETRY_TOPIC, constants.PROPERTY_ORIGIN_MESSAGE_ID))  # by them a dead letter goes back, and is found
_LOG = logging.getLogger("pyengine.client.retries")


def retry_topic(group: str) -> str:
    """Return the group's retry topic; UsageError for a group whose name is too long for it."""
    return constants.RETRY_PREFIX + check_group(group)


def dlq_topic(group: str) -> str:
    """Return the topic of the group's dead letters; UsageError as for retry_topic()."""
    return constants.DLQ_PREFIX + check_group(group)


class SentBack(NamedTuple):
    """What is stored for a message that was given back: its topic's entry of topics.json, and the message.

    `note` says why it is a dead letter before its last try, and which properties it lacks; "" for all that is as usual.
    """

    topic: TopicConfig
    raw: RawMessage
    note: str = ""


def sent_back(
    message: Message, group: str, *, delay_level: int = 0, deliver_at_ms: int | None = None,
    max_reconsume_times: int = MAX_RECONSUME_TIMES, retry_queue_nums: int = RETRY_QUEUE_NUMS, reason: str = "",
) -> SentBack:
    """Return what is stored for a message that `group` gives back.

    `delay_level` 0 means level 3 + reconsume times, a negative one the dead letters at once; `deliver_at_ms` takes its place.
    Topic and queue of the raw message are those that it is delivered to; put_raw() sends it through the delay schedule. Its put waits
    for the disk in sync mode, although its properties have WAIT=false as RocketMQ's do: the original counts as done once this one is
    stored. A message that leaves no room for the properties of a retry is a dead letter. `reason` becomes a property of a dead letter.
    """
    properties = dict(message.properties)
    properties.setdefault(constants.PROPERTY_RETRY_TOPIC, message.topic)
    properties[constants.PROPERTY_WAIT] = "false"
    is_dead = delay_level < 0 or message.reconsume_times >= max_reconsume_times
    level = 0 if is_dead or deliver_at_ms is not None else delay_level or FIRST_DELAY_LEVEL + message.reconsume_times
    properties[constants.PROPERTY_DELAY] = str(level)
    properties[constants.PROPERTY_ORIGIN_MESSAGE_ID] = properties.get(constants.PROPERTY_ORIGIN_MESSAGE_ID, "").strip() or message.msg_id
    note = ""
    if not is_dead:
        topic = TopicConfig(retry_topic(group), retry_queue_nums, retry_queue_nums)
        raw = replace(raw_of(message, properties), topic=topic.topic, queue_id=random.randrange(topic.write_queue_nums),
                      delay_level=level, deliver_at_ms=deliver_at_ms or 0, reconsume_times=message.reconsume_times + 1)
        waiting = (delayed(constants.TIMER_TOPIC, 0, timed_properties(raw.properties_text, raw.topic, raw.queue_id, deliver_at_ms), 99, 99)
                   if deliver_at_ms else delayed(raw.topic, raw.queue_id, raw.properties_text, level, level))
        if len(waiting[2].encode()) <= constants.PROPERTIES_BYTES_MAX:
            return SentBack(topic, raw)
        note = f"{message.msg_id} is a dead letter of {group} at once, because its properties leave no room for those of a retry"
        properties[constants.PROPERTY_DELAY] = "0"
    if reason:
        properties[constants.PROPERTY_REASON] = _NO_REASON.sub("\ufffd", reason)[:REASON_CHARS_MAX]
    topic = TopicConfig(dlq_topic(group), DLQ_QUEUE_NUMS, DLQ_QUEUE_NUMS)
    kept, lost = fitting(properties)
    if lost:
        note = (note or f"{message.msg_id} is a dead letter of {group}") + f"; as a dead letter it has no room for {lost}"
    return SentBack(topic, replace(raw_of(message, kept), topic=topic.topic, queue_id=0, reconsume_times=message.reconsume_times + 1),
                    note)


def fitting(properties: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return the properties that fit into a message, and which do not ("" if all do): the least needed are left out.

    Those are WAIT and DELAY, which no reader of a dead letter needs, and its reason, then the program's own, then RocketMQ's; of
    equals as few and as short ones as possible. The topic to go back to and the id of the original remain.
    """
    kept = dict(properties)
    excess = len(map_text(kept).encode()) - constants.PROPERTIES_BYTES_MAX
    needless = {constants.PROPERTY_WAIT, constants.PROPERTY_DELAY, constants.PROPERTY_REASON} & kept.keys()
    own = kept.keys() - needless - constants.RESERVED_PROPERTY_NAMES
    lost = []
    for names in (needless, own, kept.keys() - needless - own - _KEPT):
        sizes = sorted((len(f"{name}{kept[name]}".encode()) + 2, name) for name in names)  # with the two separators
        while excess > 0 and sizes:
            size_bytes, name = sizes.pop(min(bisect_left(sizes, (excess, "")), len(sizes) - 1))
            excess -= size_bytes
            del kept[name]
            if names is not needless:
                lost.append(repr(name[:LOST_CHARS_MAX]))
    more = f" and {len(lost) - LOST_NAMES_MAX} more" if len(lost) > LOST_NAMES_MAX else ""
    return kept, f"the properties {', '.join(lost[:LOST_NAMES_MAX])}{more}" if lost else ""


class RetriedMessage(Message):
    """A message that was given back and is delivered again: `topic` is the original one, queue and offsets are the retry queue's."""

    __slots__ = ()

    @classmethod
    def of(cls, message: Message) -> RetriedMessage:
        """Return the message with its original topic. RocketMQ: DefaultMQPushConsumerImpl.resetRetryAndNamespace."""
        return cls(
            message.properties.get(constants.PROPERTY_RETRY_TOPIC, message.topic), message.body, message.queue_id, message.queue_offset,
            message.physical_offset, message.size_bytes, message.raw_properties, message.flag, message.sys_flag,
            message.born_timestamp_ms, message.born_host, message.store_timestamp_ms, message.store_host,
            message.reconsume_times, message.prepared_transaction_offset, message.body_crc, message.delivery_count)


class Retries:
    """Gives back messages of one group; the first call connects to the engine. Thread-safe."""

    def __init__(self, root: str | os.PathLike[str], group: str, *, max_reconsume_times: int = MAX_RECONSUME_TIMES,
                 **settings: Unpack[EngineSettings]) -> None:
        self._root = Path(root)
        self._group = group
        self._max_reconsume_times = max_reconsume_times
        self._settings = settings
        self._producers = SharedProducer()
        self._entered: set[str] = set()

    def put(self, message: Message, delay_level: int | None = None, *, deliver_at_ms: int | None = None, reason: str = "",
            timeout_s: float | None = None) -> PutResult:
        """Store the retry or dead letter of a message. PutError, a lasting one if it can be neither; EngineUnavailableError."""
        level = 0 if delay_level is None else arguments.integer(delay_level, "delay_level")
        if not reason and level >= 0 and message.reconsume_times >= self._max_reconsume_times:
            reason = f"it was given back {message.reconsume_times + 1} times (max_reconsume_times)"
        topic, raw, note = sent_back(message, self._group, delay_level=level, deliver_at_ms=deliver_at_ms,
                                     max_reconsume_times=self._max_reconsume_times, reason=reason)
        result = self.put_into(topic, raw, timeout_s=timeout_s)
        if note:
            _LOG.error("%s", note)
        return result

    def put_into(self, topic: TopicConfig, raw: RawMessage, *, timeout_s: float | None = None) -> PutResult:
        """Enter the topic into topics.json, then store the message; errors as of put()."""
        if topic.topic not in self._entered:
            TopicConfigs(self._root).ensure(topic)
            self._entered.add(topic.topic)
        # Without an engine, it fails at once.
        producer = self._producers.get(lambda: connect_with(self._root, load_config(self._root, self._settings)))
        result = producer.put_raw(raw, timeout_s=timeout_s)
        return result if result.stored else result.raise_for_status()

    def close(self) -> None:
        self._producers.close()


@dataclass(frozen=True, slots=True)
class DeadLetterQueue:
    """One group's: those from `first` to `end` can be read, those from `next` on wait for requeue()."""

    group: str
    first: int
    end: int
    next: int
    oldest_ms: int | None

    @property
    def messages(self) -> int:
        return self.end - self.first

    @property
    def waiting(self) -> int:
        return self.end - self.next


class DeadLetters:
    """The dead letters of a store. Only requeue() needs an engine."""

    def __init__(self, path: str | os.PathLike[str], **settings: Unpack[EngineSettings]) -> None:
        check_keywords(DeadLetters, settings)
        self._root = arguments.local_path(path).absolute()
        self._settings = settings
        with self._open():
            pass

    def __repr__(self) -> str:
        return f"DeadLetters({str(self._root)!r})"

    def queues(self) -> list[DeadLetterQueue]:
        """Return each group with dead letters, sorted."""
        with self._open() as reader:
            return [self._queue(reader, topic.removeprefix(constants.DLQ_PREFIX)) for topic in sorted(reader.topics())
                    if topic.startswith(constants.DLQ_PREFIX) and 0 in reader.queue_ids(topic)]

    def messages(self, group: str, offset: int | None = None, max_messages: int = 32) -> list[Message]:
        """Return those from `offset` on (None: the first), with their original topics."""
        with self._open() as reader:
            queue = self._queue(reader, group)
            return list(_read(reader, group, queue.first if offset is None else offset, queue.end, max_messages))

    def requeue(self, group: str, offsets: Iterable[int] | None = None) -> int:
        """Put the group's waiting dead letters back, or those at `offsets`, which wait on; return their number.

        A kill may put up to 32 back twice. PutError for one that can never be stored, after the others; UsageError for an offset
        without a message; EngineUnavailableError, StoreBusyError.
        """
        if offsets is not None:
            offsets = [arguments.integer(offset, "an offset") for offset in arguments.several(offsets, "offsets", "an iterable of int")]
        topic = TopicConfig(retry_topic(group), RETRY_QUEUE_NUMS, RETRY_QUEUE_NUMS)
        refused: list[PutError] = []
        count = 0
        with (self._open() as reader, closing(Retries(self._root, group, **self._settings)) as retries,
              _alone(reader.root, group) if offsets is None else nullcontext(-1) as lock):
            queue = self._queue(reader, group)
            stored = done = queue.next
            messages = _read(reader, group, done, queue.end, queue.waiting) if offsets is None else self._read_at(reader, queue, offsets)
            try:
                for message in messages:
                    kept, lost = fitting({name: value for name, value in message.properties.items() if name != constants.PROPERTY_REASON}
                                         | {constants.PROPERTY_RETRY_TOPIC: message.topic})
                    try:
                        retries.put_into(topic, replace(raw_of(message, kept), topic=topic.topic, queue_id=0, reconsume_times=0))
                        count += 1
                        if lost:
                            _LOG.error("%s is put back for %s without %s, for which it has no room", message.msg_id, group, lost)
                    except PutError as error:
                        if not error.result.status.is_lasting:
                            raise
                        refused.append(error)
                    done = message.queue_offset + 1 if offsets is None else done
                    if done >= stored + REQUEUE_MESSAGES:
                        ConsumerOffsets(reader.root).commit(dlq_topic(group), group, {0: done})
                        stored = done
                        with suppress(OSError):  # a full disk
                            os.utime(lock)  # another call that waits sees the progress
                done = queue.end if offsets is None else done
            finally:  # after an error those before it are not put back again
                if done > stored:
                    ConsumerOffsets(reader.root).commit(dlq_topic(group), group, {0: done})
        if refused:
            raise PutError._of(refused[0].result, f"{count} of {count + len(refused)} dead letters of {group} were put back; the others "
                                                 f"can never be stored again, the first because of {refused[0]}")
        return count

    def _read_at(self, reader: LiveStoreReader, queue: DeadLetterQueue, offsets: Iterable[int]) -> list[Message]:
        messages = []
        for offset in offsets:
            found = list(_read(reader, queue.group, offset, min(offset + 1, queue.end), 1)) if offset >= queue.first else []
            if not found:
                raise UsageError(f"{queue.group} has no dead letter at offset {offset}: {queue.first} to {queue.end - 1} can be read")
            messages += found
        return messages

    def _queue(self, reader: LiveStoreReader, group: str) -> DeadLetterQueue:
        topic = dlq_topic(group)
        first, end = reader.queue_range(topic, 0)
        following = min(max(ConsumerOffsets(reader.root).read(topic, group).get(0, first), first), end)
        oldest = reader.get_message(topic, 0, following, 1).messages if following < end else []
        return DeadLetterQueue(group, first, end, following, oldest[0].store_timestamp_ms if oldest else None)

    def _open(self) -> LiveStoreReader:
        return open_store(self._root, **self._settings)


def check_group(group: str) -> str:
    """Return the group; UsageError for a name that cannot be in a topic's name `%RETRY%group`.

    RocketMQ takes groups of up to 255 characters. Their retries are refused, and their consumers handle a failed message for ever.
    """
    size_bytes = len(arguments.text(group, "group").encode(errors="surrogatepass"))
    if not 0 < size_bytes <= GROUP_BYTES_MAX:
        raise UsageError(f"the group {group!r} has {size_bytes} bytes in UTF-8; give it 1 to {GROUP_BYTES_MAX}, so that the topic of its "
                         f"retries, {constants.RETRY_PREFIX}GROUP, has at most {constants.TOPIC_BYTES_MAX}")
    return group


@contextmanager
def _alone(root: Root, group: str) -> Iterator[int]:
    """Let one call at a time put back all that wait in a group; yield the lock file. StoreBusyError without progress of another call."""
    path = StorePaths(root).config / REQUEUE_LOCK
    with opened_to_lock(path) as lock:
        wait_until_held(lambda: try_lock(lock, zlib.crc32(group.encode(errors="surrogatepass")), path), path, dlq_topic(group), path)
        yield lock


def _read(reader: LiveStoreReader, group: str, offset: int, end: int, count: int) -> Iterator[Message]:
    """Yield up to `count` dead letters from `offset` on, below `end`."""
    topic = dlq_topic(group)
    while offset < end and count > 0:
        found = reader.get_message(topic, 0, offset, count)
        for message in found.messages:
            if message.queue_offset < end:
                count -= 1
                yield RetriedMessage.of(message)
        if found.next_begin_offset <= offset:
            return
        offset = found.next_begin_offset
