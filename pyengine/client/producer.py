"""Producer: puts into a running engine through a session of its own.

What the statuses say is in docs/promises.md. When the engine dies or is replaced by another start, pending puts become
indeterminate within about a second; in a forked child the parent's are. An exception of a signal handler ends the put that it
interrupts, and the producer stays usable. A producer that is dropped without close() ends by itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, cast

from pyengine import arguments
from pyengine._front import ProducerFront
from pyengine.arguments import INT32_MAX, INT32_MIN
from pyengine.client import outgoing
from pyengine.client.outgoing import (
    BatchMessage,
    BatchOptions,
    Body,
    Delay,
    DelayedCancels,
    FirstPuts,
    OutgoingMessage,
    PutManyOptions,
    QueueChoice,
    RawMessage,
    RefusedError,
)
from pyengine.client.pending_puts import PutContext, PutFuture, PutOutcome
from pyengine.client.submission import BORN_HOST, TIMEOUT_S_MAX, PutEntry, Submitter, host_flags
from pyengine.client.transactions import Checker, GroupTransactions, Transaction  # now, before an upgrade replaces the file
from pyengine.engine_config import KEPT_NAMES, EngineSettings
from pyengine.errors import EngineError, EngineUnavailableError, UsageError, command
from pyengine.formats import constants
from pyengine.formats.record import (
    BatchMember,
    decode_properties,
    encode_batch,
    encode_host,
    is_wait_store_ok,
    record_size,
)
from pyengine.ipc.control_block import read_run_settings
from pyengine.ipc.live_reader import LiveStoreReader
from pyengine.ipc.session_client import OpenSession, open_session, require_engine, until_ready
from pyengine.ipc.shared_objects import SharedFolder
from pyengine.native import session as native
from pyengine.results import PutManyResult, PutResult, PutStatus, ReadLevel
from pyengine.storage.config import ENVIRONMENT, SET, EngineConfig, check_keywords, load_config
from pyengine.storage.engine_id import read_engine_id

Refusals = Literal["raise", "return"]
_Key = TypeVar("_Key")
_Made = TypeVar("_Made")
_refused = partial(RefusedError, status=PutStatus.SERVICE_NOT_AVAILABLE)
REMEMBERED_MAX = 100_000  # topics, tags and prefixes whose bytes are cached: some 40 MB at most


class ConnectOptions(EngineSettings, total=False):
    """The keywords of connect() and Engine.connect(), for type checkers and editors."""

    ring_bytes: int | None
    timeout_s: float
    refusals: Refusals


def connect(path: str | os.PathLike[str], *, ring_bytes: int | None = None, timeout_s: float = 10.0,
            refusals: Refusals = "raise", **settings: Unpack[EngineSettings]) -> Producer:
    """Return a producer that is connected to the engine on the store at `path`.

    It waits up to `timeout_s` for an engine, then EngineUnavailableError. With `refusals="return"` a put returns its result
    instead of raising PutError. `ring_bytes` is a power of two.
    """
    check_keywords(connect, settings)
    timeout_s = min(arguments.number(timeout_s, "timeout_s"), TIMEOUT_S_MAX)
    if ring_bytes is not None:
        native.check_ring_bytes(ring_bytes)
    if refusals not in ("raise", "return"):
        raise UsageError(f"refusals is {refusals!r}: give 'raise' or 'return'")
    root = arguments.local_path(path).absolute()
    load_config(root, settings)  # what is wrong in it is raised before any wait

    def attempt(left_s: float) -> Producer:
        require_engine(root)
        config = load_config(root, settings)
        made = connect_with(root, config, ring_bytes, timeout_s, refusals=refusals, first_timeout_s=left_s)
        wants_disk = config.flush_disk_type == "SYNC_FLUSH" and config.origins.get("flush_disk_type") == SET
        if wants_disk and not made._puts.waits & native.DURABLE:
            made.close()
            raise UsageError(f"flush_disk_type=SYNC_FLUSH is asked for, and the engine on {root} runs with ASYNC_FLUSH, so its puts do not "
                             f"wait for the disk: {command('config', 'set', root, 'flush_disk_type=SYNC_FLUSH')}, then start it again")
        return made

    return until_ready(attempt, timeout_s)


def connect_with(root: Path, config: EngineConfig, ring_bytes: int | None = None, timeout_s: float = 10.0, *,
                 refusals: Refusals = "return", first_timeout_s: float | None = None) -> Producer:
    """Connect to the engine that runs on `root` now: `timeout_s` is for a supervisor that is being restarted.

    A worker gives the settings of its engine, whatever the store's file says by now. `first_timeout_s` bounds the first session.
    """
    if ring_bytes is None and config.origins.get("session_ring_bytes") == "--set":
        ring_bytes = config.session_ring_bytes

    stores: set[str] = set()  # the ids of the store that this producer puts into

    def open_now(limit_s: float | None) -> OpenSession:
        if limit_s is None:
            limit_s = timeout_s if first_timeout_s is None else first_timeout_s
        session = open_session(root, ring_bytes, min(limit_s, timeout_s))
        try:
            own = str(session.memory.store_uuid)
            engine_id = read_engine_id(root) if stores and own not in stores else None
            if stores and own not in stores and (engine_id is None or stores.isdisjoint(engine_id.copied_from)):
                raise EngineUnavailableError(f"another store is at {root} than the one that this producer was connected to, which was "
                                             "moved, removed or replaced: connect again to put into this one")
            session.settings = _of_run(config, session.folder)
        except BaseException:
            session.close()
            raise
        stores.add(own)
        return session

    return Producer(open_now, config, refusals=refusals)


def _of_run(config: EngineConfig, folder: SharedFolder) -> EngineConfig:
    """Return the settings of this engine's run, except those that the program was given: the store's file may name the next run's."""
    given = [name for name in KEPT_NAMES if config.origins.get(name) in (ENVIRONMENT, SET)]
    with contextlib.suppress(EngineUnavailableError):
        run = read_run_settings(folder)
        return replace(config, message_index_enable=run.message_index_enable,
                       **{name: getattr(run, name) for name in KEPT_NAMES if name not in given})
    return config


