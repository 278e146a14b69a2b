"""What puts and gets answer: RocketMQ's statuses and the values around them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyengine.formats.message import Message


class PutStatus(enum.IntEnum):
    """PutMessageStatus of RocketMQ 4.9; the numbers are ours and stand in shared memory."""

    PUT_OK = 0
    FLUSH_DISK_TIMEOUT = 1
    FLUSH_SLAVE_TIMEOUT = 2
    SLAVE_NOT_AVAILABLE = 3
    SERVICE_NOT_AVAILABLE = 4
    CREATE_MAPEDFILE_FAILED = 5
    MESSAGE_ILLEGAL = 6
    PROPERTIES_SIZE_EXCEEDED = 7
    OS_PAGECACHE_BUSY = 8
    UNKNOWN_ERROR = 9
    LMQ_CONSUME_QUEUE_NUM_EXCEEDED = 10


class GetStatus(enum.IntEnum):
    """GetMessageStatus of RocketMQ 4.9 (DefaultMessageStore.getMessage)."""

    FOUND = 0
    NO_MATCHED_MESSAGE = 1
    MESSAGE_WAS_REMOVING = 2
    OFFSET_FOUND_NULL = 3
    OFFSET_OVERFLOW_BADLY = 4
    OFFSET_OVERFLOW_ONE = 5
    OFFSET_TOO_SMALL = 6
    NO_MATCHED_LOGIC_QUEUE = 7
    NO_MESSAGE_IN_QUEUE = 8


class ReadLevel(enum.Enum):
    """How far a reader looks (docs/promises.md, 4)."""

    WRITTEN = "written"
    COMMITTED = "committed"
    FLUSHED = "flushed"
    REPLICATED = "replicated"


class PutResult:
    """The answer to one put; to be read, not changed.

    `status` is PUT_OK or the reason why not; `reason` is a sentence that says what to
    change. `indeterminate` is True only when the message was submitted and its fate is
    not known (docs/promises.md, 9). Offsets are -1 where nothing was stored. A batch has
    the first member's offsets and `msg_id` with all ids joined by commas.

    A plain class: a frozen dataclass costs a microsecond more for each message.
    """

    __slots__ = ("status", "queue_offset", "physical_offset", "size_bytes", "store_timestamp_ms", "topic", "queue_id",
                 "count", "reason", "indeterminate", "_msg_id", "_store_host")

    def __init__(self, status: PutStatus, msg_id: str = "", queue_offset: int = -1, physical_offset: int = -1,
                 size_bytes: int = 0, store_timestamp_ms: int = 0, topic: str = "", queue_id: int = 0, count: int = 1,
                 reason: str = "", indeterminate: bool = False, store_host: bytes = b"") -> None:
        self.status = status
        self._msg_id = msg_id
        self.queue_offset = queue_offset
        self.physical_offset = physical_offset
        self.size_bytes = size_bytes
        self.store_timestamp_ms = store_timestamp_ms
        self.topic = topic
        self.queue_id = queue_id
        self.count = count
        self.reason = reason
        self.indeterminate = indeterminate
        self._store_host = store_host

    @property
    def ok(self) -> bool:
        return self.status is PutStatus.PUT_OK

    @property
    def msg_id(self) -> str:
        """The offset message id (docs/formats.md section 5), made at first use; empty when nothing was stored."""
        if not self._msg_id and self._store_host and self.physical_offset >= 0:
            self._msg_id = (self._store_host + self.physical_offset.to_bytes(8, "big")).hex().upper()
        return self._msg_id

    def _values(self) -> tuple:
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


@dataclass(frozen=True, slots=True)
class PutManyResult:
    """The answer to put_many: all of the messages are stored, with contiguous queue offsets, or none."""

    status: PutStatus
    count: int = 0
    first_queue_offset: int = -1
    first_physical_offset: int = -1
    end_physical_offset: int = -1
    store_timestamp_ms: int = 0
    topic: str = ""
    queue_id: int = 0
    reason: str = ""
    indeterminate: bool = False

    @property
    def ok(self) -> bool:
        return self.status is PutStatus.PUT_OK


@dataclass(frozen=True, slots=True)
class GetResult:
    """The answer to get_message: RocketMQ's status, the messages, and where to ask next."""

    status: GetStatus
    messages: list[Message] = field(default_factory=list)
    next_begin_offset: int = 0
    min_offset: int = 0
    max_offset: int = 0
