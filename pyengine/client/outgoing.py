"""Outgoing messages: check what a program puts, and encode it as the bytes of a ring entry.

RocketMQ's broker makes these checks in DefaultMessageStore.putMessage. Here the producer's process makes them, in the same order
and with the same statuses. Messages that RocketMQ 4.9 accepts and then loses are refused too (docs/promises.md, 7). The writer
repeats the checks that protect the store.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from pyengine import arguments
from pyengine._front import Turn
from pyengine.arguments import INT32_MAX, INT64_MAX
from pyengine.errors import DiskError, EngineError, StoreBusyError, UsageError, did_you_mean, require_extra
from pyengine.formats import constants
from pyengine.formats.consume_queue import is_ext_address
from pyengine.formats.delayed_message import DELIVER_AT_DAYS_MAX, DelayedId, DelayMark, timed_properties, wait_level
from pyengine.formats.paths import StorePaths
from pyengine.formats.record import Message, decode_message_id, encode_host, encode_properties, hash_map_order, string_hash
from pyengine.formats.small_file import path_stamp
from pyengine.ipc.live_reader import LiveStoreReader
from pyengine.results import PutResult, PutStatus, ReadLevel
from pyengine.storage.config_table import FORBIDDEN_TOPICS, TopicConfig, TopicConfigs
from pyengine.storage.consumer_offset import CANCELS_NAME, SEPARATOR, DelayCancels, DelayOffsets, cancelled_messages
from pyengine.storage.durable_file import opened_to_lock
from pyengine.storage.file_system import HeldStore
from pyengine.storage.later_format import require_writable
from pyengine.storage.message_getter import TAG_SEPARATOR
from pyengine.storage.ofd_lock import try_lock
from pyengine.storage.replication_state import ROLES, ReplicationStateFile

if TYPE_CHECKING:
    import pyarrow

_RESERVED = constants.RESERVED_PROPERTY_NAMES | constants.INTERNAL_PROPERTY_NAMES
_FORBIDDEN = ("\x00", constants.NAME_VALUE_SEPARATOR, constants.PROPERTY_SEPARATOR)
PROPERTY_PIECE_CHARS_MIN = 3  # readers drop a shorter piece, and with it an empty value


Body = bytes | bytearray | memoryview
"""The body of a message that is put."""


@dataclass(frozen=True, slots=True)
class BatchMessage:
    """One message of put_batch().

    Its `delay_level` and `deliver_at` replace those of the call.
    """

    body: Body = field(repr=False)
    tags: str | None = None
    keys: str | Iterable[str] | None = None
    properties: Mapping[str, str] | None = None
    flag: int = 0
    delay_level: int = 0
    deliver_at: datetime | timedelta | int | None = None


class QueueOptions(TypedDict, total=False):
    """The keywords that every put has: see Producer.put()."""

    queue_id: int | None
    delay_level: int
    timeout_s: float | None
    deliver_at: datetime | timedelta | int | None
    sharding_key: str | None


class MessageOptions(QueueOptions, total=False):
    """Those of a put whose messages have the same tags, keys, properties and flag."""

    tags: str | None
    keys: str | Iterable[str] | None
    properties: Mapping[str, str] | None
    flag: int


class BatchOptions(QueueOptions, total=False):
    """Those of a put of several messages, which need not wait for the disk."""

    wait: bool


class PutManyOptions(MessageOptions, BatchOptions, total=False):
    """The keywords of put_many()."""


class PutAsyncOptions(PutManyOptions, total=False):
    """The keywords of put_async()."""

    unique_key: str | None


class PutOptions(PutAsyncOptions, total=False):
    """The keywords of put()."""

    once: bool


@dataclass(slots=True)
class OutgoingMessage:
    """The unchecked arguments of put() and put_async(); of put_many() those that all bodies share."""

    topic: str
    body: Body
    queue_id: int | None = None
    tags: str | None = None
    keys: str | Iterable[str] | None = None
    properties: Mapping[str, str] | None = None
    flag: int = 0
    delay_level: int = 0
    unique_key: str | None = None
    deliver_at: datetime | timedelta | int | None = None
    sharding_key: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it has no properties except tags."""
        return self.keys is None and self.properties is None and self.unique_key is None

    @property
    def is_common(self) -> bool:
        """Whether it has nothing but topic, queue, tags and body, which C puts without Python."""
        return self.is_plain and not self.delay_level and self.deliver_at is None and self.flag == 0 and self.sharding_key is None


@dataclass(frozen=True, slots=True)
class RawMessage:
    """One message for put_raw(). RocketMQ: MessageExtBrokerInner.

    `store_host` None is the store's own; `deliver_at_ms` counts before `delay_level`; `clock_ms` is the store time with
    replay_clock.
    """

    topic: str
    body: Body = field(default=b"", repr=False)
    queue_id: int = 0
    properties_text: str = ""
    flag: int = 0
    sys_flag: int = 0
    born_timestamp_ms: int = 0
    born_host: str = "127.0.0.1:0"
    store_host: str | None = None
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0
    wait_store_msg_ok: bool = True
    delay_level: int = 0
    clock_ms: int = 0
    deliver_at_ms: int = 0


