"""The cleaner's rounds on a store whose other workers are played by hand; the clock and the disk are the test's."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from dying import run_and_die_at
from pyengine._native import lib
from pyengine.errors import DiskError
from pyengine.formats.paths import StorePaths, segment_name
from pyengine.ipc import cleaning
from pyengine.ipc.cleaning import UNSEEN, Cleaning, SegmentHolds, create_cleaning
from pyengine.native import control as native
from pyengine.services import clean_files, clean_resource
from pyengine.services.clean_files import HOUR_MS
from pyengine.services.clean_resource import PAUSE_S_MAX, CleanResourceService, DiskSpaceProbe
from pyengine.services.flush_consume_queue import FlushConsumeQueueService
from pyengine.services.reput_message import ReputMessageService
from pyengine.storage import durable_writes
from pyengine.storage.check.check import check
from pyengine.storage.config import EngineConfig
from pyengine.storage.file_system import DiskUse
from pyengine.storage.log_holds import LogHold, remove_log_hold, write_log_hold
from pyengine.storage.message_store import MessageStore
from pyengine.storage.store_reader import StoreReader
from ready_store import SEGMENT, store_with_writer
from reported import Reported
from waiting import eventually

NOW_MS = 1_800_000_000_000
OLD_MS = NOW_MS - 73 * HOUR_MS


class FakeClock:
    """The clocks of the cleaner's modules, until undo()."""

    def __init__(self) -> None:
        self.ms = NOW_MS
        self.hour_now = 12
        self.ns = 10**12
        patch = pytest.MonkeyPatch()
        self.undo = patch.undo
        for name in ("now_ms", "hour", "monotonic_ns"):
            for module in (clean_files, clean_resource):
                patch.setattr(module, name, getattr(self, name), raising=False)

    def now_ms(self) -> int:
        return self.ms

    def hour(self) -> int:
        return self.hour_now

    def monotonic_ns(self) -> int:
        return self.ns


class Rig:
    """`segments` full segments and one that has begun, all of it durable and dispatched."""

    def __init__(self, make_owner, segments: int = 6, **settings) -> None:
        self.owner, self.writer = store_with_writer(make_owner, segments=segments + 2)
        self.root = self.owner.root
        self.control = self.owner.control
        sizes = {name: getattr(self.owner.config, name) for name in (
            "mapped_file_size_commit_log_bytes", "mapped_file_size_consume_queue_bytes", "max_hash_slot_num", "max_index_num")}
        self.config = EngineConfig(**sizes, flush_interval_consume_queue_ms=1, **settings)
        create_cleaning(self.owner.folder)
        self.cleaning = Cleaning(self.owner.folder)
        self.clock = FakeClock()
        self.percent = 10
        self.reported = Reported()
        self.paused_s: list[float] = []
        number = 0
        while self.writer.end < segments * SEGMENT + 1000:
            self.writer.put(b"%06d" % number * 100, queue_id=number % 2, properties=f"KEYS\x01k{number}")
            number += 1
        self.reputter = ReputMessageService(self.owner.context(self.config))
        self.checkpointer = FlushConsumeQueueService(self.owner.context(self.config))
        self.flush()
        self.dispatch()
        self.checkpoint()
        for segment in self.segments():
            self.age(segment, OLD_MS)
        self.service = self.make()

    def make(self) -> CleanResourceService:
        return CleanResourceService(self.owner.context(self.config, report=self.reported), self.cleaning, self.measure)

    def measure(self) -> list[DiskUse]:
        return [DiskUse("/log", self.percent, 1 << 30), DiskUse("/queues", 10, 1 << 30)]

    def flush(self) -> None:
        lib.ms_control_publish_flushed(self.control, self.writer.end, True)

    def dispatch(self) -> None:
        while self.reputter.work():
            pass

    def checkpoint(self) -> None:
        self.checkpointer.take_settings(self.config)  # after which a round is due
        self.checkpointer.work()

    def age(self, segment: int, modified_ms: int) -> None:
        os.utime(StorePaths(self.root).commit_log_segment(segment), ns=(modified_ms * 10**6,) * 2)

    def segments(self) -> list[int]:
        return sorted(map(int, os.listdir(StorePaths(self.root).commit_log)))

    def round(self) -> int:
        """One whole round, its pauses included; how many segments it deleted."""
        before = len(self.segments())
        self.clock.ns = max(self.clock.ns, self.due_ns)
        self.service.work()
        while self.is_in_round:
            self.paused_s.append(self.pause_s())
            self.go_on()
        return before - len(self.segments())

    @property
    def due_ns(self) -> int:
        """When the next round begins."""
        return self.service.due_ns

    @property
    def is_in_round(self) -> bool:
        """Whether a round has steps left."""
        return self.service.steps is not None

    def pause_s(self) -> float:
        """How long the service pauses before its next step."""
        return (self.service.resume_ns - self.clock.ns) / 1e9

    def go_on(self) -> None:
        """One more step, after the pause."""
        self.clock.ns += max(0, round(self.pause_s() * 1e9))
        self.service.work()

    def count(self, name: str) -> int:
        return native.load(self.cleaning.block, name)

    def ask(self, reserved_ms: int = -1, percent: int = 0) -> None:
        block = self.cleaning.block
        native.store(block, "asked_reserved_ms", reserved_ms)
        native.store(block, "asked_used_percent", percent)
        native.store(block, "asked", self.count("answered") + 1)

    def close(self) -> None:
        self.clock.undo()
        self.service.close()
        self.reputter.close()
        self.cleaning.close()


