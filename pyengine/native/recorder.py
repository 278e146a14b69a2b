"""The flight recorder: what made puts wait, in shared memory that outlives every process (csrc/recorder.cdef.h).

A worker records through its `Recorder`; `pyengine why` reads all rings with read_rings().
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from pyengine._native import ffi, lib
from pyengine.native.control import SharedStruct

if TYPE_CHECKING:
    from pyengine._native import ms_recorder, ms_recorder_handle, ms_recorder_ring, ms_stall, ms_writer

_SHARED: SharedStruct[ms_recorder] = SharedStruct("the flight recorder", "struct ms_recorder", magic=b"MSRECORD",
                                                  version=lib.MS_RECORDER_LAYOUT_VERSION)
view, check = _SHARED.view, _SHARED.check
RECORDER_BYTES = _SHARED.size_bytes
THRESHOLD_NS: int = lib.MS_STALL_NS
STALLS: int = lib.MS_STALLS
PUTS_RING: int = lib.MS_WORKER_KINDS

# By their numbers in csrc/recorder.cdef.h.
PHASE_NAMES = ("ring", "segment", "touch", "write", "sync", "slave", "lock", "other")
WHAT_NAMES = ("", "pass", "request", "puts", "sync", "confirm", "write", "round", "blocked", "stopped", "died", "start")
CAUSE_NAMES = ("unknown", "sync", "write", "segment", "pool", "fault", "slave", "lock", "stopped", "no_room", "cpu", "restart",
               "backlog", "large", "blocked", "roll", "woken_late", "round", "start", "failed")
BLOCKED_PHASE = len(PHASE_NAMES)
count_resumes = lib.ms_recorder_count_resumes  # handle SIGCONT, so that a worker notices that it was stopped; called once by each worker
# Initialize zeroed memory, or keep what a dead engine of this boot recorded; called by the supervisor.
format_recorder = lib.ms_recorder_format


class Stall(NamedTuple):
    """One recorded delay, in CLOCK_MONOTONIC ns of the recorder's boot; `kind` is the worker's number, or PUTS_RING."""

    kind: int
    number: int
    began_ns: int
    took_ns: int
    what: str
    cause: str
    phase_ns: dict[str, int]
    offset: int
    bytes: int
    entries: int
    detail: int
    window_ns: int
    queued_ns: int
    busy_ns: int
    major_faults: int
    minor_faults: int
    error_number: int
    pid: int

    @property
    def ended_ns(self) -> int:
        return self.began_ns + self.took_ns


class CurrentPhase(NamedTuple):
    """What a worker does at this moment: the name of a phase, or "blocked"."""

    phase: str
    since_ns: int


class Minute(NamedTuple):
    """How many slow puts one minute (CLOCK_MONOTONIC / 60 s) had."""

    minute: int
    stalls: int


class Ring(NamedTuple):
    """What one worker has recorded: `recorded` stalls, the newest of which are in `stalls`, oldest first."""

    recorded: int
    current: CurrentPhase | None
    stalls: list[Stall]
    minutes: list[Minute]  # of PUTS_RING


class Recorder:
    """Writes one worker's ring. Without `shared` it records nothing."""

    def __init__(self, shared: ms_recorder | None = None, kind: int = 0) -> None:
        self.handle: ms_recorder_handle = ffi.new("struct ms_recorder_handle *")
        self._shared = shared  # must outlive the handle
        lib.ms_recorder_open(self.handle, ffi.NULL if shared is None else shared, kind)

    def let_writer_record(self, writer: ms_writer) -> None:
        """Let the writer's C passes record into the writer's ring and into the ring of slow puts."""
        handle = ffi.addressof(writer, "recorder")
        lib.ms_recorder_open(handle, ffi.NULL if self._shared is None else self._shared, lib.MS_WRITER)
        if handle.schedstat_fd >= 0:  # one descriptor a process
            os.close(handle.schedstat_fd)
            handle.schedstat_fd = self.handle.schedstat_fd

    def check_stopped(self, now_ns: int) -> None:
        """Record a stop by a signal since the last call; called once a round."""
        lib.ms_recorder_check_stopped(self.handle, now_ns)

    def note(self, what: str, began_ns: int, took_ns: int, *, phase: str = "other", cause: str = "unknown", **fields: int) -> None:
        """Record a stall that is over, in one phase; without a given cause, find it from the kernel's counters.

        `fields`: others of `struct ms_stall`, for example offset, bytes, error_number."""
        stall = ffi.new("struct ms_stall *", {
            "what": WHAT_NAMES.index(what), "began_ns": began_ns, "took_ns": took_ns, "cause": CAUSE_NAMES.index(cause), **fields})
        stall.phase_ns[PHASE_NAMES.index(phase)] = took_ns
        lib.ms_recorder_note(self.handle, stall)

    def set_phase(self, phase: int | None, since_ns: int = 0) -> None:
        """Publish the phase that takes long at this moment; None: it is over."""
        lib.ms_recorder_set_phase(self.handle, len(PHASE_NAMES) + 1 if phase is None else phase, since_ns)

    def close(self) -> None:
        """Stop recording."""
        lib.ms_recorder_close(self.handle)
        self._shared = None


def boot_of(recorder: ms_recorder) -> bytes:
    """Return the id of the boot whose clock the stalls use."""
    return bytes(recorder.boot_id)


def read_rings(recorder: ms_recorder) -> list[Ring]:
    """Read the ring of each worker kind, then PUTS_RING; leave out stalls that are being written."""
    minutes = sorted(Minute(row.minute, row.stalls) for row in recorder.puts_minute if row.stalls)
    return [_ring(kind, recorder.ring[kind], minutes if kind == PUTS_RING else []) for kind in range(PUTS_RING + 1)]


def _ring(kind: int, ring: ms_recorder_ring, minutes: list[Minute]) -> Ring:
    found = [stall for at in range(STALLS) if (stall := _stall(kind, ring.stall[at])) is not None]
    phase, since_ns = ring.phase, ring.phase_since_ns
    names = (*PHASE_NAMES, "blocked")
    return Ring(ring.stalls,
                CurrentPhase(names[phase], since_ns) if since_ns > 0 and phase < len(names) else None,
                sorted(found, key=lambda stall: stall.number), minutes)


def _stall(kind: int, place: ms_stall) -> Stall | None:
    copy = ffi.new("struct ms_stall *", place)
    if not lib.ms_stall_is_whole(copy) or copy.what >= len(WHAT_NAMES) or copy.cause >= len(CAUSE_NAMES):
        return None
    return Stall(
        kind, copy.number, copy.began_ns, copy.took_ns, WHAT_NAMES[copy.what], CAUSE_NAMES[copy.cause],
        {name: ns for name, ns in zip(PHASE_NAMES, copy.phase_ns, strict=True) if ns}, copy.offset, copy.bytes, copy.entries,
        copy.detail, copy.window_ns, copy.queued_ns, copy.busy_ns, copy.major_faults, copy.minor_faults, copy.error_number, copy.pid)
