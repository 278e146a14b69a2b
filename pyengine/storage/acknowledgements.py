"""Acknowledgements by message: what a group has in flight in a queue, and `config/consumers/acks/TOPIC@GROUP`, which keeps that.

    flight = InFlight(offset)                 # of one queue, in the memory of the one process that reads it for the group
    flight.resume(file.read().get(queue_id, ()), ...)   # what its earlier readers knew
    flight.deliver(messages)                  # those to hand out, with their counts
    flight.acknowledge(message)               # in any order; flight.done is the group's offset
    file.append([flight.saved(...)], ...)     # before flight.done is stored as the offset

RocketMQ knows one offset of a group and queue; all messages below it are done. Those above it that were acknowledged are in this
file, so that a kill does not repeat them, together with how often the open ones were delivered. RocketMQ ignores the file. What it
has counts only beside the offset that it was written for: a broker, a reset or an older consumerOffset.json make it void, so
that it never skips a message on their behalf. Messages are then repeated, none is lost.

A line of the file is the state of one queue, a later line replaces it (docs/formats.md section 12). A torn or damaged line is
ignored, as if it had not been written. The caller holds the lock of the groups' offsets while it appends states; a crash
leaves the old state or the new one.

A state belongs to a *tenure*: the time in which one reader reads a queue from one offset on. The reader notes how far it has
delivered in the members' file (GroupMembers.mark), with the number of its tenure; the next reader counts those deliveries.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import zlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from pyengine.arguments import INT64_MAX
from pyengine.errors import disk_errors
from pyengine.formats.paths import Root, StorePaths
from pyengine.formats.record import Message
from pyengine.formats.small_file import PARSE_ERRORS, read_small_file
from pyengine.storage.durable_writes import LOCK_MODE, open_shared_file, pwrite_all, sync_descriptor, sync_folder, write_config

COMPACT_BYTES = 256 << 10   # a file is compacted above this size, if it is COMPACT_FACTOR times as long as it was after the last time
COMPACT_FACTOR = 4
TENURE_BITS = 48
Ranges = tuple[tuple[int, int], ...]        # (start, end) of queue offsets, ascending
Counts = tuple[tuple[int, int, int], ...]   # (start, end, deliveries); of overlapping ones the last counts


class Identity(NamedTuple):
    """What tells a message apart from one that has its offset in the queue after the log was truncated."""

    physical_offset: int
    store_timestamp_ms: int
    body_crc: int

    @classmethod
    def of(cls, message: Message) -> Identity:
        return cls(message.physical_offset, message.store_timestamp_ms, message.body_crc)


@dataclass(frozen=True, slots=True)
class SavedQueue:
    """The state of one queue, one line of the file.

    offset    the group's offset that is stored with it; -1 for none
    end       the offset after the last message that was delivered in this tenure
    acked     what is done from `offset` on
    counts    how often open messages were delivered; those below `end` that are not among them once
    last      the queue offset and the Identity of the last message delivered; None if nothing is to be compared
    """

    queue: int
    tenure: int
    offset: int
    end: int
    acked: Ranges = ()
    counts: Counts = ()
    last: tuple[int, ...] | None = None

    def line(self) -> bytes:
        """Return the line of the file. It begins with a newline, because a torn line may be before it."""
        return _line(asdict(self))

    def recounted(self, offset: int, deliveries: int) -> SavedQueue:
        """Return the state after one of its messages was delivered again."""
        return replace(self, counts=(*self.counts, (offset, offset + 1, deliveries)))

    def below(self, end: int) -> SavedQueue:
        """Return the state without what the queue has lost from `end` on."""
        return replace(self, end=min(self.end, end), acked=_clipped(self.acked, 0, end),
                       counts=tuple((start, min(stop, end), count) for start, stop, count in self.counts if start < end),
                       last=None if self.last is not None and self.last[0] >= end else self.last)


class AckFile:
    """The file of one group and topic. It keeps nothing open between calls."""

    def __init__(self, root: Root, key: str) -> None:
        """`key` is the group_key() of topic and group."""
        self._path = _folder(root) / key
        self._compacted_bytes = 0
        self._is_name_durable = False

    def read(self) -> dict[int, list[SavedQueue]]:
        """Return queue id -> its states, oldest first; what is damaged is not among them. DiskError if it cannot be read now."""
        with disk_errors("read", self._path):
            try:
                return decode(read_small_file(self._path))
            except (FileNotFoundError, NotADirectoryError):
                return {}

    def append(self, states: Iterable[SavedQueue], stored: Mapping[int, int], *, is_durable: bool) -> None:
        """Add states; the caller has the lock of the groups' offsets. `stored`: the offsets that are stored now, by queue id.

        `is_durable`: they are on the disk when this returns. Raises DiskFullError, DiskError or FlushError.
        """
        content = b"".join(state.line() for state in states)
        if not content:
            return
        size_bytes = self._append(content, is_durable=is_durable)
        if size_bytes > max(COMPACT_BYTES, COMPACT_FACTOR * self._compacted_bytes):
            self._compact(stored)

    def note_delivery(self, queue: int, tenure: int, offset: int, deliveries: int) -> None:
        """Note that a message is delivered again in a tenure. Without a lock: a compaction at this moment loses the note."""
        self._append(_line({"queue": queue, "tenure": tenure, "again": offset, "deliveries": deliveries}), is_durable=False)

    def void(self, offsets: Mapping[int, int]) -> None:
        """Let nothing count that was saved of these queues: the group is set to these offsets. The caller has the lock."""
        states = [SavedQueue(queue, secrets.randbits(TENURE_BITS), offset, offset) for queue, offset in offsets.items()]
        if self._path.exists():
            self.append(states, {}, is_durable=True)

    def beyond(self, ends: Mapping[int, int]) -> list[SavedQueue]:
        """Return the states that are about messages beyond the ends of their queues, without those."""
        found = []
        for queue, states in self.read().items():
            latest = {state.offset: state for state in states if state.tenure == states[-1].tenure}
            cut = [state.below(ends.get(queue, 0)) for state in latest.values()]
            found += cut if cut != list(latest.values()) else []
        return found

    def remove(self) -> None:
        """Remove the file, if it exists: only the offset counts."""
        with disk_errors("remove", self._path), suppress(FileNotFoundError):
            self._path.unlink()

    def _append(self, content: bytes, *, is_durable: bool) -> int:
        descriptor = open_shared_file(self._path)
        try:
            with disk_errors("write", self._path):
                fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
            pwrite_all(descriptor, content, 0, self._path)  # Linux appends, whatever the position
            size_bytes = os.fstat(descriptor).st_size
            if is_durable:
                sync_descriptor(descriptor, self._path, may_repeat=True)
                if not self._is_name_durable or size_bytes == len(content):  # whoever has created it, it was perhaps not durable
                    sync_folder(self._path.parent)
                    self._is_name_durable = True
        finally:
            os.close(descriptor)
        return size_bytes

    def _compact(self, stored: Mapping[int, int]) -> None:
        """Keep the last state of each queue, and the one that the stored offset still needs if a crash comes before the next is stored."""
        kept: list[SavedQueue] = []
        for queue, states in self.read().items():
            fitting = _fitting(states, stored.get(queue, -1))
            kept += [fitting] if fitting is not None and fitting is not states[-1] else []
            kept.append(states[-1])
        content = b"".join(state.line() for state in kept)
        write_config(self._path, content, keep_backup=False, mode=LOCK_MODE, is_shared=True)
        self._compacted_bytes = len(content)


def decode(content: bytes) -> dict[int, list[SavedQueue]]:
    """Return queue id -> its states, oldest first, of the bytes of a file. Damaged lines are left out."""
    found: dict[int, list[SavedQueue]] = {}
    for line in content.split(b"\n"):
        text, _, crc = line.rpartition(b" ")
        try:
            if int(crc, 16) != zlib.crc32(text):
                continue
            fields = json.loads(text)
            if "again" in fields:
                states = found.get(fields["queue"], [])
                if states and states[-1].tenure == fields["tenure"]:
                    states[-1] = states[-1].recounted(_number(fields["again"]), _number(fields["deliveries"]))
                continue
            last = fields["last"]
            state = SavedQueue(
                _number(fields["queue"]), _number(fields["tenure"]), _number(fields["offset"], -1), _number(fields["end"]),
                tuple(_run(run) for run in fields["acked"]), tuple((*_run(run[:2]), _number(run[2])) for run in fields["counts"]),
                None if last is None else tuple(map(int, last)))
        except PARSE_ERRORS:
            continue
        found.setdefault(state.queue, []).append(state)
    return found


def remove_all(root: Root) -> None:
    """Remove the files of all groups: their offsets were written by another program."""
    with disk_errors("remove the files of", _folder(root)), suppress(FileNotFoundError):
        for path in list(_folder(root).iterdir()):
            path.unlink(missing_ok=True)


def cut_all(root: Root, queue_ends: Mapping[tuple[str, int], int]) -> list[Callable[[], None]]:
    """Return calls that remove from the files what queues have lost; by (topic, queue id) their ends. For the store's owner."""
    calls: list[Callable[[], None]] = []
    with suppress(FileNotFoundError):
        for path in sorted(_folder(root).iterdir()):
            ends = {queue: end for (topic, queue), end in queue_ends.items() if topic == path.name.partition("@")[0]}
            file = AckFile(root, path.name)
            if states := file.beyond(ends):
                calls.append(partial(file.append, states, {}, is_durable=True))
    return calls