@pytest.fixture
def make_rig(make_owner):
    rigs = []

    def make(**settings) -> Rig:
        rigs.append(Rig(make_owner, **settings))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def test_at_the_hour_old_segments_go_oldest_first_and_the_last_one_stays(make_rig):
    rig = make_rig()
    assert rig.round() == 0
    rig.clock.hour_now = 4
    rig.age(3 * SEGMENT, NOW_MS)
    assert rig.round() == 3  # the fourth is young: the older ones behind it stay too
    assert rig.segments()[0] == native.load_position(rig.control.min_offset) == 3 * SEGMENT
    rig.clock.ms += 73 * HOUR_MS
    assert rig.round() == 3
    assert rig.segments() == [6 * SEGMENT, 7 * SEGMENT]  # the one with the newest messages, and the spare one
    assert (rig.count("removed_segments"), rig.count("removed_bytes")) == (6, 6 * SEGMENT)
    assert rig.count("rounds") == 3


def test_readers_see_the_new_minimum_and_the_store_checks_clean(make_rig):
    rig = make_rig()
    with StoreReader(rig.root) as store:
        before = store.queue_range("T", 0)
        rig.clock.hour_now = 4
        assert rig.round() == 6
        low, high = store.queue_range("T", 0)
        assert before[0] == 0 < low < high == before[1]
        assert store.get_message("T", 0, 0).next_begin_offset == low
        assert [message.queue_offset for message in store.get_message("T", 0, low).messages][0] == low
        assert store.query_message("T", "k0") == []
    assert check(MessageStore(rig.root, rig.config.geometry)).findings == []


def test_the_minimum_has_moved_before_the_room_of_a_segment_is_given_back(make_rig, monkeypatch):
    rig = make_rig()
    free_blocks, seen = clean_files.free_blocks, []

    def look(descriptor):
        first = min(int(path.name) for path in (rig.root / "commitlog").iterdir())
        seen.append((native.load_position(rig.owner.control.min_offset), first))
        return free_blocks(descriptor)

    monkeypatch.setattr(clean_files, "free_blocks", look)
    rig.clock.hour_now = 4
    rig.round()
    assert seen and all(shown == first for shown, first in seen)