def raw_of(message: Message, properties: Mapping[str, str]) -> RawMessage:
    """Return a stored message to be put again, with these properties in the order of the broker's map.

    Its second queues have it already, so INNER_MULTI_DISPATCH is left out. A host that the log can have and no put, with a negative
    port, is replaced: otherwise the message would be refused each time.
    """
    kept = {name: value for name, value in properties.items() if name not in constants.MULTI_DISPATCH_NAMES}
    return RawMessage(
        message.topic, message.body, message.queue_id, map_text(kept), message.flag, message.sys_flag,
        message.born_timestamp_ms, _host(message.born_host), _host(message.store_host), message.reconsume_times)


def _host(text: str) -> str:
    try:
        encode_host(text)
    except UsageError:
        return "127.0.0.1:0"
    return text


def result_of(message: Message, status: PutStatus = PutStatus.PUT_OK, reason: str = "") -> PutResult:
    """Return the result of the put that has stored this message."""
    return PutResult(status, message.msg_id, message.queue_offset, message.physical_offset, message.size_bytes,
                     message.store_timestamp_ms, message.topic, message.queue_id, reason=reason)


def map_text(properties: Mapping[str, str]) -> str:
    """Return the property text that a broker encodes from a map: in the order of java.util.HashMap."""
    return encode_properties({name: properties[name] for name in hash_map_order(properties)})


class RefusedError(Exception):
    """A message is refused before it is submitted: the reason, and RocketMQ's status."""

    def __init__(self, reason: str, status: PutStatus = PutStatus.MESSAGE_ILLEGAL) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


def topic_bytes(topic: str) -> bytes:
    """Return the topic in UTF-8, or raise RefusedError."""
    try:
        data = arguments.text(topic, "topic").encode()
    except UnicodeEncodeError:
        raise RefusedError("the topic holds a lone surrogate: give it as valid text") from None
    if not data:
        raise RefusedError("the topic is empty: name one")
    if len(data) > constants.TOPIC_BYTES_MAX:
        raise RefusedError(f"the topic has {len(data)} bytes in UTF-8, {constants.TOPIC_BYTES_MAX} are possible: shorten it")
    if topic in (".", "..") or "/" in topic:
        raise RefusedError(f"the topic {topic!r} cannot be a folder's name: leave out '/', '.' and '..'")
    if any(mark in topic for mark in _FORBIDDEN):
        raise RefusedError("the topic holds a character 0, 1 or 2: leave it out")
    return data


def put_topic_bytes(topic: str) -> bytes:
    """Like topic_bytes(), for a put of a program: RefusedError also for a topic of the system, or that no group could consume."""
    data = topic_bytes(topic)
    if topic in FORBIDDEN_TOPICS:
        raise RefusedError(f"the topic {topic} is one of the system's, to which no program sends: name another")
    if SEPARATOR in topic:
        raise RefusedError(f"the topic {topic!r} holds '{SEPARATOR}', which separates topic and group in the file of offsets, so no group "
                           "could consume it: leave it out")
    if not topic.isprintable():
        raise RefusedError(f"the topic {topic!r} has a character that is not printable, so no group could consume it: leave it out")
    return data


def check(message: OutgoingMessage) -> None:
    """Raise RefusedError, UsageError or TypeError for a message that no engine accepts, before one is asked."""
    put_topic_bytes(message.topic)
    properties_bytes(properties_text(message.tags, message.keys, message.properties, message.unique_key))
    if message.deliver_at is not None:
        deliver_at_ms(message.deliver_at)


def body_bytes(body: Body, name: str = "body") -> bytes:
    """Return the body as bytes; TypeError for text, whose encoding would be a guess."""
    if type(body) is bytes:
        return body
    if isinstance(body, (bytes, bytearray, memoryview)):
        return bytes(memoryview(body))  # a subclass may say that it has another length
    how = "text first, for example with .encode()" if isinstance(body, str) else "it first, for example with json.dumps(...).encode()"
    raise TypeError(f"{name} must be bytes, not {type(body).__name__}: encode {how}")


def property_value(name: str, value: str, what: str) -> str:
    """Return a value of a property, or a part of it without a name; RefusedError, naming `what`, if the text cannot contain it."""
    if any(mark in arguments.text(value, what) for mark in _FORBIDDEN):
        raise RefusedError(f"{what} holds a character 0, 1 or 2, which separate properties on disk: leave it out")
    if name and len(name) + 1 + len(value) < PROPERTY_PIECE_CHARS_MIN or not value:
        raise RefusedError(f"{what} is empty: readers of the format would drop it; leave it out")
    return value


