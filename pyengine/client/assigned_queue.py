"""What a consumer knows of one queue it holds: four offsets, and what is fetched but not handed out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyengine.formats.record import Message
    from pyengine.ipc.group_members import Claim


@dataclass(slots=True)
class AssignedQueue:
    """Always `done <= handed_end <= position`, but for a moment inside a method.

    position     the next entry to fetch
    handed_end   behind the last message that the program was given
    done         everything below has been dealt with: what a commit remembers
    committed    what is remembered; -1 for nothing
    """

    queue_id: int
    claim: Claim | None
    position: int
    committed: int = -1
    done: int = -1
    handed_end: int = -1
    buffer: deque[Message] = field(default_factory=deque)
    last: Message | None = None           # the last one fetched: tells whether the log is still the same
    leaving_since_s: float | None = None  # it belongs to another member now: nothing more is handed out

    def __post_init__(self) -> None:
        self.done = self.handed_end = self.position

    @property
    def is_outstanding(self) -> bool:
        """Whether the program was given messages and has not said that it is done with them."""
        return self.done < self.handed_end

    @property
    def next_offset(self) -> int:
        """What is handed out next, or where it will be looked for."""
        return self.buffer[0].queue_offset if self.buffer else self.position

    def hand_out(self, count: int) -> list[Message]:
        """Up to `count` messages for the program."""
        messages = [self.buffer.popleft() for _ in range(min(count, len(self.buffer)))]
        if messages:
            self.handed_end = messages[-1].queue_offset + 1
        return messages

    def finish(self, end: int | None = None) -> None:
        """The program is done with what it was given, below `end` at least if that is said."""
        self.done = self.handed_end if end is None else max(self.done, min(end, self.handed_end))
        self.settle()

    def settle(self) -> None:
        """What was passed over without being handed out is done too, once nothing before it is open."""
        if not self.is_outstanding and not self.buffer:
            self.done = self.handed_end = self.position

    def put_back(self) -> None:
        """Forget what was fetched but not handed out."""
        self.position = self.next_offset
        self.buffer.clear()
        self.settle()

    def go_to(self, offset: int) -> None:
        """Go on at `offset`, whatever was handed out."""
        self.buffer.clear()
        self.last = None
        self.position = self.handed_end = self.done = offset