def test_queue_and_index_files_follow_the_log(make_rig):
    rig = make_rig()
    paths = StorePaths(rig.root)

    def starts(queue_id: int) -> list[int]:
        return sorted(map(int, os.listdir(paths.queue_folder("T", queue_id))))

    queue_files, index_files = starts(0), sorted(os.listdir(paths.index))
    assert len(index_files) > 1
    rig.clock.hour_now = 4
    rig.round()
    assert starts(0)[-1] == queue_files[-1]
    assert sorted(os.listdir(paths.index)) == index_files[-len(os.listdir(paths.index)):]
    assert rig.count("removed_index_files") == len(index_files) - len(os.listdir(paths.index)) > 0
    assert rig.count("removed_queue_files") == 2 * (len(queue_files) - len(starts(0)))


def test_a_batch_is_a_limit_and_segments_are_paused_between(make_rig):
    rig = make_rig(delete_files_batch_max=2, delete_commit_log_files_interval_ms=700)
    rig.clock.hour_now = 4
    assert [rig.round() for _ in range(4)] == [2, 2, 2, 0]
    assert rig.paused_s.count(0.7) == 3
    before_ns = rig.clock.ns
    assert not rig.service.work() and rig.service.pause_s() > 0  # until the next round
    assert rig.due_ns - before_ns == rig.config.clean_resource_interval_ms * 10**6


def test_a_full_disk_deletes_young_segments_only_until_there_is_room(make_rig, monkeypatch):
    rig = make_rig()
    for segment in rig.segments():
        rig.age(segment, NOW_MS)
    rig.percent = 88
    real = clean_files.unlink_durably

    def unlink(path):
        rig.percent -= 1
        return real(path)

    monkeypatch.setattr(clean_files, "unlink_durably", unlink)
    assert rig.round() == 3 and rig.percent == 85
    assert rig.round() == 0  # over 75 % only what is old enough goes
    rig.clock.ms += 73 * HOUR_MS
    assert rig.round() == 3  # and then whatever the hour


@pytest.mark.parametrize("name", ["committed", "flushed", "reput_from"])
def test_bytes_not_committed_flushed_or_dispatched_are_kept(make_rig, name):
    rig = make_rig()
    native.store_position(getattr(rig.control, name), 2 * SEGMENT + 5)
    rig.ask(reserved_ms=0)
    assert rig.round() == 2


def test_segments_that_the_checkpointer_has_yet_to_read_are_kept(make_rig):
    rig = make_rig()
    native.store(rig.control.workers[native.CHECKPOINTER], "position", SEGMENT)
    rig.ask(reserved_ms=0)
    assert rig.round() == 1
    rig.checkpoint()  # reads from there on
    assert rig.control.workers[native.CHECKPOINTER].error_count == 0


def test_a_frozen_store_is_left_as_it_is(make_rig):
    rig = make_rig()
    native.freeze(rig.control, native.FLUSHER, errno.EIO, "gone")
    rig.ask(reserved_ms=0)
    assert rig.round() == 0 and rig.count("rounds") == 0
    assert rig.service.pause_s() > 0, "and it sleeps"


def test_a_store_that_freezes_within_a_round_keeps_the_rest(make_rig):
    rig = make_rig()
    rig.ask(reserved_ms=0)
    rig.service.work()  # the first segment has lost its name
    assert rig.segments()[0] == SEGMENT and rig.is_in_round
    native.freeze(rig.control, native.FLUSHER, errno.EIO, "gone")
    rig.round()
    assert rig.segments()[0] == SEGMENT
    assert [rig.count(name) for name in ("removed_queue_files", "removed_index_files", "answered")] == [0, 0, 0]


def test_a_request_by_hand_is_done_at_once_and_answered(make_rig):
    rig = make_rig(delete_files_batch_max=1)
    assert not rig.service.work()
    rig.ask()
    assert rig.service.work() or rig.is_in_round  # not due, but asked
    assert rig.round() + 1 >= 5 and rig.segments()[0] == 6 * SEGMENT
    assert (rig.count("answered"), rig.count("removed_segments"), rig.count("removed_bytes")) == (1, 6, 6 * SEGMENT)
    rig.ask(reserved_ms=0)
    assert rig.round() == 0 and rig.count("answered") == 2 and rig.count("removed_segments") == 6


