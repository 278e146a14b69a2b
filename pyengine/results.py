"""What puts and gets answer: RocketMQ's statuses, the values around them, and the errors that carry a put's result."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Self, cast

from pyengine._front import Result
from pyengine.arguments import INT64_MAX, INT64_MIN
from pyengine.errors import EngineError, UsageError

if TYPE_CHECKING:
    from pyengine.formats.record import Message


class PutStatus(enum.IntEnum):
    """PutMessageStatus of RocketMQ 4.9; the numbers are not."""

    PUT_OK = 0
    """Stored, as durable as promised."""
    FLUSH_DISK_TIMEOUT = 1
    """Stored, not synced within sync_flush_timeout_ms."""
    FLUSH_SLAVE_TIMEOUT = 2
    """Stored, not confirmed within slave_timeout_ms."""
    SLAVE_NOT_AVAILABLE = 3
    """Stored; too few slaves are connected, or they lag too far."""
    SERVICE_NOT_AVAILABLE = 4
    """Refused: no engine, a full disk, a read-only store or a slave."""
    CREATE_MAPEDFILE_FAILED = 5
    """Refused: no next segment in time."""
    MESSAGE_ILLEGAL = 6
    """Refused: the topic, body, queue id or a property."""
    PROPERTIES_SIZE_EXCEEDED = 7
    """Refused: properties above 32,767 bytes."""
    OS_PAGECACHE_BUSY = 8
    """Refused: the writer is busy (os_page_cache_busy_timeout_ms)."""
    UNKNOWN_ERROR = 9
    """No answer in time: indeterminate."""
    LMQ_CONSUME_QUEUE_NUM_EXCEEDED = 10
    """Refused: too many light queues."""

    @property
    def is_lasting(self) -> bool:
        """Whether it is always refused."""
        return self in _LASTING


_LASTING = frozenset((PutStatus.MESSAGE_ILLEGAL, PutStatus.PROPERTIES_SIZE_EXCEEDED, PutStatus.LMQ_CONSUME_QUEUE_NUM_EXCEEDED))


class GetStatus(enum.IntEnum):
    """GetMessageStatus of RocketMQ 4.9."""

    FOUND = 0
    """There are messages."""
    NO_MATCHED_MESSAGE = 1
    """None of the messages matches."""
    MESSAGE_WAS_REMOVING = 2
    """They were deleted in this moment."""
    OFFSET_FOUND_NULL = 3
    """The queue file is gone."""
    OFFSET_OVERFLOW_BADLY = 4
    """Beyond the end of the queue."""
    OFFSET_OVERFLOW_ONE = 5
    """At the end of the queue: nothing new yet."""
    OFFSET_TOO_SMALL = 6
    """Deleted."""
    NO_MATCHED_LOGIC_QUEUE = 7
    """Never given."""
    NO_MESSAGE_IN_QUEUE = 8
    """An empty or unknown queue."""


class ReadLevel(enum.Enum):
    """Up to which position a reader reads (docs/promises.md, 4)."""

    WRITTEN = "written"
    """All complete records; with the pool, as `committed`."""
    COMMITTED = "committed"
    """What survives the death of any process."""
    FLUSHED = "flushed"
    """What survives a power cut."""
    REPLICATED = "replicated"
    """What the slaves have confirmed; on a slave, what it has."""

    @classmethod
    def of(cls, level: ReadLevel | str) -> ReadLevel:
        """Return the level of this name, or raise UsageError."""
        try:
            return cls(level)
        except ValueError:
            raise UsageError(f"{level!r} is not a read level: choose one of {', '.join(one.value for one in cls)}") from None


Level = ReadLevel | Literal["written", "committed", "flushed", "replicated"]


class _PutAnswer:
    """What the results of put and put_many share. True in a condition only if the status is PUT_OK."""

    __slots__ = ()

    if TYPE_CHECKING:
        @property
        def status(self) -> PutStatus: ...

    @property
    def ok(self) -> bool:
        """Whether the status is PUT_OK."""
        return self.status is PutStatus.PUT_OK

    def __bool__(self) -> bool:
        return self.ok

    def raise_for_status(self) -> Self:
        """Return itself, or raise its PutError."""
        if not self.ok:
            raise PutError._of(cast("PutResult | PutManyResult", self))
        return self


class PutResult(Result, _PutAnswer):
    """The answer to one put, true only if PUT_OK; of a batch with its first member's offsets."""

    # The fields are those of a C struct (csrc/front/result.c), made into objects when they are asked for: a put makes
    # one of these for each message (docs/design/10-fast-path.md).

    __slots__ = ()

    if TYPE_CHECKING:
        ok: bool
        """Whether the status is PUT_OK."""
        stored: bool
        """Whether the log has it."""
        physical_offset: int
        """-1: nothing was stored."""
        queue_offset: int
        """-1: nothing was stored."""
        store_timestamp_ms: int
        """The writer's clock."""
        count: int
        """Messages stored."""
        size_bytes: int
        """Of all of a batch."""
        topic: str
        queue_id: int
        """As `topic`, of a delayed message the schedule's."""
        reason: str
        """Why not PUT_OK, and what to change."""
        indeterminate: bool
        """Submitted, its fate not known (docs/promises.md, 9)."""

    @property
    def status(self) -> PutStatus:
        return PutStatus(self._status)

    def __new__(cls, status: PutStatus, msg_id: str = "", queue_offset: int = -1, physical_offset: int = -1,
                size_bytes: int = 0, store_timestamp_ms: int = 0, topic: str = "", queue_id: int = 0,
                count: int | None = None, reason: str = "", indeterminate: bool = False,
                store_host: bytes = b"") -> Self:
        count = int(physical_offset >= 0) if count is None else count
        queue_id = max(INT64_MIN, min(INT64_MAX, queue_id))  # of a put that was refused for it
        answer = (0, physical_offset, -1, queue_offset, store_timestamp_ms, int(status), 0, count, size_bytes)
        return cls._of_answer(answer, topic, queue_id, store_host, reason, indeterminate, msg_id)

    @classmethod
    def _of_answer(cls, answer: tuple[int, ...], topic: str, queue_id: int, store_host: bytes, reason: str = "",
                  indeterminate: bool = False, msg_id: str = "") -> Self:
        """Return the result of a put with this answer of the writer (ANSWER in pyengine/native/session.py)."""
        return Result.__new__(cls, answer, topic, queue_id, store_host, reason, indeterminate, msg_id)

    @property
    def msg_id(self) -> str:
        """The offset id; of a batch all, joined by commas."""
        if not self._msg_id and self._store_host and self.physical_offset >= 0:
            return (self._store_host + self.physical_offset.to_bytes(8, "big")).hex().upper()
        return self._msg_id

    def _values(self) -> tuple[object, ...]:
        return (self.status, self.msg_id, self.queue_offset, self.physical_offset, self.size_bytes,
                self.store_timestamp_ms, self.topic, self.queue_id, self.count, self.reason, self.indeterminate)

    def __eq__(self, other: object) -> bool:
        return self._values() == other._values() if isinstance(other, PutResult) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        return (f"PutResult({self.status.name}, msg_id={self.msg_id!r}, queue_offset={self.queue_offset}, "
                f"physical_offset={self.physical_offset}, size_bytes={self.size_bytes}, topic={self.topic!r}, "
                f"queue_id={self.queue_id}, count={self.count}, indeterminate={self.indeterminate}, reason={self.reason!r})")

    def __reduce__(self) -> tuple[object, ...]:
        return PutResult._of_answer, (self._answer, self.topic, self.queue_id, self._store_host, self.reason, self.indeterminate,
                                     self._msg_id)


