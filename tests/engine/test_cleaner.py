"""The cleaner as a process: old files go while producers put, a full or read-only disk refuses puts and takes them again."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import pyengine
from fix_cli import run
from fix_engine import EACH_MODE, RunningEngine
from pyengine.ipc.cleaning import Cleaning
from pyengine.native import control as native
from pyengine.results import PutStatus
from pyengine.storage.check.check import check
from pyengine.storage.config import load_config
from pyengine.storage.message_store import MessageStore
from waiting import eventually

EVERY_HOUR = ";".join(map(str, range(24)))
EAGER = {"file_reserved_time_hours": 0, "delete_when": EVERY_HOUR, "clean_resource_interval_ms": 20,
         "delete_commit_log_files_interval_ms": 1, "flush_interval_consume_queue_ms": 50,
         "delete_consume_queue_files_interval_ms": 1}
SEGMENT = 1 << 20
BODY = b"x" * 4000


def segments(engine: RunningEngine) -> list[int]:
    return sorted(map(int, os.listdir(engine.root / "commitlog")))


def findings(engine: RunningEngine) -> list:
    return check(MessageStore(engine.root, load_config(engine.root).geometry)).findings


def put_segments(producer, count: int, topic: str = "T") -> None:
    for _ in range(count):
        assert producer.put_many(topic, [BODY] * (SEGMENT // 4200), keys="k").ok


@pytest.mark.parametrize("mode", EACH_MODE)
def test_old_segments_go_while_producers_put(make_engine, mode):
    engine = make_engine(mode, **EAGER)
    engine.start()
    with pyengine.connect(engine.root) as producer, pyengine.open_store(engine.root) as store:
        put_segments(producer, 8)
        eventually(lambda: segments(engine)[0] >= 6 * SEGMENT, "all but the last are deleted")
        last = producer.put("T", b"the last one")
        eventually(lambda: store.queue_range("T", 0)[1] == last.queue_offset + 1, "it is dispatched")
        low, high = store.queue_range("T", 0)
        assert 0 < low <= last.queue_offset < high
        assert store.message_at(last.physical_offset).body == b"the last one"
        with engine.memory() as memory:
            eventually(lambda: native.load_position(memory.control.min_offset) == segments(engine)[0], "the minimum follows")
    assert engine.stop()
    assert findings(engine) == []


def test_a_store_is_left_alone_by_default(make_engine):
    engine = make_engine(clean_resource_interval_ms=10, delete_when=EVERY_HOUR)
    engine.start()
    with pyengine.connect(engine.root) as producer:
        put_segments(producer, 3)
    with engine.memory() as memory, Cleaning(memory.folder) as cleaning:
        eventually(lambda: native.load(cleaning.block, "rounds") > 5, "it went round")
    assert segments(engine)[0] == 0
    assert engine.stop()


READER = textwrap.dedent("""
    import sys
    import pyengine
    with pyengine.open_store(sys.argv[1]) as store, store.hold(0) as held:
        assert held
        view = store.commit_log.view(0)
        print("held", flush=True)
        sys.stdin.read(1)
        print(store.message_at(0).body[:3], flush=True)
    print("given back", flush=True)
    sys.stdin.read(1)
