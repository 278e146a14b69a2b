"""Waiting, scheduling, and how a process appears in /proc (csrc/latch, sequence, stream, cpu, process .cdef.h).

A latch wakes the one process that waits on it: arm it, look for work, then wait. A sequence is a number that many processes sleep on
until it moves: load it, look, then wait. The waker publishes first and wakes second (the loops are in those headers).

A Sleeper is a thread that waits for messages of some queues, each of which it has looked at (csrc/arrivals.cdef.h). A Watch is one
thread, without the interpreter, that does so for many, and raises the descriptor of each (csrc/watch.cdef.h). A Pulse is what a
process does for its consumers twice a second though nothing happens, without the interpreter too (csrc/pulse.cdef.h).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pyengine._native import ffi, lib
from pyengine.errors import EngineUnavailableError
from pyengine.native.control import raise_os_error

if TYPE_CHECKING:
    from pyengine._native import Array, ms_awaited, ms_control, ms_latch, ms_position, ms_sequence

# Set this process's timer slack to the minimum, so that its sleeps end on time, not up to 50 us later.
sleep_precisely = lib.ms_sleep_precisely


class Latch:
    """One worker's latch: a shared flag, which is mapped writable, and the named semaphore `name` (which must exist).

    The writer's has no semaphore ("").
    """

    def __init__(self, latch: ms_latch, name: str) -> None:
        error_number = ffi.new("int *")
        semaphore = lib.ms_latch_open(name.encode(), error_number) if name else ffi.NULL
        if name and semaphore == ffi.NULL:
            raise EngineUnavailableError(f"semaphore {name}: {os.strerror(error_number[0])}")
        self.latch = latch
        self.semaphore = semaphore
        self._hears_rings = False

    def wakeup(self) -> None:
        """Wake the owner, unless it is awake or is being woken."""
        lib.ms_latch_wakeup(self.latch, self.semaphore)

    def arm(self) -> None:
        """Forget old wake-ups; any later one ends the next wait."""
        lib.ms_latch_arm(self.latch, self.semaphore)

    def disarm(self) -> None:
        """Mark the owner as awake: other processes need not wake it until the next arm."""
        lib.ms_latch_disarm(self.latch)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until woken (True), or until the timeout or a signal (False)."""
        return lib.ms_latch_wait(self.latch, self.semaphore, int(timeout_s * 1e9)) > 0

    def hear_rings(self) -> None:
        """Handle SIGURG in this process, the writer: producers send it when a wake-up may come before the sleep."""
        raise_os_error(lib.ms_latch_hear_rings(self.latch))
        self._hears_rings = True

    def close(self) -> None:
        """Close the semaphore, and ignore rings; the shared flag stays."""
        if self._hears_rings:
            self._hears_rings = False
            lib.ms_latch_hear_rings(ffi.NULL)
        if self.semaphore:
            lib.ms_latch_close(self.semaphore)
            self.semaphore = ffi.NULL


def load_sequence(sequence: ms_sequence) -> int:
    """Return the current number; call it before you check what it announces."""
    return lib.ms_sequence_load(ffi.addressof(sequence))


def raise_sequence(sequence: ms_sequence) -> None:
    """Wake all sleepers so that they check again; call it after publishing."""
    lib.ms_sequence_raise(ffi.addressof(sequence))


def wait_for_sequence(sequence: ms_sequence, seen: int, timeout_s: float) -> bool:
    """Sleep until the number differs from `seen` (True) or until the timeout or a signal (False)."""
    return lib.ms_sequence_wait(ffi.addressof(sequence), seen, max(0, int(timeout_s * 1e9))) == 1


SLEEP_S_MAX = 5.0  # then the interpreter looks for a signal that came just before the sleep


class Awaited(NamedTuple):
    """A queue that has nothing to read for a reader of this level below `end`, a physical offset."""

    level: ms_position
    end: int
    slot: int  # arrival_slot()


def arrival_slot(topic: str, queue_id: int) -> int:
    """Return the number under which the control block notes messages of this queue."""
    name = topic.encode(errors="surrogatepass")  # a folder of a queue can have any name
    return lib.ms_arrivals_slot(name, len(name), queue_id)


def queue_limit(control: ms_control, level: ms_position) -> int:
    """Return the physical offset below which a reader of this level finds messages in queues now."""
    return lib.ms_arrivals_limit(control, ffi.addressof(level))


def has_arrived(control: ms_control, queue: Awaited) -> bool:
    """Whether the queue may have something to read."""
    return lib.ms_arrivals_has(control, ffi.addressof(queue.level), queue.end, queue.slot) == 1


def arrived_ends(control: ms_control) -> Array[int]:
    """Return by slot what each queue that has_arrived() has above its `end`: for many queues, without a call for each."""
    return control.arrivals.end


