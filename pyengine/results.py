"""What puts and gets answer: RocketMQ's statuses and the values around them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyengine.formats.message import Message


class PutStatus(enum.IntEnum):
    """PutMessageStatus of RocketMQ 4.9 (BEHAVIOUR section 17); the numbers are ours and stand in shared memory."""

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
    """GetMessageStatus of RocketMQ 4.9 (BEHAVIOUR section 12)."""

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
    """How far a reader looks (DESIGN section 2, promise 4)."""

    WRITTEN = "written"
    COMMITTED = "committed"
    FLUSHED = "flushed"
    REPLICATED = "replicated"


@dataclass(frozen=True, slots=True)
class PutResult:
    """The answer to one put.

    `status` is PUT_OK or the reason why not; `reason` is a sentence that says what to
    change. `indeterminate` is True only when the message was submitted and its fate is
    not known (DESIGN promise 9). Offsets are -1 where nothing was stored. A batch has
    the first member's offsets and `msg_id` with all ids joined by commas.
    """

    status: PutStatus
    msg_id: str = ""
    queue_offset: int = -1
    physical_offset: int = -1
    size_bytes: int = 0
    store_timestamp_ms: int = 0
    topic: str = ""
    queue_id: int = 0
    count: int = 1
    reason: str = ""
    indeterminate: bool = False

    @property
    def ok(self) -> bool:
        return self.status is PutStatus.PUT_OK


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