""")


@pytest.fixture
def reader(make_engine):
    """(engine with full segments that would go at once, a process that holds the first one)."""
    engine = make_engine(clean_resource_interval_ms=20)
    engine.start()
    with pyengine.connect(engine.root) as producer:
        put_segments(producer, 4)
    engine.wait_noted()
    process = subprocess.Popen([sys.executable, "-c", READER, engine.root], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, bufsize=0)
    assert process.stdout.readline() == b"held\n"
    yield engine, process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def asks(engine: RunningEngine) -> int:
    """Segments that `pyengine clean` deletes."""
    return run("clean", engine.root, "--older-than", 0, "--json").document["segments"]


def test_a_reader_that_holds_a_segment_keeps_reading_it(reader):
    engine, process = reader
    assert asks(engine) == 0 and segments(engine)[0] == 0
    held = run("status", engine.root, "--json").document["disk"]["held_segments"]
    assert held == [{"segment": 0, "pid": process.pid}]
    process.stdin.write(b"x")
    assert process.stdout.readline() == b"b'xxx'\n" and process.stdout.readline() == b"given back\n"
    eventually(lambda: asks(engine) > 0, "it goes once it is given back")
    assert "holds it: tried again" in engine.log()


def test_a_dead_readers_hold_does_not_count(reader):
    engine, process = reader
    assert asks(engine) == 0
    process.kill()
    process.wait()
    eventually(lambda: asks(engine) > 0, "it goes")
    assert "although" not in engine.log()


def test_a_hold_ends_with_the_time_it_may_last(make_engine):
    engine = make_engine(clean_resource_interval_ms=20, destroy_mapped_file_interval_forcibly_ms=1)
    engine.start()
    with pyengine.connect(engine.root) as producer:
        put_segments(producer, 4)
    engine.wait_noted()
    with pyengine.open_store(engine.root) as store, store.hold(5) as held:
        assert held
        view = store.commit_log.view(0)
        eventually(lambda: asks(engine) or segments(engine)[0] > 0, "it is forced")  # by what was asked, or by a round of its own
        assert store.message_at(0) is None
        eventually(lambda: view[:100] == bytes(100), "its bytes are gone")  # after its name; no SIGBUS: zeros
        with store.hold(5) as again:
            assert again  # what this process holds already
    assert "although process" in engine.log()


def test_a_scan_holds_the_segment_it_reads_and_leaves_out_what_goes(make_engine):
    pytest.importorskip("pyarrow")
    engine = make_engine(clean_resource_interval_ms=20)
    engine.start()
    with pyengine.connect(engine.root) as producer:
        put_segments(producer, 4)
    engine.wait_noted()
    with pyengine.open_store(engine.root) as store:
        batches = store.scan(columns=["physicalOffset", "body"])
        rows = next(batches).to_pylist()
        assert run("status", engine.root, "--json").document["disk"]["held_segments"][0]["pid"] == os.getpid()
        assert asks(engine) == 0
        for batch in batches:
            rows += batch.to_pylist()
        assert {row["body"] for row in rows} == {BODY} and len(rows) == 4 * (SEGMENT // 4200)
        eventually(lambda: asks(engine) > 0, "it goes")


def test_the_next_cleaner_answers_what_the_dead_one_was_asked(make_engine):
    engine = make_engine(clean_resource_interval_ms=3_600_000)
    engine.start()
    with pyengine.connect(engine.root) as producer:
        put_segments(producer, 4)
    engine.wait_noted()
    incarnation = engine.incarnation("cleaner")
    with engine.memory(writable=True) as memory, Cleaning(memory.folder) as cleaning:
        native.store(cleaning.block, "asked_reserved_ms", 0)
        os.kill(engine.pid("cleaner"), 19)  # SIGSTOP: asked while it cannot answer
        native.store(cleaning.block, "asked", 1)
        engine.kill("cleaner")
        engine.wait_back("cleaner", incarnation)
        eventually(lambda: native.load(cleaning.block, "answered") == 1, "the next one has done it")
        assert native.load(cleaning.block, "removed_segments") >= 3


@pytest.mark.ci
def test_killed_at_random_moments_it_leaves_a_whole_store(make_engine, rng):
    """Kills of the cleaner while it deletes as fast as producers put; then of everything at once."""
    engine = make_engine(**EAGER)
    engine.start()
    acked = []
    with pyengine.connect(engine.root, refusals="return") as producer:
        for number in range(6):  # each pause before a restart is longer than the one before
            for _ in range(3):
                put_segments(producer, 1)
                result = producer.put("T", b"%d" % number, queue_id=1)
                assert result.ok
                acked.append(result)
            incarnation = engine.incarnation("cleaner")
            for _ in range(rng.randrange(400)):
                os.listdir(engine.root / "commitlog")  # a moment of random length
            engine.kill("cleaner")
            engine.wait_back("cleaner", incarnation)
            starts = segments(engine)
            assert starts == list(range(starts[0], starts[-1] + SEGMENT, SEGMENT))
    eventually(lambda: segments(engine)[0] > 0, "the last one has deleted something, however early the others died")
    engine.kill_all()
    assert run("recover", engine.root).code == 0
    assert findings(engine) == []
    with pyengine.open_store(engine.root) as store:
        kept = [result for result in acked if result.physical_offset >= store.min_physical_offset]
        assert [store.message_at(result.physical_offset).queue_offset for result in kept] == [
            result.queue_offset for result in kept]
        assert kept and store.queue_range("T", 1) == (kept[0].queue_offset, acked[-1].queue_offset + 1)


@pytest.fixture
def small_engine(make_small_disk, make_engine):
    def make(size: str, **settings) -> RunningEngine:
        engine = make_engine(clean_resource_interval_ms=50, delete_commit_log_files_interval_ms=1,
                             flush_interval_consume_queue_ms=50, **settings)
        engine.root = make_small_disk(size) / "store"
        engine.start()
        return engine

    return make


def disk_percent(engine: RunningEngine) -> int:
    return run("status", engine.root, "--json").document["disk"]["used_percent"]


@pytest.mark.ci
@pytest.mark.root
def test_a_filling_disk_is_cleaned_by_itself_and_puts_continue(small_engine):
    engine = small_engine("64m")
    with pyengine.connect(engine.root, refusals="return") as producer:
        for _ in range(160):  # two and a half times the disk
            def one_more() -> bool:
                result = producer.put_many("T", [BODY] * (SEGMENT // 4200))
                assert result.ok or result.status in (PutStatus.SERVICE_NOT_AVAILABLE, PutStatus.CREATE_MAPEDFILE_FAILED), result
                return result.ok
            eventually(one_more, "there is room again")
    assert segments(engine)[0] > 64 << 20 and disk_percent(engine) <= 100
    eventually(lambda: disk_percent(engine) <= 86, "the use goes back below the forced ratio")
    assert engine.stop()
    assert findings(engine) == []


@pytest.mark.root
def test_a_full_disk_refuses_with_a_reason_and_takes_puts_again_by_itself(small_engine):
    engine = small_engine("64m")
    ballast = engine.root.parent / "ballast"
    with pyengine.connect(engine.root, refusals="return") as producer:
        assert producer.put("T", b"before").ok
        ballast.write_bytes(bytes(58 << 20))

        def refused():
            result = producer.put("T", b"meanwhile")
            return [result] if result.status is PutStatus.SERVICE_NOT_AVAILABLE else []

        result, = eventually(refused, "the full disk is noticed")
        assert "the disk is too full" in result.reason and "`pyengine clean`" in result.reason
        document = run("status", engine.root, "--json").document
        assert document["read_only"] and "over disk_space_warning_level_ratio = 90" in document["reason"]
        ballast.unlink()
        eventually(lambda: producer.put("T", b"after").ok, "there is room again")
    assert not run("status", engine.root, "--json").document["read_only"]
    assert "puts are refused: the disk" in engine.log() and "there is room again" in engine.log()
    assert engine.stop()
    assert findings(engine) == []


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    def is_mounted() -> bool:
        subprocess.run(["mount", "--bind", folder, folder], check=True)
        done = subprocess.run(["mount", "-o", "remount,ro,bind", folder], capture_output=True, text=True)
        if done.returncode:  # the allocator has created a segment since the bind: it is busy
            subprocess.run(["umount", "--lazy", folder], check=True)
        return not done.returncode

    eventually(is_mounted, "the folder is read-only")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.root
def test_a_folder_that_becomes_read_only_refuses_and_comes_back(small_engine):
    engine = small_engine("64m")
    folder = engine.root / "commitlog"
    with pyengine.connect(engine.root, refusals="return") as producer:
        assert producer.put("T", b"before").ok

        with read_only(folder):
            result, = eventually(lambda: (lambda put: [] if put.ok else [put])(producer.put("T", b"meanwhile")), "it is noticed")
            assert result.status is PutStatus.SERVICE_NOT_AVAILABLE and "cannot be written" in result.reason
            assert "mounted read-only" in run("status", engine.root, "--json").document["reason"]
        eventually(lambda: producer.put("T", b"after").ok, "it is writable again")
    assert engine.stop()
    assert findings(engine) == []


@pytest.mark.ci
@pytest.mark.root
def test_a_worker_that_cannot_open_its_segment_on_a_read_only_disk_comes_up_when_it_can(small_engine):
    """Of a flusher that must open the segment just then: it ended five times, and with it the engine."""
    engine = small_engine("64m")
    with pyengine.connect(engine.root, refusals="return") as producer:
        assert producer.put("T", b"before").ok
        with read_only(engine.root / "commitlog"):
            flusher = engine.incarnation("flusher")
            engine.kill("flusher")
            eventually(lambda: engine.log().count("flusher (pid ") > 6, "it has been tried more often than it may fail to start")
        engine.wait_back("flusher", flusher)
        eventually(lambda: producer.put("T", b"after").ok, "it is writable again")
    assert engine.stop()
    assert findings(engine) == []
