"""AllocateMappedFileService: the next segment stands ready before the writer needs it.

RocketMQ's puts order the next file and the one after it. Here the writer says up to where
it wants segments (`wanted_end`), and one more than the one it writes to is always kept
ready. A segment appears complete or not at all (storage/new_file.py); `ready_end` moves
afterwards, then the writer is woken.

A disk without room is no failure, nor one that would leave queues and index too little
(storage/derived_room.py): the errno stands in the control block (the writer answers
CREATE_MAPEDFILE_FAILED meanwhile), it is tried again each half second, and the store goes
on by itself once there is room. An orderly stop removes the segments that were never used,
as RocketMQ's shutdown does.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from pyengine.config import EngineConfig
from pyengine.errors import DiskError
from pyengine.formats.paths import StorePaths
from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.shared_objects import KIND_NAMES
from pyengine.ipc.store_lock import living_kinds
from pyengine.native import control as native
from pyengine.native import cpu
from pyengine.native.failpoint import failpoint
from pyengine.native.flush import monotonic_ns
from pyengine.services.page_warmer import PageWarmer
from pyengine.storage.derived_room import reserve_dispatch_space
from pyengine.storage.log_files import new_segment_folder
from pyengine.storage.new_file import create_file, make_folders, sync_folder

RETRY_NS = 500_000_000
IDLE_PAUSE_S = 0.1      # a writer that wakes up has a window of 64 MiB, enough for longer than this
BUSY_PAUSE_S = 0.002    # in a stream: as long as about this much is written, so that looking costs slow ones little
BUSY_PAUSE_S_MAX = 0.02
BUSY_STEP_BYTES = 4 << 20
BUSY_NS = 100_000_000


class AllocateMappedFileService:
    """Creates segments ahead of the writer and, in async mapped mode, brings their pages in."""

    def __init__(self, memory: EngineMemory, root: str | os.PathLike[str], config: EngineConfig,
                 report: Callable[[str], None] = lambda text: None, warn: Callable[[str], None] = lambda text: None) -> None:
        """`report` gets a sentence when making a segment begins to fail and when it works again, `warn` what is only slower."""
        self._memory = memory
        self._root = root
        self._control = memory.control
        self._line = memory.control.allocator
        self._paths = StorePaths(root)
        self._segment_bytes = memory.identity.segment_bytes
        self._report = report
        self._warn = warn
        self._warned = False
        self._warmer = None
        if memory.identity.mode == native.MODE_MAPPED:
            self._warmer = PageWarmer(root, self._segment_bytes, whole=config.warm_mapped_file_enable,
                                      populated_end=native.load(self._line, "populated_end"))
        self._retry_ns = 0
        self.obstacle = ""
        self._wrote = -1
        cpu.schedule_batch()
        self._moved_ns = 0
        self._paused = 0, 0  # when, and where the log ended then

    def work(self) -> bool:
        """Make one segment, or populate one piece, if that is due."""
        now_ns = monotonic_ns()
        wrote = native.load_position(self._control.wrote)
        if wrote != self._wrote:
            self._wrote, self._moved_ns = wrote, now_ns
        if native.load(self._line, "ready_end") < self._target(wrote):
            if now_ns < self._retry_ns or native.load(self._control.state, "frozen"):
                return False
            return self._make_one(now_ns)
        return self._warm(wrote)

    def _target(self, wrote: int) -> int:
        """Segments must stand ready up to here: what the writer wants, and one behind the one it writes to."""
        size = self._segment_bytes
        wanted = native.load(self._control.writer, "wanted_end")
        return max(-(-wanted // size) * size, wrote - wrote % size + 2 * size)

    def _make_one(self, now_ns: int) -> bool:
        start = native.load(self._line, "ready_end")
        try:
            self._create(start)
        except DiskError as error:
            number = error.errno or errno.EIO
            said, self.obstacle = self.obstacle, f"cannot make the next segment: {error}; trying again each {RETRY_NS / 1e9:g} s"
            if said != self.obstacle:
                self._report(self.obstacle)
            native.store(self._line, "error_number", number)
            native.add(self._line, "error_count")
            self._retry_ns = now_ns + RETRY_NS
            self._memory.wake(native.WRITER)
            return False
        if native.load(self._line, "error_number"):
            native.store(self._line, "error_number", 0)
            self.obstacle = ""
            self._report("segments can be made again")
        failpoint("segment_made")
        native.store(self._line, "ready_end", start + self._segment_bytes)
        failpoint("segment_ready")
        self._memory.wake(native.WRITER)
        self._memory.wake(native.FLUSHER)  # it opens the segment before anything is written to it
        return True

    def _create(self, start: int) -> None:
        path = self._paths.commit_log_segment(start)
        if not path.exists():
            path = new_segment_folder(self._root, start, self._segment_bytes) / path.name
            make_folders(path.parent)
            undispatched_bytes = start + self._segment_bytes - native.load_position(self._control.reput_from)
            reserve_dispatch_space(path.parent, self._segment_bytes, undispatched_bytes)
        try:
            os.close(create_file(path.parent, path.name, self._segment_bytes))
        except DiskError as error:
            # Made by a predecessor that died before it could say so: complete, since it has its name.
            if error.errno != errno.EEXIST:
                raise
            size = path.stat().st_size
            if size != self._segment_bytes:
                raise DiskError(f"{error.path} has {size} bytes, not {self._segment_bytes}", path=error.path) from error

    def _warm(self, wrote: int) -> bool:
        if self._warmer is None:
            return False
        more = self._warmer.advance(wrote, native.load(self._line, "ready_end"))
        native.store(self._line, "populated_end", self._warmer.populated_end)
        if self._warmer.lock_refused and not self._warned:
            self._warned = True
            self._warn(f"the pages of the next segments cannot be locked in memory ({os.strerror(self._warmer.lock_refused)}), "
                       f"puts may wait for one: raise the memlock limit to {3 * self._segment_bytes:,} bytes "
                       "(ulimit -l, LimitMEMLOCK=)")
        return more

    def pause_s(self) -> float:
        now_ns = monotonic_ns()
        if native.load(self._line, "error_number"):
            return max(0.01, (self._retry_ns - now_ns) / 1e9)
        if self._warmer is None:
            return 1.0
        if now_ns - self._moved_ns >= BUSY_NS:
            return IDLE_PAUSE_S
        (then_ns, then_wrote), self._paused = self._paused, (now_ns, self._wrote)
        pause_s = (now_ns - then_ns) / 1e9 * BUSY_STEP_BYTES / max(1, self._wrote - then_wrote)
        return min(max(pause_s, BUSY_PAUSE_S), BUSY_PAUSE_S_MAX)

    def drain(self) -> bool:
        """Remove the segments that were never written to; only in a stop of the whole engine, behind the writer.

        A living writer has the next segment mapped or open already: what it puts there
        after the name is gone would be lost, however often it is synced.
        """
        stopping = native.load(self._control.state, "refuse_puts") & native.REFUSE_STOPPING
        if not stopping or native.load(self._control.state, "frozen"):
            return False
        if native.WRITER in living_kinds(self._root, len(KIND_NAMES)):
            return False
        wrote, _ = native.committed_slot(self._control)
        wrote = max(wrote, native.load(self._control.writer, "intent_end"))
        ready_end = native.load(self._line, "ready_end")
        first = -(-wrote // self._segment_bytes) * self._segment_bytes
        if 0 < wrote == native.load_position(self._control.min_offset):
            first += self._segment_bytes  # an empty log that begins here: its one segment says so
        if first >= ready_end:
            return False
        if self._warmer is not None:
            self._warmer.close()
        native.store(self._line, "ready_end", first)  # first: nobody may count on what goes now
        failpoint("spare_given_up")
        folders = set()
        for start in reversed(range(first, ready_end, self._segment_bytes)):
            path = self._paths.commit_log_segment(start)
            folders.add(path.parent)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise DiskError(f"cannot remove {error.filename}: {error.strerror}", errno=error.errno or 0) from error
            failpoint("spare_unlinked")
        for folder in folders:
            sync_folder(folder)
        return False

    def close(self) -> None:
        if self._warmer is not None:
            self._warmer.close()