def property_text(name: str, value: str, what: str) -> str:
    """Return one property as the text of properties has it; raise as property_value()."""
    return f"{name}{constants.NAME_VALUE_SEPARATOR}{property_value(name, value, what)}"


def _user_property(name: str, value: str) -> str:
    if not arguments.text(name, "a property's name") or any(mark in name for mark in _FORBIDDEN):
        raise RefusedError(f"the property name {name!r} is empty or holds a character 0, 1 or 2")
    if name == constants.PROPERTY_INNER_MULTI_DISPATCH:
        for topic in value.split(constants.MULTI_DISPATCH_SEPARATOR):
            try:
                put_topic_bytes(topic)
            except RefusedError as refused:
                raise RefusedError(f"a queue in {constants.PROPERTY_INNER_MULTI_DISPATCH}: {refused.reason}", refused.status) from None
    elif name in _RESERVED:
        raise RefusedError(f"the property name {name} is reserved by RocketMQ: use the argument for it, or another name")
    return property_text(name, value, f"the property {name}")


def _key(word: str) -> str:
    if " " in property_value("", word, "a key"):
        raise RefusedError(f"the key {word!r} holds a blank, which separates keys: replace it, or give its words as keys")
    return word


def properties_text(tags: str | None, keys: str | Iterable[str] | None, properties: Mapping[str, str] | None,
                    unique_key: str | None = None, *, is_copy: bool = False) -> str:
    """Return the property text, user properties first, in their order; RefusedError if a part of it is illegal.

    A copy (`is_copy`) of a stored message has its tag, perhaps with ||, which RocketMQ's clients may send, and keys with blanks.
    """
    pieces = []
    if properties:
        pieces += [_user_property(name, value) for name, value in arguments.mapping(properties, "properties").items()]
    if keys is not None:
        if not isinstance(keys, str):
            arguments.several(keys, "keys", "str or an iterable of str")
        words = keys if isinstance(keys, str) else " ".join(keys if is_copy else map(_key, keys))
        if words:
            pieces.append(property_text(constants.PROPERTY_KEYS, words, "keys"))
    if unique_key is not None:
        pieces.append(property_text(constants.PROPERTY_UNIQ_KEY, unique_key, "unique_key"))
    if tags:
        if TAG_SEPARATOR in arguments.text(tags, "tags") and not is_copy:
            raise RefusedError(f"tags is {tags!r}: a message has one tag, and tags= cannot name one with ||: give one without")
        pieces.append(property_text(constants.PROPERTY_TAGS, tags, "tags"))
    return constants.PROPERTY_SEPARATOR.join(pieces)


PIECE_BYTES, BATCH_PIECE_BYTES = 64 << 20, 256 << 10  # a batch must fit into a segment, and so be small beside the smallest ones
_RECORD_BYTES = 256  # most of a record's bytes beside its body and properties


class RowColumns(NamedTuple):
    """The names of a table's columns that make a message of each row; each of `properties` is a property of its name."""

    body: str = "body"
    keys: str | None = None
    tags: str | None = None
    properties: tuple[str, ...] = ()

    @property
    def are_plain(self) -> bool:
        """Whether messages have a body only."""
        return self == RowColumns(self.body)


def pieces_of(table: object, columns: RowColumns, most_bytes: int) -> Iterator[list[bytes] | list[BatchMessage]]:
    """Yield the rows of a table, or of an Arrow stream, as messages, in pieces of at most `most_bytes`, or of one message.

    UsageError for a column that is missing, is of a wrong type, or has a null body; TypeError if it is no table.
    """
    require_extra("pyarrow", name="arrow")
    import pyarrow as pa

    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    if not hasattr(table, "__arrow_c_stream__"):
        raise TypeError(f"table must be a table of pyarrow, Polars, DuckDB or pandas, or an Arrow stream, not {type(table).__name__}")
    reader = pa.RecordBatchReader.from_stream(table)
    for name in (columns.body, columns.keys, columns.tags, *columns.properties):
        if name is not None and name not in reader.schema.names:
            raise UsageError(f"the table has no column {name!r}{did_you_mean(name, reader.schema.names)}")
    piece: list[Any] = []
    size_bytes = 0
    for batch in reader:
        for message, message_bytes in _messages(batch, columns):
            if piece and size_bytes + message_bytes > most_bytes:
                yield piece
                piece, size_bytes = [], 0
            piece.append(message)
            size_bytes += message_bytes
    if piece:
        yield piece