class InFlight:
    """What one reader of a queue has delivered and what of it is done. The caller admits one thread at a time.

    done           all messages below are done: the group's offset
    delivered_end  the offset after the last message that was delivered
    open           those that were delivered and are not done, by offset and ascending
    again          the offsets of those of them that were given back, to be delivered again
    dead           the offsets of those that were delivered too often: no program gets them any more
    spared         the offsets of those that a kill from now on does not count for
    """

    def __init__(self, offset: int) -> None:
        self.open: dict[int, Message] = {}
        self.again: dict[int, None] = {}
        self.dead: dict[int, None] = {}
        self.spared: set[int] = set()
        self.last: tuple[int, ...] | None = None
        self.seek(offset)

    def seek(self, offset: int) -> None:
        """Begin a tenure at this offset, whatever was delivered before."""
        self.done = self.delivered_end = offset
        for each in (self.open, self.again, self.dead, self.spared):
            each.clear()
        self.tenure = secrets.randbits(TENURE_BITS)
        self._skipped: Ranges = ()
        self._counts: Counts = ()
        self._newest: Message | None = None
        self.last = None
        self._has_acks = False
        self._written: SavedQueue | None = None

    def resume(self, states: Sequence[SavedQueue], offset: int | None, marked_end: Callable[[int], int]) -> None:
        """Take over what earlier readers have saved. `offset` is the stored one; `marked_end` says how far a tenure has delivered."""
        if not states:
            return
        last = states[-1]
        fitting = _fitting(states, -1 if offset is None else offset)
        if fitting is not None:
            self._skipped = _clipped(fitting.acked, self.done, INT64_MAX)
            self.last = fitting.last
        self._counts = _counted(last, self.done, marked_end(last.tenure))
        self._has_acks = bool(self._skipped)

    def forget(self) -> None:
        """Forget what earlier readers have saved: it is about messages that the log has lost."""
        self._skipped, self._counts, self.last = (), (), None

    @property
    def is_outstanding(self) -> bool:
        """Whether a program has messages that are not done."""
        return len(self.open) > len(self.again) + len(self.dead)

    def is_suspicious(self, deliveries_max: int | None) -> bool:
        """Whether a message comes that was delivered suspicious_deliveries() times and never finished."""
        at, least = self.delivered_end, suspicious_deliveries(deliveries_max)
        return any(count >= least and end > at and not _contains_all(self._skipped, max(start, at), end)
                   for start, end, count in self._counts)

    def exceeds(self, span: int) -> bool:
        """Whether more than `span` messages were delivered from the oldest open one on, some of which are acknowledged."""
        return self._has_acks and self.delivered_end - self.done > span

    def unacknowledged(self, messages: list[Message]) -> list[Message]:
        """Return those messages that no earlier reader has acknowledged."""
        if not self._skipped or not messages or messages[0].queue_offset >= self._skipped[-1][1]:
            return messages
        return [message for message in messages if not _contains(self._skipped, message.queue_offset)]

    def deliver(self, messages: list[Message], deliveries_max: int | None) -> list[Message]:
        """Note that these are delivered; return them with their counts, without those that were delivered `deliveries_max` times."""
        self.delivered_end = messages[-1].queue_offset + 1
        self._newest = messages[-1]
        if not self._counts or messages[0].queue_offset >= self._counts[-1][1]:
            for message in messages:
                self.open[message.queue_offset] = message
            return messages
        return [counted for message in messages
                if (counted := self._recount(message, _count_at(self._counts, message.queue_offset) + 1, deliveries_max)) is not None]

    def deliver_again(self, count: int, deliveries_max: int | None) -> list[Message]:
        """Return up to `count` of the messages that were given back, with their counts; they are delivered now."""
        found: list[Message] = []
        while self.again and len(found) < count:
            offset = next(iter(self.again))
            del self.again[offset]
            message = self.open[offset]
            if (counted := self._recount(message, message.delivery_count + 1, deliveries_max)) is not None:
                found.append(counted)
        return found

    def finish(self, last: Message | None = None) -> None:
        """Note that what a program has is done; with `last`, up to that message."""
        if last is None and not self.again and not self.dead:  # the common case
            self.open.clear()
            self.done = self.delivered_end
            return
        if last is None:
            ended: Collection[int] = list(self.open)
        elif last.queue_offset < self.delivered_end and self._is_same(last):
            ended = [offset for offset in self.open if offset <= last.queue_offset]
        else:
            return
        if self.again or self.dead:
            ended = [offset for offset in ended if offset not in self.again and offset not in self.dead]
            self._has_acks = True  # those after one that is kept
        if len(ended) == len(self.open):
            self.open.clear()
        for offset in ended if self.open else ():
            del self.open[offset]
        self.done = next(iter(self.open), self.delivered_end)

    def acknowledge(self, message: Message) -> bool:
        """Note that a message is done, even if earlier ones are not; return whether it was open."""
        offset = message.queue_offset
        if offset not in self.open or not self._is_same(message):
            return False
        del self.open[offset]
        self.again.pop(offset, None)
        self.dead.pop(offset, None)
        self._has_acks = True
        self.done = next(iter(self.open), self.delivered_end)
        return True

    def give_back(self, message: Message) -> bool:
        """Note that a message is to be delivered again; return whether it was open."""
        if message.queue_offset not in self.open or not self._is_same(message):
            return False
        self.again[message.queue_offset] = None
        return True

    def given_back(self) -> dict[int, Message]:
        """Return the messages that were given back, by offset, for undeliver()."""
        return {offset: self.open[offset] for offset in self.again}

    def undeliver(self, delivered_end: int, done: int, again: Mapping[int, Message]) -> None:
        """Restore what was before a delivery that failed, the counts too: the program did not get its messages."""
        while self.open and next(reversed(self.open)) >= delivered_end:
            self.dead.pop(self.open.popitem()[0], None)
        self.delivered_end, self.done = delivered_end, done
        for offset, message in again.items():
            self.open[offset] = message
            self.dead.pop(offset, None)
        self.again = dict.fromkeys(again)

    def take_back(self, messages: Iterable[Message]) -> None:
        """Note that the program did not get these messages: they come again, next of all, without being counted twice."""
        found = {message.queue_offset: self.open[message.queue_offset] for message in messages if message.queue_offset in self.open}
        for offset, message in found.items():
            self.open[offset] = replace(message, delivery_count=message.delivery_count - 1)
        self.again = dict.fromkeys(found) | self.again

    def saved(self, queue: int, offset: int) -> SavedQueue | None:
        """Return the state to append before `offset`, which is self.done, is stored; None if the file needs no other one."""
        at, acked = self.done, []
        for start in self.open if self._has_acks else ():
            if at < start:
                acked.append((at, start))
            at = start + 1
        if self._has_acks and at < self.delivered_end:
            acked.append((at, self.delivered_end))
        acked += _clipped(self._skipped, self.delivered_end, INT64_MAX)
        self._counts = tuple(run for run in self._counts if run[1] > self.done)
        counts = [(start, start + 1, count) for start, message in self.open.items()
                  if (count := message.delivery_count - (start in self.spared)) > 1]
        counts += [(max(start, self.delivered_end), end, count) for start, end, count in self._counts if end > self.delivered_end]
        if self._newest is not None and (self.last is None or self.last[0] <= self._newest.queue_offset):
            self.last = (self._newest.queue_offset, *Identity.of(self._newest))
        state = SavedQueue(queue, self.tenure, offset, self.delivered_end, tuple(acked), _merged(counts), self.last)
        before = self._written
        if before is not None and (state == before or not (acked or counts or before.counts)):
            return None
        return state

    def note_saved(self, state: SavedQueue) -> None:
        """Note that this state is in the file."""
        self._written = state

    def _recount(self, message: Message, deliveries: int, deliveries_max: int | None) -> Message | None:
        is_dead = deliveries_max is not None and deliveries > deliveries_max
        counted = replace(message, delivery_count=deliveries - is_dead)
        self.open[message.queue_offset] = counted
        if is_dead:
            self.dead[message.queue_offset] = None
            return None
        return counted

    def _is_same(self, message: Message) -> bool:
        mine = self.open.get(message.queue_offset)
        return mine is None or mine is message or Identity.of(mine) == Identity.of(message)