class Sleeper:
    """The sleeps of one thread at a time for messages of queues; any thread of the process may end them."""

    def __init__(self) -> None:
        self._struct = ffi.new("struct ms_sleeper *")
        self.waits_in: object = None  # the memory of the engine for whose messages it waits
        self.watched: Watched | None = None  # the descriptor of a program that waits in an event loop instead

    @property
    def stirs(self) -> int:
        """A number that changes with each stir(): take it before you look at what you wait for."""
        return self._struct.stirs

    def wait(self, control: ms_control, queues: Sequence[Awaited], timeout_s: float, stirs: int) -> None:
        """Sleep until a queue may have something to read, until stir() is called after `stirs`, or until the timeout."""
        rows, count, until_s = _rows(queues), len(queues), time.monotonic() + timeout_s
        ended = lib.MS_ARRIVALS_SIGNAL
        while ended == lib.MS_ARRIVALS_SIGNAL and (left_s := until_s - time.monotonic()) > 0:
            ended = lib.ms_arrivals_wait(control, self._struct, stirs, rows, count, int(min(left_s, SLEEP_S_MAX) * 1e9))

    def stir(self) -> None:
        """End the sleep, or the one that is about to begin."""
        lib.ms_arrivals_stir(self._struct)
        if self.watched is not None:
            self.watched.raise_now()


def _rows(queues: Sequence[Awaited]) -> ms_awaited:
    rows = ffi.new("struct ms_awaited[]", max(1, len(queues)))
    for number, queue in enumerate(queues):
        row = rows[number]
        row.level, row.looked_end, row.slot = ffi.addressof(queue.level), queue.end, queue.slot
    return rows


class Watched:
    """A descriptor that is readable once some queues may have something to read. It is open as long as this object lives."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._struct = ffi.new("struct ms_watched *", {"fd": self.descriptor})
        self._kept: object = None  # the rows that it is armed with
        weakref.finalize(self, os.close, self.descriptor).atexit = False

    def raise_now(self) -> None:
        """Make the descriptor readable."""
        os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Make the descriptor unreadable until the next raise."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)


class Watch:
    """The thread of this process that raises the descriptors of all that wait for queues of one engine; close() ends it.

    `control` must stay mapped until then. OSError if the system has no thread left. After close() the calls do nothing: one that
    a signal handler interrupts may find that the handler has closed it.
    """

    def __init__(self, control: ms_control) -> None:
        error_number = ffi.new("int *")
        self._control = control
        self._pointer = lib.ms_watch_start(control, error_number)
        if self._pointer == ffi.NULL:
            raise_os_error(-error_number[0])

    def add(self, watched: Watched) -> None:
        """Watch for this one too, once it is armed."""
        if self._pointer:
            lib.ms_watch_add(self._pointer, watched._struct)

    def remove(self, watched: Watched) -> None:
        """Forget this one, so that it is armed no more."""
        if self._pointer:
            lib.ms_watch_remove(self._pointer, watched._struct)
        watched._kept = None

    def arm(self, watched: Watched, theirs: ms_control, queues: Sequence[Awaited]) -> None:
        """Raise it once one of `queues`, whose levels are in the mapping `theirs` of the same block, may have something to read."""
        rows, count = _rows(queues), len(queues)
        if self._pointer:
            watched._kept = watched._kept, rows  # a signal handler may raise before or after the call
            lib.ms_watch_arm(self._pointer, watched._struct, theirs, rows, count)
            watched._kept = rows

    def disarm(self, watched: Watched) -> None:
        """Raise it no more until it is armed again."""
        if self._pointer:
            lib.ms_watch_disarm(self._pointer, watched._struct)

    def close(self) -> None:
        """End the thread."""
        pointer, self._pointer = self._pointer, ffi.NULL
        if pointer:
            lib.ms_watch_stop(pointer)


BEAT_INTERVAL_S = 0.5
BEAT_CHANGED, BEAT_ROUSED = lib.MS_BEAT_CHANGED, lib.MS_BEAT_ROUSED
THIS_FILE, ITS_LENGTH, ITS_NAMES, ITS_LOCK = lib.MS_NAME_FILE, lib.MS_NAME_LENGTH, lib.MS_NAME_FOLDER, lib.MS_NAME_LOCK
MEMBER_SLOTS_MAX = lib.MS_MEMBER_SLOTS_MAX
Names = Mapping[str, int]  # path -> what of it is compared, one of these


def locked_bytes(descriptor: int, start: int, count: int) -> list[int]:
    """Return those of `count` bytes from `start` on that other open files have locked. Raises OSError."""
    found = bytearray(count)
    raise_os_error(lib.ms_locks_find(descriptor, start, count, ffi.from_buffer("uint8_t[]", found)))
    return [start + at for at, is_locked in enumerate(found) if is_locked]


class Pulse:
    """What this process does for its consumers each BEAT_INTERVAL_S. Not for a forked child."""

    def __init__(self) -> None:
        self._pointer = _required(lib.ms_pulse_new())

    def wait(self, timeout_s: float) -> None:
        """Beat, in the one thread that does so, until a Beat has something to take or none is left, or until the timeout."""
        lib.ms_pulse_wait(self._pointer, int(BEAT_INTERVAL_S * 1e9), int(timeout_s * 1e9))

    def ran_s(self) -> float:
        """Return the time by its beats, which pauses while this process is stopped, or the whole machine is."""
        return lib.ms_pulse_beats(self._pointer) * BEAT_INTERVAL_S


class Beat:
    """What one consumer, or one member of a group, is watched by: it tells whether anything has changed. Threads may share it.

    With `member`, fields of ms_member, it writes that member's heartbeats until close().
    """

    def __init__(self, pulse: Pulse, member: Mapping[str, int] | None = None) -> None:
        self._pulse, self._pid = pulse, os.getpid()
        self._lock = threading.RLock()  # a signal handler in a thread that has it may close a consumer
        given = ffi.NULL if member is None else ffi.new("struct ms_member *", member)
        self._pointer = _required(lib.ms_beat_add(pulse._pointer, given))
        self._names: Names = {}
        self._rests = False

    def watch(self, names: Names) -> None:
        """Compare these from now on; the next look finds a change if they are others than before."""
        with self._lock:
            if names == self._names or not self._pointer:
                return
            self._names = names
            lib.ms_beat_forget(self._pulse._pointer, self._pointer)
            for path, what in names.items():
                raise_os_error(lib.ms_beat_watch(self._pulse._pointer, self._pointer, os.fsencode(path), what))

    def set_records(self, count: int) -> None:
        """Compare the records of the first `count` queues."""
        with self._lock:
            if self._pointer:
                lib.ms_beat_set_records(self._pointer, count)

    def rest(self) -> None:
        """Have nothing to take until something changes, or until rouse(): before a look that finds nothing to do."""
        self._rests = True

    def rouse(self) -> None:
        """End a rest: there may be something to do."""
        if self._rests:
            with self._lock:
                self._rests = False
                if self._pointer:
                    lib.ms_beat_rouse(self._pointer)

    def take(self) -> int:
        """Return whether anything has changed since the last call, BEAT_CHANGED, or the rest has ended, BEAT_ROUSED."""
        with self._lock:
            return lib.ms_beat_take(self._pointer) if self._pointer else 0

    def close(self) -> None:
        """End it; the member's descriptor is not used any more then."""
        if self._pid != os.getpid():
            return
        with self._lock:
            pointer, self._pointer = self._pointer, ffi.NULL
            if pointer:
                lib.ms_beat_remove(self._pulse._pointer, pointer)


