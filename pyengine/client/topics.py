"""The topics of a store, and topics whose messages are values of a type.

A body that does not decode can never be handled, so it becomes a dead letter of the group, with the reason as a property.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import os
import time
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, Self, Unpack

from pyengine import arguments
from pyengine.client.consumer import Call, ConsumeOptions, Consumer, RetryOptions, consume
from pyengine.client.handler import give_back
from pyengine.client.outgoing import PutAsyncOptions, PutManyOptions, PutOptions, RefusedError, put_topic_bytes
from pyengine.engine_config import EngineSettings
from pyengine.errors import BadMessageError, UsageError
from pyengine.formats.record import Message
from pyengine.ipc.live_reader import LiveStoreReader, open_store
from pyengine.storage.config import check_keywords, existing_store
from pyengine.storage.config_table import NamedRows, TopicConfig, TopicConfigs

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from pyengine.client.pending_puts import PutFuture
    from pyengine.client.producer import Producer
    from pyengine.results import PutManyResult, PutResult

    _Value = TypeVar("_Value", default=Any)  # a Topic without a type in an annotation has any
else:
    _Value = typing.TypeVar("_Value")

_LOG = logging.getLogger("pyengine.client.topics")
Perm = Literal["rw", "r", "w", "none"] | int
PERMS = {"rw": 6, "r": 4, "w": 2, "none": 0}


@dataclass(frozen=True, slots=True)
class TopicState:
    """One topic."""

    topic: str
    queues: tuple[int, ...]
    """Those that have, or had, messages."""
    messages: int
    config: TopicConfig | None
    """Its entry, if it has one."""
    size_bytes: int | None = None
    """For list(sizes=True)."""


class Topics:
    """The topics of a store, with or without an engine; a change is durable when a method returns.

    StoreBusyError while a RocketMQ broker has the store open; DiskError.
    """

    def __init__(self, path: str | os.PathLike[str], **settings: Unpack[EngineSettings]) -> None:
        """NotAStoreError, ConfigError."""
        check_keywords(Topics, settings)
        self._root = existing_store(arguments.local_path(path).absolute())
        self._settings = settings
        self._configs = TopicConfigs(self._root)

    def __repr__(self) -> str:
        return f"Topics({str(self._root)!r})"

    def list(self, *, sizes: bool = False) -> Sequence[TopicState]:
        """Return the topics with messages or an entry; with `sizes` also their bytes in the log."""
        return self._list(sizes)[0]

    def _list(self, sizes: bool) -> tuple[Sequence[TopicState], NamedRows[TopicConfig]]:
        table = self._configs.read()
        found = []
        with open_store(self._root, **self._settings) as reader:
            queues = reader.topics()
            for topic in sorted(queues.keys() | table.rows.keys()):
                ranges = {queue_id: reader.queue_range(topic, queue_id) for queue_id in queues.get(topic, ())}
                found.append(TopicState(
                    topic, tuple(ranges), sum(end - first for first, end in ranges.values()), table.rows.get(topic),
                    sum(_record_bytes(reader, topic, queue_id, *span) for queue_id, span in ranges.items()) if sizes else None))
        return found, table

    def create(self, topic: str, *, queues: int | None = None, read_queue_nums: int | None = None, write_queue_nums: int | None = None,
               perm: Perm | None = None, order: bool | None = None, exist_ok: bool = False) -> TopicConfig:
        """Enter a topic with `queues` (8), `perm` "rw", "r", "w" or "none"; UsageError if it exists, unless `exist_ok`."""
        _check_name(topic)
        config = TopicConfig(topic, **_changes(queues, read_queue_nums, write_queue_nums, perm, order))
        return self._configs.ensure(config) if exist_ok else self._configs.create(config)

    def update(self, topic: str, *, queues: int | None = None, read_queue_nums: int | None = None, write_queue_nums: int | None = None,
               perm: Perm | None = None, order: bool | None = None) -> TopicConfig:
        """Change a topic's entry; producers follow within 5 seconds. UsageError without one."""
        changes = _changes(queues, read_queue_nums, write_queue_nums, perm, order)
        if not changes:
            raise UsageError("update changes nothing: give queues, read_queue_nums, write_queue_nums, perm or order")
        return self._configs.update(arguments.text(topic, "topic"), **changes)

    def delete(self, topic: str) -> None:
        """Remove a topic's entry; its messages stay until retention (docs/topics.md)."""
        self._configs.delete(arguments.text(topic, "topic"))