@pytest.mark.parametrize("reserved_ms, percent", [(-2, 0), (0, 101), (5, -1)])
def test_a_request_that_makes_no_sense_deletes_nothing(make_rig, reserved_ms, percent):
    rig = make_rig()
    rig.ask(reserved_ms, percent)
    assert rig.round() == 0 and rig.count("answered") == 1
    native.store(rig.cleaning.block, "asked", 77)  # scribbled, not asked
    assert rig.round() == 0 and rig.count("answered") == 1


def test_a_held_segment_waits_and_goes_when_it_is_given_back(make_rig):
    rig = make_rig(delete_when="04")
    holds = SegmentHolds(rig.owner.folder)
    assert holds.hold(0) and holds.hold(0)
    rig.clock.hour_now = 4
    assert rig.round() == 0
    assert f"process {os.getpid()} holds it" in rig.reported[-1] and rig.count("waited_for_holds") == 1
    assert not SegmentHolds(rig.owner.folder).hold(0)  # its turn has come: no other gets one
    assert rig.cleaning.held() == [(0, os.getpid())]
    holds.release(0)
    assert rig.round() == 0  # held twice
    holds.release(0)
    assert rig.round() == 6 and rig.count("forced_holds") == 0
    holds.close()


def test_a_log_over_its_size_loses_young_segments_until_it_fits(make_rig):
    rig = make_rig(log_retention_bytes=3 * SEGMENT, delete_files_batch_max=2)
    for segment in rig.segments():
        rig.age(segment, NOW_MS)
    assert rig.round() == 2 and rig.round() == 2, "a batch a round"
    assert rig.round() == 0
    kept = native.load_position(rig.control.wrote) - native.load_position(rig.control.min_offset)
    assert 2 * SEGMENT < kept <= 3 * SEGMENT and rig.segments()[0] == 4 * SEGMENT


def test_the_last_segment_stays_however_small_the_log_is_to_be(make_rig):
    rig = make_rig(log_retention_bytes=1)
    assert rig.round() == 6 and rig.round() == 0
    assert rig.segments() == [6 * SEGMENT, 7 * SEGMENT]


def test_the_size_of_the_log_takes_no_segment_from_its_reader(make_rig):
    """Not even after the time for which age and disk wait; and others may hold it too meanwhile."""
    rig = make_rig(log_retention_bytes=SEGMENT, destroy_mapped_file_interval_forcibly_ms=1000)
    with contextlib.closing(SegmentHolds(rig.owner.folder)) as holds, contextlib.closing(SegmentHolds(rig.owner.folder)) as others:
        assert holds.hold(0)
        for _ in range(3):
            assert rig.round() == 0
            rig.clock.ns += 10**12
        assert "the log is over log_retention_bytes" in rig.reported[-1] and len(rig.reported) == 1
        assert rig.count("forced_holds") == 0 and rig.count("waited_for_holds") == 3
        assert others.hold(0)
        holds.release(0)
        assert rig.round() == 0
        others.release(0)
        assert rig.round() == 6


def test_a_held_segment_that_is_old_is_forced_though_the_log_is_over_its_size_too(make_rig):
    rig = make_rig(log_retention_bytes=SEGMENT, destroy_mapped_file_interval_forcibly_ms=1000)
    rig.age(SEGMENT, NOW_MS)
    rig.clock.hour_now = 4
    with contextlib.closing(SegmentHolds(rig.owner.folder)) as holds:
        assert holds.hold(0) and holds.hold(SEGMENT)
        assert rig.round() == 0
        rig.clock.ns += 10**12
        assert rig.round() == 1 and rig.count("forced_holds") == 1, "what is old, as without a limit on the size"
        rig.clock.ns += 10**12
        assert rig.round() == 0 and rig.count("forced_holds") == 1, "nothing that is young"


