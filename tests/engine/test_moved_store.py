"""A store's folder is moved, removed, replaced or covered while its engine runs: acknowledged means in the store."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys

import pytest

import pyengine
from faults.mounts import own_mounts, with_own_mounts
from fix_cli import run
from fix_engine import EACH_MODE, SMALL, put_numbers, stored
from pyengine.engine.kinds import child_environment
from pyengine.errors import EngineError, EngineUnavailableError, ExitCode
from pyengine.formats.small_file import opened
from pyengine.ipc.store_lock import living_kinds
from pyengine.native import control as native
from pyengine.storage.consumer_offset import ConsumerOffsets
from waiting import eventually, scaled_timeout_s

SEGMENT = 65536


def wait_ended(pid: int) -> None:
    """Wait until every thread of the process has ended, and the kernel has continued the children that it leaves."""
    with contextlib.suppress(ProcessLookupError), opened(os.pidfd_open(pid)) as descriptor:
        assert select.select([descriptor], [], [], scaled_timeout_s(60))[0], f"process {pid} has not ended"


def put_until_refused(producer, bodies: list[bytes], first: int = 0) -> str:
    """Put until a put is refused; adds what was acknowledged to `bodies`, returns the reason.

    The session may close while a put waits for its answer, as it does for the last one of an engine that ends.
    """
    for number in range(first, 1_000_000):
        result = producer.put("T", b"%06d" % number, queue_id=0, timeout_s=20)
        if result.ok:
            bodies.append(b"%06d" % number)
        elif not result.indeterminate:
            return result.reason
    raise AssertionError("no put was refused")


def until_refused(bodies: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """What is stored after put_until_refused(): without the put that may have had no answer, or with it."""
    return bodies, [*bodies, b"%06d" % len(bodies)]


def put_another_in_its_place(engine, make_engine, messages: int, **settings):
    """Move the store of `engine`, and start another one with as many messages at its old path: (that engine, its bodies)."""
    engine.root = engine.root.rename(engine.root.with_name("moved"))
    other = make_engine(**settings)
    other.start()
    return other, put_numbers(other, 500_000, messages)


def names_below(folder) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("mode", EACH_MODE)
def test_what_was_acknowledged_is_in_the_moved_store_and_the_engine_ends_in_order(make_engine, mode):
    engine = make_engine(mode, mapped_file_size_commit_log_bytes=SEGMENT)
    engine.start()
    supervisor, root, bodies = engine.pid("supervisor"), engine.root, []
    with pyengine.connect(root, refusals="return") as producer:
        assert producer.put("T", b"x", queue_id=1).ok
        engine.root = root.rename(root.with_name("moved"))
        reason = put_until_refused(producer, bodies)
        assert "moved" in reason or f"{root}, which does not exist" in reason, reason
        wait_ended(supervisor)
        assert f"{root}, which does not exist" in producer.put("T", b"y", timeout_s=1).reason
    assert len(bodies) * 100 > SEGMENT, "segments were made after the move"
    assert not root.exists() and not (engine.root / "abort").exists()
    log = engine.log()
    assert "STORE_LOST" in log and f"which are in {engine.root}" in log and "ENGINE_STOPPED" in log and "STOP_UNCLEAN" not in log
    assert stored(engine) in until_refused(bodies)
    outcome = engine.start()
    assert "normal path" in outcome["recovery"]
    assert stored(engine) in until_refused(bodies)
    engine.stop()


def test_a_new_store_at_the_old_path_is_not_touched(make_engine):
    engine, bodies = make_engine(mapped_file_size_commit_log_bytes=SEGMENT), []
    engine.start()
    supervisor, root = engine.pid("supervisor"), engine.root
    with pyengine.connect(root, refusals="return") as producer:
        assert producer.put("T", b"x", queue_id=1).ok
        other, theirs = put_another_in_its_place(engine, make_engine, 3, mapped_file_size_commit_log_bytes=SEGMENT)
        reason = put_until_refused(producer, bodies)
        assert "moved, removed or replaced" in reason, reason
        wait_ended(supervisor)
        reason = producer.put("T", b"y", timeout_s=5).reason
        assert "another store is at" in reason and "connect again" in reason
    assert (root / "abort").exists() and set(other.pids()) >= {"supervisor", "writer", "flusher"}
    assert stored(other) == theirs and "STORE_LOST" not in other.log()
    assert other.stop() and stored(other) == theirs
    assert stored(engine) in until_refused(bodies) and not (engine.root / "abort").exists()


def test_a_producer_follows_a_copy_that_took_the_stores_place(make_engine):
    engine = make_engine()
    engine.start()
    with pyengine.connect(engine.root, refusals="return") as producer:
        assert producer.put("T", b"000000", queue_id=0).ok
        engine.stop()
        shutil.copytree(engine.root, engine.root.with_name("copy"))
        shutil.rmtree(engine.root)
        engine.root.with_name("copy").rename(engine.root)
        engine.start()
        assert producer.put("T", b"000001", queue_id=0, timeout_s=20).ok
    engine.stop()
    assert stored(engine) == [b"000000", b"000001"]


@pytest.mark.parametrize("mode", EACH_MODE)
def test_an_engine_whose_store_was_removed_ends_and_makes_nothing_anew(make_engine, mode):
    engine = make_engine(mode, mapped_file_size_commit_log_bytes=SEGMENT)
    engine.start()
    processes, root = engine.pids(), engine.root
    with pyengine.connect(root, refusals="return") as producer:
        assert producer.put("T", b"x").ok
        while root.exists():  # a worker may make a file in a folder that is just emptied
            shutil.rmtree(root, ignore_errors=True)
        put_until_refused(producer, [])
        for pid in processes.values():
            wait_ended(pid)
        assert not producer.put("new topic", b"x", timeout_s=2).ok
    assert not root.exists()


@pytest.mark.ci
def test_an_engine_whose_files_were_removed_makes_no_folder_in_what_is_left(make_engine):
    engine = make_engine(mapped_file_size_commit_log_bytes=SEGMENT)
    engine.start()
    processes, root = engine.pids(), engine.root
    with pyengine.connect(root, refusals="return") as producer:
        assert producer.put("T", b"x").ok
        for entry in root.iterdir():
            while entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            entry.unlink(missing_ok=True)
        put_until_refused(producer, [])
        for pid in processes.values():
            wait_ended(pid)
    assert names_below(root) <= {"engine.log"}  # a process writes its log where it belongs


def test_the_log_folder_alone_is_replaced(make_engine):
    engine = make_engine(mapped_file_size_commit_log_bytes=SEGMENT)
    engine.start()
    supervisor, log = engine.pid("supervisor"), engine.root / "commitlog"
    log.rename(engine.root / "old-commitlog")
    log.mkdir()
    wait_ended(supervisor)
    assert "commitlog was replaced while the engine ran" in engine.log()
    assert os.listdir(log) == [] and (engine.root / "abort").exists()


def test_another_engine_on_the_same_files_loses_nothing_to_the_one_that_ends(make_engine):
    """A copy was written over the store, with the identity of another one."""
    engine = make_engine()
    engine.start()
    bodies, processes = put_numbers(engine, 0, 10), engine.pids()
    engine.wait_noted()
    engine.kill("supervisor", signal.SIGSTOP)  # it sees all of the change, or nothing
    for name in ("config/engine-id", "lock"):
        copied = shutil.copy(engine.root / name, engine.root / "copied")
        os.replace(copied, engine.root / name)
    os.kill(processes["supervisor"], signal.SIGCONT)
    for pid in processes.values():
        wait_ended(pid)
    assert (engine.root / "abort").exists() and "so the workers were killed" in engine.log()
    assert stored(engine) == bodies


def test_an_engine_whose_lock_stays_away_ends_without_a_clean_mark(make_engine):
    engine = make_engine("pool")
    engine.start()
    bodies, processes = put_numbers(engine, 0, 10), engine.pids()
    (engine.root / "lock").unlink()
    for pid in processes.values():
        wait_ended(pid)
    assert (engine.root / "abort").exists() and "lock was removed while the engine ran" in engine.log()
    assert run("recover", engine.root).code == ExitCode.OK and stored(engine) == bodies  # what was in the pool, too


def test_a_renamed_parent_is_a_move(make_engine, tmp_path):
    parent = tmp_path / "parent"
    parent.mkdir()
    engine = make_engine(name="parent/store")
    engine.start()
    supervisor, bodies = engine.pid("supervisor"), []
    with pyengine.connect(engine.root, refusals="return") as producer:
        parent.rename(tmp_path / "renamed")
        engine.root = tmp_path / "renamed" / "store"
        put_until_refused(producer, bodies)
    wait_ended(supervisor)
    assert stored(engine) in until_refused(bodies) and not parent.exists()


def test_a_link_to_the_store_that_leads_elsewhere_ends_the_engine_and_one_that_leads_back_does_not(make_engine, tmp_path):
    engine = make_engine(name="there")
    engine.root.mkdir()
    link = tmp_path / "link"
    link.symlink_to(engine.root)
    engine.root = link
    engine.start()
    supervisor = engine.pid("supervisor")
    (tmp_path / "there").rename(tmp_path / "elsewhere")
    (tmp_path / "there").symlink_to(tmp_path / "elsewhere")
    bodies = put_numbers(engine, 0, 10)
    with engine.memory() as memory:
        line, beats = memory.control.workers[native.SUPERVISOR], set()
        eventually(lambda: beats.add(native.load(line, "heartbeat_ns")) or len(beats) == 3, "the supervisor has looked again")
    assert "STORE_LOST" not in engine.log()
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "there").unlink()
    (tmp_path / "there").symlink_to(other)
    wait_ended(supervisor)
    engine.root = tmp_path / "elsewhere"
    assert stored(engine) == bodies and os.listdir(other) == []


def test_a_folder_of_the_log_on_another_disk_is_moved(make_engine, tmp_path):
    outside = tmp_path / "disk" / "log"
    engine = make_engine(mapped_file_size_commit_log_bytes=SEGMENT, store_path_commit_log=str(outside))
    engine.start()
    supervisor, bodies = engine.pid("supervisor"), []
    with pyengine.connect(engine.root, refusals="return") as producer:
        (tmp_path / "disk").rename(tmp_path / "moved")
        put_until_refused(producer, bodies)
    wait_ended(supervisor)
    assert f"{outside} does not lead to this store's files any more, which are in {tmp_path / 'moved' / 'log'}" in engine.log()
    assert not outside.exists() and not (engine.root / "commitlog").exists()
    (tmp_path / "moved").rename(tmp_path / "disk")
    assert stored(engine) in until_refused(bodies) and not (engine.root / "abort").exists()


@pytest.mark.root
def test_a_mount_over_the_store_ends_the_engine_and_the_store_below_it_is_whole(make_engine):
    with_own_mounts(_mount_over, make_engine)


def _mount_over(make_engine) -> None:
    own_mounts()
    engine = make_engine()
    engine.start()
    supervisor, bodies = engine.pid("supervisor"), []
    with pyengine.connect(engine.root, refusals="return") as producer:
        subprocess.run(["mount", "-t", "tmpfs", "none", str(engine.root)], check=True)
        put_until_refused(producer, bodies)
        wait_ended(supervisor)
        assert os.listdir(engine.root) == []
    subprocess.run(["umount", str(engine.root)], check=True)
    assert stored(engine) in until_refused(bodies) and "ENGINE_STOPPED" in engine.log()


def test_workers_without_a_supervisor_end_by_themselves(make_engine):
    engine = make_engine()
    engine.start()
    bodies, processes = put_numbers(engine, 0, 10), engine.pids()
    engine.kill("supervisor")
    engine.root = engine.root.rename(engine.root.with_name("moved"))
    for pid in processes.values():
        wait_ended(pid)
    assert "no supervisor runs, and" in engine.log() and "STORE_LOST" in engine.log()
    assert living_kinds(engine.root) == [] and stored(engine) == bodies


@pytest.mark.parametrize("dead", ["", pytest.param("allocator", marks=pytest.mark.ci)])
def test_workers_whose_log_was_moved_are_ended_by_the_supervisor_that_adopts_them(make_engine, tmp_path, dead):
    outside = tmp_path / "disk" / "log"
    engine = make_engine(store_path_commit_log=str(outside))
    engine.start()
    bodies, workers = put_numbers(engine, 0, 2), set(engine.pids()) - {"supervisor"}
    with pyengine.connect(engine.root, refusals="return") as producer:
        wait_ended(engine.kill("supervisor"))
        for kind in workers - {dead}:
            engine.suspend(kind)  # they would end by themselves
        if dead:
            wait_ended(engine.kill(dead))
        (tmp_path / "disk").rename(tmp_path / "moved")
        with pytest.raises(EngineError, match=f"{outside} was moved or removed"):
            engine.start()
        engine.wait_gone()
        assert not producer.put("T", b"x", timeout_s=1).ok
    assert not (tmp_path / "disk").exists() and (engine.root / "abort").exists() == bool(dead)
    assert ("ENGINE_STOPPED" in engine.log()) == (not dead)
    (tmp_path / "moved").rename(tmp_path / "disk")
    engine.start()
    bodies += put_numbers(engine, 2, 1)
    engine.stop()
    assert stored(engine) == bodies


def test_a_worker_that_dies_just_after_the_move_is_started_in_the_moved_store(make_engine):
    engine = make_engine()
    engine.start()
    bodies, supervisor = put_numbers(engine, 0, 10), engine.pid("supervisor")
    engine.kill("supervisor", signal.SIGSTOP)
    engine.root = engine.root.rename(engine.root.with_name("moved"))
    engine.kill("flusher")
    os.kill(supervisor, signal.SIGCONT)
    wait_ended(supervisor)
    assert "STOP_UNCLEAN" not in engine.log() and not (engine.root / "abort").exists()
    assert stored(engine) == bodies


def test_consumers_commit_into_no_other_store_and_say_what_happened(make_engine):
    engine = make_engine()
    engine.start()
    put_numbers(engine, 0, 10)
    with pyengine.connect(engine.root, refusals="return") as producer:
        assert producer.put("T", b"000010", queue_id=0).ok
    root = engine.root
    consumer = pyengine.consume(root, "T", group="G", from_="first", auto_commit=False)
    messages = consumer.pull(5, timeout_s=10)
    assert [message.body for message in messages] == [b"%06d" % number for number in range(5)]
    other, _ = put_another_in_its_place(engine, make_engine, 20)

    def refuses():
        try:
            assert all(message.body < b"500000" for message in consumer.pull(1, timeout_s=0.1))
        except EngineUnavailableError as error:
            return f"{root} does not lead to this store's files any more" in str(error)
    eventually(refuses, "the consumer says so")
    with pytest.raises(EngineError):
        consumer.commit(messages)
    with pytest.raises(EngineError):
        consumer.close()
    assert ConsumerOffsets(root).groups() == {} and not list((root / "config").glob("consumers/*@*"))
    other.stop()


def test_a_removed_store_is_not_made_anew_by_a_consumer(make_engine):
    engine = make_engine()
    engine.start()
    put_numbers(engine, 0, 10)
    consumer = pyengine.consume(engine.root, "T", group="G", from_="first")
    assert consumer.pull(5, timeout_s=10)
    engine.stop()
    shutil.rmtree(engine.root)
    with pytest.raises(EngineError):
        while True:
            consumer.pull(1, timeout_s=0.1)
    with pytest.raises(EngineError):
        consumer.close()
    assert not engine.root.exists()


def test_a_reader_stays_with_its_store_and_then_says_that_it_was_moved(make_engine):
    engine = make_engine()
    engine.start()
    bodies = put_numbers(engine, 0, 10)
    engine.stop()
    root = engine.root
    with pyengine.open_store(root) as store:
        assert store.get_message("T", 0, 0).messages[0].body == bodies[0]
        other, _ = put_another_in_its_place(engine, make_engine, 20)

        def refuses():
            try:
                assert [message.body for message in store.get_message("T", 0, 0).messages] == bodies
            except EngineUnavailableError as error:
                return f"which are in {engine.root}" in str(error) and "open the store again" in str(error)
        eventually(refuses, "the reader says so")
        other.stop()


def test_an_embedded_engine_says_where_its_store_is(tmp_path):
    root = tmp_path / "store"
    engine = pyengine.Engine(root, **SMALL).start()
    with engine.connect() as producer:
        assert producer.put("T", b"x").ok
    supervisor = engine.pid
    root.rename(tmp_path / "moved")
    wait_ended(supervisor)
    with pytest.raises(EngineError, match=f"has ended: {root} does not lead .* which are in {tmp_path / 'moved'}"):
        engine.stop()
    engine.stop()  # nothing is left to stop
    assert not root.exists() and not (tmp_path / "moved" / "abort").exists()


def test_a_foreground_engine_ends_with_the_code_that_a_service_manager_does_not_restart(tmp_path):
    root = tmp_path / "store"
    words = [sys.executable, "-P", "-m", "pyengine.workers.supervisor", str(root)]
    for name, value in SMALL.items():
        words += ["--set", f"{name}={value}"]
    process = subprocess.Popen(words, env=child_environment(), stderr=subprocess.PIPE, text=True)
    eventually(lambda: run("status", root, "--json").code == 0 and run("put", root, "--topic", "T", "x").code == 0, "it takes puts")
    root.rename(tmp_path / "moved")
    _, log = process.communicate(timeout=scaled_timeout_s(60))
    assert process.returncode == ExitCode.USAGE and "STORE_LOST" in log
    assert not root.exists()
    for command in ("stop", "status"):
        found = run(command, root)
        assert found.code == ExitCode.USAGE and f"{root} does not exist" in found.stderr, found
    assert run("stop", tmp_path / "moved").code == ExitCode.OK