def _check_name(topic: str) -> None:
    """UsageError for a topic that no program can put into."""
    try:
        put_topic_bytes(topic)
    except RefusedError as refused:
        raise UsageError(refused.reason) from None


def _record_bytes(reader: LiveStoreReader, topic: str, queue_id: int, first: int, end: int) -> int:
    queue = reader._queue(topic, queue_id)
    return 0 if queue is None else queue.record_bytes(first, end)


def _changes(queues: int | None, read_queue_nums: int | None, write_queue_nums: int | None, perm: Perm | None,
             order: bool | None) -> dict[str, Any]:
    """Return the fields of a TopicConfig that are given; TypeError or UsageError for a wrong one."""
    numbers = {"read_queue_nums": queues if read_queue_nums is None else read_queue_nums,
               "write_queue_nums": queues if write_queue_nums is None else write_queue_nums}
    changes: dict[str, Any] = {name: arguments.integer(value, name) for name, value in numbers.items() if value is not None}
    if isinstance(perm, str) and perm not in PERMS:
        raise UsageError(f"perm is {perm!r}: give {', '.join(PERMS)}")
    if perm is not None:
        changes["perm"] = PERMS[perm] if isinstance(perm, str) else arguments.integer(perm, "perm")
    if order is not None:
        changes["order"] = arguments.truth(order, "order")
    return changes


# ---- topics of values ------------------------------------------------------------------

CONTENT_TYPE = "content-type"  # the property that names the codec's type


class Codec(Protocol):
    """Bodies of values, and values of bodies; decode() may raise any exception."""

    content_type: str

    def encode(self, value: Any) -> bytes:
        """Return the body of a value."""

    def decode(self, body: bytes) -> Any:
        """Return the value of a body."""


class _Functions:
    def __init__(self, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]) -> None:
        self.content_type = "application/json"
        self.encode, self.decode = encode, decode


def _json(kind: Any) -> Codec:
    """JSON by the standard library: of dataclasses of what JSON has, whose fields are not checked, and of what JSON has."""
    origin = typing.get_origin(kind) or (dict if typing.is_typeddict(kind) else kind)
    if not isinstance(origin, type) or not (dataclasses.is_dataclass(origin) or origin in (dict, list, str, int, float, bool, object)):
        raise UsageError(f"the codec 'json' makes dataclasses, dict, list, str, numbers, bool and object, not {kind!r}: use 'msgspec' or "
                         "'pydantic', or a Codec of your own")

    def decode(body: bytes) -> Any:
        value = json.loads(body, parse_constant=_no_json)
        if dataclasses.is_dataclass(origin):
            return origin(**value)
        if not isinstance(value, origin) and not (origin is float and type(value) is int):
            raise TypeError(f"it is {type(value).__name__}, not {origin.__name__}")
        return value

    def encode(value: Any) -> bytes:
        def plain(part: Any) -> Any:
            if part is value and dataclasses.is_dataclass(part) and not isinstance(part, type):
                return {each.name: getattr(part, each.name) for each in dataclasses.fields(part) if each.init}
            inside = "" if part is value else f" inside of {type(value).__name__}"  # a dataclass there would be read back as a dict
            raise TypeError(f"the codec 'json' cannot write {type(part).__name__}{inside}: use 'msgspec' or 'pydantic', or a Codec of "
                            "your own")

        if origin is float and isinstance(value, bool):
            raise TypeError("the codec 'json' writes bool as no number: give a float")
        try:
            body = json.dumps(value, default=plain, allow_nan=False)
        except ValueError as error:  # NaN, which other readers of JSON refuse
            raise UsageError(f"the codec 'json' cannot write the value: {error}") from None
        if dataclasses.is_dataclass(origin):
            given, value = value, decode(body.encode())  # TypeError for fields of a subclass; an InitVar may make another value
            if json.dumps(value, default=plain) != body or any(
                    getattr(value, each.name, None) != getattr(given, each.name, None)
                    for each in dataclasses.fields(origin) if not each.init):
                raise TypeError(f"the codec 'json' reads another value of {type(value).__name__}: use 'msgspec' or 'pydantic', or a Codec "
                                "of your own")
        return body.encode()

    return _Functions(encode, decode)