@dataclass(frozen=True, slots=True)
class PutManyResult(_PutAnswer):
    """The answer to put_many."""

    status: PutStatus
    """As PutResult.status."""
    count: int = 0
    """As PutResult.count."""
    first_queue_offset: int = -1
    first_physical_offset: int = -1
    end_physical_offset: int = -1
    store_timestamp_ms: int = 0
    topic: str = ""
    queue_id: int = 0
    reason: str = ""
    """As PutResult.reason."""
    indeterminate: bool = False
    """As PutResult.indeterminate."""

    @property
    def stored(self) -> bool:
        """As PutResult.stored."""
        return self.first_physical_offset >= 0


class PutError(EngineError):
    """A put did not end with PUT_OK; `result` has the status and the reason. Each one raised is of a subclass. Can be pickled.
    """

    _ADVICE = ""

    def __init__(self, message: str, result: PutResult | PutManyResult) -> None:
        super().__init__(message)
        self.result = result

    @staticmethod
    def _of(result: PutResult | PutManyResult, message: str = "") -> PutError:
        """Return the error of a result that is not PUT_OK; its text is `message`, or has status, reason and what to do."""
        kind = (PutIndeterminateError if result.indeterminate else PutNotDurableError if result.stored else PutRefusedError)
        return kind(message or f"{result.status.name}: {result.reason}{kind._ADVICE}", result)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.result), vars(self)


class PutRefusedError(PutError):
    """Nothing was stored."""


class PutIndeterminateError(PutError):
    """Its fate is not known: a second put may store it twice (docs/promises.md, 9)."""

    _ADVICE = "; look for it before you put it again: a second put may store it twice"


class PutNotDurableError(PutError):
    """The log has it, less durable or on fewer slaves than asked: a second put would store it twice."""

    _ADVICE = "; it is in the log, so do not put it again: that would store it twice"


class GetRecords(NamedTuple):
    """The answer to get_records: RocketMQ's status, the messages as they are in the log, end to end, and where to ask next."""

    status: GetStatus
    records: bytes = b""
    message_count: int = 0
    next_begin_offset: int = 0
    min_offset: int = 0
    max_offset: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class GetResult:
    """The answer to get_message.

    `queue_offsets` are those of the queue that was asked, which differ from the messages' own for light queues (docs/queues.md).
    """

    status: GetStatus
    messages: list[Message] = field(default_factory=list)
    next_begin_offset: int = 0
    """Where to continue, whatever the status."""
    min_offset: int = 0
    max_offset: int = 0
    """The offset after the last message at this level."""
    queue_offsets: list[int] = field(default_factory=list)

    def __repr__(self) -> str:
        return (f"GetResult({self.status.name}, {len(self.messages)} messages, next_begin_offset={self.next_begin_offset}, "
                f"min_offset={self.min_offset}, max_offset={self.max_offset})")

    def _placed(self, topic: str, queue_id: int) -> list[Message]:
        """Return the messages with `queue_id` and `queue_offset` of the queue that was read, those of a light queue with its topic too."""
        return [
            message if message.queue_offset == offset and message.queue_id == queue_id and message.topic == topic
            else message._of_queue(topic, queue_id, offset)
            for message, offset in zip(self.messages, self.queue_offsets)
        ]