def _folder(root: Root) -> Path:
    return StorePaths(root).config / "consumers" / "acks"


def _line(fields: Mapping[str, object]) -> bytes:
    text = json.dumps(fields, separators=(",", ":")).encode()
    return b"\n%s %08x" % (text, zlib.crc32(text))


def _number(value: object, low: int = 0) -> int:
    if type(value) is not int or not low <= value <= INT64_MAX:
        raise ValueError(value)
    return value


def _run(run: Sequence[object]) -> tuple[int, int]:
    start, end = map(_number, run)
    if start >= end:
        raise ValueError(run)
    return start, end


def _fitting(states: Sequence[SavedQueue], offset: int) -> SavedQueue | None:
    """Return the state that was written with this offset, in the last tenure."""
    return next((state for state in reversed(states) if state.tenure == states[-1].tenure and state.offset == offset), None)


def _clipped(ranges: Ranges, low: int, high: int) -> Ranges:
    return tuple((max(start, low), min(end, high)) for start, end in ranges if start < high and end > low)


def _contains(ranges: Ranges, offset: int) -> bool:
    at = bisect_right(ranges, (offset, INT64_MAX)) - 1
    return at >= 0 and offset < ranges[at][1]


def suspicious_deliveries(deliveries_max: int | None) -> int:
    """Return how often a message is delivered, without an end, until it may be what killed its readers: 2, or 1 if 2 are the limit."""
    return 1 if deliveries_max == 2 else 2