def _messages(batch: pyarrow.RecordBatch, columns: RowColumns) -> Iterator[tuple[bytes | BatchMessage, int]]:
    """Yield each row as a message, and its bytes: of a body alone, or the most that the record takes."""
    bodies = _values(batch, columns.body, "large_binary")
    if None in bodies:
        raise UsageError(f"the column {columns.body!r} has a null: give each row a body, perhaps an empty one")
    if columns.are_plain:
        yield from ((body, len(body)) for body in bodies)
        return
    none = [None] * len(bodies)
    is_list = columns.keys is not None and str(batch.schema.field(columns.keys).type).startswith(("list", "large_list"))
    keys = none if columns.keys is None else _values(batch, columns.keys, "large_list" if is_list else "large_string")
    if is_list:
        keys = [words and [word for word in words if word is not None] for words in keys]
    tags = none if columns.tags is None else _values(batch, columns.tags, "large_string")
    properties = [_values(batch, name, "large_string") for name in columns.properties]
    for body, words, tag, *values in zip(bodies, keys, tags, *properties):
        own = {name: value for name, value in zip(columns.properties, values) if value is not None}
        chars = len(tag or "") + sum(len(word) + 1 for word in words or ()) + sum(len(name) + len(own[name]) + 2 for name in own)
        yield BatchMessage(body, tag, words, own), _RECORD_BYTES + len(body) + 4 * chars  # a character has up to 4 bytes


def _values(batch: pyarrow.RecordBatch, name: str, kind: str) -> list[Any]:
    """Return the values of a column as Python has this type of Arrow; UsageError for a column of another type."""
    import pyarrow as pa

    column = batch.column(batch.schema.names.index(name))
    wanted = pa.large_list(pa.large_string()) if kind == "large_list" else getattr(pa, kind)()
    is_dictionary = pa.types.is_dictionary(column.type)
    own = column.type.value_type if is_dictionary else column.type
    if kind == "large_binary" and not str(own).removeprefix("large_").startswith(("string", "binary", "fixed_size_binary")):
        raise UsageError(f"the column {name!r} is {column.type}, not text or bytes: encode it first, for example as JSON")
    try:
        if is_dictionary:  # cast first: not every type can be decoded
            column = column.dictionary.cast(wanted).take(column.indices)
        values: list[Any] = column.cast(wanted).to_pylist()
    except pa.ArrowException as error:
        raise UsageError(f"the column {name!r} is {column.type}, which cannot be read as {wanted}: {error}") from None
    return values


def properties_bytes(text: str) -> bytes:
    """Return the property text in UTF-8. As in RocketMQ, too many characters and too many bytes are different statuses."""
    if len(text) > constants.PROPERTIES_BYTES_MAX:
        raise RefusedError(f"the properties have {len(text)} characters, {constants.PROPERTIES_BYTES_MAX} are possible: store less in them")
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise RefusedError("a property holds a lone surrogate: give it as valid text") from None
    if len(data) > constants.PROPERTIES_BYTES_MAX:
        raise RefusedError(f"the properties have {len(data)} bytes in UTF-8, {constants.PROPERTIES_BYTES_MAX} are possible: store less in "
                           "them", PutStatus.PROPERTIES_SIZE_EXCEEDED)
    return data