_PUT_KEYWORDS = (*[each.name for each in fields(OutgoingMessage)], "wait", "timeout_s")
_MANY_KEYWORDS = ("topic", "bodies", *PutManyOptions.__annotations__)
_KEYWORDS = {
    "put": (*_PUT_KEYWORDS, "once"), "put_async": _PUT_KEYWORDS, "put_many": _MANY_KEYWORDS, "put_many_async": _MANY_KEYWORDS,
    "put_batch": ("topic", "messages", "properties", *BatchOptions.__annotations__),
    "put_arrow": ("topic", "table", "body", "keys", "tags", "properties", *BatchOptions.__annotations__)}


class Producer(ProducerFront, arguments.AsyncBlock, arguments.Closing):
    """Puts messages into a running engine; for `with` and `async with`. Threads may share it.

    A put returns only with PUT_OK, else it raises PutError, whose subclass says whether the log has the message; a wrong argument
    is TypeError or UsageError. The next put after an engine was replaced opens a new session, and so does a forked child's first.
    """

    # put, put_many and put_async are ProducerFront's (csrc/front/producer_front.c): they handle the common case in C,
    # and call _put_any, _put_many_any or _put_async_any for all other cases.

    __slots__ = ("_topics", "_tags", "_group_transactions", "_first_puts", "_delayed_cancels", "_calling", "_calls", "_is_copy",
                 "_kept", "__weakref__")

    def __init__(self, open_session: Callable[[float | None], OpenSession], config: EngineConfig, *, refusals: Refusals = "raise") -> None:
        # open_session(limit_s) is called with None now, and later with the remaining seconds of a put.
        self._topics: dict[str, bytes] = {}
        self._tags: dict[str | None, bytes] = {None: b"", "": b""}
        self._is_copy = False  # whether it puts what a store has had: see properties_text()
        self._kept: object = None  # until close(): the shared Engine that it came from
        self._begin()
        super().__init__(Submitter(open_session, config, refusals == "raise"))
        arguments.after_fork(self)

    def _begin(self) -> None:
        self._group_transactions: GroupTransactions | None = None
        self._first_puts: FirstPuts | None = None
        self._delayed_cancels: DelayedCancels | None = None
        self._calling = threading.RLock()  # guards `_calls`; a signal handler in a thread that has it may close
        self._calls: dict[object, int] = {}  # that use the store's files now, and their threads

    @property
    def _delays_ms(self) -> tuple[int, ...]:
        return self._puts.settings.delay_levels_ms

    def _forked(self) -> None:
        """In a forked child: drop what belongs to the parent; its threads may hold the locks of these objects for ever."""
        self._begin()
        self._puts.forked()

    def close(self) -> None:
        """Wait for all answers, at most 2 s after the last one, then close the session."""
        if self._group_transactions is not None:
            # A checker, or a signal handler in a call that the thread may wait for, cannot wait for the thread.
            self._group_transactions.end_asking(threading.get_ident() not in [*self._calls.values()])
        self._puts.close()
        self._close_files()
        self._kept = None

    @contextlib.contextmanager
    def _files(self, error: Callable[[str], Exception] = UsageError) -> Iterator[None]:
        """For a block that uses the store's files, which close() leaves open until it ends; `error` if the producer is closed.

        Otherwise a call beside close() would read and write what the program opens next.
        """
        call = object()
        try:
            with self._calling:
                if why := self._puts.why_unusable:
                    raise error(why)
                self._calls[call] = threading.get_ident()
            yield
        finally:
            self._calls.pop(call, None)
            self._close_files()

    def _close_files(self) -> None:
        """Close the store's files, once the producer is closed and no call uses them."""
        with self._calling:
            if self._puts.why_unusable and not self._calls:
                for each in (self._choice, self._group_transactions, self._first_puts, self._delayed_cancels):
                    if each is not None:
                        each.close()

    def _made_once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the attribute, which `make` makes at the first call; of two threads the faster one's."""
        if getattr(self, name) is None:
            made = make()
            if getattr(self, name) is None:
                setattr(self, name, made)
            else:
                made.close()
        return getattr(self, name)

    def __enter__(self) -> Self:
        """Return self; UsageError if the producer is closed."""
        if why := self._puts.why_unusable:
            raise UsageError(why)
        return self

    def __repr__(self) -> str:
        return f"Producer({str(self._puts.root)!r}, {'closed' if self._puts.why_unusable else 'open'})"

    # ---- puts -------------------------------------------------------------------

    if TYPE_CHECKING:  # implemented by the base class in C
        def put(self, topic: str, body: Body, *, queue_id: int | None = None, tags: str | None = None,
                keys: str | Iterable[str] | None = None, properties: Mapping[str, str] | None = None, flag: int = 0,
                delay_level: int = 0, unique_key: str | None = None, wait: bool = True,
                timeout_s: float | None = None, deliver_at: datetime | timedelta | int | None = None,
                sharding_key: str | None = None, once: bool = False) -> PutResult:
            """Store one message, as durable as the flush mode promises.

            The queue is the topic's next in turn, `queue_id`, or that of `sharding_key` (docs/topics.md). `keys` are words for
            query_message, `unique_key` is UNIQ_KEY; with `once` a key's later puts, of any process, return the first result
            (docs/promises.md, 9). `delay_level` or `deliver_at` delivers it later (docs/delayed.md). `wait=False` waits for no
            disk and no slave. `timeout_s` bounds the wait for the writer (default put_timeout_ms).
            """

        def put_async(self, topic: str, body: Body, *, queue_id: int | None = None, tags: str | None = None,
                      keys: str | Iterable[str] | None = None, properties: Mapping[str, str] | None = None, flag: int = 0,
                      delay_level: int = 0, unique_key: str | None = None, wait: bool = True,
                      timeout_s: float | None = None, deliver_at: datetime | timedelta | int | None = None,
                      sharding_key: str | None = None) -> PutFuture[PutResult]:
            """Like put(), but return a Future, whose result or await raises the PutError.

            With a full ring a plain thread waits up to `timeout_s` for room; in an event loop the put is submitted later, in
            order, so bound the pending ones by awaiting. Callbacks run in the thread that takes the answers: keep them short.
            """

        def put_many(self, topic: str, bodies: Iterable[Body], **options: Unpack[PutManyOptions]) -> PutManyResult:
            """Store up to 256 MiB of messages, each with all of `keys`, in one queue, all or none, with contiguous queue offsets."""

    def _put_any(self, topic: str, body: Body, *, wait: bool = True, timeout_s: float | None = None, once: bool = False,
                 **options: Any) -> PutResult:
        arguments.known_keywords("put", options, _KEYWORDS["put"])
        message = OutgoingMessage(topic, body, **options)
        entry = self._checked(self._entry, message, wait)
        if arguments.truth(once, "once"):
            if not message.unique_key:
                raise UsageError("once recognises a message by its unique_key: give one")
            if isinstance(entry, PutEntry):
                if not self._puts.settings.message_index_enable:
                    raise UsageError("once finds a unique_key by the index, and the engine runs with message_index_enable=false")
                entry = self._checked(self._put_once, message, entry, timeout_s)
            return cast(PutResult, self._puts.give(entry))
        return cast(PutResult, self._put(entry, timeout_s))

    def _put_once(self, message: OutgoingMessage, entry: PutEntry, timeout_s: float | None) -> PutResult:
        """Return the result of the first put of the message's key, which is this one if there was none. RefusedError."""
        unique_key, limit_s, waits = message.unique_key or "", self._puts._limit_s(timeout_s), entry.context.waits
        with self._files(_refused):
            firsts: FirstPuts = self._made_once("_first_puts", lambda: FirstPuts(self._puts.root))
            with firsts.locked(message.topic, unique_key, limit_s):
                first = firsts.find(message.topic, unique_key)
                if first is None:
                    result = cast(PutResult, self._puts.put_and_wait(entry, timeout_s))
                    firsts.wait_for(result)
                    return result
            level = ReadLevel.REPLICATED if waits & native.CONFIRMED else ReadLevel.FLUSHED if waits else ReadLevel.COMMITTED
            return firsts.result(first, level, limit_s)

    def _put_async_any(self, topic: str, body: Body, *, wait: bool = True, timeout_s: float | None = None,
                       **options: Any) -> PutFuture[PutResult]:
        arguments.known_keywords("put_async", options, _KEYWORDS["put_async"])
        return self._puts.submit(self._checked(self._entry, OutgoingMessage(topic, body, **options), wait), timeout_s)

    def _put_many_any(self, topic: str, bodies: Iterable[Body], *, wait: bool = True, timeout_s: float | None = None,
                      **options: Any) -> PutManyResult:
        made = self._several("put_many", self._many_entry, topic, bodies, wait=wait, timeout_s=timeout_s, **options)
        return cast(PutManyResult, self._put(*made))

    def _several(self, call: str, make: Callable[..., PutEntry], topic: str, messages: Iterable[object], /, *, wait: bool = True,
                 timeout_s: float | None = None, **options: Any) -> tuple[PutEntry | PutOutcome, float | None]:
        """Return what `make` makes of the messages of `call`, or their refusal, and the longest wait."""
        arguments.known_keywords(call, options, _KEYWORDS[call])
        return self._checked(make, OutgoingMessage(topic, b"", **options), messages, wait), timeout_s

    def _put(self, entry: PutEntry | PutOutcome, timeout_s: float | None) -> PutOutcome:
        return self._puts.give(self._puts.put_and_wait(entry, timeout_s))

    def put_many_async(self, topic: str, bodies: Iterable[Body], **options: Unpack[PutManyOptions]) -> PutFuture[PutManyResult]:
        """Like put_many(), but return a Future."""
        return self._puts.submit(*self._several("put_many_async", self._many_entry, topic, bodies, **options))

    def put_batch(self, topic: str, messages: Iterable[BatchMessage | Body], *, properties: Mapping[str, str] | None = None,
                  **options: Unpack[BatchOptions]) -> PutResult:
        """Store messages with properties of their own, all or none, in one segment. RocketMQ: putMessages.

        `properties` are appended to those of each. Together they obey max_message_size_bytes. All have the same delay level, or
        each has a time.
        """
        made = self._several("put_batch", self._batch_entry, topic, messages, properties=properties, **options)
        return cast(PutResult, self._put(*made))

    def put_arrow(self, topic: str, table: object, *, body: str = "body", keys: str | None = None, tags: str | None = None,
                  properties: Sequence[str] = (), **options: Unpack[BatchOptions]) -> list[PutManyResult]:
        """Store each row as a message in one queue; needs pyarrow.

        `table` is of pyarrow, Polars, DuckDB or pandas, or an Arrow stream. `body`, `keys`, `tags` and `properties` name columns.
        Each piece (64 MiB; 256 KiB with keys, tags or properties) is stored as by put_many(); a note of the PutError says what is
        stored.
        """
        arguments.known_keywords("put_arrow", options, _KEYWORDS["put_arrow"])
        columns = outgoing.RowColumns(body, keys, tags, tuple(arguments.several(properties, "properties", "a sequence of str")))
        most_bytes = outgoing.PIECE_BYTES if columns.are_plain else outgoing.BATCH_PIECE_BYTES
        given: dict[str, Any] = {**options}
        wait, timeout_s = given.pop("wait", True), given.pop("timeout_s", None)
        message = OutgoingMessage(topic, b"", **given)  # which keeps the queue that is chosen for the first piece
        make = self._many_entry if columns.are_plain else self._batch_entry
        results: list[PutManyResult] = []
        try:
            for piece in outgoing.pieces_of(table, columns, most_bytes):
                if results and message.sharding_key is not None:
                    message.queue_id = None
                rows = _Named("row {}", sum(result.count for result in results))
                results.append(_of_many(self._put(self._checked(make, message, piece, wait, rows), timeout_s)))
                if not results[-1].ok:
                    break
        except Exception as error:
            if results:
                error.add_note(f"{sum(result.count for result in results)} rows of the table are stored, those of earlier pieces")
            raise
        return results

    def cancel_delayed(self, msg_id: str) -> bool:
        """Cancel a delayed message by its put's id. True: it is never delivered. False: it is due, delivered or deleted.

        UsageError for another id (docs/delayed.md).
        """
        with self._files():
            cancels: DelayedCancels = self._made_once("_delayed_cancels", lambda: DelayedCancels(LiveStoreReader(self._puts.root)))
            return cancels.cancel(msg_id)

    # ---- raw puts: the calls that RocketMQ's broker makes to its store ------------

    def put_raw(self, message: RawMessage, *, timeout_s: float | None = None) -> PutResult:
        """Store one message, every field set by the caller."""
        return cast(PutResult, self._puts.give(self._put_raw(message, timeout_s)))

    def _put_raw(self, message: RawMessage, timeout_s: float | None) -> PutResult:
        """Like put_raw(), and return the result also if it is not PUT_OK."""
        return cast(PutResult, self._puts.put_and_wait(self._checked(self._raw_entry, message), timeout_s))

    def put_raw_async(self, message: RawMessage, *, timeout_s: float | None = None) -> PutFuture[PutResult]:
        """Like put_raw(), but return a Future."""
        return self._puts.submit(self._checked(self._raw_entry, message), timeout_s)

    def put_batch_raw(self, message: RawMessage, members: Sequence[BatchMember], *, timeout_s: float | None = None) -> PutResult:
        """Store a batch with every field set by the caller. RocketMQ: MessageExtBatch."""
        return cast(PutResult, self._put(self._checked(self._raw_batch_entry, message, members), timeout_s))

    def put_batch_raw_async(self, message: RawMessage, members: Sequence[BatchMember], *,
                            timeout_s: float | None = None) -> PutFuture[PutResult]:
        """Like put_batch_raw(), but return a Future."""
        return self._puts.submit(self._checked(self._raw_batch_entry, message, members), timeout_s)

    # ---- transactions -------------------------------------------------------------

    def transaction(
        self, *, checker: Checker | None = None, group: str = "pyengine", check_after_s: int | None = None,
    ) -> Transaction:
        """Return a block for `with` and `async with` whose `put()`s consumers see at its end, and never if it raises.

        `checker` decides, in a thread, about messages of `group` that a kill left undecided for transaction_timeout_ms, or
        `check_after_s` (docs/transactions.md).
        """
        arguments.text(group, "group")
        if checker is not None and not callable(checker):
            raise arguments.wrong_type(checker, "checker", "a function")
        if check_after_s is not None and not 0 <= arguments.integer(check_after_s, "check_after_s") <= INT32_MAX:
            raise UsageError(f"check_after_s is {check_after_s}: give 0 to {INT32_MAX} seconds")
        with self._files():
            return self._in_groups().transaction(group, checker, check_after_s)

    def check_transactions(self) -> int:
        """Call the checkers now; return the number of messages, 0 while another process does."""
        with self._files():
            return self._in_groups().check_now()

    def _in_groups(self) -> GroupTransactions:
        def make() -> GroupTransactions:
            made = GroupTransactions(weakref.proxy(self))  # so that a producer that is dropped ends
            weakref.finalize(self, made.stop_asking)
            return made

        groups: GroupTransactions = self._made_once("_group_transactions", make)
        return groups

    def _transaction_raw(self, message: OutgoingMessage, more: dict[str, str], timeout_s: float | None) -> RawMessage:
        """Return a message of a transaction, with TRAN_MSG and the properties `more`; RefusedError as of put()."""
        self._topic_bytes(message.topic)
        choose = self._queue_chooser(message)
        pieces = [outgoing.properties_text(message.tags, message.keys, message.properties, message.unique_key,
                                           is_copy=self._is_copy)]
        pieces += [outgoing.property_text(name, value, name)
                   for name, value in ({constants.PROPERTY_TRANSACTION_PREPARED: "true"} | more).items()]
        body = outgoing.body_bytes(message.body)
        delay = Delay.of(message.delay_level, message.deliver_at)
        if why := self._puts.open_until(timeout_s):
            raise _refused(why)
        self._follow()
        self._refuse_second_queues(message)
        queue_id = choose()
        self._refuse_sizes(len(body), queue_id, message.flag)
        return RawMessage(message.topic, body, queue_id=queue_id, properties_text=constants.PROPERTY_SEPARATOR.join(pieces),
                          flag=message.flag, born_timestamp_ms=time.time_ns() // 1_000_000, delay_level=delay.level,
                          deliver_at_ms=delay.at_ms or 0)

    # ---- choice of the queue ------------------------------------------------------

    def _queue_chooser(self, message: OutgoingMessage) -> Callable[[], int]:
        """Return what chooses and sets the queue of a message that names none, or has a sharding key; RefusedError for an illegal topic."""
        given, sharding_key = message.queue_id, message.sharding_key
        if given is not None:
            if sharding_key is not None:
                raise UsageError("queue_id and sharding_key exclude each other")
            return lambda: given
        self._topic_bytes(message.topic)
        if sharding_key is not None:
            properties = {} if message.properties is None else arguments.mapping(message.properties, "properties")
            message.properties = {**properties, constants.PROPERTY_SHARDING_KEY: arguments.text(sharding_key, "sharding_key")}

        def choose() -> int:
            choice = self._choice
            if choice is None:
                with self._files(_refused):
                    settings = self._puts.settings
                    is_own = settings.origins.get("default_topic_queue_nums") in (ENVIRONMENT, SET)
                    choice = self._choice = QueueChoice(self._puts.root, settings.put_topic_queue_nums, self._turns, is_own=is_own,
                                                        files=partial(Producer._files, weakref.proxy(self), _refused))
            may_wait = self._puts.may_wait()
            message.queue_id = (choice.next_queue(message.topic, may_wait=may_wait) if sharding_key is None
                                else choice.queue_of(message.topic, sharding_key, may_wait=may_wait))
            return message.queue_id

        return choose

    # ---- entries ------------------------------------------------------------------

    def _checked(self, make: Callable[..., _Made], message: OutgoingMessage | RawMessage, *more: object) -> _Made | PutOutcome:
        """Return what `make` makes of a message; the result of the put where it raises RefusedError."""
        try:
            return make(message, *more)
        except RefusedError as refused:
            kind = PutManyResult if make == self._many_entry else PutResult
            return kind(refused.status, topic=str(message.topic), queue_id=message.queue_id or 0, reason=refused.reason)

    def _for_engine(self, kind: int, message: OutgoingMessage | RawMessage, wait: bool, place: Callable[[], PutEntry]) -> PutEntry:
        """Return the entry that `place` makes for the engine that runs now, or raise RefusedError.

        What the engine before refuses, the next one may take: then it is an entry that is to be made again.
        """
        sessions = self._puts.sessions
        self._follow()
        try:
            entry = place()
        except RefusedError:
            if self._puts.is_in(sessions):
                raise
            context = PutContext(kind, str(message.topic), message.queue_id or 0, self._puts.store_host, self._puts.waits if wait else 0)
            entry, sessions = PutEntry(native.new_header(), b"", b"", context), -1
        entry.sessions, entry.again = sessions, partial(self._for_engine, kind, message, wait, place)
        return entry

    def _entry(self, message: OutgoingMessage, wait: bool) -> PutEntry:
        """Check and encode a message, for the delay schedule if it is delivered later; or raise RefusedError."""
        choose, body = self._queue_chooser(message), message.body
        name = self._topic_bytes(message.topic)
        if message.tags is not None:
            arguments.text(message.tags, "tags")
        text = self._tags.get(message.tags) if message.is_plain else None
        if text is None:
            text = self._properties(message)
        content = body if type(body) is bytes else outgoing.body_bytes(body)
        delay = self._delay(message)

        def place() -> PutEntry:
            self._refuse_second_queues(message)
            queue_id = choose()
            self._refuse_sizes(len(content), queue_id, message.flag)
            return self._shared(message, native.PUT, queue_id, name, text, delay, content, wait)

        return self._for_engine(native.PUT, message, wait, place)

    def _delay(self, message: OutgoingMessage) -> Delay | None:
        return Delay.of(message.delay_level, message.deliver_at) if message.delay_level or message.deliver_at is not None else None

    def _shared(self, message: OutgoingMessage, kind: int, queue_id: int, name: bytes, text: bytes, delay: Delay | None, payload: bytes,
                wait: bool) -> PutEntry:
        """Return the entry of bodies that share a queue and properties."""
        topic = message.topic
        if delay is not None:
            topic, queue_id, waiting = outgoing.later(topic, queue_id, text.decode(), delay, self._delays_ms)
            name, text = topic.encode(), outgoing.properties_bytes(waiting)
        self._remember(message, name, text)
        context = PutContext(kind, topic, queue_id, self._puts.store_host, self._puts.waits if wait else 0)
        return self._made(context, name, text, message.flag, payload)

    def _many_entry(self, message: OutgoingMessage, bodies: Iterable[Body], wait: bool, named: _Named | None = None) -> PutEntry:
        """Return put_many's entry, all bodies with what they share; or raise RefusedError."""
        choose = self._queue_chooser(message)
        name = self._topic_bytes(message.topic)
        text = self._properties(message)
        bodies = [*arguments.several(bodies, "bodies", "an iterable of bytes")]
        if not bodies:
            raise RefusedError("put_many got no bodies: give at least one")
        delay = self._delay(message)
        with named or _Named("bodies[{}]") as one:
            try:
                payload = native.pack_many(bodies)
            except TypeError:
                payload = native.pack_many([outgoing.body_bytes(body, one.name(at)) for at, body in enumerate(bodies)])
        sizes = memoryview(payload)[:4 * len(bodies)].cast("I")
        most = max(sizes)
        if len(payload) > native.SIDE_BYTES_MAX - 131072:
            raise RefusedError("put_many takes at most 256 MiB at once: split it")
        count = len(bodies)

        def place() -> PutEntry:
            flags = host_flags(BORN_HOST, self._puts.store_host)
            room = self._puts.segment_bytes - constants.BLANK_HEADER_BYTES - record_size(0, len(name), len(text), flags)
            with one:
                for one.at, size_bytes in enumerate(sizes if most > min(self._puts.max_message_bytes, room) else ()):
                    self._refuse_sizes(size_bytes, 0, message.flag)
                    if size_bytes > room:
                        raise RefusedError(f"the body has {size_bytes} bytes, which no segment of the commit log can hold: split it, or "
                                           "make the store with a larger mapped_file_size_commit_log_bytes")
            queue_id = choose()
            self._refuse_sizes(0, queue_id, message.flag)
            entry = self._shared(message, native.MANY, queue_id, name, text, delay, payload, wait)
            entry.header.count = count
            return entry

        return self._for_engine(native.MANY, message, wait, place)

    def _remember(self, message: OutgoingMessage, name: bytes, text: bytes) -> None:
        """Let C handle puts of this topic, queue and tags from now on."""
        queue_id = message.queue_id
        common = message.is_common and type(message.topic) is str and (message.tags is None or type(message.tags) is str)
        if common and type(queue_id) is int:  # True is not queue 1
            _remember(self._prefixes, (message.topic, queue_id, message.tags, 0), self._puts.native.prefix(name, text, queue_id, 0))

    def _batch_entry(self, message: OutgoingMessage, messages: Iterable[BatchMessage | Body], wait: bool,
                     named: _Named | None = None) -> PutEntry:
        """Return put_batch's entry, or raise RefusedError."""
        choose = self._queue_chooser(message)
        self._topic_bytes(message.topic)
        shared = self._properties(message).decode()
        delay = Delay.of(message.delay_level, message.deliver_at)
        members: list[tuple[bytes, int]] = []
        texts, delays = [], []
        with named or _Named("messages[{}]") as one:
            for one.at, each in enumerate(arguments.several(messages, "messages", "an iterable of BatchMessage or bytes")):
                each = each if isinstance(each, BatchMessage) else BatchMessage(each)
                body = each.body if type(each.body) is bytes else outgoing.body_bytes(each.body, one.name())
                has_own = each.delay_level or each.deliver_at is not None
                texts.append(outgoing.properties_text(each.tags, each.keys, each.properties, is_copy=self._is_copy))
                delays.append(Delay.of(each.delay_level, each.deliver_at) if has_own else delay)
                members.append((body, each.flag))
        if not members:
            raise RefusedError("put_batch got no messages: give at least one")

        def place() -> PutEntry:
            with one:
                for one.at, (body, flag) in enumerate(members):
                    self._refuse_sizes(len(body), 0, flag)
            queue_id = choose()
            self._refuse_sizes(0, queue_id, 0)
            topic, queue_id, text, own_texts = outgoing.later_batch(message.topic, queue_id, shared, texts, delays, self._delays_ms)
            with one:
                for one.at, own_text in enumerate(own_texts):
                    outgoing.properties_bytes(own_text)
            context = PutContext(native.BATCH, topic, queue_id, self._puts.store_host, self._puts.waits if wait else 0)
            return self._with_members(self._made(context, topic.encode(), outgoing.properties_bytes(text)),
                                      [BatchMember(body, flag, own_text) for (body, flag), own_text in zip(members, own_texts)])

        return self._for_engine(native.BATCH, message, wait, place)

    def _with_members(self, entry: PutEntry, members: Sequence[BatchMember]) -> PutEntry:
        """Add the members to a batch's entry; RefusedError if they are too large together."""
        payload = encode_batch(members)
        most, header, context = self._puts.max_message_bytes, entry.header, entry.context
        if len(payload) > most:
            raise RefusedError(f"the batch has {len(payload)} bytes, {most} are possible (max_message_size_bytes): split it, or use "
                               "put_many")
        header.payload_bytes, header.count = len(payload), len(members)
        sizes = []
        for member in members:
            own, shared = len(member.properties_text.encode()), len(entry.properties)
            joint = bool(shared and own and not member.properties_text.endswith("\x02"))
            sizes.append(record_size(len(member.body), len(entry.topic), own + joint + shared, header.sys_flag))
        entry.payload, context.sizes = payload, tuple(sizes)
        return entry

    def _raw_batch_entry(self, message: RawMessage, members: Sequence[BatchMember]) -> PutEntry:
        """Check and encode a raw batch, or raise RefusedError."""
        if message.sys_flag & constants.SYS_FLAG_TRANSACTION_MASK or message.delay_level > 0 or message.deliver_at_ms:
            raise RefusedError("a batch holds no transaction and no delayed messages: put them singly")
        name = outgoing.topic_bytes(message.topic)
        shared = outgoing.properties_bytes(message.properties_text)
        wait = message.wait_store_msg_ok and is_wait_store_ok(decode_properties(message.properties_text))

        def place() -> PutEntry:
            context = self._raw_context(native.BATCH, message, message.topic, message.queue_id, wait)
            entry = self._made(context, name, shared, raw=message)
            entry.header.prepared_transaction_offset = 0
            return self._with_members(entry, members)

        return self._for_engine(native.BATCH, message, wait, place)

    def _raw_entry(self, message: RawMessage) -> PutEntry:
        """Check and encode a raw message, for the delay schedule if it is delivered later; or raise RefusedError."""
        body = outgoing.body_bytes(message.body)

        def place() -> PutEntry:
            topic, queue_id, properties_text = message.topic, message.queue_id, message.properties_text
            if len(topic) > constants.TOPIC_BYTES_MAX:
                raise RefusedError(f"the topic has {len(topic)} characters, {constants.TOPIC_BYTES_MAX} are possible: shorten it")
            transaction = message.sys_flag & constants.SYS_FLAG_TRANSACTION_MASK
            if ((message.delay_level > 0 or message.deliver_at_ms)
                    and transaction in (constants.SYS_FLAG_TRANSACTION_NONE, constants.SYS_FLAG_TRANSACTION_COMMIT)):
                outgoing.properties_bytes(properties_text)
                delay = Delay(message.delay_level, message.deliver_at_ms or None)
                topic, queue_id, properties_text = outgoing.later(topic, queue_id, properties_text, delay, self._delays_ms)
            name = outgoing.topic_bytes(topic)
            text = outgoing.properties_bytes(properties_text)
            self._refuse_sizes(len(body), queue_id, message.flag)
            context = self._raw_context(native.PUT, message, topic, queue_id, message.wait_store_msg_ok)
            return self._made(context, name, text, message.flag, body, raw=message)

        return self._for_engine(native.PUT, message, message.wait_store_msg_ok, place)

    def _raw_context(self, kind: int, message: RawMessage, topic: str, queue_id: int, wait: bool) -> PutContext:
        store_host = encode_host(message.store_host) if message.store_host else self._puts.store_host
        return PutContext(kind, topic, queue_id, store_host, self._puts.waits if wait else 0)

    def _made(self, context: PutContext, name: bytes, text: bytes, flag: int = 0, payload: bytes = b"",
              raw: RawMessage | None = None) -> PutEntry:
        """Return an entry, with the header of a put that is made now, or of a raw message."""
        header, born_host = native.new_header(), BORN_HOST if raw is None else encode_host(raw.born_host)
        header.kind, header.count, header.sys_flag = context.kind, 1, host_flags(born_host, context.store_host)
        header.queue_id, header.flag, header.payload_bytes = context.queue_id, flag, len(payload)
        header.topic_bytes, header.properties_bytes = len(name), len(text)
        header.born_timestamp_ms = time.time_ns() // 1_000_000
        if raw is not None:
            header.sys_flag |= raw.sys_flag & ~(constants.SYS_FLAG_BORN_HOST_V6 | constants.SYS_FLAG_STORE_HOST_V6)
            header.born_timestamp_ms = raw.born_timestamp_ms
            header.reconsume_times = raw.reconsume_times
            header.prepared_transaction_offset = raw.prepared_transaction_offset
            header.clock_ms = raw.clock_ms
        native.fill_hosts(header, born_host, context.store_host)
        return PutEntry(header, name, text, context, payload)

    def _refuse_second_queues(self, message: OutgoingMessage) -> None:
        if constants.PROPERTY_INNER_MULTI_DISPATCH in (message.properties or ()) and not self._puts.settings.enable_multi_dispatch:
            raise RefusedError(f"{constants.PROPERTY_INNER_MULTI_DISPATCH} names queues that would stay empty, since the engine runs with "
                               "enable_multi_dispatch=false: start it with enable_multi_dispatch=true, or leave the property out")

    def _refuse_sizes(self, body_size: int, queue_id: int, flag: int) -> None:
        if body_size > self._puts.max_message_bytes:
            raise RefusedError(f"the body has {body_size} bytes, {self._puts.max_message_bytes} are possible: split it or raise "
                               "max_message_size_bytes")
        if not 0 <= arguments.integer(queue_id, "queue_id") <= INT32_MAX:
            raise RefusedError(f"the queue id {queue_id} is not in 0 .. {INT32_MAX}")
        if not INT32_MIN <= arguments.integer(flag, "flag") <= INT32_MAX:
            raise RefusedError(f"the flag {flag} is not in {INT32_MIN} .. {INT32_MAX}")

    def _topic_bytes(self, topic: str) -> bytes:
        name = self._topics.get(topic) if isinstance(topic, str) else None
        if name is None:
            name = outgoing.put_topic_bytes(topic)
            _remember(self._topics, topic, name)
        return name

    def _properties(self, message: OutgoingMessage) -> bytes:
        data = outgoing.properties_bytes(
            outgoing.properties_text(message.tags, message.keys, message.properties, message.unique_key, is_copy=self._is_copy))
        if message.is_plain:
            _remember(self._tags, message.tags, data)
        return data


