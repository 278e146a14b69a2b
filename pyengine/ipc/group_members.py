"""The members of a consumer group on a topic and the queues that each holds: `config/consumers/<topic>@<group>`.

Kernel locks decide, so a member's death needs no clean-up. The bytes of the file have only
what locks cannot express: each member's heartbeat, and which claims are no longer valid.

| lock, exclusive, of the open file | held by | means |
|---|---|---|
| MEMBERS + slot | a member, as long as it lives | gets a share of the queues |
| GUESTS + slot | a member that chose its queues itself, or ends | lives, but gets no share |
| SHARERS + slot | a member of a group whose members share messages | reads all queues, claims none |
| TABLE + fence | such a member, during a turn | no other one takes or ends messages under this fence |
| COMPACTION | such a member, while it replaces their file or raises the fence | no other one does either |
| QUEUES + fence * 2^32 + queue id | the holder of a queue | no other member may claim it under this fence |

| bytes | contents | written by |
|---|---|---|
| slot records, SLOTS_AT + 64 * slot, for each of the three kinds | incarnation, heartbeats, pid, filter | the slot's holder |
| queue records, RECORDS_AT + 32 * queue id | fence, incarnation of the holder | the holder of the lock on the groups' offsets |
| marks, 20 bytes after those | the offset up to which the queue was delivered | the holder of the queue |

A member holds a queue as long as the queue's record has its incarnation and the fence
of its claim. It reads the record before it delivers a message, and again, under the lock of
the offsets, before it commits. So another member can take a queue from one that is stopped or
hangs: a higher fence in the record ends the old hold. The old member still has its kernel lock,
but on the byte of the old fence, which is no longer used. A torn or damaged record reads as
another fence: the holder drops the queue and claims it again. The worst effect of any content
of this file is that messages are delivered again, or counted once too often or too seldom.

The file must not be removed while members live. A member whose file was removed drops all its queues.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pyengine.arguments import after_fork
from pyengine.errors import EngineError, UsageError, disk_error, disk_errors
from pyengine.formats.paths import StorePaths
from pyengine.native.waiting import BEAT_CHANGED, MEMBER_SLOTS_MAX, Beat, Pulse, locked_bytes
from pyengine.storage.config_table import QUEUE_NUMS_MAX
from pyengine.storage.consumer_offset import group_key
from pyengine.storage.durable_writes import open_shared_file
from pyengine.storage.ofd_lock import try_lock, unlock

SLOTS_MAX = MEMBER_SLOTS_MAX
MEMBERS = 1 << 40
GUESTS = 1 << 41
SHARERS = 1 << 42
TABLE = 1 << 43
COMPACTION = TABLE - 1
QUEUES = 1 << 61
SLOTS_AT = 4096
RECORDS_AT = 1 << 20
_SLOT_STRIDE, _RECORD_STRIDE = 64, 32
_SLOT = struct.Struct("<QQII")    # the fields of a SlotRecord; then a CRC-32 over them
_RECORD = struct.Struct("<QQ")    # fence, incarnation; then a CRC-32 over them
_MARK = struct.Struct("<QI")      # the offset; a CRC-32 over it and the tenure (storage/acknowledgements.py)
_MARK_AT = 20
_CRC = struct.Struct("<I")
_FENCES = 1 << 24
_NO_OWNER = 0
_READS = 4                        # a read during a write may be torn, but not four times in a row
_MIXED = {
    False: "the members of the group {1} on {0} share messages, so one that owns queues cannot join",
    True: "the members of the group {1} on {0} own queues, so one that shares messages cannot join",
}


class SlotRecord(NamedTuple):
    """A member's own record. `heartbeats` rises while it lives and is not stopped; `wanted` stands for its filter, 0 if it is unknown."""

    incarnation: int = _NO_OWNER
    heartbeats: int = 0
    pid: int = 0
    wanted: int = 0


@dataclass(frozen=True, slots=True)
class QueueRecord:
    """The current claim on a queue: its fence, and the incarnation of the member that made it (0: none)."""

    fence: int = 0
    incarnation: int = _NO_OWNER


