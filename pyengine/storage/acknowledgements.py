"""Acknowledgements by message: what a group has in flight in a queue (InFlight), and `config/consumers/acks/TOPIC@GROUP`, which keeps
that (docs/formats.md section 12).

RocketMQ knows one offset of a group and queue; all messages below it are done. Those above it that were acknowledged are in this
file, so that a kill does not repeat them, together with how often the open ones were delivered. What it has counts only beside the
offset that it was written for: a broker, a reset or an older consumerOffset.json make it void, so that it never skips a message on
their behalf. Messages are then repeated, none is lost.

A state is appended before its offset is stored, under the lock of the groups' offsets. A damaged line counts as not written, so a crash
leaves the old state or the new one. A state belongs to a *tenure*: the time in which one reader reads a queue from one offset on. The
reader notes how far it has delivered in the members' file (GroupMembers.mark); the next reader counts those deliveries.

If the members of a group share messages, all of them read each queue, and a tenure lasts until the last of them ends. Each has
the whole table in its memory (SharedQueue), and first reads the lines that others have appended (SharedLog). Their lines are *steps*,
which change the newest state: of a member, what it has taken, ended and given back. A step is appended under the group's lock, before
the messages are handed out. States are appended and the file is compacted under both that lock and the offsets' lock, which comes
first: a reset, or a recovery, has only that one. A file that has another inode, or more lines than a member has written, is read again.

A member that is stopped in its turn has the group's lock for as long as that lasts. Others go on without it: they append a *fence*,
a number from which on turns count, and lock another byte. A line that comes after a higher fence than that of its turn does not count.
So when the stopped member goes on, it changes nothing, and finds the fence before its program gets a message (PassedOverError).
"""

from __future__ import annotations

import secrets
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from pyengine.arguments import INT64_MAX
from pyengine.errors import disk_errors
from pyengine.formats.paths import Root, StorePaths
from pyengine.formats.record import Message
from pyengine.formats.small_file import PARSE_ERRORS, read_or_none
from pyengine.storage.durable_file import AppendedLines, lines_of

