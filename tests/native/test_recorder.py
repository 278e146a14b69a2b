"""The flight recorder's rings: what is kept, what is passed over, and the cause that is found."""

from __future__ import annotations

import errno
import os
import signal

import pytest

from pyengine._native import ffi, lib
from pyengine.errors import EngineUnavailableError
from pyengine.ipc.shared_objects import KIND_NAMES
from pyengine.native import control as native
from pyengine.native import recorder
from pyengine.native.flush import monotonic_ns

BOOT = bytes(range(16))
MS = 1_000_000
# So long that nothing the kernel counts of this process is half of it, and not before the boot of a machine that has just started.
LONG_NS = min(3_600_000_000_000, monotonic_ns() // 2)


@pytest.fixture
def shared():
    memory = bytearray(recorder.RECORDER_BYTES)
    found = recorder.view(memory)
    recorder.format_recorder(found, BOOT)
    yield found
    del memory


def writers(shared) -> recorder.Recorder:
    return recorder.Recorder(shared, native.WRITER)


def stalls(shared, ring: int = native.WRITER) -> list[recorder.Stall]:
    return recorder.read_rings(shared)[ring].stalls


def test_a_stall_is_kept_with_its_phases(shared):
    began_ns = monotonic_ns()
    writers(shared).note("request", began_ns, LONG_NS, phase="segment", offset=7, bytes=8, detail=9)
    [stall] = stalls(shared)
    assert (stall.what, stall.cause, stall.began_ns, stall.took_ns) == ("request", "segment", began_ns, LONG_NS)
    assert stall.phase_ns == {"segment": LONG_NS} and (stall.offset, stall.bytes, stall.detail) == (7, 8, 9)
    assert stall.pid == os.getpid() and stall.number == 1


def test_the_newest_stalls_are_kept_and_all_are_counted(shared):
    handle = writers(shared)
    for number in range(recorder.STALLS + 5):
        handle.note("request", number, 1)
    ring = recorder.read_rings(shared)[native.WRITER]
    assert ring.recorded == recorder.STALLS + 5
    assert [stall.number for stall in ring.stalls] == list(range(6, recorder.STALLS + 6))


def test_minutes_count_the_records_of_slow_puts(shared):
    handle = writers(shared)
    what = recorder.WHAT_NAMES.index("puts")
    for began_ms in (0, 10, 20, 60_000):
        puts = ffi.new("struct ms_stall *", {"what": what, "began_ns": began_ms * MS, "took_ns": 6 * MS, "entries": 1})
        lib.ms_recorder_note_puts(handle.handle, puts, ffi.NULL)
    handle.note("request", 0, 1)
    assert [ring.minutes for ring in recorder.read_rings(shared)] == [[]] * recorder.PUTS_RING + [[(0, 3), (1, 1)]]


def test_a_stall_that_is_not_whole_is_passed_over(shared):
    handle = writers(shared)
    handle.note("request", 1, 1)
    handle.note("request", 2, 1)
    shared.ring[native.WRITER].stall[1].began_ns += 1
    assert [stall.number for stall in stalls(shared)] == [2]


def test_a_ring_of_garbage_is_read_as_empty(shared):
    ffi.memmove(ffi.addressof(shared, "ring"), b"\xa5" * ffi.sizeof("struct ms_recorder_ring"),
                ffi.sizeof("struct ms_recorder_ring"))
    ring = recorder.read_rings(shared)[0]
    assert ring.stalls == [] and ring.current is None
    recorder.Recorder(shared, 0).note("died", 1, 0)  # and its worker goes on


@pytest.mark.parametrize("phase, cause", [
    ("sync", "sync"), ("write", "write"), ("segment", "segment"), ("slave", "slave"), ("lock", "lock"), ("touch", "fault"),
    ("other", "woken_late"), ("ring", "woken_late")])
def test_the_longest_phase_is_the_cause(shared, phase, cause):
    stall = ffi.new("struct ms_stall *", {"what": recorder.WHAT_NAMES.index("request"), "began_ns": monotonic_ns(), "took_ns": LONG_NS})
    stall.phase_ns[recorder.PHASE_NAMES.index("other")] = 2 * MS
    stall.phase_ns[recorder.PHASE_NAMES.index(phase)] = LONG_NS - 2 * MS
    lib.ms_recorder_note(writers(shared).handle, stall)
    assert stalls(shared)[0].cause == cause


@pytest.mark.parametrize("what, number, cause", [
    ("blocked", errno.ENOSPC, "no_room"), ("blocked", errno.EDQUOT, "no_room"), ("blocked", errno.EIO, "blocked"),
    ("blocked", 0, "blocked"), ("request", errno.EIO, "failed")])
def test_the_kind_and_error_number_of_a_stall_give_its_cause(shared, what, number, cause):
    writers(shared).note(what, monotonic_ns(), 0, error_number=number)
    assert stalls(shared)[0].cause == cause


def test_a_stall_that_began_before_its_worker_has_the_cause_restart(shared):
    began_ns = monotonic_ns() - LONG_NS
    writers(shared).note("request", began_ns, LONG_NS - 1)
    assert stalls(shared)[0].cause == "restart"


def test_a_stop_by_a_signal_is_recorded_once(shared):
    handle = writers(shared)
    recorder.count_resumes()
    try:
        began_ns = monotonic_ns() - LONG_NS
        handle.check_stopped(began_ns)
        os.kill(os.getpid(), signal.SIGCONT)
        handle.check_stopped(monotonic_ns())
        handle.check_stopped(monotonic_ns())
    finally:
        signal.signal(signal.SIGCONT, signal.SIG_DFL)
    [stall] = stalls(shared)
    assert (stall.what, stall.cause, stall.began_ns) == ("stopped", "stopped", began_ns) and stall.took_ns >= LONG_NS


def test_the_current_phase_is_seen_until_it_ends(shared):
    handle = writers(shared)
    handle.set_phase(recorder.PHASE_NAMES.index("sync"), 5)
    assert recorder.read_rings(shared)[native.WRITER].current == recorder.CurrentPhase("sync", 5)
    handle.set_phase(None)
    assert recorder.read_rings(shared)[native.WRITER].current is None


def test_a_new_engine_keeps_the_stalls_that_a_dead_one_recorded(shared):
    writers(shared).set_phase(recorder.PHASE_NAMES.index("sync"), 5)
    writers(shared).note("request", 1, 1)
    recorder.format_recorder(shared, BOOT)
    ring = recorder.read_rings(shared)[native.WRITER]
    assert [stall.began_ns for stall in ring.stalls] == [1] and ring.current is None


def test_a_hand_without_a_recorder_records_nothing():
    handle = recorder.Recorder()
    handle.note("request", 1, 1)
    handle.check_stopped(1)
    lib.ms_recorder_begin_window(handle.handle, 1)
    handle.set_phase(recorder.PHASE_NAMES.index("sync"), 5)
    handle.close()


@pytest.mark.parametrize("damage", ["magic", "layout_version"])
def test_another_layout_is_refused(shared, damage):
    setattr(shared, damage, 0)
    with pytest.raises(EngineUnavailableError):
        recorder.check(shared, recorder.RECORDER_BYTES)


def test_a_short_object_is_refused(shared):
    with pytest.raises(EngineUnavailableError, match="too short"):
        recorder.check(shared, recorder.RECORDER_BYTES - 1)


def test_each_kind_of_worker_has_a_ring(shared):
    assert len(recorder.read_rings(shared)) == len(KIND_NAMES) + 1 == recorder.PUTS_RING + 1
