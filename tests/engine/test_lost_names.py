"""The names of an engine in shared memory are removed under it: by a logout, a cleaner, a hand."""

from __future__ import annotations

import os
import signal
import subprocess

import psutil
import pytest

import pyengine
from crash.board import Board
from fix_cli import run
from fix_engine import put_numbers, stored
from fix_golden import usual
from pyengine.engine.embedded import stop_engine
from pyengine.errors import EngineError
from pyengine.ipc.shared_objects import find_folder, semaphore_name, unlink_semaphores
from pyengine.ipc.store_lock import living_kinds
from pyengine.native import control as native
from pyengine.native.failpoints import VARIABLE
from pyengine.storage.engine_id import read_epoch
from waiting import eventually


def remove_all(engine):
    """With rm, since the supervisor may remove the session of a producer at the same time."""
    folder = find_folder(engine.root)
    subprocess.run(["rm", "-rf", folder.path], check=True)
    unlink_semaphores(folder.short_id)


def remove_one(name):
    return lambda engine: (find_folder(engine.root).path / name).unlink()


def remove_a_semaphore(engine):
    os.unlink(f"/dev/shm/sem.{semaphore_name(find_folder(engine.root).short_id, native.FLUSHER)[1:]}")


def wait_again(engine, processes, epoch=2):
    """Wait until the engine has restarted with the same number of processes."""
    def is_back():
        try:
            with engine.memory() as memory:
                engine.semaphores.add(memory.identity.sysv_semaphore_id)
                workers = memory.control.workers
                return (memory.identity.epoch >= epoch and not memory.missing_names() and len(living_kinds(engine.root)) == processes
                        and all(native.load(workers[kind], "state") == native.WORKER_READY for kind in living_kinds(engine.root)))
        except EngineError:
            return False
    eventually(is_back, "the engine is back", timeout_s=90)


REMOVALS = [("pool", remove_all), ("sync", remove_one("control")), ("async", remove_all), ("async", remove_one("socket")),
            ("async", remove_a_semaphore), ("async", remove_one("cleaning"))]


@pytest.mark.parametrize(("mode", "remove"), usual(REMOVALS, REMOVALS[:1], pytest.mark.ci))
def test_an_engine_whose_names_were_removed_stops_in_order_and_starts_again(make_engine, mode, remove):
    engine = make_engine(mode)
    engine.start()
    supervisor_pid, before = engine.pid("supervisor"), engine.pids()
    with pyengine.connect(engine.root, refusals="return") as producer:
        assert producer.put("T", b"000000").ok
        remove(engine)
        bodies = [b"000000"]
        for number in range(1, 50):  # some meet the old engine, some the new one
            result = producer.put("T", b"%06d" % number, timeout_s=30)
            bodies += [b"%06d" % number] if result.ok else []
        wait_again(engine, len(before))
        assert producer.put("T", b"000099", timeout_s=30).ok
    after = engine.pids()
    assert before.keys() == after.keys() and set(before.values()) & set(after.values()) == {supervisor_pid}
    assert "stopped in order and started again" in engine.log() and "not stopped in an orderly way" not in engine.log()
    assert engine.stop() is True and living_kinds(engine.root) == []
    assert not (engine.root / "abort").exists()
    assert set(stored(engine)) >= {*bodies, b"000099"}


@pytest.mark.ci
def test_a_supervisor_that_dies_while_it_names_the_memory_again_leaves_a_store_that_starts(make_engine, tmp_path, monkeypatch):
    board = Board(tmp_path / "board")
    monkeypatch.setenv(VARIABLE, str(board.path))
    engine = make_engine("pool")
    engine.start()
    engine.kill("committer", signal.SIGSTOP)
    bodies = put_numbers(engine, 0, 300)
    positions = engine.positions()
    assert positions["wrote"] > positions["committed"], "undrained bytes"
    board.arm("object_copied", nth=3, process="supervisor")
    victims = [engine.pid("committer"), engine.pid("writer")]
    remove_all(engine)
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: living_kinds(engine.root) == [], "the supervisor was killed between two copies", timeout_s=90)
    assert board.struck_pid
    board.disarm()
    assert {"pool-0", "pool-1", "pool-2.new"} <= set(find_folder(engine.root).names())
    assert engine.start()["state"] == "running"
    engine.stop()
    found = stored(engine)
    assert found == bodies[:len(found)], "what was in the pool alone is lost with its only process"


@pytest.mark.ci
def test_pool_bytes_outlive_their_names_and_the_death_of_their_workers(make_engine):
    engine = make_engine("pool")
    engine.start()
    processes = len(engine.pids())
    engine.kill("committer", signal.SIGSTOP)
    bodies = put_numbers(engine, 0, 300)
    positions = engine.positions()
    assert positions["wrote"] > positions["committed"], "undrained bytes"
    victims = [engine.pid("committer"), engine.pid("writer")]
    remove_all(engine)
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    wait_again(engine, processes)
    assert "drained" in engine.log()
    bodies += put_numbers(engine, 300, 5)
    engine.stop()
    assert stored(engine) == bodies


@pytest.mark.parametrize("mode", usual(["sync", "pool"], ["pool"], pytest.mark.ci))
def test_workers_without_names_and_supervisor_end_in_order_and_the_next_start_recovers(make_engine, mode):
    engine = make_engine(mode)
    engine.start()
    with pyengine.connect(engine.root) as producer:
        producer.put("T", b"000000")
        engine.kill("supervisor")
        eventually(lambda: native.SUPERVISOR not in living_kinds(engine.root), "the supervisor is gone")
        pids = engine.pids()
        remove_all(engine)
        status = run("status", engine.root, "--json").document
        if living_kinds(engine.root):
            assert "names in shared memory were removed" in status["reason"] and "pyengine start" in status["reason"]
        outcome = engine.start()
        assert not outcome["adopted"] and read_epoch(engine.root) == 2
        assert not set(pids.values()) & set(engine.pids().values())
        assert producer.put("T", b"000001", timeout_s=30).ok
    engine.stop()
    assert stored(engine) == [b"000000", b"000001"]


def test_an_engine_whose_names_were_removed_is_stopped_in_order(make_engine):
    engine = make_engine("pool")
    engine.start()
    bodies = put_numbers(engine, 0, 50)
    remove_all(engine)
    assert engine.stop() is True
    assert living_kinds(engine.root) == [] and not (engine.root / "abort").exists()
    assert stored(engine) == bodies


def test_stop_succeeds_only_when_no_process_is_left(make_engine):
    engine = make_engine()
    engine.start()
    bodies = put_numbers(engine, 0, 5)
    supervisor = engine.kill("supervisor")
    # its lock is free a moment before: the kernel resumes stopped processes that lose their parent
    eventually(lambda: psutil.Process(engine.pid("flusher")).ppid() != supervisor, "the supervisor is gone")
    stopped = engine.kill("flusher", signal.SIGSTOP)
    remove_all(engine)
    with pytest.raises(EngineError, match=rf"still stopping after 3 s.*flusher \(pid {stopped}\)"):
        stop_engine(engine.root, timeout_s=3)
    assert "waiting for them to end by themselves" in engine.log()
    os.kill(stopped, signal.SIGKILL)
    engine.wait_gone()
    engine.start()
    engine.stop()
    assert stored(engine) == bodies