COMPACT_BYTES = 256 << 10   # a file is compacted above this size, if it is COMPACT_FACTOR times as long as it was after the last time
COMPACT_FACTOR = 4
TENURE_BITS = 48
STEP_MESSAGES_MAX = 1 << 24
_QUEUE = b'{"queue":'       # what a line of a queue begins with
Ranges = tuple[tuple[int, int], ...]        # (start, end) of queue offsets, ascending
Counts = tuple[tuple[int, int, int], ...]   # (start, end, deliveries); of overlapping ones the last counts
Fields = Mapping[str, Any]                  # of a line


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
    taken     the open messages that members which share messages have: (start, end, the member's incarnation)
    fence     of the turn in which such a member has written it; -1: it counts whatever the fence is
    after     the tenure that it ends, 0 for none: it counts only if that is the newest one, no reset has come between; -1: always
    """

    queue: int
    tenure: int
    offset: int
    end: int
    acked: Ranges = ()
    counts: Counts = ()
    last: tuple[int, ...] | None = None
    taken: Counts = ()
    fence: int = -1
    after: int = -1

    def fields(self) -> Fields:
        """Return the fields of the line."""
        return {name: value for name, value in asdict(self).items()
                if not (name == "taken" and not value or name in ("fence", "after") and value < 0)}

    def below(self, end: int) -> SavedQueue:
        """Return the state without what the queue has lost from `end` on."""
        return replace(self, end=min(self.end, end), acked=_clipped(self.acked, 0, end),
                       counts=_counts_below(self.counts, end), taken=_counts_below(self.taken, end),
                       last=None if self.last is not None and self.last[0] >= end else self.last)


class AckFile:
    """The file of one group and topic. It keeps nothing open between calls."""

    def __init__(self, root: Root, key: str) -> None:
        """`key` is the group_key() of topic and group."""
        self.path = _folder(root) / key
        self._compacted_bytes = 0
        self._durable_name: tuple[int, int] | None = None

    def read(self, queues: Iterable[int] | None = None) -> dict[int, list[SavedQueue]]:
        """Return queue id -> its states, oldest first; what is damaged is not among them. DiskError if it cannot be read now.

        Of `queues` only, if they are given: to decode a line takes long, and the file has one of each tenure of each queue.
        """
        content = self.content()
        if queues is not None:
            wanted = {b"%d" % queue for queue in queues}
            content = b"\n".join(line for line in content.split(b"\n")
                                 if not line.startswith(_QUEUE) or line[len(_QUEUE) : line.find(b",")] in wanted)
        return decode(content)

    def append(self, states: Iterable[SavedQueue], stored: Mapping[int, int], *, is_durable: bool) -> None:
        """Add states; the caller has the lock of the groups' offsets. `stored`: the offsets that are stored now, by queue id.

        `is_durable`: they are on the disk when this returns. Raises DiskFullError, DiskError or FlushError.
        """
        lines = [state.fields() for state in states]
        if lines and self.is_long(self._append(lines, is_durable=is_durable)):
            self.compact(stored)

    def is_long(self, size_bytes: int) -> bool:
        """Whether a file of this size is to be compacted."""
        return size_bytes > max(COMPACT_BYTES, COMPACT_FACTOR * self._compacted_bytes)

    def raise_fence(self, fence: int) -> None:
        """Let no line of a turn count that comes later and has a lower fence. Not during a compaction."""
        self._append([{"fence": fence}], is_durable=False)

    def unread(self, queue: int, offset: int, end: int) -> list[tuple[int, int]]:
        """Return the runs of [offset, end) that are not acknowledged; `offset` is the group's stored one."""
        flight = InFlight(offset)
        flight.resume(self.read([queue]).get(queue, ()), offset, lambda tenure: offset)
        return flight.unread(offset, end)

    def content(self) -> bytes:
        """Return the bytes of the file, none without a file."""
        return read_or_none(self.path) or b""

    def note_delivery(self, queue: int, tenure: int, offset: int, deliveries: int) -> None:
        """Note that a message is delivered again in a tenure. Without a lock: a compaction at this moment loses the note."""
        self._append([{"queue": queue, "tenure": tenure, "again": offset, "deliveries": deliveries}], is_durable=False)

    def void(self, offsets: Mapping[int, int]) -> None:
        """Let nothing count that was saved of these queues: the group is set to these offsets. The caller has the lock."""
        states = [SavedQueue(queue, new_tenure(), offset, offset) for queue, offset in offsets.items()]
        self.supersede(states)

    def supersede(self, states: Iterable[SavedQueue]) -> None:
        """Add states, durable, beside members that share messages, whose lock the caller has not: so it does not compact."""
        self._append([state.fields() for state in states], is_durable=True)

    def beyond(self, ends: Mapping[int, int]) -> list[SavedQueue]:
        """Return the states that are about messages beyond the ends of their queues, without those, and in a new tenure each queue.

        So steps of members that share messages do not count that come after the cut and were made before it.
        """
        found = []
        for queue, states in self.read().items():
            latest = {state.offset: state for state in states if state.tenure == states[-1].tenure}
            cut = [state.below(ends.get(queue, 0)) for state in latest.values()]
            if cut != list(latest.values()):
                tenure = new_tenure()
                found += [replace(state, tenure=tenure) for state in cut]
        return found

    def remove(self) -> None:
        """Remove the file, if it exists: only the offset counts."""
        with disk_errors("remove", self.path), suppress(FileNotFoundError):
            self.path.unlink()

    def _append(self, lines: Iterable[Fields], *, is_durable: bool) -> int:
        log = AppendedLines(self.path)  # threads may append at once
        log.durable_name = self._durable_name
        try:
            log.renew()
            log.append(*lines)
            size_bytes = log.length()
            if is_durable:
                log.sync()
                self._durable_name = log.durable_name
        finally:
            log.close()
        return size_bytes

    def compact(self, stored: Mapping[int, int]) -> None:
        """Keep the last state of each queue, and the one that the stored offset still needs if a crash comes before the next is stored.

        The caller may append states.
        """
        before = self.content()
        fence = newest_fence(before)
        lines: list[Fields] = [{"fence": fence}] if fence else []
        for queue, states in decode(before).items():
            fitting = _fitting(states, stored.get(queue, -1))
            lines += [fitting.fields()] if fitting is not None and fitting is not states[-1] else []
            lines.append(states[-1].fields())
        self._compacted_bytes = AppendedLines(self.path).replace(lines)


def decode(content: bytes) -> dict[int, list[SavedQueue]]:
    """Return queue id -> its states, oldest first, of the bytes of a file. Damaged lines are left out."""
    found: dict[int, list[SavedQueue]] = {}
    shared: dict[int, SharedQueue] = {}  # the newest states, with the steps since then
    fence = Fence()
    for line in filter(fence.admits, parse(lines_of(content))):
        if isinstance(line, SavedQueue):
            _fold(found, shared, line.queue)
            states = found.setdefault(line.queue, [])
            if line.after in (-1, states[-1].tenure if states else 0):
                states.append(replace(line, fence=-1, after=-1) if line.fence >= 0 else line)
            continue
        queue = line["queue"]
        states = found.get(queue, [])
        if not states or states[-1].tenure != line["tenure"]:
            continue
        if "again" in line:
            again = line["again"], line["again"] + 1, line["deliveries"]
            states[-1] = replace(states[-1], counts=(*states[-1].counts, again))
        else:
            if queue not in shared:
                shared[queue] = SharedQueue(states[-1])
            shared[queue].apply(line)
    for queue in [*shared]:
        _fold(found, shared, queue)
    return found


class PassedOverError(Exception):
    """Others have passed over this member, because it seemed stopped: nothing of its turn counts."""


class Fence:
    """The newest fence of the lines that it was asked about, one after the other."""

    def __init__(self) -> None:
        self.number = 0

    def admits(self, line: SavedQueue | Fields) -> bool:
        """Whether a state or step counts; not what a member has appended that others had passed over."""
        if isinstance(line, SavedQueue):
            return line.fence < 0 or line.fence >= self.number
        if "queue" not in line:
            self.number = max(self.number, line["fence"])
            return False
        return "by" not in line or line.get("fence", 0) >= self.number


def newest_fence(content: bytes) -> int:
    """Return the newest fence in the bytes of a file."""
    fence = Fence()
    for line in parse(lines_of(content)):
        fence.admits(line)
    return fence.number


def _fold(found: dict[int, list[SavedQueue]], shared: dict[int, SharedQueue], queue: int) -> None:
    if queue in shared:
        found[queue][-1] = shared.pop(queue).saved(found[queue][-1].offset)


def parse(lines: Iterable[Any]) -> Iterator[SavedQueue | Fields]:
    """Yield the states, steps and fences that the fields of these lines are."""
    for fields in lines:
        with suppress(*PARSE_ERRORS):
            yield _checked(fields)


def _checked(fields: Fields) -> SavedQueue | Fields:
    if "queue" not in fields:
        return {"fence": _number(fields["fence"])}
    if "again" in fields:
        return {name: _number(fields[name]) for name in ("queue", "tenure", "again", "deliveries")}
    last = None if fields["last"] is None else tuple(map(int, fields["last"]))
    if "by" in fields:
        step = {name: _number(fields[name]) for name in ("queue", "tenure", "by", "from", "end")}
        runs = {name: [_run(run) for run in fields[name]] for name in STEPS if name in fields}
        if any(end - start > STEP_MESSAGES_MAX for each in runs.values() for start, end in each):
            raise ValueError(fields)
        return {**step, **runs, "last": last, "fence": _number(fields.get("fence", 0))}
    return SavedQueue(
        _number(fields["queue"]), _number(fields["tenure"]), _number(fields["offset"], -1), _number(fields["end"]),
        tuple(_run(run) for run in fields["acked"]), tuple((*_run(run[:2]), _number(run[2])) for run in fields["counts"]),
        last, tuple((*_run(run[:2]), _number(run[2])) for run in fields.get("taken", ())),
        *(_number(fields.get(name, -1), -1) for name in ("fence", "after")))


def new_tenure() -> int:
    """Return the number of a new tenure."""
    return secrets.randbits(TENURE_BITS)


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
                calls.append(partial(file.supersede, states))
    return calls


STEPS = ("counted", "spared", "ended", "back", "undone", "took")  # the parts of a step, in the order in which they take effect


class SharedQueue:
    """The newest state of a queue whose members share messages, and the steps since then.

    done   all messages below are done: the group's offset
    end    the offset after the last message that was taken
    open   those that were taken and are not done, ascending: (deliveries, the member that has it, 0 for none)
    free   the offsets of those that no member has
    """

    def __init__(self, saved: SavedQueue) -> None:
        self.queue, self.tenure, self.end, self.last = saved.queue, saved.tenure, saved.end, saved.last
        self.open: OrderedDict[int, tuple[int, int]] = OrderedDict()  # a dict passes what was deleted before its first one
        self._skipped = _clipped(saved.acked, saved.end, INT64_MAX)
        self._counts = tuple(run for run in saved.counts if run[1] > saved.end)
        at = max(saved.offset, 0)
        counts, owners = (_by_offset(runs, at, saved.end) for runs in (saved.counts, saved.taken))
        for offset in _offsets(_gaps(saved.acked, at, saved.end)):
            self.open[offset] = counts.get(offset, 1), owners.get(offset, 0)
        self.free = {offset: None for offset, (_, owner) in self.open.items() if not owner}

    @property
    def done(self) -> int:
        """The group's offset: all messages below are done."""
        return next(iter(self.open), self.end)

    @property
    def owners(self) -> set[int]:
        """The members that have messages."""
        return {owner for _, owner in self.open.values() if owner}

    def unacknowledged(self, messages: list[Message]) -> list[Message]:
        """Return those messages that were not acknowledged in an earlier tenure."""
        return [message for message in messages if not _contains(self._skipped, message.queue_offset)] if self._skipped else messages

    def unread(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the runs of [start, end), from the end of what was taken on, that were not acknowledged in an earlier tenure."""
        return [*_gaps(self._skipped, start, end)]

    def deliveries(self, offset: int) -> int:
        """Return how often a message was delivered."""
        return self.open[offset][0] if offset in self.open else _count_at(self._counts, offset)

    def is_suspicious(self, deliveries_max: int | None) -> bool:
        """Whether a message comes that was delivered suspicious_deliveries() times and never finished."""
        least = suspicious_deliveries(deliveries_max)
        return any(self.open[offset][0] >= least for offset in self.free) or any(
            count >= least and not _contains_all(self._skipped, max(start, self.end), end) for start, end, count in self._counts
            if end > self.end)

    def step(self, by: int, parts: Mapping[str, Iterable[int]], end: int = 0, last: Message | None = None) -> dict[str, Any]:
        """Return the line of a step of a member: `parts` are the offsets of each of STEPS."""
        identity = None if last is None else (last.queue_offset, *Identity.of(last))
        return {"queue": self.queue, "tenure": self.tenure, "by": by, "from": self.end, "end": end, "last": identity,
                **{name: _runs(offsets) for name, offsets in parts.items() if offsets}}

    def apply(self, step: Fields) -> None:
        """Take over what a member has taken, ended or given back; what it did not have any more is left out."""
        by = step["by"]
        for offset in range(self.end, step["from"]):  # a power cut has lost the step that took these
            if not _contains(self._skipped, offset):
                self.open[offset] = self.deliveries(offset) + 1, 0
                self.free[offset] = None
        self._end_at(max(self.end, step["from"]))
        for name, change in (("counted", 1), ("spared", -1)):
            for offset in _offsets(step.get(name, ())):
                if self._has(offset, by):
                    self.open[offset] = self.open[offset][0] + change, by
        for offset in _offsets(step.get("ended", ())):
            if self._has(offset, by):
                del self.open[offset]
                self.free.pop(offset, None)
        for name, uncounted in (("back", 0), ("undone", 1)):
            for offset in _offsets(step.get(name, ())):
                if self._has(offset, by):
                    self.open[offset] = self.open[offset][0] - uncounted, 0
                    self.free[offset] = None
        for offset in _offsets(step.get("took", ())):
            if offset >= self.end or offset in self.free:
                self.open[offset] = self.deliveries(offset) + 1, by
                self.free.pop(offset, None)
        self._end_at(max(self.end, step["end"]))
        if step["last"] is not None:
            self.last = step["last"]

    def saved(self, offset: int) -> SavedQueue:
        """Return the state, to append before `offset` is stored."""
        acked = _gaps(((start, start + 1) for start in self.open), max(offset, 0), self.end)
        counts = [(start, start + 1, count) for start, (count, _) in self.open.items() if count != 1]
        counts += [(max(start, self.end), end, count) for start, end, count in self._counts]
        taken = [(start, start + 1, owner) for start, (_, owner) in self.open.items() if owner]
        return SavedQueue(self.queue, self.tenure, offset, self.end, (*acked, *self._skipped), _merged(counts), self.last, _merged(taken))

    def _end_at(self, end: int) -> None:
        if end > self.end:
            self.end = end
            self._counts = tuple(run for run in self._counts if run[1] > end)
            self._skipped = _clipped(self._skipped, end, INT64_MAX)

    def _has(self, offset: int, member: int) -> bool:
        return offset in self.open and self.open[offset][1] == member


class SharedLog(AppendedLines):
    """The file of a group whose members share messages, as one member reads and writes it. It keeps the file open until close().

    The caller of follow(), add() and write(), and of AckFile.compact(), has the group's lock, which is one for each fence.
    """

    def __init__(self, file: AckFile) -> None:
        self.queues: dict[int, SharedQueue] = {}
        self._file = file
        self._lines: list[SavedQueue | dict[str, Any]] = []
        self._fence = Fence()
        super().__init__(file.path)

    @property
    def fence(self) -> int:
        """The newest fence of what was read."""
        return self._fence.number

    def follow(self) -> None:
        """Read what others have appended. Raises DiskError."""
        self._lines.clear()
        try:
            self.renew()
            if not self.size_bytes:
                self.queues, self._fence = {}, Fence()
            for line in parse(self.news()):
                self._apply(line)
        except BaseException:
            self.forget()
            raise

    def add(self, line: SavedQueue | dict[str, Any]) -> None:
        """Apply a line; write() appends it."""
        if isinstance(line, SavedQueue):
            line = replace(line, fence=self.fence, after=self._tenure(line.queue))
        elif self.fence:
            line["fence"] = self.fence
        self._lines.append(line)
        self._apply(line)

    def add_to(self, step: dict[str, Any], more: Fields) -> None:
        """Apply more of a step that was added since the last write(), with parts that take effect after its own: it stays one line."""
        step.update(more)
        self._apply({**more, "fence": self.fence})

    def write(self) -> bool:
        """Append what was added; return whether there was any.

        Raises DiskFullError, DiskError, or PassedOverError if what was added does not count: then forget() it.
        """
        lines = [line.fields() if isinstance(line, SavedQueue) else line for line in self._lines]
        self._lines.clear()
        if lines and not self.append(*lines, are_known=True):
            # Others have appended: a reset a state, or members that pass over this one a fence.
            self.forget()
            if self.read_fence() > self.fence:
                raise PassedOverError
        return bool(lines)

    def forget(self) -> None:
        """Read the whole file again next time."""
        self._lines.clear()
        self.rewind()

    def read_fence(self) -> int:
        """Return the newest fence in the file, without the lock."""
        return newest_fence(self._file.content())

    def _tenure(self, queue: int) -> int:
        return self.queues[queue].tenure if queue in self.queues else 0

    def _apply(self, line: SavedQueue | Fields) -> None:
        if not self._fence.admits(line):
            return
        if isinstance(line, SavedQueue):
            if line.after in (-1, self._tenure(line.queue)):
                self.queues[line.queue] = SharedQueue(line)
        elif "by" in line and (queue := self.queues.get(line["queue"])) is not None and queue.tenure == line["tenure"]:
            queue.apply(line)


class InFlight:
    """What one reader of a queue has delivered and what of it is done. The caller admits one thread at a time.

    done           all messages below are done: the group's offset
    delivered_end  the offset after the last message that was delivered
    open           those that were delivered and are not done, by offset and ascending
    again          the offsets of those of them that were given back, to be delivered again
    dead           the offsets of those that were delivered too often: no program gets them any more
    spared         the offsets of those that a kill from now on does not count for
    aside          the bounds of runs of messages that are as open as those, and not in the memory: their reader waits for who wants them
    """

    def __init__(self, offset: int) -> None:
        self.aside = array("q")
        self.open: OrderedDict[int, Message] = OrderedDict()  # a dict passes what was deleted before its first one
        self.again: OrderedDict[int, None] = OrderedDict()
        self.dead: dict[int, None] = {}
        self.spared: set[int] = set()
        self.last: tuple[int, ...] | None = None
        self._redelivered: dict[int, Message] | None = None
        self.seek(offset)

    def seek(self, offset: int) -> None:
        """Begin a tenure at this offset, whatever was delivered before."""
        self.done = self.delivered_end = offset
        for each in (self.open, self.again, self.dead, self.spared):
            each.clear()
        del self.aside[:]
        self.tenure = new_tenure()
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

    def unread(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the runs of [start, end) that no earlier reader has acknowledged."""
        return [*_gaps(self._skipped, start, end)]

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
            message = self.open[offset]
            if self._redelivered is not None:
                self._redelivered[offset] = message
            del self.again[offset]
            if (counted := self._recount(message, message.delivery_count + 1, deliveries_max)) is not None:
                found.append(counted)
        return found

    def finish(self, last: Message | None = None, kept: Collection[int] = ()) -> None:
        """Note that what a program has is done; with `last`, up to that message; but not those at the physical offsets `kept`."""
        if last is None and not self.again and not self.dead and not kept:  # the common case
            self.open.clear()
            self.done = self.delivered_end
            return
        if last is not None and not (last.queue_offset < self.delivered_end and self._is_same(last)):
            return
        ended = self._those_to_end(last, kept)
        for offset in ended:
            del self.open[offset]
        self.done = next(iter(self.open), self.delivered_end)
        self._has_acks |= bool(ended) and ended[-1] > self.done  # after one that is open

    def _those_to_end(self, last: Message | None, kept: Collection[int]) -> list[int]:
        return [offset for offset, message in self.open.items()
                if offset not in self.again and offset not in self.dead and message.physical_offset not in kept
                and (last is None or offset <= last.queue_offset)]

    def acknowledge(self, message: Message) -> bool:
        """Note that a message is done, even if earlier ones are not; return whether it was open."""
        offset = message.queue_offset
        if offset not in self.open or not self._is_same(message):
            return False
        del self.open[offset]
        self.again.pop(offset, None)
        self.dead.pop(offset, None)
        self._has_acks = True
        self._move_done()
        return True

    def set_aside(self, offset: int) -> None:
        """Keep an open message out of the memory, as open, until bring_back()."""
        del self.open[offset]
        self.again.pop(offset, None)
        flip(self.aside, offset, offset + 1)

    def bring_back(self, runs: Iterable[tuple[int, int]], messages: Iterable[Message]) -> None:
        """Take these runs, all of which are set aside: these messages are in the memory again, the others were deleted."""
        for start, end in runs:
            flip(self.aside, start, end)
        for message in messages:
            self.open[message.queue_offset] = message
        self.open = OrderedDict(sorted(self.open.items()))
        self._has_acks = True
        self._move_done()

    def _move_done(self) -> None:
        self.done = next(iter(self.open), self.delivered_end)
        if self.aside:
            self.done = min(self.done, self.aside[0])

    def _open_runs(self) -> Iterable[tuple[int, int]]:
        """Return what is open, as (start, end) and ascending."""
        runs = [(offset, offset + 1) for offset in self.open]
        return sorted([*runs, *zip(self.aside[::2], self.aside[1::2])]) if self.aside else runs

    def give_back(self, message: Message) -> bool:
        """Note that a message is to be delivered again; return whether it was open."""
        if message.queue_offset not in self.open or not self._is_same(message):
            return False
        self.again[message.queue_offset] = None
        return True

    def redelivered(self) -> dict[int, Message]:
        """Return, for undeliver(), what gets each message that is delivered again until the next call, as it was before."""
        self._redelivered = {}
        return self._redelivered

    def undeliver(self, delivered_end: int, done: int, again: Mapping[int, Message]) -> None:
        """Restore what was before a delivery that failed, the counts too: the program did not get its messages."""
        while self.open and next(reversed(self.open)) >= delivered_end:
            self.dead.pop(self.open.popitem()[0], None)
        self.delivered_end, self.done = delivered_end, done
        for offset, message in again.items():
            self.open[offset] = message
            self.dead.pop(offset, None)
        self.again = OrderedDict.fromkeys(again) | self.again

    def take_back(self, messages: Iterable[Message]) -> None:
        """Note that the program did not get these messages: they come again, next of all, without being counted twice."""
        found = {message.queue_offset: self.open[message.queue_offset] for message in messages if message.queue_offset in self.open}
        for offset, message in found.items():
            self.open[offset] = replace(message, delivery_count=message.delivery_count - 1)
        self.again = OrderedDict.fromkeys(found) | self.again

    def copied(self) -> InFlight:
        """Return what saved() needs, as it is now, for another thread."""
        found = copy(self)
        found.open, found.aside, found.spared = self.open.copy(), self.aside[:], self.spared.copy()
        return found

    def saved(self, queue: int, offset: int) -> SavedQueue | None:
        """Return the state to append before `offset`, which is self.done, is stored; None if the file needs no other one."""
        acked = [*_gaps(self._open_runs(), self.done, self.delivered_end)] if self._has_acks else []
        acked += _clipped(self._skipped, self.delivered_end, INT64_MAX)
        self._counts = tuple(run for run in self._counts if run[1] > self.done)
        counts = [(start, start + 1, count) for start, message in self.open.items()
                  if (count := message.delivery_count - (start in self.spared)) != 1]
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


def flip(bounds: MutableSequence[int], start: int, end: int) -> None:
    """Add neighbouring offsets to a set of runs, [start, end, start, end, ...] and ascending; or remove them, if it has all of them."""
    for bound in (start, end):
        at = bisect_left(bounds, bound)
        if at < len(bounds) and bounds[at] == bound:
            del bounds[at]
        else:
            bounds.insert(at, bound)


def _folder(root: Root) -> Path:
    return StorePaths(root).config / "consumers" / "acks"


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


def _gaps(runs: Iterable[tuple[int, int]], low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield what of [low, high) is in none of these runs, which are ascending."""
    for start, end in runs:
        if start >= high:
            break
        if low < start:
            yield low, start
        low = max(low, end)
    if low < high:
        yield low, high


def _contains(ranges: Ranges, offset: int) -> bool:
    return _contains_all(ranges, offset, offset + 1)


def suspicious_deliveries(deliveries_max: int | None) -> int:
    """Return how often a message is delivered, without an end, until it may be what killed its readers: 2, or 1 if 2 are the limit."""
    return 1 if deliveries_max == 2 else 2


def _contains_all(ranges: Ranges, start: int, end: int) -> bool:
    at = bisect_right(ranges, (start, INT64_MAX)) - 1
    return at >= 0 and end <= ranges[at][1]


def _count_at(counts: Counts, offset: int, without: int = 0) -> int:
    return next((count for start, end, count in reversed(counts) if start <= offset < end), without)


def _counted(state: SavedQueue, done: int, marked_end: int) -> Counts:
    """Return how often the messages from `done` on were delivered, after a tenure that ended with this state and mark."""
    edges = {done, state.end, marked_end, *(edge for start, end, _ in state.counts for edge in (start, end))}
    points = sorted(edge for edge in edges if edge >= done)
    found = []
    for start, end in pairwise(points):
        if count := _count_at(state.counts, start, int(start < state.end)) + (state.end <= start < marked_end):
            found.append((start, end, count))
    return _merged(found)


def _by_offset(counts: Counts, low: int, high: int) -> dict[int, int]:
    return {offset: count for start, end, count in counts for offset in range(max(start, low), min(end, high))}


def _counts_below(counts: Counts, end: int) -> Counts:
    return tuple((start, min(stop, end), count) for start, stop, count in counts if start < end)


def _runs(offsets: Iterable[int]) -> list[list[int]]:
    """Return offsets as (start, end) of neighbours."""
    found: list[list[int]] = []
    for offset in sorted(offsets):
        if found and found[-1][1] == offset:
            found[-1][1] += 1
        else:
            found.append([offset, offset + 1])
    return found


def _offsets(runs: Iterable[Sequence[int]]) -> Iterator[int]:
    for start, end in runs:
        yield from range(start, end)


def _merged(counts: Iterable[tuple[int, int, int]]) -> Counts:
    """Join neighbours of the same count."""
    found: list[tuple[int, int, int]] = []
    for start, end, count in counts:
        if found and found[-1][1] == start and found[-1][2] == count:
            found[-1] = (found[-1][0], end, count)
        else:
            found.append((start, end, count))
    return tuple(found)