def _no_json(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _msgspec(kind: Any) -> Codec:
    msgspec = import_module("msgspec")
    return _Functions(msgspec.json.Encoder().encode, msgspec.json.Decoder(kind).decode)


def _pydantic(kind: Any) -> Codec:
    adapter = import_module("pydantic").TypeAdapter(kind)

    def encode(value: Any) -> bytes:
        readable, reason = b"", "it reads another value"
        for form in ({}, {"round_trip": True}, {"round_trip": True, "by_alias": True}):  # the first as a rule: others read the names
            body: bytes = adapter.dump_json(value, **form)
            try:
                read = adapter.validate_json(body)
            except ValueError as error:
                reason = str(error)
                continue
            readable = readable or body
            with suppress(Exception):  # arrays have no one answer
                if read == value:
                    return body
        if not readable or b'"**********"' in readable:  # as a SecretStr is written
            raise TypeError(f"the codec 'pydantic' cannot read what it writes of {type(value).__name__}: {reason}")
        return readable  # without what a model excludes, or of a type whose values are not compared

    return _Functions(encode, adapter.validate_json)


def _classes(kind: Any) -> tuple[type, ...]:
    """What a value of `kind` is an instance of; `object` for an annotation that isinstance() does not know."""
    origin = typing.get_origin(kind) or kind
    try:
        isinstance(None, origin)
    except TypeError:  # a TypedDict, a Protocol, a text
        return (object,)
    if origin.__module__ in ("types", "typing"):  # unions and Annotated are classes in some Pythons
        return (object,)
    return {float: (float, int), list: (list, tuple)}.get(origin, (origin,))  # JSON does not tell them apart


CODECS: Mapping[str, Callable[[Any], Codec]] = {"json": _json, "msgspec": _msgspec, "pydantic": _pydantic}


@dataclass(frozen=True, slots=True)
class Typed(Generic[_Value]):
    """A Topic's message and its value."""

    value: _Value
    message: Message


class Topic(Generic[_Value]):
    """A topic of values of `type`, as JSON by `codec`: "json", "msgspec", "pydantic", or a Codec of your own.

    Bodies have the property `content-type`. One of another type, or that does not decode, becomes a dead letter at once; without a
    group it is skipped and logged. TypeError for another value.
    """

    def __init__(self, name: str, type: type[_Value], *, codec: Literal["json", "msgspec", "pydantic"] | Codec = "json") -> None:
        _check_name(name)
        self.name = name
        self.type = type
        if isinstance(codec, str) and codec not in CODECS:
            raise UsageError(f"{codec!r} is not a codec: give {', '.join(CODECS)}, or an object with content_type, encode and decode")
        try:
            self.codec: Codec = CODECS[codec](type) if isinstance(codec, str) else codec
        except ImportError as error:
            raise UsageError(f"the codec {codec!r} needs the package {error.name}: pip install {error.name}") from error
        self._classes = _classes(type) if isinstance(codec, str) else (object,)

    def __repr__(self) -> str:
        return f"Topic({self.name!r}, {getattr(self.type, '__name__', self.type)})"

    def put(self, producer: Producer, value: _Value, **options: Unpack[PutOptions]) -> PutResult:
        """As Producer.put."""
        return producer.put(self.name, self._encoded(value), **self._with_type(options))

    def put_async(self, producer: Producer, value: _Value, **options: Unpack[PutAsyncOptions]) -> PutFuture[PutResult]:
        """As Producer.put_async."""
        return producer.put_async(self.name, self._encoded(value), **self._with_type(options))

    def put_many(self, producer: Producer, values: Iterable[_Value], **options: Unpack[PutManyOptions]) -> PutManyResult:
        """As Producer.put_many."""
        return producer.put_many(self.name, [self._encoded(value) for value in values], **self._with_type(options))

    def _encoded(self, value: _Value) -> bytes:
        """The body of a value; TypeError for one that consumers would make a dead letter."""
        if not isinstance(value, self._classes):
            raise arguments.wrong_type(value, f"a value of topic {self.name!r}", self.type.__name__)
        return self.codec.encode(value)

    def _with_type(self, options: PutManyOptions) -> Any:
        own = options.get("properties")
        own = {} if own is None else arguments.mapping(own, "properties")
        return {**options, "properties": {**own, CONTENT_TYPE: self.codec.content_type}}

    def decode(self, message: Message) -> Typed[_Value]:
        """Return the message with its value; BadMessageError."""
        given = message.properties.get(CONTENT_TYPE, self.codec.content_type)
        if _media_type(given) != _media_type(self.codec.content_type):
            raise BadMessageError(f"the content type is {given}, not {self.codec.content_type}")
        try:
            return Typed(self.codec.decode(message.content), message)
        except Exception as error:
            raise BadMessageError(f"the body is no {getattr(self.type, '__name__', self.type)}: {type(error).__name__}: {error}") from error

    def handler(self, function: Callable[[Typed[_Value]], Any]) -> Callable[[Message], Any]:
        """Return a handler for run_consumer(), or of a coroutine function for run_consumer_async()."""
        if inspect.iscoroutinefunction(function):
            async def handle_async(message: Message) -> None:
                await typing.cast(Awaitable[object], function(self.decode(message)))

            return handle_async
        return lambda message: function(self.decode(message))

    def consume(self, path: str | os.PathLike[str], *, group: str | None = None, auto_commit: bool = True,
                **options: Unpack[ConsumeOptions]) -> TypedConsumer[_Value]:
        """As pyengine.consume."""
        return TypedConsumer(self, consume(path, self.name, group=group, auto_commit=auto_commit, **options))


class TypedConsumer(Generic[_Value]):
    """A Consumer of values; `consumer` has its other methods."""

    def __init__(self, topic: Topic[_Value], consumer: Consumer) -> None:
        self.topic = topic
        self.consumer = consumer

    def __repr__(self) -> str:
        return f"TypedConsumer({self.consumer!r})"

    def pull(self, max_messages: int = 32, timeout_s: float | None = 1.0) -> list[Typed[_Value]]:
        """As Consumer.pull."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            buried: list[Message] = []

            def values(messages: list[Message], buried: list[Message] = buried) -> list[Typed[_Value]]:
                found, bad = self._decoded(messages)
                self._bury(bad, buried)
                return found

            found = self.consumer._pull(max_messages, timeout_s, values, buried)
            if found or not buried:
                return found
            timeout_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())

    async def pull_async(self, max_messages: int = 32, timeout_s: float | None = 1.0) -> list[Typed[_Value]]:
        """As Consumer.pull_async."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            call = Call()
            buried: list[Message] = []
            try:
                found, bad = self._decoded(await self.consumer._pull_async(max_messages, timeout_s, call))
                if bad:
                    await arguments.in_thread(partial(self._bury, bad, buried))
            except BaseException:
                call.undo(buried)
                raise
            call.taken, call.has_ended = [], True
            if found or not buried:
                return found
            timeout_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())

    def _decoded(self, messages: Iterable[Message]) -> tuple[list[Typed[_Value]], list[tuple[Message, str]]]:
        """Return (the messages with values, the others with the reasons)."""
        found, bad = [], []
        for message in messages:
            try:
                found.append(self.topic.decode(message))
            except BadMessageError as error:
                bad.append((message, str(error)))
        return found, bad

    def _bury(self, bad: Iterable[tuple[Message, str]], buried: list[Message]) -> None:
        """Make dead letters of these messages; `buried` gets those that are."""
        for message, reason in bad:
            _LOG.error("%s of %s is %s: %s", message.msg_id, self.topic.name,
                       "skipped" if self.consumer.group is None else f"a dead letter of {self.consumer.group}", reason)
            if self.consumer.group is not None:
                give_back(self.consumer, message, -1, reason=reason)
            buried.append(message)

    def __iter__(self) -> Iterator[Typed[_Value]]:
        """Yield values as they arrive, one by one, until close()."""
        return self.consumer._each_of(self.pull)

    async def __aiter__(self) -> AsyncIterator[Typed[_Value]]:
        """Yield values as they arrive, one by one, until close()."""
        while not self.consumer._closing.is_set():
            for each in await self.pull_async(1, timeout_s=None):
                yield each

    def ack(self, messages: Typed[_Value] | Iterable[Typed[_Value]]) -> None:
        """As Consumer.ack."""
        self.consumer.ack(_messages(messages))

    def commit(self, messages: Typed[_Value] | Iterable[Typed[_Value]] | None = None) -> dict[int, int]:
        """As Consumer.commit."""
        return self.consumer.commit(None if messages is None else _messages(messages))

    def requeue(self, messages: Typed[_Value] | Iterable[Typed[_Value]]) -> None:
        """As Consumer.requeue."""
        self.consumer.requeue(_messages(messages))

    def retry(self, message: Typed[_Value], delay_level: int | None = None, **options: Unpack[RetryOptions]) -> PutResult:
        """As Consumer.retry."""
        return self.consumer.retry(arguments.instance(message, "message", Typed).message, delay_level, **options)

    def __enter__(self) -> Self:
        self.consumer.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.consumer.__exit__(*exception)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *exception: object) -> None:
        await self.consumer.__aexit__(*exception)


def _media_type(content_type: str) -> str:
    """Return a content type without its parameters."""
    return content_type.partition(";")[0].strip().lower()


def _messages(given: Typed[_Value] | Iterable[Typed[_Value]]) -> list[Message]:
    return [each.message for each in arguments.one_or_several(given, "messages", Typed)]