def _contains_all(ranges: Ranges, start: int, end: int) -> bool:
    at = bisect_right(ranges, (start, INT64_MAX)) - 1
    return at >= 0 and end <= ranges[at][1]


def _count_at(counts: Counts, offset: int) -> int:
    return next((count for start, end, count in reversed(counts) if start <= offset < end), 0)


def _counted(state: SavedQueue, done: int, marked_end: int) -> Counts:
    """Return how often the messages from `done` on were delivered, after a tenure that ended with this state and mark."""
    edges = {done, state.end, marked_end, *(edge for start, end, _ in state.counts for edge in (start, end))}
    points = sorted(edge for edge in edges if edge >= done)
    found = []
    for start, end in pairwise(points):
        count = _count_at(state.counts, start) or (1 if start < state.end else 0)
        found.append((start, end, count + (1 if state.end <= start < marked_end else 0)))
    return _merged(found)


def _merged(counts: Iterable[tuple[int, int, int]]) -> Counts:
    """Join neighbours of the same count, and leave out those without deliveries."""
    found: list[tuple[int, int, int]] = []
    for start, end, count in counts:
        if found and found[-1][1] == start and found[-1][2] == count:
            found[-1] = (found[-1][0], end, count)
        elif count:
            found.append((start, end, count))
    return tuple(found)
