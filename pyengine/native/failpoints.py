"""Failpoints: named steps at which a process kills or stops itself when told to (csrc/failpoint.cdef.h).

PYENGINE_FAILPOINT says what is armed:

    name:nth:kill           this process is killed when it reaches the step for the nth time (SIGKILL)
    name:nth:stop           ... is stopped (SIGSTOP); it continues with SIGCONT
    name@kind:nth:kill      only a process of that kind: a worker kind, `supervisor`, or a command of pyengine
    /path                   a file of FILE_BYTES that the processes share: it strikes one of them, once,
                            and a test can arm it again while they run (`Board`)

Steps in C are in a build made with PYENGINE_BUILD_FAILPOINTS=1 only.

FAILPOINTS lists all steps. Each lies between two stores to shared memory, or between two system calls, where a crash must do no
harm. Each name occurs exactly once in the code, in the file `where` (tests/faults/test_failpoints.py). The crash tests go through
all of them. Some gaps have no failpoint: between stores on which no decision depends (statistics, the words of a reason before its
length), and between stores into memory that no other process can find yet.
"""

from __future__ import annotations

import mmap
import os
import signal
import stat
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from pyengine._native import ffi, lib
from pyengine.errors import UsageError

if TYPE_CHECKING:
    from pyengine._native import ms_failpoint

VARIABLE = "PYENGINE_FAILPOINT"
FILE_BYTES = 4096
_MAGIC = b"pyengine failpoint\n"  # the last bytes of the file
_ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}

_is_used = False
_references: list[object] = []


def failpoint(name: str) -> None:
    """Kill or stop this process if the step `name` is armed for it."""
    if _is_used:
        lib.ms_failpoint_reach(name.encode())