@dataclass(frozen=True, slots=True)
class Claim:
    """One queue that this process holds as long as GroupMembers.holds() is true."""

    queue_id: int
    fence: int


class GroupMembers:
    """The members of one group on one topic.

    join() makes this process a member; reading needs no join().
    """

    def __init__(self, root: str | os.PathLike[str], topic: str, group: str, *, may_create: bool = True,
                 pulse: Pulse | None = None, wanted: int = 0) -> None:
        """Open the file; create it if `may_create`, else raise FileNotFoundError if it does not exist.

        `pulse` sends the heartbeats from join() on; `wanted` is of the SlotRecord.
        """
        self._wanted = wanted
        self.path = StorePaths(root).config / "consumers" / group_key(topic, group)
        try:
            self._descriptor = open_shared_file(self.path) if may_create else os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise disk_error(error, "open", self.path) from error
        self._pulse = pulse
        self._beat: Beat | None = None
        self._slot = -1
        self._base = MEMBERS
        self._heartbeats = 0
        self._records = 0  # as many as hold all that it has claimed, but for queues that no entry of a topic has
        self._claimed: dict[int, bytes] = {}  # the record of its last claim by queue
        self.incarnation = secrets.randbits(63) | 1
        after_fork(self)

    # -- members ------------------------------------------------------------------

    def join(self, kind: int = MEMBERS) -> int:
        """Become a member of this kind, MEMBERS, GUESTS or SHARERS, and return the slot.

        EngineError when all SLOTS_MAX slots are taken; UsageError beside members that do not share, or do share, messages.
        """
        for slot in range(SLOTS_MAX):
            if self._try_lock(kind + slot):
                others = (MEMBERS, GUESTS) if kind == SHARERS else (SHARERS,)
                if any(self._locked(base, base + SLOTS_MAX) for base in others):  # looked for with the lock: one of two sees the other
                    self._unlock(kind + slot)
                    raise UsageError(_MIXED[kind == SHARERS].format(*self.path.name.split("@"))
                                     + ": give all of them the same `sharing`, or stop those")
                self._base, self._slot = kind, slot
                self.heartbeat()
                if self._pulse is not None:
                    self._beat = Beat(self._pulse, {
                        "fd": self._descriptor, "slot": slot, "incarnation": self.incarnation, "heartbeats": self._heartbeats,
                        "pid": os.getpid(), "wanted": self._wanted, "slots": 0 if kind == GUESTS else SLOTS_MAX,
                        "slots_at": self._slot_at(kind, 0), "locks_at": kind, "records_at": RECORDS_AT})
                    self._beat.set_records(self._records)
                return slot
        raise EngineError(f"{self.path.name} has {SLOTS_MAX} members already")

    def move(self, kind: int) -> int:
        """Become a member of another kind, which keeps its claims, and return the slot; EngineError, and no change, as join()."""
        before, beat = self._base + self._slot, self._beat
        slot = self.join(kind)  # first: without a slot it would seem dead, and its claims overdue
        if beat is not None:
            beat.close()  # before another member has its slot
        self._unlock(before)
        return slot

    def has_changed(self) -> bool:
        """Whether, at a heartbeat since the last call, the members or the claims on queues had changed, or a member seemed stopped.

        Members are those of the same kind; a member that chose its queues itself needs to know of none.
        """
        return self._beat is not None and bool(self._beat.take() & BEAT_CHANGED)

    def heartbeat(self) -> None:
        """Raise this member's heartbeat, which `pulse` does otherwise: it lives and is not stopped."""
        self._heartbeats += 1
        self._put(self._slot_at(self._base, self._slot), _SLOT.pack(self.incarnation, self._heartbeats, os.getpid(), self._wanted))

    def members(self) -> dict[int, SlotRecord]:
        """Return the record of each living member, guests too, by a number that identifies the member while it lives."""
        found = {at for base in (MEMBERS, GUESTS, SHARERS) for at in self._locked(base, base + SLOTS_MAX)}
        if self._slot >= 0:
            found.add(self._base + self._slot)
        blocks = {base: self._read(self._slot_at(base, 0), _SLOT_STRIDE * SLOTS_MAX) for base in {at & -MEMBERS for at in found}}
        return {at: self._slot_record(at, blocks[at & -MEMBERS]) for at in sorted(found)}

    @property
    def is_current(self) -> bool:
        """Whether the open file still has its name, so that other members open the same one."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except OSError:
            return False

    # -- members that share messages ----------------------------------------------

    def try_table(self, fence: int) -> bool:
        """Take the lock under which members change who has which message, if no other process has it."""
        return self._try_lock(TABLE + fence)

    def leave_table(self) -> None:
        """Release it, of whichever fence."""
        if self._descriptor >= 0:
            unlock(self._descriptor, TABLE, QUEUES - TABLE)

    @contextlib.contextmanager
    def compaction(self) -> Iterator[bool]:
        """Allow one process at a time to replace the members' table or to raise its fence; False if another one does now."""
        try:  # around it, since an exception of a signal handler may follow it at once
            yield self._try_lock(COMPACTION)
        finally:
            if self._descriptor >= 0:
                self._unlock(COMPACTION)

    # -- queues: a caller that changes a record must hold the lock of the groups' offsets --

    def record(self, queue_id: int) -> QueueRecord:
        """Return the current record of the queue."""
        fields = self._get(RECORDS_AT + _RECORD_STRIDE * queue_id, _RECORD)
        return QueueRecord() if fields is None else QueueRecord(*fields)

    def is_claimed(self, queue_id: int) -> bool:
        """Whether another living process has the current claim on the queue."""
        at = _queue_byte(queue_id, self.record(queue_id).fence)
        return bool(self._locked(at, at + 1))

    def claim(self, queue_id: int) -> Claim | None:
        """Claim a queue that no member holds; None when a member holds it."""
        fence = self.record(queue_id).fence
        if not self._try_lock(_queue_byte(queue_id, fence)):
            return None
        self._put_record(queue_id, QueueRecord(fence, self.incarnation))
        self._records = max(self._records, min(queue_id + 1, QUEUE_NUMS_MAX))
        if self._beat is not None:
            self._beat.set_records(self._records)
        self._claimed[queue_id] = _with_crc(_RECORD.pack(fence, self.incarnation))
        return Claim(queue_id, fence)

    def fence_off(self, queue_id: int) -> int:
        """End any hold on a queue, so that a member can claim it; return the new fence."""
        fence = (self.record(queue_id).fence + 1) % (1 << 63)
        self._put_record(queue_id, QueueRecord(fence, _NO_OWNER))
        return fence

    def holds(self, claim: Claim) -> bool:
        """Whether this process still holds the queue. Unless the caller holds the offsets' lock, that may change at any time."""
        content = self._claimed.get(claim.queue_id, b"")  # compared as it is, since each delivery asks
        if content and self._read(RECORDS_AT + _RECORD_STRIDE * claim.queue_id, len(content)) == content:
            return bool(_RECORD.unpack_from(content)[0] == claim.fence)
        return self.record(claim.queue_id) == QueueRecord(claim.fence, self.incarnation)

    def release(self, claim: Claim) -> None:
        """Release a queue."""
        if self.holds(claim):
            self._put_record(claim.queue_id, QueueRecord(claim.fence, _NO_OWNER))
        self.drop(claim)

    def drop(self, claim: Claim) -> None:
        """Drop the kernel lock of a claim, valid or not, without a change of the record."""
        self._unlock(_queue_byte(claim.queue_id, claim.fence))

    def mark(self, queue_id: int, tenure: int, end: int) -> None:
        """Note that the queue is delivered up to `end` in a tenure; it survives a kill of this process, not a power cut."""
        self._write(RECORDS_AT + _RECORD_STRIDE * queue_id + _MARK_AT, _MARK.pack(end, _mark_crc(end, tenure)))

    def marked_end(self, queue_id: int, tenure: int) -> int:
        """Return how far the queue was delivered in this tenure, by what its holder has marked; 0 if it has not."""
        found = self._read(RECORDS_AT + _RECORD_STRIDE * queue_id + _MARK_AT, _MARK.size)
        end, crc = _MARK.unpack(found.ljust(_MARK.size, b"\0"))
        return int(end) if crc == _mark_crc(end, tenure) else 0

    def close(self) -> None:
        """Leave the group: drop every lock of this process on it, even if a forked child has the file open."""
        if self._beat is not None:
            self._beat.close()
        if self._descriptor >= 0:
            try:
                unlock(self._descriptor)
            finally:
                self._forked()

    def _forked(self) -> None:
        """Close the file without unlocking: a forked child shares its parent's locks, which must end with the parent."""
        if self._descriptor >= 0:
            descriptor, self._descriptor, self._slot = self._descriptor, -1, -1
            os.close(descriptor)

    # -- locks --------------------------------------------------------------------

    def _try_lock(self, byte: int) -> bool:
        return try_lock(self._descriptor, byte, self.path)

    def _unlock(self, byte: int) -> None:
        unlock(self._descriptor, byte, 1)

    def _locked(self, start: int, end: int) -> list[int]:
        """Return the bytes of [start, end) that other open files have locked."""
        with disk_errors("read the locks of", self.path):
            return locked_bytes(self._descriptor, start, end - start)

    # -- records ------------------------------------------------------------------

    def _slot_at(self, base: int, slot: int) -> int:
        return SLOTS_AT + _SLOT_STRIDE * ((base >> 41) * SLOTS_MAX + slot)

    def _slot_record(self, byte: int, block: bytes) -> SlotRecord:
        """Return the record of a slot from those of its kind, or from the file if it is torn there."""
        base = byte & -MEMBERS
        slot = byte - base
        fields = _checked(block[_SLOT_STRIDE * slot : _SLOT_STRIDE * (slot + 1)], _SLOT) or self._get(self._slot_at(base, slot), _SLOT)
        return SlotRecord() if fields is None else SlotRecord(*fields)

    def _put_record(self, queue_id: int, record: QueueRecord) -> None:
        self._put(RECORDS_AT + _RECORD_STRIDE * queue_id, _RECORD.pack(record.fence, record.incarnation))

    def _put(self, at: int, fields: bytes) -> None:
        self._write(at, _with_crc(fields))

    def _write(self, at: int, content: bytes) -> None:
        try:  # not disk_errors(), which takes as long as the call
            os.pwrite(self._descriptor, content, at)
        except OSError as error:
            raise disk_error(error, "write", self.path) from error

    def _read(self, at: int, count: int) -> bytes:
        try:  # not disk_errors(), which takes as long as the call
            return os.pread(self._descriptor, count, at)
        except OSError as error:
            raise disk_error(error, "read", self.path) from error

    def _get(self, at: int, fields: struct.Struct) -> tuple[int, ...] | None:
        """Return the fields of a record; None if there is none with a valid checksum."""
        for _ in range(_READS):
            if (found := _checked(self._read(at, fields.size + _CRC.size), fields)) is not None:
                return found
        return None


def _queue_byte(queue_id: int, fence: int) -> int:
    return QUEUES + (fence % _FENCES << 32) + queue_id


def _with_crc(fields: bytes) -> bytes:
    return fields + _CRC.pack(zlib.crc32(fields))


def _checked(content: bytes, fields: struct.Struct) -> tuple[int, ...] | None:
    """Return the fields at the begin of the content; None without a valid checksum after them."""
    if len(content) < fields.size + _CRC.size or _CRC.unpack_from(content, fields.size)[0] != zlib.crc32(content[: fields.size]):
        return None
    return fields.unpack_from(content)


def _mark_crc(end: int, tenure: int) -> int:
    return zlib.crc32(_RECORD.pack(end, tenure))