for _call in ("put", "put_async", "put_many"):  # which Python names in an error about an argument
    getattr(Producer, f"_{_call}_any").__qualname__ = f"Producer.{_call}"


class SharedProducer(arguments.Closing):
    """The producer of several threads, the first of which connects; those that wait meanwhile get its producer, or its error."""

    def __init__(self) -> None:
        self._lock = arguments.inherited_lock()  # a signal handler in a thread that has it may put
        self._producer: Producer | None = None
        self._failure: EngineError | None = None

    def get(self, make: Callable[[], Producer]) -> Producer:
        """Return the producer, which `make` connects if there is none."""
        failure = self._failure
        with self._lock:
            if self._producer is None:
                if self._failure is not None and self._failure is not failure:
                    raise copy(self._failure)
                try:
                    made = make()
                except EngineError as error:
                    self._failure = copy(error)  # without the frames that have raised it
                    raise
                if self._producer is None:
                    self._producer = made
                else:  # of a signal handler, meanwhile
                    made.close()
            return self._producer

    def close(self) -> None:
        """Close the producer, if there is one; the next get() connects again."""
        with self._lock:
            producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()


class _Named:
    """Names the member `at`, of those from `first` on, in a RefusedError about it that ends the block."""

    def __init__(self, form: str, first: int = 0) -> None:
        self._form, self._first = form, first
        self.at = 0

    def name(self, at: int | None = None) -> str:
        return self._form.format(self._first + (self.at if at is None else at))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RefusedError):
            raise RefusedError(f"{self.name()}: {error.reason}", error.status) from None


def _of_many(result: PutOutcome) -> PutManyResult:
    """Return the result of a batch as one of put_many."""
    if isinstance(result, PutManyResult):
        return result
    end = result.physical_offset + result.size_bytes if result.stored else -1
    return PutManyResult(result.status, result.count, result.queue_offset, result.physical_offset, end, result.store_timestamp_ms,
                         result.topic, result.queue_id, result.reason, result.indeterminate)


def _remember(memory: dict[_Key, bytes], key: _Key, value: bytes) -> None:
    """Remember a value; a full dictionary is cleared first, so that tags which are no longer used make room for current ones."""
    if len(memory) >= REMEMBERED_MAX:
        memory.clear()
    memory[key] = value