class Board:
    """One failpoint in a file that processes share; they find the file by PYENGINE_FAILPOINT=path."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Create the file if it does not exist; UsageError for an existing file with other content, which stays as it is."""
        self.path = Path(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and status.st_size == 0:
                os.pwrite(descriptor, _MAGIC, FILE_BYTES - len(_MAGIC))  # gives it its size too, also while another process does so
            elif status.st_size != FILE_BYTES or os.pread(descriptor, len(_MAGIC), FILE_BYTES - len(_MAGIC)) != _MAGIC:
                raise UsageError(f"{path} is not a file of a failpoint: name one that is not there")
            self._mapping = mmap.mmap(descriptor, FILE_BYTES)
        finally:
            os.close(descriptor)
        self._point = ffi.cast("struct ms_failpoint *", ffi.from_buffer(self._mapping))

    def arm(self, name: str, nth: int = 1, action: str = "kill", process: str = "") -> None:
        """Arm the failpoint: the nth time that a process of that kind reaches the step, it is killed or stopped."""
        self.disarm()
        _fill(self._point, name, nth, action, process)

    def disarm(self) -> None:
        """Disarm the failpoint."""
        lib.ms_store_u32(ffi.addressof(self._point, "state"), lib.MS_FAILPOINT_IDLE)

    @property
    def is_armed(self) -> bool:
        """Return whether the failpoint is armed and has struck no process yet."""
        return lib.ms_load_u32(ffi.addressof(self._point, "state")) == lib.MS_FAILPOINT_ARMED

    @property
    def struck_pid(self) -> int:
        """Return the process that was struck since the failpoint was armed, 0 if none was."""
        struck = lib.ms_load_u32(ffi.addressof(self._point, "state")) == lib.MS_FAILPOINT_STRUCK
        return self._point.pid if struck else 0

    def use(self, process: str) -> None:
        """Attach this process to the board, as one of the kind `process`."""
        _use(self._point, process, self)


def is_built(point: Failpoint) -> bool:
    """Return whether this build has the step: those in C need PYENGINE_BUILD_FAILPOINTS=1."""
    return not point.in_c or bool(lib.ms_failpoint_built())


def _use(point: ms_failpoint, process: str, keep: object) -> None:
    global _is_used
    _references.append((point, keep))
    lib.ms_failpoint_use(point, process.encode()[:31])
    _is_used = True


def _fill(point: ms_failpoint, name: str, nth: int, action: str, process: str) -> None:
    known = FAILPOINTS.get(name)
    if known is None or action not in _ACTIONS or nth < 1:
        raise UsageError(f"no failpoint {name}:{nth}:{action}: the names are in pyengine/native/failpoints.py, "
                         "passings count from 1, and the last word is kill or stop")
    if not is_built(known):
        raise UsageError(f"the failpoint {name} is in C: build with PYENGINE_BUILD_FAILPOINTS=1 to have it")
    point.nth, point.hits, point.pid, point.signal = nth, 0, 0, _ACTIONS[action]
    ffi.memmove(point.name, name.encode().ljust(64, b"\0"), 64)
    ffi.memmove(point.process, process.encode()[:31].ljust(32, b"\0"), 32)
    lib.ms_store_u32(ffi.addressof(point, "state"), lib.MS_FAILPOINT_ARMED)


def own_kind() -> str:
    """Return this process's kind: `writer` of `-m pyengine.workers.writer`, `recover` of `-m pyengine recover`."""
    try:
        words = Path("/proc/self/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    if "-m" not in words:
        return ""
    module, *rest = words[words.index("-m") + 1:] or [""]
    if module == "pyengine":
        return next((word for word in rest if not word.startswith("-")), "")
    return module.rpartition(".")[2]


def read_environment() -> None:
    """Arm what PYENGINE_FAILPOINT says; called at a process's start, and after a fork into another kind."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return
    if text.startswith("/"):
        Board(text).use(own_kind())
        return
    try:
        where, nth, action = text.split(":")
        name, _, process = where.partition("@")
        point = ffi.new("struct ms_failpoint *")
        _fill(point, name, int(nth), action, process)
    except ValueError:
        raise UsageError(f"{VARIABLE}={text}: write name:nth:kill, name:nth:stop, name@kind:nth:kill or the path of a "
                         "file") from None
    _use(point, own_kind(), point)


# ---- the steps ----------------------------------------------------------------------------------

EVERY_MODE = "async pool sync"
MASTER, SLAVE = "master", "slave"

# What must happen so that a process reaches a step.
PUTS = "puts"          # producers put
DELAYED = "delayed"    # ... delayed messages too
CLEANING = "cleaning"  # ... and old segments are deleted
START = "start"        # an engine starts
STOP = "stop"          # an engine is stopped in order
RECOVERY = "recovery"  # `recover` after everything was killed
EXT = "ext"            # queues have extensions
TABLES = "tables"      # more queues come than the queue table has room for
REPLICATED = "replicated"  # a SYNC_MASTER and its slave, while producers put
PROMOTED = "promoted"  # the slave is promoted, and the old master comes back as its slave
OWN = "own"            # something rare, for which the step has its own test


class Failpoint(NamedTuple):
    """One step. `gap` says what is done when a process reaches it, and what is not.

    `process`: the kind of process that reaches it, or one of them. `modes`: the write paths that have it.
    `after`: mostly the successor of a process that died at that other step reaches it.
    `side`: which of two engines has the process; "" for either.
    """

    name: str
    gap: str
    where: str
    process: str
    modes: str = EVERY_MODE
    after: str = ""
    scene: str = PUTS
    side: str = ""

    @property
    def in_c(self) -> bool:
        return self.where.startswith("csrc/")


def _steps(where: str, process: str, *steps: partial[Failpoint], **common: str) -> list[Failpoint]:
    """Return the steps of one file; a step's own fields take precedence over `process` and `common`."""
    return [step(**({"where": where, "process": process} | common | step.keywords)) for step in steps]


def _(name: str, gap: str, **fields: str) -> partial[Failpoint]:
    return partial(Failpoint, name, gap, **fields)


_TABLE = (
    *_steps("csrc/writer.c", "writer",
        _("pass_intent_reset", "a pass begins: intent_end is at the position, the undo list is still the last pass's"),
        _("pass_undo_emptied", "the undo list is empty, but still the last pass's"),
        _("pass_undo_opened", "the undo list belongs to the new pass, which is not intended yet"),
        _("pass_intended", "the pass is intended, nothing is done"),
        _("pass_ready", "all entries of the pass are executed; where the pass is written their bytes are in the file"),
        _("commit_slot_wrote", "the other commit slot has the new end, but the old store time"),
        _("commit_slot_begun", "the other commit slot has the new end, but the old heads"),
        _("commit_slot_head", "one session's head is new there, its answers are not"),
        _("commit_slot_filled", "the other commit slot is whole, not committed"),
        _("commit_point", "committed; wrote, heads and answers lag"),
        _("wrote_published", "wrote moved, committed and answers lag"),
        _("committed_published", "readers see the records, producers no answers"),
        _("pass_published", "the flusher is woken, producers see no answers"),
        _("session_head_published", "the ring's room is free, the answers are not published"),
        _("session_acked_published", "acked moved; acked_seq, on which producers sleep, did not"),
        _("session_answer_published", "this session's answers are published, other sessions' are not"),
        _("answers_published", "all answers are there, no process is woken"),
        _("producers_woken", "producers are awake, reputter or committer are not"),
        _("pass_done", "nothing is left to do"),
        _("rollback_queue_put_back", "one queue's offset of a dead pass is restored, others are not", after="pass_queue_advanced"),
        _("rollback_undo_emptied", "all offsets of a dead pass are restored; the empty list is still its list",
          after="pass_queue_advanced"),
        _("rollback_undo_closed", "the list belongs to no pass; the dead one is still intended", after="pass_queue_advanced"),
        _("rollback_done", "the dead pass is closed", after="pass_queue_advanced"),
        _("writer_state_taken", "a new writer has read the commit slot", after="commit_point"),
        _("writer_wrote_published", "a new writer has published wrote, not committed", after="commit_point"),
    ),
    *_steps("csrc/take_entry.c", "writer",
        _("pass_queue_remembered", "the queue's offset is in the undo list"),
        _("pass_record_appended", "a record is beyond the end of the log"),
        _("pass_queue_advanced", "a queue offset of an uncommitted pass is assigned"),
        _("answer_filled", "an answer is filled in, its sequence may be torn"),
        _("answer_given", "an answer of an uncommitted pass is in the session"),
        _("session_accused", "a producer's fault is in its row, its session does not say so", scene=OWN),
        _("session_closed", "the session of a producer that broke the protocol is closed, its row still says OPEN", scene=OWN),
    ),
    *_steps("csrc/undo.h", "writer",
        _("undo_filled", "an undo entry is filled in, not counted"),
        _("undo_counted", "the undo entry counts, the queue is not marked as remembered"),
    ),
    *_steps("csrc/light_queues.c", "writer",
        _("light_queue_advanced", "a further queue's offset is assigned", scene=OWN),
    ),
    *_steps("csrc/log_tail.c", "writer",
        _("tail_intended", "intent_end covers the record, no byte of it is written", modes="async pool"),
        _("tail_stage_intended", "the same where the pass is written: it will be gathered", modes="async sync"),
        _("tail_record_encoded", "a whole record beyond the end, the position does not cover it"),
        _("tail_gathered", "records are gathered, none is in the file", modes="async sync"),
        _("tail_zeros_due", "gathered records are in the file, the zeros ahead are not", modes="sync"),
        _("tail_written", "records are in the file, in sync mode zeros ahead too", modes="async sync"),
        _("tail_blank_encoded", "the blank that ends the segment is written, the next one not begun"),
        _("tail_rolled", "the next segment is the current one"),
    ),
    *_steps("csrc/record.c", "writer",
        _("record_head_encoded", "half a record: no body"),
        _("record_body_copied", "half a record: its body has no checksum"),
        _("record_body_encoded", "half a record: no topic"),
    ),
    *_steps("csrc/queue_table.c", "writer",
        _("queue_slot_filled", "a new queue is filled in, no search finds it"),
        _("queue_slot_claimed", "a new queue can be found, it is not counted"),
        _("queue_table_copying", "a larger queue table is half filled", scene=OWN),
    ),
    *_steps("csrc/latch.c", "writer",
        _("latch_taken", "the flag says that the owner was woken, but it was not"),
        _("latch_arming", "there is nothing to do, and wakers do not post yet"),
        _("latch_armed", "about to check once more and to sleep"),
        _("latch_sleeping", "there was nothing to do after arming either: about to sleep"),
    ),
    *_steps("csrc/control.c", "flusher",
        _("control_versioned", "the control block has its version and size, no magic", process="supervisor", scene=START),
        _("flush_slot_begun", "synced; the other slot has the new end, but the old time"),
        _("flush_slot_filled", "synced; the new pair is in the other slot"),
        _("flush_pair_published", "the pair moved, flushed did not"),
        _("flushed_published", "flushed moved, the sequence that producers sleep on did not"),
        _("confirm_stored", "`confirm` moved, the sequence that puts sleep on did not", process="replicator", scene=REPLICATED),
        _("freeze_claimed", "the store is frozen, the reason is not written", scene=OWN),
        _("freeze_numbered", "worker and error number are there, no reason in words", scene=OWN),
        _("freeze_reasoned", "the reason is there, the state says RUNNING", scene=OWN),
        _("freeze_stated", "the state says READ_ONLY, the freeze is not complete", scene=OWN),
        _("freeze_complete", "frozen; no process is woken", scene=OWN),
    ),
    *_steps("csrc/group_commit.c", "flusher",
        _("group_sync_announced", "sync mode: waiting producers see how far the next sync will go; it has not begun"),
        _("group_sync_begins", "sync mode: about to sync"),
        _("group_sync_done", "one segment is synced"),
        _("group_synced", "all is synced, nothing published"),
        _("group_published", "published; the writer is not woken"),
        modes="sync"),
    *_steps("csrc/pool_commit.c", "committer",
        _("pool_piece_written", "a piece of the pool is in its file, committed lags"),
        _("pool_blank_written", "a segment is complete in its file, committed lags"),
        _("pool_committed", "committed moved, the reputter is not woken"),
        modes="pool"),
    *_steps("csrc/sequence.c", "flusher",
        _("sequence_raised", "a sequence moved, its sleepers are not woken"),
    ),
    *_steps("csrc/arrivals.c", "reputter",
        _("arrivals_raised", "messages can be read, their readers are not woken"),
    ),
    *_steps("csrc/consume_queue.c", "reputter",
        _("queue_room_allocated", "blocks for queue entries, no entries"),
        _("queue_entries_written", "entries of one queue are in its file, other queues lack theirs"),
        _("ext_units_written", "extension units are there, the entries that name them are not", scene=EXT),
    ),
    *_steps("csrc/dispatch.c", "reputter",
        _("dispatch_queued", "a record's queue entries are gathered, its keys are not put"),
        _("dispatch_indexed", "a record's keys are put, its queue entries are in no file"),
        _("dispatch_gathered", "a batch is gathered, its entries are in no file"),
        _("dispatch_written", "a batch is in its files, reput_from lags"),
    ),
    *_steps("csrc/reput.c", "reputter",
        _("batch_dispatched", "a batch is in queues and index, reput_from lags"),
        _("reput_from_moved", "reput_from moved, consumers are not woken"),
    ),
    *_steps("csrc/index_file.c", "reputter",
        _("index_window_allocated", "blocks for index entries, no entries"),
        _("index_undo_written", "the undo of a put is there, nothing is changed"),
        _("index_hash_written", "half an index entry"),
        _("index_entry_written", "a whole index entry, no slot leads to it"),
        _("index_slot_written", "the slot leads to an entry that is not counted"),
        _("index_begin_written", "the first entry's begin is in the header"),
        _("index_slots_counted", "the slot is counted, the entry is not"),
        _("index_entry_counted", "the entry counts, the header's end lags"),
        _("index_end_offset_written", "end offset, no end time"),
        _("index_end_time_written", "the put is complete, its undo is still there"),
        _("index_put_done", "a key is in"),
        _("index_slot_put_back", "a dead put's slot is restored, the header is not", after="index_slot_written"),
        _("index_header_put_back", "a dead put is undone, the undo is still there", after="index_slot_written"),
        _("index_inherits", "a new index file has its predecessor's times, not its offsets"),
    ),
    *_steps("csrc/cleaning.c", "cleaner",
        _("hold_owned", "a place for a hold is a reader's, it names no segment", process="reader"),
        _("hold_stored", "the hold is stored, the reader has not looked whether it came too late", process="reader"),
        _("hold_emptied", "a hold names no segment any more, its place is still the reader's", process="reader"),
        _("dead_hold_emptied", "the same of a dead reader's, by the cleaner"),
        _("removing_end_moved", "no process gets a new hold on the segment", scene=CLEANING),
        scene=OWN),
    *_steps("csrc/producer.c", "acked_producer",
        _("producer_entry_filled", "an entry is in the ring, the writer may not have it"),
        _("producer_entry_published", "the writer may have the entry, it is not woken"),
    ),
    *_steps("pyengine/storage/durable_writes.py", "allocator",
        _("new_file_unnamed", "an empty file without a name"),
        _("new_file_sized", "a file without a name has its length, no blocks"),
        _("new_file_allocated", "it has its blocks, not durable", scene=OWN),  # the allocator's segments have none yet
        _("new_file_synced", "it is durable, and has no name"),
        _("new_files_unnamed", "many complete files without names, none durable", scene=OWN),
        _("new_files_synced", "they are durable, none has its name", scene=OWN),
        _("new_files_linked", "some have their names, not durably", scene=OWN),
        _("new_file_linked", "it has its name; the name is not durable"),
        _("new_file_durable", "file and name are durable, no process is told"),
        _("folder_made", "a new folder whose name is not durable", scene=OWN),
        _("sibling_file_made", "no O_TMPFILE: the finished file is in the sibling folder", scene=OWN),
        _("sibling_file_renamed", "no O_TMPFILE: it has its name; the sibling folder still exists", scene=OWN),
        _("config_opened", "an empty temporary file beside the old one", process="checkpointer"),
        _("config_written", "the new content is written, not durable", process="checkpointer"),
        _("config_synced", "the new content is durable under its temporary name", process="checkpointer"),
        _("config_backup_linked", "the old content has its second name, `.bak` is older", scene=OWN),
        _("config_backup_renamed", "`.bak` is the present content", scene=OWN),
        _("config_renamed", "the new content has its name; the name is not durable", process="checkpointer"),
        _("config_durable", "file and name are durable", process="checkpointer"),
    ),
    *_steps("pyengine/storage/checkpoint.py", "checkpointer",
        _("checkpoint_written", "the three times are written in place, not durable"),
        _("checkpoint_synced", "they are durable"),
    ),
    *_steps("pyengine/storage/checkpoint.py", "supervisor",
        _("abort_created", "`abort` exists, its name is not durable", scene=START),
        _("abort_removed", "`abort` is gone, not durably", scene=STOP),
    ),
    *_steps("pyengine/storage/durable_writes.py", "cleaner",
        _("removal_unlinked", "a file has lost its name, not durably", scene=CLEANING),
        _("removal_durable", "it has lost its name for good, its blocks are still taken", scene=CLEANING),
        _("removal_step_done", "a part of its blocks is freed", scene=OWN),
    ),
    *_steps("pyengine/storage/checkpoint.py", "flusher",
        _("sync_failure_noted", "a failed sync is noted on the disk, its caller has told no process", scene=OWN),
    ),
    *_steps("pyengine/storage/durable_writes.py", "recover",
        _("bytes_rewritten", "bytes that may not be on the disk are written over themselves, not durable", scene=OWN),
        _("bytes_written", "bytes are in an existing file, not durable", modes="pool", scene=RECOVERY),
        _("bytes_durable", "they are durable", modes="pool", scene=RECOVERY),
    ),
    *_steps("pyengine/storage/mapped_file.py", "recover",
        _("zeros_page_written", "one page after the end is cleared, the next is not"),
        _("zeros_written", "everything after the end is cleared, not durable"),
        scene=RECOVERY),
    *_steps("pyengine/storage/recovery/quarantine.py", "recover",
        _("quarantine_copied", "a durable copy without its note"),
        _("quarantine_noted", "a note without its file"),
        _("quarantine_moved", "the file is moved, not durably"),
        modes="async sync", scene=RECOVERY),
    *_steps("pyengine/storage/index_file.py", "reputter",
        _("index_file_made", "a new index file that says nothing of its predecessor"),
    ),
    *_steps("pyengine/storage/recovery/recover.py", "recover",
        _("recovery_planned", "everything is decided, nothing is changed", scene=RECOVERY),
        _("recovery_marked", "the marker exists", scene=RECOVERY),
        _("recovery_loss_accepted", "the watermark is lowered, the log is not truncated", scene=OWN),
    ),
    *_steps("pyengine/storage/recovery/log.py", "recover",
        _("recovery_segment_gone", "a segment after the end is gone, the one before it still exists"),
        _("recovery_drained", "pool bytes of one segment are in its file", modes="pool"),
        _("recovery_tail_cleared", "the tail is zero, the log is not synced"),
        _("recovery_log_done", "the log is whole and durable; queues and index are as they were"),
        scene=RECOVERY),
    *_steps("pyengine/storage/recovery/derived.py", "recover",
        _("recovery_queue_cut", "one queue is cut back to the log"),
        _("recovery_index_deleted", "index files that recovery cannot trust are deleted", modes="async sync"),
        _("recovery_dispatched", "queues and index have everything, nothing of it is durable"),
        _("recovery_derived_synced", "queues and index are durable, the checkpoint is old"),
        scene=RECOVERY),
    *_steps("pyengine/storage/recovery/recover.py", "recover",
        _("recovery_checkpoint_written", "the checkpoint is true, the watermark is old"),
        _("recovery_watermark_written", "the watermark is true, `abort` still exists"),
        _("recovery_kept_noted", "the next recovery knows where this one began to read, `abort` is there"),
        _("recovery_abort_removed", "`abort` is gone, the marker still exists"),
        _("recovery_marker_removed", "the files are done, consumers' offsets are not checked"),
        _("recovery_done", "the store is as it was stopped in order"),
        scene=RECOVERY),
    *_steps("pyengine/services/flush_commit_log.py", "flusher",
        _("flusher_taken_over", "a new incarnation that no writer vouches for", after="flushed_published", modes=EVERY_MODE),
        _("timed_sync_begins", "about to sync one segment"),
        _("timed_synced", "all is synced, nothing published"),
        _("timed_published", "flushed is published"),
        modes="async pool"),
    *_steps("pyengine/services/flush_commit_log.py", "committer",
        _("pool_without_room", "a piece may be in its file in part, puts without a buffer are refused, the writer is not woken",
          scene=OWN),
        _("pool_buffer_freed", "a buffer is free, the writer is not woken"),
        modes="pool"),
    *_steps("pyengine/services/allocate_mapped_file.py", "allocator",
        _("segment_made", "a complete segment that was not announced"),
        _("segment_ready", "ready_end moved, writer and flusher are not woken"),
        _("log_reserved", "a step of the log has blocks, reserved_end lags"),
        _("log_reserve_published", "reserved_end moved, the writer is not woken"),
        _("spare_given_up", "stopping: ready_end and reserved_end are lowered, the spare segments exist", scene=STOP),
        _("spare_unlinked", "stopping: a spare segment is gone, not durably", scene=STOP),
    ),
    *_steps("pyengine/services/flush_consume_queue.py", "checkpointer",
        _("derived_file_synced", "one queue or index file is durable, the next one is not"),
        _("derived_synced", "queues and index are durable, nothing says so"),
        _("derived_noted", "the control block says so, the checkpoint does not"),
        _("checkpoint_noted", "the checkpoint is new, the watermark is old"),
        _("watermark_noted", "both are new"),
        _("adopted_segment_read", "a segment of another program is read and whole, the watermark does not cover it", scene=OWN),
    ),
    *_steps("pyengine/services/clean_files.py", "cleaner",
        _("segment_chosen", "its turn has come; readers still get holds on it"),
        _("segment_released", "no process holds the segment, it still exists"),
        _("segment_removed", "the segment has lost its name for good, min does not know"),
        _("min_moved", "min moved, the counters did not"),
        _("removal_half_counted", "a segment is counted, its bytes are not"),
        _("removal_counted", "everything but the blocks is done"),
        _("derived_file_removed", "a queue or index file has lost its name, nothing is counted"),
        scene=CLEANING),
    *_steps("pyengine/services/schedule_message.py", "scheduler",
        _("deliveries_taken", "due messages are taken, none is put; a cancel comes too late for them"),
        _("delivery_submitted", "a delayed message is submitted for its topic"),
        _("delivery_answered", "it is stored, nothing says so"),
        _("deliveries_durable", "it is durable, delayOffset.json does not say so"),
        _("deliveries_noted", "delayOffset.json says so"),
        scene=DELAYED),
    *_steps("pyengine/storage/consumer_offset.py", "producer",
        _("cancel_marked", "a delayed message is cancelled for all processes, not durably"),
        _("cancel_durable", "it is durable, its canceller has no answer"),
        scene=OWN),
    *_steps("pyengine/services/put_message.py", "writer",
        _("dead_pass_put_back", "a new writer has put the dead pass's queues back, its bytes are still there",
          after="pass_queue_advanced"),
        _("dead_pass_zeroed", "its bytes are zero, it is still intended", after="pass_queue_advanced"),
        _("pass_cut_short", "zeros are in place of bodies that a producer took away, nothing of the pass is rolled back",
          scene=OWN),
        _("pass_without_room", "a pass found no room: its bytes are in the file in part, it is not rolled back", scene=OWN),
        _("pool_buffer_taken", "a buffer is taken for the next segment, the writer has not attached it", modes="pool"),
        _("segment_wanted", "a segment is asked for, the allocator is not woken"),
        _("segment_rolled", "the finished segment is released, no next one is attached"),
        _("session_attached", "a session is attached, none of its entries is read"),
        _("session_detached", "a dead session is drained, its object exists"),
        _("session_unlinked", "its object is gone, its row says DEAD"),
        _("table_wanted", "a larger queue table is asked for, the supervisor is not woken", scene=TABLES),
        _("table_copied", "a larger queue table is filled, not in use", scene=TABLES),
        _("table_used", "the larger one is committed, the old one still exists", scene=TABLES),
        _("unseen_sync_found", "bytes are in doubt of a sync that this writer's descriptors know nothing of", scene=OWN),
        _("writer_sync_announced", "the writer is about to sync its descriptors for a new flusher", after="flushed_published"),
        _("flusher_vouched", "the writer's descriptors are synced clean, no flusher is told", after="flushed_published"),
        _("flusher_verified", "the new flusher may go on, it is not woken", after="flushed_published"),
    ),
    *_steps("pyengine/services/service.py", "flusher",
        _("sync_failed", "a sync has failed, nothing says so", scene=OWN),
    ),
    *_steps("pyengine/ipc/crashed_engine_memory.py", "recover",
        _("left_memory_retired", "producers see that their engine has ended, recovery has not begun", scene=RECOVERY),
    ),
    *_steps("pyengine/ipc/shared_objects.py", "supervisor",
        _("shared_object_gone", "one object of a dead engine is removed, others exist", scene=START),
        _("run_written", "where the memory will be is noted in a temporary file", scene=OWN),
        _("shared_object_named", "an object of no bytes has its name", scene=START),
        _("shared_object_allocated", "it has its pages, and says nothing", scene=START),
        _("object_copied", "an object that lost its name has a copy, still under another name", scene=OWN),
        _("semaphore_made", "one worker has its wait point, others do not", scene=START),
    ),
    *_steps("pyengine/ipc/control_block.py", "supervisor",
        _("settings_renamed", "changed settings have their name, no worker is told and no limit is changed"),
        _("limits_changed", "producers that connect find the new limits, no worker is told"),
        scene=OWN),
    *_steps("pyengine/ipc/heartbeat.py", "flusher",
        _("worker_line_begun", "a new worker's line has its start time and the dead one's pid"),
        _("worker_line_counted", "it counts as a new incarnation, under the dead one's pid"),
        after="flushed_published"),
    *_steps("pyengine/ipc/sessions.py", "supervisor",
        _("session_object_made", "a session's object exists, its row is FREE"),
        _("session_row_filled", "its row is filled in, FREE still"),
        _("session_opened", "its row is OPEN, the writer is not told"),
        _("session_marked_dead", "its row is DEAD, the writer is not told"),
    ),
    *_steps("csrc/raw_append.c", "writer",
        _("raw_begun", "a slave's writer has room for what its master sent, nothing is copied"),
        _("raw_record_copied", "one record is beyond the end, the next is not copied"),
        _("raw_copied", "all of them are beyond the end, nothing is answered"),
        side=SLAVE, scene=REPLICATED),
    *_steps("csrc/replication.c", "replicator",
        _("link_texts_begun", "a link's texts are being written: text_seq is odd"),
        _("link_texts_filled", "they are written, text_seq is odd still"),
        _("link_cleared", "one link of a dead replicator is gone, the others are there", after="confirm_stored"),
        scene=REPLICATED),
    *_steps("pyengine/services/replication/ha_client.py", "replicator",
        _("slave_session_opened", "a session for what the master sends, no connection"),
        _("slave_connected", "connected, nothing is asked for"),
        _("slave_asked", "the first report is sent, nothing has come"),
        _("received_moved", "`received` moved over what came, none of it is with the writer"),
        _("slave_linked", "`linked` says so, the link's row does not"),
        _("raw_submitted", "records are in the writer's ring, unanswered"),
        _("raw_answered", "they are appended, nothing is reported"),
        _("slave_confirmed", "`confirm` moved, nothing is reported"),
        _("slave_reported", "reported to the master, the link's row lags"),
        _("slave_disconnected", "the connection is closed, `linked` still says it is open", after=""),
        after="confirm_stored", side=SLAVE, scene=REPLICATED),
    *_steps("csrc/ha_follow.c", "replicator",
        _("run_received", "records are in the ring and not published; `received` moved over them"),
        _("run_submitted", "records are in the writer's ring, unanswered"),
        _("run_answered", "they are appended, nothing is reported"),
        _("run_confirmed", "`confirm` moved, nothing is reported"),
        _("run_reported", "reported to the master, the link's row lags"),
        side=SLAVE, scene=REPLICATED),
    *_steps("csrc/ha_links.c", "replicator",
        _("frame_read", "bytes to send are read; whether they were deleted meanwhile is not checked"),
        _("frame_made", "a frame is made, nothing of it is sent"),
        _("frame_sent", "a frame is with the kernel, the link's row does not say so"),
        _("report_taken", "a report is in the link's row, `confirm` lags"),
        _("confirm_published", "`confirm` moved, the reputter is not woken"),
        side=MASTER, scene=REPLICATED),
    *_steps("pyengine/services/replication/ha_connection.py", "replicator",
        _("link_positioned", "a slave has reported its position, nothing shows it"),
        _("frames_filled", "frames are made, none is sent"),
        _("frames_sent", "frames are with the kernel, the link's row does not say so"),
        after="confirm_stored", side=MASTER, scene=REPLICATED),
    *_steps("pyengine/services/replication/ha_service.py", "replicator",
        _("link_opened", "a connection has its row, no loop serves it", after="confirm_stored"),
        _("link_dropped", "a connection and its row are gone, `slaves_connected` still counts it"),
        _("slaves_counted", "`slaves_connected` is true", after="confirm_stored"),
        side=MASTER, scene=REPLICATED),
    *_steps("pyengine/services/replication/ha_connection.py", "replicator",
        _("source_opened", "a segment is open to be sent, its descriptor is not kept yet"),
        _("source_read", "bytes to send are read; whether they were deleted meanwhile is not checked"),
        after="confirm_stored", side=MASTER, scene=REPLICATED),
    *_steps("pyengine/services/replication/ha_notes.py", "replicator",
        _("replication_noted", "replication.json is new and durable", scene=REPLICATED),
    ),
    *_steps("pyengine/storage/recovery/log.py", "supervisor",
        _("cut_watermark_lowered", "the watermark ends at the cut, the log beyond it"),
        _("cut_copied", "the end of the segment of the cut is in quarantine, the note does not say so"),
        _("cut_kept", "the note says so, nothing is cut"),
        _("cut_segment_gone", "a segment after the cut is deleted, the one before it still exists"),
        _("cut_cleared", "the log ends at the cut, the note still exists"),
        _("cut_note_unlinked", "the note has lost its name, not durably"),
        _("cut_done", "the note is gone; queues and index go beyond the log"),
        scene=PROMOTED),
    *_steps("pyengine/engine/bring_up.py", "supervisor",
        _("confirmed_settled", "what counts as confirmed is noted, no memory is made"),
        _("confirm_restored", "`confirm` is in memory that no process can attach yet"),
        scene=PROMOTED),
    *_steps("pyengine/storage/backup_files.py", "backup",
        _("backup_piece_written", "a piece of a backup is written, not synced, and has no name"),
        _("backup_piece_synced", "it is durable and has no name"),
        _("backup_note_synced", "the new manifest or progress note is durable and has no name, the old one is in its place"),
        scene=OWN),
    *_steps("pyengine/client/table_formats.py", "tables",
        _("table_data_durable", "data files are durable, no commit of the Delta table names them"),
        _("table_committed", "one Delta table has a piece of the log, the folder's note lags"),
        _("table_metadata_due", "data files of the Iceberg table are durable, its metadata is not written"),
        _("table_catalog_committed", "one Iceberg table has a piece of the log, the folder's note lags"),
        scene=OWN),
    *_steps("pyengine/client/tables.py", "tables",
        _("tables_noted", "all tables have a piece and the folder says so, the hold is at the piece's beginning"),
        scene=OWN),
    *_steps("pyengine/client/backup.py", "backup",
        _("backup_piece_noted", "a new piece is named in progress.json, the manifest is that of the backup before"),
        _("backup_manifest_due", "all files of the backup are durable, its manifest is not written"),
        _("backup_manifest_written", "the backup is complete, files of the one before still exist"),
        _("restore_segment_made", "a segment is restored where no store is yet", process="restore"),
        _("restore_rebuilt", "queues and index are made, the store is not in its place", process="restore"),
        _("restore_moving", "the store is whole and noted to be; none of it is in its place", process="restore"),
        _("restore_moved", "a part of the store is in its place", process="restore"),
        scene=OWN),
    *_steps("pyengine/cli/promote.py", "promote",
        _("promotion_judged", "it may be promoted, and runs as a slave"),
        _("promotion_stopped", "it is stopped, and a slave still"),
        _("promotion_set", "engine.toml says master, replication.json says slave"),
        _("promotion_noted", "both say master, the engine is not started"),
        scene=PROMOTED),
    *_steps("pyengine/engine/supervisor.py", "supervisor",
        _("adopted_running", "a stop that was cut short is off, puts are still refused", scene=OWN),
        _("stop_refused", "puts are refused, the state says RUNNING"),
        _("stop_stated", "the state says STOPPING, no process was told"),
        _("stopped_stated", "`abort` is gone and the state says STOPPED, the memory exists"),
        _("stopped_retired", "processes that have the memory see that it is retired"),
        _("stopped_uncounted", "the count of producers is gone, the memory exists"),
        scene=STOP),
    *_steps("pyengine/engine/bring_up.py", "supervisor",
        _("table_made", "a larger queue table exists, it is not offered", scene=TABLES),
        _("table_offered", "it is offered, the writer is not woken", scene=TABLES),
        _("epoch_raised", "the store is recovered, memory of the dead engine still exists", scene=START),
        _("cut_decided", "a slave's log is longer than its master's; nothing is changed", scene=PROMOTED),
        _("cut_intended", "the note says where to cut, nothing is cut", scene=PROMOTED),
        _("origin_made", "a new slave has its first segment, no memory", scene=OWN),
        _("memory_made", "shared memory is made, `abort` does not exist", scene=START),
        _("engine_opened", "`abort` exists, the control block is not published", scene=START),
        _("engine_published", "workers can attach, none is started", scene=START),
    ),
)

FAILPOINTS = MappingProxyType({point.name: point for point in _TABLE})

read_environment()