def test_changed_settings_decide_from_the_next_round_on_which_begins_at_once(make_rig):
    rig = make_rig(clean_resource_interval_ms=86_400_000)
    assert rig.round() == 0
    rig.service.take_settings(replace(rig.config, log_retention_bytes=2 * SEGMENT, delete_commit_log_files_interval_ms=7000))
    assert rig.service.pause_s() == 0
    assert rig.round() == 5 and set(rig.paused_s) >= {7.0}
    assert rig.service.pause_s() == PAUSE_S_MAX


def test_a_held_segment_is_tried_again_after_the_hour_and_forced_at_last(make_rig):
    rig = make_rig(redelete_hanged_file_interval_ms=30_000, destroy_mapped_file_interval_forcibly_ms=120_000)
    holds = SegmentHolds(rig.owner.folder)
    assert holds.hold(0)
    rig.clock.hour_now = 4
    assert rig.round() == 0
    rig.clock.hour_now = 12  # nothing asks for a deletion any more, but its turn had come
    began_ns, tries = rig.clock.ns, rig.count("waited_for_holds")
    rounds = 0
    while rig.round() == 0:
        rounds += 1
        assert rounds < 100
    assert 120e9 <= rig.clock.ns - began_ns <= 151e9
    assert tries + 3 <= rig.count("waited_for_holds") <= tries + 5  # each 30 s, not each round
    assert rig.segments()[0] == SEGMENT and rig.count("forced_holds") == 1
    assert "although process" in rig.reported[-1]
    holds.close()


def test_since_when_a_segment_is_held_outlives_the_cleaner(make_rig):
    rig = make_rig(destroy_mapped_file_interval_forcibly_ms=50_000)
    holds = SegmentHolds(rig.owner.folder)
    assert holds.hold(0)
    rig.clock.hour_now = 4
    assert rig.round() == 0
    rig.clock.ns += 40 * 10**9
    rig.service = rig.make()  # a new incarnation
    assert rig.round() >= 1 or rig.round() >= 1
    assert rig.count("forced_holds") == 1
    holds.close()


HOLDING = """
import os, signal, sys, time
from pyengine.ipc.cleaning import SegmentHolds
from pyengine.ipc.shared_objects import SharedFolder
holds = SegmentHolds(SharedFolder(sys.argv[1]))
assert holds.hold(0)
if os.fork() == 0:
    time.sleep(600)
print("held", flush=True)
time.sleep(600)
"""


def test_a_dead_readers_hold_ends_with_it_though_its_child_lives(make_rig):
    rig = make_rig()
    rig.clock.hour_now = 4
    with subprocess.Popen([sys.executable, "-c", HOLDING, rig.owner.folder.path], stdout=subprocess.PIPE, start_new_session=True) as reader:
        try:
            assert reader.stdout.readline() == b"held\n"
            eventually(lambda: rig.cleaning.held() == [(0, reader.pid)], "the child has closed its copies")
            assert rig.round() == 0, "it lives"
            reader.send_signal(signal.SIGSTOP)
            assert rig.round() == 0 and rig.cleaning.held() == [(0, reader.pid)], "stopped, it lives"
            reader.kill()
            reader.wait()
            assert rig.cleaning.held() == [] and rig.cleaning.holders(1 << 40) == [] and rig.round() == 6
        finally:
            os.killpg(reader.pid, signal.SIGKILL)