def deliver_at_ms(when: datetime | timedelta | int, name: str = "deliver_at") -> int:
    """Return the time in ms since 1970; UsageError for a time in seconds, without a time zone, or too far ahead."""
    now_ms = -(-time.time_ns() // 1_000_000)  # rounded up, as is a part of a millisecond: never early
    if isinstance(when, timedelta):
        ahead = min(when, timedelta(days=DELIVER_AT_DAYS_MAX + 1))  # of a larger one the negative may be none
        time_ms = now_ms - (-ahead // timedelta(milliseconds=1)) if when > timedelta(0) else 0
    else:
        time_ms = arguments.moment_ms(when, name, f"{arguments.MOMENT}, or a timedelta from now on")
    if time_ms > now_ms + DELIVER_AT_DAYS_MAX * 86_400_000:
        raise UsageError(f"{name} is more than {DELIVER_AT_DAYS_MAX} days ahead: give at most {DELIVER_AT_DAYS_MAX} days")
    return time_ms


def seconds_ms(delay_s: float, name: str = "delay_s") -> int:
    """Return the time in ms since 1970 that is so many seconds ahead; errors as of deliver_at_ms()."""
    return deliver_at_ms(timedelta(seconds=min(arguments.number(delay_s, name), DELIVER_AT_DAYS_MAX * 86_401)), name)


class Delay(NamedTuple):
    """When a message is delivered: after a delay level, or at a time in ms since 1970; 0 and None for at once."""

    level: int
    at_ms: int | None

    @classmethod
    def of(cls, level: int, deliver_at: datetime | timedelta | int | None) -> Delay:
        """Return the delay that these arguments of a put ask for; RefusedError, UsageError or TypeError for wrong ones."""
        if deliver_at is not None and level:
            raise UsageError("delay_level and deliver_at exclude each other")
        if arguments.integer(level, "delay_level") < 0:
            raise RefusedError(f"delay_level {level} is negative: give 1 or more, or 0 for no delay")
        return cls(level, None if deliver_at is None else deliver_at_ms(deliver_at))


def later(topic: str, queue_id: int, text: str, delay: Delay, delays_ms: Sequence[int]) -> tuple[str, int, str]:
    """Return (topic, queue id, property text) with which a message waits for its delivery; what was given if it does not wait."""
    level, at_ms = delay
    now_ms = time.time_ns() // 1_000_000
    if at_ms is not None and at_ms > now_ms:
        level, text = wait_level(at_ms - now_ms, delays_ms), timed_properties(text, topic, queue_id, at_ms)
        topic, queue_id = constants.TIMER_TOPIC, 0
    return delayed(topic, queue_id, text, level, len(delays_ms)) if level > 0 else (topic, queue_id, text)


def later_batch(topic: str, queue_id: int, shared: str, texts: list[str], delays: Sequence[Delay], delays_ms: Sequence[int]
                ) -> tuple[str, int, str, list[str]]:
    """Like later(), for a batch: (topic, queue id, shared text, text of each member). RefusedError for members that cannot wait together.

    Members with times wait in the level of the earliest, from which the scheduler moves the others on.
    """
    several = set(delays)
    times_ms = [delay.at_ms for delay in delays if delay.at_ms is not None]
    if len(several) == 1 and not times_ms:
        return *later(topic, queue_id, shared, delays[0], delays_ms), texts
    if len(times_ms) < len(delays):
        raise RefusedError("a batch is stored in one queue, and each delay level is a queue of its own: give all its messages the same "
                           "delay_level, or each of them a deliver_at")
    now_ms = time.time_ns() // 1_000_000
    if max(times_ms) <= now_ms:
        return topic, queue_id, shared, texts
    level = wait_level(min(times_ms) - now_ms, delays_ms)
    return (*delayed(constants.TIMER_TOPIC, 0, shared, level, len(delays_ms)),
            [timed_properties(text, topic, queue_id, at_ms) for text, at_ms in zip(texts, times_ms)])


def delayed(topic: str, queue_id: int, text: str, level: int, levels: int) -> tuple[str, int, str]:
    """Return (topic, queue id, property text) of a message that waits in a level, at most the last. RocketMQ: CommitLog.asyncPutMessage."""
    level = min(level, levels)
    pieces = {piece.partition(constants.NAME_VALUE_SEPARATOR)[0]: piece for piece in text.split(constants.PROPERTY_SEPARATOR) if piece}
    for name, value in (
            (constants.PROPERTY_DELAY, level), (constants.PROPERTY_REAL_TOPIC, topic), (constants.PROPERTY_REAL_QUEUE_ID, queue_id)):
        pieces[name] = f"{name}{constants.NAME_VALUE_SEPARATOR}{value}"
    return constants.SCHEDULE_TOPIC, level - 1, constants.PROPERTY_SEPARATOR.join(pieces[name] for name in hash_map_order(pieces))


RELOAD_INTERVAL_NS = 5_000_000_000  # between two looks at topics.json
TURNS_MAX = 10_000  # topics whose turns are kept; afterwards each begins at random again


class QueueChoice:
    """Chooses the queues of one producer's puts. Thread-safe: at worst several threads read the file at once.

    `queue_nums` is the number of queues of a topic without an entry in topics.json. If the producer was given a number of its own
    (`is_own`), it enters the topic, unless the put may not wait: the checkpointer would enter it with the engine's number.
    Nothing is entered after the store was moved, removed or replaced. `files()` is for blocks that use the store's files.
    """

    def __init__(self, root: Path, queue_nums: int, turns: dict[str, Turn] | None = None, *, is_own: bool = False,
                 clock_ns: Callable[[], int] = time.monotonic_ns, files: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._store: HeldStore | None = None
        self._topics = TopicConfigs(root)
        with suppress(OSError):  # the store was moved or removed: the engine refuses the put and says so
            self._store = HeldStore(root)
            self._store.watch()
            self._topics = TopicConfigs(self._store.root)
        self._queue_nums = queue_nums
        self._is_own = is_own
        self._clock_ns = clock_ns
        self._files = files
        self._turns: dict[str, Turn] = {} if turns is None else turns  # C takes turns too
        self._others: dict[str, int] = {}  # the topics of the file with another number of write queues
        self._entered: set[str] = set()    # its other topics, if this producer enters those that are missing
        self._stamp = -1
        self._until_ns = 0

    def close(self) -> None:
        """Close the store's folder, which would keep its file system in use; nothing is entered afterwards."""
        store, self._store = self._store, None
        if store is not None:
            self._topics = TopicConfigs(store.name)
            store.close()

    def next_queue(self, topic: str, *, may_wait: bool = True) -> int:
        """Return the topic's queues in turn, starting at a random one, so that many short programs also use all of them."""
        return self._turn(topic, may_wait).take()

    def queue_of(self, topic: str, sharding_key: str, *, may_wait: bool = True) -> int:
        """Return the key's queue, the same while the topic has the same number of queues. RocketMQ: SelectMessageQueueByHash."""
        return abs(string_hash(sharding_key)) % self._turn(topic, may_wait).queues

    def _turn(self, topic: str, may_wait: bool) -> Turn:
        """Return the topic's turn, with the number of queues that the file had at the last look."""
        turn = self._turns.get(topic)
        if turn is not None and self._clock_ns() < turn.until_ns:
            return turn
        with self._files():
            if turn is None or self._clock_ns() >= self._until_ns:
                self._read()
            queues = self._others.get(topic, self._queue_nums)
            if self._is_own and topic not in self._others and topic not in self._entered and may_wait:
                queues = self._enter(topic)
        if turn is None:
            if len(self._turns) >= TURNS_MAX:  # of a producer that names ever new topics
                self._turns.clear()
            turn = Turn()
            turn.next = random.randrange(queues)
        turn.queues, turn.until_ns = queues, self._until_ns
        return self._turns.setdefault(topic, turn)

    def _read(self) -> None:
        """Look at the file; if it has changed, read it."""
        stamp = self._topics._stamp
        if stamp != self._stamp:
            with suppress(DiskError):  # what was read before remains
                rows = self._topics.read().rows.values()
                self._others = {row.topic: max(1, row.write_queue_nums) for row in rows if row.write_queue_nums != self._queue_nums}
                if self._is_own:
                    self._entered = {row.topic for row in rows} - self._others.keys()
                self._stamp = stamp
        self._until_ns = self._clock_ns() + RELOAD_INTERVAL_NS

    def _enter(self, topic: str) -> int:
        if self._store is None or self._store.loss() is not None:
            return self._queue_nums
        with suppress(DiskError, StoreBusyError):  # the topic cannot be entered now, but the put works without an entry
            return max(1, self._topics.ensure(TopicConfig(topic, self._queue_nums, self._queue_nums)).write_queue_nums)
        return self._queue_nums


ONCE_LOCK = "once.lock"  # whose bytes stand for unique keys
ONCE_PAUSES_S = 0.0005, 0.02  # between two tries to lock a key: at first, and at most
INDEX_S = 5.0  # longest wait until the index has what was put


class FirstPuts:
    """Finds the first message of a unique key, for puts with `once`. Thread-safe.

    The kernel frees a key when its holder dies. An entry of the dead one that the writer has not taken by then is stored after the
    next put has looked: then there are two messages.
    """

    def __init__(self, root: Path) -> None:
        self._reader = LiveStoreReader(root)
        self._delays = DelayOffsets(self._reader.root)
        self._marks: tuple[int, Mapping[DelayedId, DelayMark]] = -1, {}
        self._reading = threading.RLock()

    @contextmanager
    def locked(self, topic: str, unique_key: str, timeout_s: float) -> Iterator[None]:
        """Keep all others from putting the key with `once` during the block. RefusedError while one does for too long."""
        path = StorePaths(self._reader.root).config / ONCE_LOCK
        byte = int.from_bytes(hashlib.blake2b(f"{topic}\0{unique_key}".encode(), digest_size=7).digest(), "big")
        deadline_s, (pause_s, most_s) = time.monotonic() + timeout_s, ONCE_PAUSES_S
        with opened_to_lock(path) as descriptor:
            while not try_lock(descriptor, byte, path):
                if time.monotonic() >= deadline_s:
                    raise RefusedError(f"another put of the unique key {unique_key!r} takes longer than {timeout_s:g} s: put it again "
                                       "later", PutStatus.SERVICE_NOT_AVAILABLE)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, most_s)
            yield

    def find(self, topic: str, unique_key: str) -> Message | None:
        """Return the oldest message of the key that was not cancelled, as it was put; RefusedError as _hits()."""
        with self._reading:
            hits = self._hits(topic, unique_key)
            if not any(found.topic == constants.SCHEDULE_TOPIC for found in hits):  # what waits no more cannot be cancelled
                return next(iter(hits), None)
            stamp = path_stamp(StorePaths(self._reader.root).config / CANCELS_NAME)
            if stamp != self._marks[0]:
                self._marks = stamp, cancelled_messages(self._reader.root)
            # After the marks, of which the scheduler drops what is noted, and before the index, which has what was delivered until then.
            noted, _ = self._delays.read()
            hits = self._hits(topic, unique_key)
            return next((found for found in hits if not self._is_cancelled(found, hits, noted)), None)

    def _hits(self, topic: str, unique_key: str) -> list[Message]:
        """Return the records of a key in the index, oldest first. RefusedError if that does not have all messages in time."""
        if not self._is_indexed(self._reader.max_physical_offset(ReadLevel.COMMITTED)):
            raise RefusedError("the index does not have the newest messages yet, so the unique key cannot be looked up: put it again later",
                               PutStatus.SERVICE_NOT_AVAILABLE)
        hits = [found for where in (topic, constants.SCHEDULE_TOPIC, constants.TIMER_TOPIC)
                for found in self._reader.query_message(where, unique_key, level=ReadLevel.COMMITTED, max_messages=INT32_MAX)
                if found.uniq_key == unique_key and _real_topic(found) == topic
                and found.transaction_type in (constants.SYS_FLAG_TRANSACTION_NONE, constants.SYS_FLAG_TRANSACTION_COMMIT)]
        return sorted(hits, key=lambda found: found.physical_offset)

    def _is_cancelled(self, found: Message, hits: Sequence[Message], noted: Mapping[int, int]) -> bool:
        """Whether a message of these was cancelled; without its mark: its last record is noted as delivered, and nothing was put."""
        if found.topic != constants.SCHEDULE_TOPIC:
            return False
        name = DelayedId.of(found)
        if name in self._marks[1]:
            return True
        last = next(one for one in reversed(hits) if one.topic == constants.SCHEDULE_TOPIC and DelayedId.of(one) == name)
        return last.queue_offset < noted.get(last.queue_id + 1, 0) and not any(
            one.physical_offset > last.physical_offset and one.topic != constants.SCHEDULE_TOPIC
            and one.born_timestamp_ms == last.born_timestamp_ms for one in hits)

    def wait_for(self, result: PutResult) -> None:
        """Wait until the index has what was put, or cannot have it in time."""
        with suppress(EngineError), self._reading:
            if result.stored:
                self._is_indexed(result.physical_offset + result.size_bytes)

    def result(self, first: Message, level: ReadLevel, timeout_s: float) -> PutResult:
        """Return the result of the first put, once the message is as durable as this put is to be, or a status that says it is not."""
        end, deadline_s = first.physical_offset + first.size_bytes, time.monotonic() + timeout_s
        with self._reading:
            while not self._reaches(level, end):
                if time.monotonic() >= deadline_s:
                    status = PutStatus.FLUSH_DISK_TIMEOUT if level is ReadLevel.FLUSHED else PutStatus.FLUSH_SLAVE_TIMEOUT
                    return result_of(first, status, f"stored before, but not {level.value} within {timeout_s:g} s")
                time.sleep(ONCE_PAUSES_S[0])
        return result_of(first)

    def _reaches(self, level: ReadLevel, end: int) -> bool:
        try:
            return self._reader.max_physical_offset(level) >= end
        except (StoreBusyError, UsageError):  # while a crashed engine is recovered the files do not tell
            return False

    def _is_indexed(self, end: int) -> bool:
        return self._reader._wait_for_dispatch(end, INDEX_S)

    def close(self) -> None:
        self._reader.close()


def _real_topic(message: Message) -> str:
    """Return the topic to which a message is delivered."""
    properties = message.properties
    if message.topic not in (constants.SCHEDULE_TOPIC, constants.TIMER_TOPIC):
        return message.topic
    topic = properties.get(constants.PROPERTY_REAL_TOPIC, "")
    return properties.get(constants.PROPERTY_TIMED_TOPIC, "") if topic == constants.TIMER_TOPIC else topic


CANCEL_READ_S = 2.0     # longest wait until a message that was put can be read
CANCEL_POLL_INTERVAL_S = 0.005
CANCEL_READ_MESSAGES = 256
CANCEL_LOOKS = 3


class DelayedCancels:
    """Cancels delayed messages by the ids of their first records. Thread-safe."""

    def __init__(self, reader: LiveStoreReader, clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        """The reader belongs to this object from now on."""
        self._reader = reader
        self._clock_ms = clock_ms
        self._cancels = DelayCancels(reader.root)
        self._lock = threading.Lock()
        self._firsts, self._firsts_below = array("q"), 0  # first offsets below this one of all that waited at the last whole look

    def cancel(self, msg_id: str, topic: str | None = None) -> bool:
        """Cancel a message; see Producer.cancel_delayed(). UsageError also if it is to be delivered to another topic than `topic`."""
        with self._lock:
            self._require_scheduler()
            message = self._find(arguments.text(msg_id, "msg_id"))
            if message is None:
                return False
            if topic is not None and _real_topic(message) != topic:
                raise UsageError(f"the message {msg_id} is not one of topic {topic}")
            mark = DelayMark.of(message)
            if isinstance(mark, str):
                raise UsageError(f"the message {msg_id} cannot be cancelled: {mark}")
            now_ms, due_ms = self._clock_ms(), self._due_ms(message, mark)
            if message.store_timestamp_ms < due_ms:  # a delivered record has reached that: the clock may have been set back since
                now_ms = max(now_ms, self._reader._newest_ms())
            return self._cancels.cancel(mark, is_due=due_ms <= now_ms)

    def close(self) -> None:
        self._reader.close()
        self._cancels.close()

    def _require_scheduler(self) -> None:
        """Raise EngineError if another program than this engine's scheduler delivers the store's messages."""
        root = self._reader.root
        require_writable(root, "open in another program, which delivers its messages itself")
        state = ReplicationStateFile(root).read().state
        if state is not None and (state.role == ROLES[-1] or state.is_fenced):
            what = "a master that was replaced" if state.is_fenced else "a slave"
            raise EngineError(f"{root} is {what}: cancel the message at its master")

    def _due_ms(self, message: Message, mark: DelayMark) -> int:
        """Return when the message is due; INT64_MAX while its queue does not have it. EngineError if only recovery can tell."""
        if mark.due_ms:
            return mark.due_ms
        # What is not dispatched has no entry yet, or half of one, and the first one of a store is like the zeros that are there before it.
        if self._reader.is_live and message.physical_offset >= self._reader.dispatched_offset(ReadLevel.COMMITTED):
            return INT64_MAX
        queue = self._reader._queue(constants.SCHEDULE_TOPIC, message.queue_id)
        entry = None if queue is None else queue.entry(message.queue_offset, message.queue_offset + 1)
        if queue is None or entry is None or (entry.physical_offset, entry.size_bytes) != (
                message.physical_offset, message.size_bytes):
            if self._reader.is_live:  # it was recovered, and the scheduler sees no message before its queue has it
                return INT64_MAX
            raise EngineError(f"queue {message.queue_id} of {constants.SCHEDULE_TOPIC} lacks its offset {message.queue_offset} since a "
                              "crash, so nothing says whether the message was delivered: start the engine and cancel it again")
        code = entry.tags_code
        if is_ext_address(code):
            if (unit := queue.ext_unit(code)) is None:
                raise EngineError(f"queue {message.queue_id} of {constants.SCHEDULE_TOPIC} lacks the extension unit of its offset "
                                  f"{message.queue_offset}, so nothing says whether the message is due: stop the engine, run `pyengine "
                                  "rebuild`, and cancel it again")
            code = unit.tags_code
        return code

    def _find(self, msg_id: str) -> Message | None:
        """Return a record of the message, None if none waits any more; FormatError, or UsageError for an id that no message has."""
        _, offset = decode_message_id(msg_id)
        deadline_s = time.monotonic() + CANCEL_READ_S
        while (message := self._reader.message(msg_id, ReadLevel.COMMITTED)) is None:
            if offset < self._reader.min_physical_offset:
                return self._waiting(offset)
            is_coming = self._reader.is_live and offset >= self._reader.max_physical_offset(ReadLevel.COMMITTED)
            if not is_coming or time.monotonic() >= deadline_s:
                raise UsageError(f"no message has the id {msg_id}")
            time.sleep(CANCEL_POLL_INTERVAL_S)
        return message

    def _waiting(self, first_offset: int) -> Message | None:
        """Return the record that waits now of a message whose first record is deleted, by a look at all that wait.

        None of those that a whole look did not find ever waits again, so that ids that somebody made up cost one look."""
        if first_offset < self._firsts_below and first_offset not in self._firsts:
            return None
        firsts, below, is_whole = array("q"), self._reader.min_physical_offset, self._reader.is_live
        noted, _ = DelayOffsets(self._reader.root).read()
        starts = {level - 1: offset for level, offset in noted.items()}
        log_end = self._reader.max_physical_offset(ReadLevel.COMMITTED)
        for _ in range(CANCEL_LOOKS):  # what moves to another level during a look is new there in the next
            is_dispatched = self._reader.dispatched_offset(ReadLevel.COMMITTED) >= log_end
            ends = {queue_id: self._reader.queue_range(constants.SCHEDULE_TOPIC, queue_id, ReadLevel.COMMITTED)[1]
                    for queue_id in self._reader.queue_ids(constants.SCHEDULE_TOPIC)}
            for queue_id, end in ends.items():
                start = starts.get(queue_id, 0)
                while start < end:
                    found = self._reader.get_message(
                        constants.SCHEDULE_TOPIC, queue_id, start, CANCEL_READ_MESSAGES, level=ReadLevel.COMMITTED)
                    for message in found.messages:
                        if (first := DelayedId.of(message).physical_offset) == first_offset:
                            return message
                        if first < below:
                            firsts.append(first)
                    is_whole = is_whole and start < found.next_begin_offset == start + len(found.messages)
                    if found.next_begin_offset <= start:
                        break
                    start = found.next_begin_offset
            starts = ends
        if is_whole and is_dispatched:
            self._firsts, self._firsts_below = firsts, below
        return None
