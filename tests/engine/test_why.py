"""Stalls made on purpose: `pyengine why` names the cause of each."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time

import pytest

import pyengine
from crash.replicas import free_port
from faults.logged_disk import build_server, logged_disk
from faults.mounts import with_own_mounts
from fix_engine import SMALL as SETTINGS
from fix_slave import secret_file
from pyengine.cli import why
from pyengine.engine.embedded import start_engine, stop_engine
from pyengine.ipc.shared_objects import KIND_NAMES
from pyengine.ipc.store_lock import living_kinds
from pyengine.native.flush import monotonic_ns
from waiting import eventually, scaled_timeout_s

HOUR_NS = 3_600_000_000_000
HELD_NS = 200_000_000  # twice what counts as a wait (the_wait)
SLOW_FLUSH_US = 40_000
SEGMENT_BYTES = 4096 * 16
LARGE = b"x" * (SEGMENT_BYTES // 3)
FIFREEZE, FITHAW = 0xC0045877, 0xC0045878  # linux/fs.h


def told(root) -> why.Why:
    now_ns = monotonic_ns()
    return why.explain(why.read_recorder(root), living_kinds(root), now_ns - HOUR_NS, now_ns, time.time() * 1000)


def stays_held() -> None:
    """Return after HELD_NS, or later on a loaded machine, where the writer gets a put late."""
    held_ns, began_ns = scaled_timeout_s(HELD_NS), monotonic_ns()
    eventually(lambda: monotonic_ns() - began_ns >= held_ns, "it was held for long enough")


class Held:
    """A process that is stopped, and kept so until a put has waited for it for long enough."""

    def __init__(self, engine, kind: str) -> None:
        self.pid = engine.suspend(kind)

    def while_waits(self, future):
        stays_held()
        assert not future.done()
        os.kill(self.pid, signal.SIGCONT)
        return future.result(60)


def the_wait(root, cause: str, said: str = "") -> why.Entry:
    """The longest wait, of that cause, once its worker and who kept that one have recorded it."""
    def collect():
        waits = [one for one in told(root).waits if one.took_ms >= HELD_NS / 1e6 / 2 and said in one.sentence]
        return max(waits, key=lambda one: one.took_ms) if waits else None

    found = eventually(collect, f"the wait is recorded: {said}")
    assert found.cause == cause, told(root)
    return found


def test_a_stopped_writer(make_engine):
    engine = make_engine("async")
    engine.start()
    with pyengine.connect(engine.root, refusals="return") as producer:
        assert producer.put("T", b"first").ok
        held = Held(engine, "writer")
        assert held.while_waits(producer.put_async("T", b"x")).ok
    found = the_wait(engine.root, "stopped")
    assert (found.worker, found.what, found.puts) == ("writer", "puts", 1) and "the writer was stopped by a signal" in found.sentence
    assert "the writer was stopped by a signal" in told(engine.root).sentence


def test_a_stopped_flusher_in_sync_mode(make_engine):
    engine = make_engine("sync")
    engine.start()
    with pyengine.connect(engine.root, refusals="return") as producer:
        assert producer.put("T", b"first").ok
        held = Held(engine, "flusher")
        assert held.while_waits(producer.put_async("T", b"x")).ok
    found = the_wait(engine.root, "stopped")
    assert (found.worker, found.what) == ("flusher", "sync") and "the flusher was stopped by a signal" in found.sentence


def test_a_killed_writers_recorded_stalls_are_kept(make_engine):
    engine = make_engine("async")
    engine.start()
    with pyengine.connect(engine.root) as producer:
        assert producer.put("T", b"first").ok
        held = Held(engine, "writer")
        future = producer.put_async("T", b"x")
        stays_held()
        assert not future.done()
        os.kill(held.pid, signal.SIGKILL)
        assert future.result(60).ok
    assert the_wait(engine.root, "restart").sentence == "the writer had died and was started again"
    assert "the writer died, and was started again" in [one.sentence for one in told(engine.root).others]
    engine.kill_all()
    the_wait(engine.root, "restart")  # nothing runs any more
    engine.start()
    the_wait(engine.root, "restart")
    assert [one.what for one in told(engine.root).others].count("start") == 2
    engine.stop()
    with pytest.raises(pyengine.EngineUnavailableError, match="stopped in order"):
        told(engine.root)


def test_a_segment_that_is_late_because_the_allocator_is_stopped(make_engine):
    engine = make_engine("async", mapped_file_size_commit_log_bytes=SEGMENT_BYTES)
    engine.start()
    with pyengine.connect(engine.root, refusals="return") as producer:
        assert producer.put("T", b"first").ok
        held = Held(engine, "allocator")
        futures = [producer.put_async("T", LARGE) for _ in range(12)]
        eventually(lambda: told(engine.root).now, "the writer waits")
        assert held.while_waits(futures[-1]).ok
    the_wait(engine.root, "segment",
             "the next segment, or its space, was not ready: the allocator was stopped by a signal")


def test_a_pool_without_a_free_buffer_because_the_committer_is_stopped(make_engine):
    engine = make_engine("pool", mapped_file_size_commit_log_bytes=SEGMENT_BYTES, transient_store_pool_size=2)
    engine.start()
    with pyengine.connect(engine.root, refusals="return") as producer:
        assert producer.put("T", b"first").ok
        held = Held(engine, "committer")
        futures = [producer.put_async("T", LARGE) for _ in range(12)]
        eventually(lambda: told(engine.root).now, "the writer waits")
        assert held.while_waits(futures[-1]).ok
    the_wait(engine.root, "pool", "no buffer of the pool was free: the committer was stopped by a signal")


def test_a_wait_for_the_next_segment_is_shown_only_while_it_lasts(make_engine):
    engine = make_engine("async", mapped_file_size_commit_log_bytes=SEGMENT_BYTES)
    engine.start()
    with pyengine.connect(engine.root, refusals="return") as producer:
        assert producer.put("T", b"first").ok
        held = Held(engine, "allocator")
        futures = [producer.put_async("T", LARGE) for _ in range(12)]
        assert "the writer waits for the next segment" in eventually(lambda: told(engine.root).now, "it is told")[0]
        assert held.while_waits(futures[-1]).ok
    eventually(lambda: not told(engine.root).now, "it is over")


@pytest.mark.ci
def test_a_writer_without_a_processor(make_engine):
    """It runs only where nothing else does, on a processor that two others share."""
    engine = make_engine("async", os_page_cache_busy_timeout_ms=60_000, put_timeout_ms=60_000)  # a pass or a put may take seconds
    engine.start()
    pid, place = engine.pid("writer"), min(os.sched_getaffinity(0))
    os.sched_setaffinity(pid, {place})
    os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    spin = f"import os; os.sched_setaffinity(0, {{{place}}})\nwhile True: pass"
    spinning = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2)]
    try:
        with pyengine.connect(engine.root) as producer:
            def collect():
                assert producer.put("T", b"x").ok
                return any((one.cause, one.worker) == ("cpu", "writer") for one in told(engine.root).waits)

            eventually(collect, "a put waits for a processor", 60)
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def test_a_quiet_engine_has_nothing_to_tell_of_its_puts(make_engine):
    engine = make_engine("async")
    engine.start()
    found = told(engine.root)
    assert found.waits == [] and "no put waited" in found.sentence and {one.worker for one in found.others} <= set(KIND_NAMES)


def test_a_slave_that_is_stopped(make_engine, tmp_path):
    secret, port = secret_file(tmp_path), free_port()
    shared = {"ha_secret_file": secret, "slave_timeout_ms": 60_000}
    master = make_engine("async", "master", broker_role="SYNC_MASTER", ha_listen_host="127.0.0.1", ha_listen_port=port, **shared)
    slave = make_engine("async", "slave", broker_role="SLAVE", ha_master_address=f"127.0.0.1:{port}", **shared)
    master.start()
    slave.start()
    with pyengine.connect(master.root, refusals="return") as producer:
        eventually(lambda: producer.put("T", b"first").ok, "the slave confirms", 60)
        held = Held(slave, "replicator")
        assert held.while_waits(producer.put_async("T", b"x")).ok
    found = the_wait(master.root, "slave")
    assert (found.worker, found.what, found.sentence) == ("replicator", "confirm", "slaves took long to confirm")


@pytest.mark.root
def test_a_full_disk(make_small_disk, make_engine):
    engine = make_engine("async", mapped_file_size_commit_log_bytes=SEGMENT_BYTES)
    disk = engine.root = make_small_disk("4m")
    engine.root = disk / "store"
    engine.start()
    with pyengine.connect(engine.root, refusals="return") as producer:
        def recorded():
            """After a put: one that is refused because a segment came late does not fill the disk."""
            producer.put("T", LARGE)
            return [one for one in told(engine.root).others if one.cause == "no_room"]

        full = eventually(recorded, "a put is refused, and that is recorded")
    assert full[0].sentence == "the disk was full, from here on"


@pytest.mark.block
def test_a_file_system_that_is_frozen(tmp_path):
    found = with_own_mounts(put_on_a_frozen_disk, tmp_path)
    assert (found.worker, found.what, found.cause) == ("writer", "puts", "fault")


def put_on_a_frozen_disk(folder):
    with logged_disk(build_server(folder), folder) as disk:
        start_engine(disk.store, SETTINGS, timeout_s=60)
        inside = os.open(disk.store, os.O_RDONLY)
        try:
            with pyengine.connect(disk.store) as producer:
                assert producer.put("T", b"x").ok
                fcntl.ioctl(inside, FIFREEZE, 0)
                try:
                    future = producer.put_async("T", b"x")
                    stays_held()
                finally:
                    fcntl.ioctl(inside, FITHAW, 0)
                assert future.result(60).ok
            return eventually(lambda: [one for one in told(disk.store).waits if one.took_ms >= HELD_NS / 1e6 / 2], "it is recorded")[-1]
        finally:
            os.close(inside)
            stop_engine(disk.store, timeout_s=60)


@pytest.mark.block
def test_a_disk_that_takes_long_to_sync(tmp_path):
    [found] = with_own_mounts(put_on_a_slow_disk, tmp_path)
    assert (found.worker, found.what, found.cause) == ("flusher", "sync", "sync")
    assert found.sentence.startswith("the device took long to sync: ") and found.phases_ms["sync"] >= SLOW_FLUSH_US / 1000


def put_on_a_slow_disk(folder):
    with logged_disk(build_server(folder), folder, flush_us=SLOW_FLUSH_US) as disk:
        start_engine(disk.store, {**SETTINGS, "flush_disk_type": "SYNC_FLUSH"}, timeout_s=60)
        try:
            with pyengine.connect(disk.store, refusals="return") as producer:
                assert producer.put("T", b"x").ok
                assert producer.put("T", b"x").ok
            return eventually(lambda: told(disk.store).waits, "the wait is recorded")[-1:]
        finally:
            stop_engine(disk.store, timeout_s=60)