def test_holds_are_of_one_process_and_one_engine(make_rig):
    rig = make_rig()
    holds = SegmentHolds(rig.owner.folder)
    assert holds.hold(SEGMENT)
    child = os.fork()
    if child == 0:  # a fork has none of its parent's holds, and cannot give them back
        holds.release(SEGMENT)
        held = rig.cleaning.held() == [(SEGMENT, os.getppid())] and holds.hold(SEGMENT)
        os._exit(0 if held and rig.cleaning.held() == sorted([(SEGMENT, os.getpid()), (SEGMENT, os.getppid())]) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert rig.cleaning.held() == [(SEGMENT, os.getpid())]
    holds.close()
    assert rig.cleaning.held() == []


def test_a_hold_is_only_of_the_segments_below_the_end(make_rig):
    rig = make_rig()
    with contextlib.closing(SegmentHolds(rig.owner.folder)) as holds:
        assert holds.hold(2 * SEGMENT)
        assert rig.cleaning.holders(2 * SEGMENT) == [] and rig.cleaning.holders(3 * SEGMENT) == [os.getpid()]
        holds.release(SEGMENT)  # it holds none there
        assert rig.cleaning.holders(3 * SEGMENT) == [os.getpid()]
        rig.clock.hour_now = 4
        assert rig.round() == 2 and rig.segments()[0] == 2 * SEGMENT
        assert not holds.hold(SEGMENT) and not SegmentHolds(rig.owner.folder).hold(2 * SEGMENT), "its deletion has begun"
        assert holds.hold(2 * SEGMENT), "what is held already, is"


def test_a_holder_that_proc_does_not_show_is_respected(make_rig, monkeypatch):
    """As a process of another container, whose pid has no entry here."""
    rig = make_rig()
    monkeypatch.setattr(cleaning, "locks_on", lambda file: iter(()))
    with contextlib.closing(SegmentHolds(rig.owner.folder)) as holds:
        assert holds.hold(SEGMENT)
        assert rig.cleaning.held() == [(SEGMENT, UNSEEN)] and rig.cleaning.holders(2 * SEGMENT) == [UNSEEN]
        rig.clock.hour_now = 4
        assert rig.round() == 1 and "a process of another container holds it" in rig.reported[-1]


def test_a_holder_that_proc_does_not_show_is_respected_beside_one_that_it_shows(make_rig, monkeypatch):
    rig, locks_on = make_rig(), cleaning.locks_on
    monkeypatch.setattr(cleaning, "locks_on", lambda file: (lock for lock in locks_on(file) if lock.start > 2 * SEGMENT))
    with contextlib.closing(SegmentHolds(rig.owner.folder)) as holds:
        assert holds.hold(SEGMENT) and holds.hold(2 * SEGMENT)
        assert rig.cleaning.holders(2 * SEGMENT) == [UNSEEN] and rig.cleaning.holders(3 * SEGMENT) == [os.getpid()]


# Takes and gives back holds on the first segment that it can, and looks, while it holds one, whether that is deleted.
RACING = """
import os, sys
from pyengine.ipc.cleaning import SegmentHolds
from pyengine.ipc.shared_objects import SharedFolder
holds, segments, held = SegmentHolds(SharedFolder(sys.argv[1])), int(sys.argv[2]), 0
descriptor = os.open(sys.argv[3], os.O_RDONLY)
print("ready", flush=True)
segment = 0
while segment < segments:
    if holds.hold(segment):
        held += 1
        for _ in range(3):
            assert os.pread(descriptor, 1, segment) == bytes(1), segment
        holds.release(segment)
    else:
        segment += 1
print(held)
"""


def test_the_cleaner_sees_each_hold_that_it_does_not_refuse(make_rig, tmp_path):
    rig, segments, deleted = make_rig(), 300, tmp_path / "deleted"
    deleted.write_bytes(bytes(segments))
    command = [sys.executable, "-c", RACING, rig.owner.folder.path, str(segments), deleted]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    with open(deleted, "r+b", buffering=0) as marks:
        for reader in readers:
            assert reader.stdout.readline() == "ready\n"
        for segment in range(segments):
            native.store(rig.cleaning.block, "removing_end", segment + 1)
            while rig.cleaning.holders(segment + 1):
                pass
            os.pwrite(marks.fileno(), b"x", segment)
    held = [int(reader.communicate(timeout=60)[0]) for reader in readers]
    assert all(reader.returncode == 0 for reader in readers) and sum(held) > 0


def test_a_folder_that_cannot_be_written_is_reported_once_and_tried_again(make_rig, monkeypatch):
    rig = make_rig()
    real = clean_files.unlink_durably

    def refuse(path):
        raise DiskError("cannot delete it: Read-only file system", errno=errno.EROFS)

    monkeypatch.setattr(clean_files, "unlink_durably", refuse)
    rig.clock.hour_now = 4
    assert [rig.round(), rig.round()] == [0, 0]
    assert len(rig.reported) == 1 and "Read-only file system; trying again each 10 s" in rig.reported[0]
    rig.ask()
    rig.round()
    assert (rig.count("answered"), rig.count("answer_errno")) == (1, errno.EROFS)
    monkeypatch.setattr(clean_files, "unlink_durably", real)
    assert rig.round() == 6 and rig.reported[-1] == "old files can be deleted again"


def test_a_stop_interrupts_a_deletion_and_leaves_the_rest(make_rig):
    rig = make_rig()
    rig.ask(reserved_ms=0)
    rig.service.work()
    assert rig.is_in_round
    rig.service.close()
    assert rig.count("answered") == 0  # asked still: the next one does it
    assert not rig.service.drain()
    rig.service = rig.make()
    assert rig.round() > 0 and rig.segments()[0] == 6 * SEGMENT


def test_the_probe_is_not_blocked_by_a_deletion_that_hangs(make_rig, monkeypatch):
    rig = make_rig()
    hanging, over = threading.Event(), threading.Event()

    def hang(path):
        hanging.set()
        assert over.wait(30)
        return -1

    monkeypatch.setattr(clean_files, "unlink_durably", hang)
    watch = DiskSpaceProbe(rig.owner.context(rig.config), rig.cleaning.block, rig.measure, 0.001)
    watch.start()
    rig.ask(reserved_ms=0)
    deletion = threading.Thread(target=rig.service.work)
    deletion.start()
    assert hanging.wait(30)
    rig.percent = 95
    eventually(lambda: native.load(rig.control.state, "refuse_puts") == native.REFUSE_DISK_FULL, "the full disk is seen")
    rig.percent = 50
    eventually(lambda: native.load(rig.control.state, "refuse_puts") == 0, "the room is seen")
    assert deletion.is_alive()
    over.set()
    deletion.join()
    watch.close()


def test_the_queues_are_gone_through_once_and_then_only_when_the_log_has_moved(make_rig, monkeypatch):
    rig = make_rig()
    looked = []
    monkeypatch.setattr("pyengine.services.clean_files.queue_folders",
                        lambda paths: looked.append(paths) or iter(()))
    rig.round()
    assert looked == []  # the log begins at 0: nothing can be expired
    rig.clock.hour_now = 4
    rig.round()
    rig.round()
    assert len(looked) == 1
    rig.service = rig.make()  # what a killed one may have left
    rig.round()
    assert len(looked) == 2


def test_killed_at_any_step_the_next_one_finishes_and_the_store_is_whole(make_rig):
    """Every deletion is cut short before each of its system calls."""
    rig = make_rig(segments=4)
    rig.clock.hour_now = 4
    def one_round() -> None:
        rig.service = rig.make()
        rig.round()

    for step in itertools.cycle(range(9)):  # every second round begins where the one before was cut short
        over = run_and_die_at(step, one_round, ("unlink", "fsync"), [(durable_writes, "punch")])
        segments = rig.segments()
        assert segments == list(range(segments[0], segments[-1] + SEGMENT, SEGMENT))  # no gap
        for queue_id in (0, 1):
            starts = sorted(map(int, os.listdir(StorePaths(rig.root).queue_folder("T", queue_id))))
            size = rig.config.mapped_file_size_consume_queue_bytes
            assert starts == list(range(starts[0], starts[-1] + size, size))
        assert check(MessageStore(rig.root, rig.config.geometry)).findings == []
        if over:
            break
    one_round()
    assert rig.segments()[0] == 4 * SEGMENT and check(MessageStore(rig.root, rig.config.geometry)).findings == []
    assert native.load_position(rig.control.min_offset) == 4 * SEGMENT
    assert segment_name(4 * SEGMENT) in os.listdir(StorePaths(rig.root).commit_log)


def test_a_log_hold_keeps_its_segments_until_its_time_is_over(make_rig):
    rig = make_rig()
    rig.clock.hour_now = 4
    write_log_hold(rig.root, LogHold("backup-1", "backup to /b (pid 7)", 2 * SEGMENT + 5, NOW_MS + 60_000))
    assert rig.round() == 2 and rig.segments()[0] == 2 * SEGMENT
    assert rig.round() == 0
    assert [reported for reported in rig.reported if "log hold" in reported] == [
        f"segment {segment_name(2 * SEGMENT)} should be deleted, but the log hold backup-1 of backup to /b (pid 7) keeps it, for 60 s "
        "more unless it is renewed"]
    rig.clock.ms += 60_000
    assert rig.round() == 4


def test_a_log_hold_keeps_the_log_from_a_request_by_hand(make_rig):
    rig = make_rig()
    write_log_hold(rig.root, LogHold("backup-1", "backup", 0, NOW_MS + 60_000))
    rig.ask(reserved_ms=0)
    assert rig.round() == 0 and rig.count("answered") == 1
    remove_log_hold(rig.root, "backup-1")
    rig.ask(reserved_ms=0)
    assert rig.round() == 6


def test_a_log_hold_that_comes_in_the_pause_between_two_segments_keeps_the_second(make_rig):
    rig = make_rig(delete_commit_log_files_interval_ms=700)
    rig.clock.hour_now = 4
    rig.clock.ns = rig.due_ns
    rig.service.work()
    while rig.is_in_round and rig.pause_s() != 0.7:  # not between the steps of one file
        rig.clock.ns = max(rig.clock.ns, rig.service.resume_ns)
        rig.service.work()
    assert rig.segments()[0] == SEGMENT and rig.is_in_round
    write_log_hold(rig.root, LogHold("backup-1", "backup", SEGMENT, NOW_MS + 60_000))
    assert rig.round() == 0 and rig.segments()[0] == SEGMENT
    remove_log_hold(rig.root, "backup-1")
    assert rig.round() == 5


@pytest.mark.parametrize("percent, deleted", [(80, 0), (90, 6)])
def test_only_a_disk_that_is_nearly_full_passes_a_log_hold(make_rig, percent, deleted):
    rig = make_rig(disk_space_enough_bytes=0)
    write_log_hold(rig.root, LogHold("backup-1", "backup", 0, NOW_MS + 60_000))
    rig.percent = percent
    assert rig.round() == deleted


def test_a_spare_segment_that_is_removed_during_a_listing_hides_no_older_one(make_rig, monkeypatch):
    """The allocator removes unused segments at a stop. Without the oldest ones in the list, a newer one would be deleted first."""
    rig = make_rig()
    real, removed = clean_files.is_plain_file, []

    def remove_first(entry):
        if not removed:
            removed.append(int(entry.name))
            os.unlink(entry.path)
        return real(entry) or int(entry.name) in removed

    before = rig.segments()
    monkeypatch.setattr(clean_files, "is_plain_file", remove_first)
    log = clean_files.CleanCommitLogService(rig.control, rig.cleaning.block, MessageStore(rig.root), rig.config,
                                            rig.cleaning.holders, rig.reported)
    listed = [start for start, _ in log.segments()]
    assert listed == [start for start in before if start not in removed]


@pytest.mark.parametrize("folder", ["commitlog", "consumequeue"])
def test_a_folder_that_cannot_be_listed_is_reported_and_tried_again(make_rig, monkeypatch, folder):
    rig = make_rig()
    real = os.scandir

    def full(path):
        if folder in str(path):
            raise OSError(errno.ENFILE, "Too many open files in system", str(path))
        return real(path)

    rig.clock.hour_now = 4
    monkeypatch.setattr(os, "scandir", full)
    rig.round()
    assert folder in rig.service.blocked_reason and "Too many open files" in rig.service.blocked_reason
    monkeypatch.undo()
    rig.round()
    assert not rig.service.blocked_reason