def _required(pointer: Any) -> Any:
    if pointer == ffi.NULL:
        raise MemoryError
    return pointer


class Stream(NamedTuple):
    """How a worker waits in a stream of work (csrc/stream.cdef.h)."""

    gather_ns: int  # how long it lets work gather
    quiet_ns: int  # the stream ends after this time without work


INTERACTIVE = lib.MS_CPU_INTERACTIVE  # when woken, preempt a process with longer slices: for short work that others wait for
BATCH = lib.MS_CPU_BATCH              # when woken, take an idle CPU or wait for one, but do not preempt a producer or the writer
schedule = lib.ms_cpu_schedule        # set how this process is scheduled: one of these


ROUNDS = 60
PERCENT = 90
SPIN_US_MIN = 60
SPIN_US_MAX = 150


def wake_up_us(rounds: int = ROUNDS, percent: int = PERCENT) -> float:
    """Measure how long a wake-up takes: return the `percent` percentile in us; OSError if that fails."""
    answer = lib.ms_calibrate_wake_ns(rounds, percent)
    raise_os_error(answer)
    return answer / 1000


def spin_us(setting: int, processes: int = 2) -> tuple[int, int]:
    """Return the spin times (writer's, producers') for the setting: as given, or measured for -1 (auto).

    Auto chooses a spin longer than a wake-up, since a shorter one costs CPU and saves no sleep. It chooses 0 if there are
    fewer CPUs than `processes`, the number that a put passes through, since a spin would keep the others from running.
    """
    if setting >= 0:
        return setting, setting
    if len(os.sched_getaffinity(0)) < processes:
        return 0, 0
    try:
        wake_us = wake_up_us()
    except OSError:
        wake_us = SPIN_US_MIN
    producer = round(min(SPIN_US_MAX, max(SPIN_US_MIN, 1.2 * wake_us)))
    return round(min(SPIN_US_MAX, 1.25 * producer)), producer


_MEMORY_FIELDS = (26, 27, 45, 46, 47, 28)  # of /proc/PID/stat (proc(5)): code, data, heap and stack, as csrc/process.cdef.h has them


def show_command(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Set this process's command line and environment as /proc shows them; OSError, without effect, if the kernel refuses."""
    shown = _row(words)
    text = shown + _row(f"{name}={value}" for name, value in environment.items())
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()  # from the third on; the program's name before may contain any character
    places = ffi.new("uint64_t[]", [int(fields[number - 3]) for number in _MEMORY_FIELDS])
    raise_os_error(lib.ms_process_show_command(text, len(shown), len(text), places))


def adopt_orphans() -> None:
    """Become the parent of each descendant whose parent ends; OSError if the kernel refuses."""
    raise_os_error(lib.ms_process_adopt_orphans())


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that forked it ends; OSError if the kernel refuses."""
    raise_os_error(lib.ms_process_end_with_parent())


def _row(texts: Iterable[str]) -> bytes:
    return b"".join(os.fsencode(text) + b"\0" for text in texts)
