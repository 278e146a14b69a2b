"""The whole engine: start, restart in place, adoption, recovery after everything died, orderly stop."""

from __future__ import annotations

import json
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import threading
import types

import pytest

import pyengine
from broker_lock import held_by_a_broker
from crash.board import Board
from damage import flip
from fix_engine import EACH_MODE, MODES, SMALL, WORKERS, put_numbers, stored
from fix_golden import usual
from fix_owner import CHECKOUT
from pyengine.engine import embedded
from pyengine.engine.embedded import start_engine, stop_engine, supervisor_pid
from pyengine.engine.supervisor import LatchBridge
from pyengine.errors import (
    CorruptionError,
    EngineError,
    EngineUnavailableError,
    ExitCode,
    NotAStoreError,
    StoreBusyError,
    UsageError,
)
from pyengine.ipc.control_block import MODE_NAMES, EngineMemory, read_run_settings
from pyengine.ipc.crashed_engine_memory import open_crashed_memory
from pyengine.ipc.live_reader import check_now
from pyengine.ipc.shared_objects import KIND_NAMES, SharedFolder, find_folder
from pyengine.ipc.store_lock import living_kinds
from pyengine.native import control as native
from pyengine.native import waiting
from pyengine.native.failpoints import VARIABLE
from pyengine.results import PutStatus
from pyengine.storage.checkpoint import read_watermark
from pyengine.storage.config import config_path, load_config, set_in_file
from pyengine.storage.engine_id import read_epoch
from waiting import eventually, scaled_timeout_s


@pytest.mark.parametrize("mode", usual(MODES, ["pool"], pytest.mark.ci))
def test_start_put_stop_leaves_a_clean_store_and_no_object(make_engine, mode):
    engine = make_engine(mode)
    outcome = engine.start()
    assert outcome["state"] == "running" and not outcome["adopted"]
    assert {KIND_NAMES[kind] for kind in living_kinds(engine.root)} == WORKERS[mode] | {"supervisor"}
    assert (engine.root / "abort").exists()
    folder = find_folder(engine.root)
    bodies = put_numbers(engine, 0, 200)
    assert engine.stop() is True
    assert living_kinds(engine.root) == [] and not (engine.root / "abort").exists()
    assert not folder.path.exists() and folder.names() == []
    assert not [name for name in os.listdir("/dev/shm") if folder.short_id in name]
    assert stored(engine) == bodies
    with pyengine.open_store(engine.root) as store:
        assert read_watermark(engine.root).watermark.flushed == store.max_physical_offset("committed")
        assert [message.body for message in store.query_message("T", "000007")] == [b"000007"]
    assert engine.stop() is False
    engine.start()
    bodies += put_numbers(engine, 200, 50)
    engine.stop()
    assert stored(engine) == bodies and read_epoch(engine.root) == 2


@pytest.mark.parametrize("mode", EACH_MODE)
def test_any_worker_killed_is_restarted_in_place_and_nothing_is_lost_or_doubled(make_engine, mode):
    engine = make_engine(mode)
    engine.start()
    bodies = put_numbers(engine, 0, 20)
    for number, kind in enumerate(sorted(WORKERS[mode]), 1):
        before = engine.incarnation(kind)
        engine.kill(kind)
        engine.wait_back(kind, before)
        bodies += put_numbers(engine, number * 20, 20)
    with engine.memory() as memory:
        for kind in WORKERS[mode]:
            assert native.load(memory.control.workers[KIND_NAMES.index(kind)], "restarts") == 1
    assert read_epoch(engine.root) == 1, "no recovery"
    engine.stop()
    assert stored(engine) == bodies
    assert engine.log().count("SIGKILL; starting it again") == len(WORKERS[mode])


def test_a_producer_continues_while_workers_are_killed_under_it(make_engine, rng):
    engine = make_engine("sync")
    engine.start()
    acked, going = [], True

    def produce():
        with pyengine.connect(engine.root) as producer:
            number = 0
            while going:
                result = producer.put("T", b"%06d" % number, timeout_s=30)
                assert result.status is PutStatus.PUT_OK, result
                acked.append(b"%06d" % number)
                number += 1

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        for _ in range(6):
            kind = rng.choice(["writer", "flusher", "reputter"])
            before, done = engine.incarnation(kind), len(acked)
            engine.kill(kind)
            engine.wait_back(kind, before)
            eventually(lambda done=done: len(acked) > done + 20, f"puts go on after {kind}")
    finally:
        going = False
        thread.join()
    engine.stop()
    assert stored(engine) == acked


@pytest.mark.parametrize("mode", EACH_MODE)
def test_a_start_after_all_processes_were_killed_keeps_acknowledged_messages(make_engine, mode):
    engine = make_engine(mode)
    engine.start()
    if mode == "pool":
        engine.kill("committer", signal.SIGSTOP)
    bodies = put_numbers(engine, 0, 300)
    if mode == "pool":
        positions = engine.positions()
        assert positions["wrote"] > positions["committed"], "undrained bytes at the kill"
    engine.kill_all()
    assert (engine.root / "abort").exists()
    outcome = engine.start()
    assert not outcome["adopted"] and "abnormal" in outcome["recovery"]
    assert ("drained" in outcome["recovery"]) == (mode == "pool")
    assert engine.positions()["flushed"] == engine.positions()["wrote"]
    bodies += put_numbers(engine, 300, 50)
    engine.stop()
    assert stored(engine) == bodies


def test_without_shared_memory_the_files_alone_bring_it_back(make_engine):
    engine = make_engine("sync")
    engine.start()
    bodies = put_numbers(engine, 0, 100)
    engine.kill_all()
    find_folder(engine.root).sweep()
    engine.start()
    bodies += put_numbers(engine, 100, 10)
    engine.stop()
    assert stored(engine) == bodies


def test_old_producers_notice_a_new_engine(make_engine):
    engine = make_engine()
    engine.start()
    with pyengine.connect(engine.root, refusals="return") as producer:
        assert producer.put("T", b"000000").ok
        engine.kill_all()
        engine.start()
        result = producer.put("T", b"000001", timeout_s=30)
        assert result.ok or result.indeterminate
        assert producer.put("T", b"000002", timeout_s=30).ok
    engine.stop()
    found = stored(engine)
    assert found[0] == b"000000" and found[-1] == b"000002" and (not result.ok or found[1] == b"000001")


def test_a_successor_adopts_living_workers_without_recovery(make_engine):
    engine = make_engine()
    engine.start()
    bodies = put_numbers(engine, 0, 10)
    with pyengine.connect(engine.root) as producer:
        engine.kill("supervisor")
        eventually(lambda: native.SUPERVISOR not in living_kinds(engine.root), "the supervisor is gone")
        before = dict(engine.pids().items())
        assert producer.put("T", b"000010").ok, "an open session needs no supervisor"
        with pytest.raises(EngineUnavailableError, match="supervisor"):
            pyengine.connect(engine.root, timeout_s=0.2)
        outcome = engine.start()
        assert outcome["adopted"]
        after = engine.pids()
        assert {kind: after[kind] for kind in before} == before and "supervisor" in after
        assert producer.put("T", b"000011").ok
    assert read_epoch(engine.root) == 1
    before = engine.incarnation("reputter")
    engine.kill("reputter")
    engine.wait_back("reputter", before)
    bodies += [b"000010", b"000011", *put_numbers(engine, 12, 5)]
    engine.stop()
    assert stored(engine) == bodies


def orphan(engine):
    """Kill the supervisor; the workers live on."""
    engine.kill("supervisor")
    eventually(lambda: native.SUPERVISOR not in living_kinds(engine.root), "the supervisor is gone")


def mode_of(engine):
    with engine.memory() as memory:
        return MODE_NAMES[memory.identity.mode]


def test_living_workers_are_not_adopted_by_a_start_that_asks_for_other_settings(make_engine, monkeypatch):
    engine = make_engine(put_timeout_ms=9000)
    engine.start()
    bodies = put_numbers(engine, 0, 5)
    orphan(engine)
    pids = engine.pids()
    for asked, where in (({"flush_disk_type": "SYNC_FLUSH"}, "--set"), ({"max_message_size_bytes": 501}, "--set"),
                         ({}, "environment"), ({}, "engine.toml")):
        with monkeypatch.context() as patch:
            if where == "environment":
                patch.setenv("PYENGINE_ZERO_AHEAD_BYTES", "1")
            elif where == "engine.toml":
                set_in_file(config_path(engine.root), {"broker_role": "SYNC_MASTER"})
            with pytest.raises(StoreBusyError, match=rf"\({where}\) is asked for, .* runs: `pyengine stop .*`, then start"):
                start_engine(engine.root, asked, timeout_s=60)
        assert engine.pids() == pids, "and they live on"
    assert engine.stop() is True, "whatever the files ask for"
    assert not (engine.root / "abort").exists() and stored(engine) == bodies
    set_in_file(config_path(engine.root), {}, without=("broker_role",))
    assert engine.start(flush_disk_type="SYNC_FLUSH")["mode"] == mode_of(engine) == "sync"
    engine.stop()


def test_a_successor_lets_the_living_workers_take_the_live_settings_that_it_is_asked_for(make_engine):
    engine = make_engine(put_timeout_ms=9000, file_reserved_time_hours=77)
    engine.start()
    bodies = put_numbers(engine, 0, 5)
    orphan(engine)
    pids = engine.pids()
    assert start_engine(engine.root, {"put_timeout_ms": 8000}, timeout_s=60)["adopted"]
    running = read_run_settings(find_folder(engine.root))
    assert (running.put_timeout_ms, running.file_reserved_time_hours) == (8000, 77), "what nothing gives stays as it runs"
    with engine.memory() as memory:
        assert memory.identity.put_timeout_ms == 8000
    assert {kind: pid for kind, pid in engine.pids().items() if kind != "supervisor"} == pids
    assert stored(engine) == bodies


@pytest.mark.parametrize("step", ["settings_renamed", "limits_changed"])
def test_a_supervisor_that_dies_while_it_changes_settings_has_a_successor_that_does_it(make_engine, tmp_path, monkeypatch, step):
    board = Board(tmp_path / "board")
    monkeypatch.setenv(VARIABLE, str(board.path))
    engine = make_engine()
    engine.start()
    bodies = put_numbers(engine, 0, 2)
    board.arm(step, process="supervisor")
    set_in_file(config_path(engine.root), {"put_timeout_ms": 8000, "file_reserved_time_hours": 5})
    os.kill(engine.pid("supervisor"), signal.SIGHUP)
    eventually(lambda: native.SUPERVISOR not in living_kinds(engine.root), "it is dead")
    assert board.struck_pid
    board.disarm()
    assert engine.start()["adopted"]
    with engine.memory() as memory:
        number = waiting.load_sequence(memory.control.settings_seq)
        assert memory.identity.put_timeout_ms == 8000
        eventually(lambda: native.load(memory.control.workers[native.CLEANER], "settings_seq") == number, "the cleaner has taken them")
    assert read_run_settings(find_folder(engine.root)).file_reserved_time_hours == 5
    engine.stop()
    assert stored(engine) == bodies


def test_workers_that_a_successor_starts_run_with_the_settings_of_the_others(make_engine):
    engine = make_engine("sync", file_reserved_time_hours=77)
    engine.start()
    orphan(engine)
    before = engine.incarnation("cleaner")
    engine.kill("cleaner")
    outcome = start_engine(engine.root, {}, timeout_s=60)
    assert outcome["adopted"] and outcome["mode"] == mode_of(engine) == "sync"
    engine.wait_back("cleaner", before)
    running = read_run_settings(find_folder(engine.root))
    assert (running.file_reserved_time_hours, running.flush_disk_type) == (77, "SYNC_FLUSH")
    engine.stop()


def test_without_children_workers_of_other_settings_are_stopped_in_order_and_the_store_is_started_with_the_new_ones(make_engine):
    engine = make_engine()
    engine.start()
    bodies = put_numbers(engine, 0, 5)
    orphan(engine)
    asked = {**engine.settings, "flush_disk_type": "SYNC_FLUSH"}
    pairs = [word for name, value in asked.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-P", "-m", "pyengine.workers.supervisor", str(engine.root), "--no-children", *pairs]
    supervisor = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(CHECKOUT)}, stderr=subprocess.PIPE, text=True)
    try:
        eventually(lambda: living_kinds(engine.root) == [native.SUPERVISOR] and read_epoch(engine.root) == 2
                   and find_folder(engine.root).socket_path.exists(), "it has started anew")
        assert mode_of(engine) == "sync"
        with engine.memory() as memory:
            engine.semaphores.add(memory.identity.sysv_semaphore_id)
        assert stored(engine) == bodies
    finally:
        supervisor.kill()
        said = supervisor.communicate()[1]
    assert "the settings have changed: flush_disk_type = SYNC_FLUSH (--set) is asked for, ASYNC_FLUSH runs" in said
    assert "normal path" in said, "nothing was cut short"


def test_without_children_a_settings_file_that_was_spoilt_does_not_leave_workers_alone(make_engine):
    engine = make_engine()
    engine.start()
    orphan(engine)
    with config_path(engine.root).open("a") as file:
        file.write("flush_disk_typ = 1\n")
    command = [sys.executable, "-P", "-m", "pyengine.workers.supervisor", str(engine.root), "--no-children"]
    supervisor = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(CHECKOUT)}, stderr=subprocess.PIPE, text=True)
    try:
        eventually(lambda: native.SUPERVISOR in living_kinds(engine.root) and find_folder(engine.root).socket_path.exists(), "it is up")
        supervisor.send_signal(signal.SIGTERM)
        said = supervisor.communicate(timeout=scaled_timeout_s(60))[1]
    finally:
        supervisor.kill()
    assert supervisor.returncode == 0 and "SETTINGS_REFUSED living workers keep their settings: unknown setting 'flush_disk_typ'" in said
    assert subprocess.run(command, capture_output=True, text=True,
                          timeout=scaled_timeout_s(60)).returncode == ExitCode.USAGE, "none lives now"


def test_a_supervisor_that_dies_while_it_stops_has_a_successor_that_takes_puts(make_engine, tmp_path, monkeypatch):
    """At whatever moment: before the state says so, behind it, and its successor once more while it takes that back."""
    board = Board(tmp_path / "board")
    monkeypatch.setenv(VARIABLE, str(board.path))
    engine = make_engine()
    engine.start()
    bodies = put_numbers(engine, 0, 2)
    for number, steps in enumerate((["stop_refused"], ["stop_stated", "adopted_running"]), 1):
        board.arm(steps[0], process="supervisor")
        os.kill(engine.pid("supervisor"), signal.SIGTERM)
        eventually(lambda: native.SUPERVISOR not in living_kinds(engine.root), "it is dead")
        assert board.struck_pid
        for step in steps[1:]:
            board.arm(step, process="supervisor")
            with pytest.raises(EngineError):
                engine.start()
            assert board.struck_pid
        board.disarm()
        with engine.memory(writable=True) as memory:
            native.refuse_puts(memory.control, native.REFUSE_LOST)  # as if it had stopped since its folder was moved, for a while
        assert engine.start()["adopted"]
        bodies += put_numbers(engine, number * 2, 2)
    engine.stop()
    assert stored(engine) == bodies and read_epoch(engine.root) == 1


def test_a_successor_starts_workers_that_died_meanwhile(make_engine):
    engine = make_engine()
    engine.start()
    bodies = put_numbers(engine, 0, 5)
    engine.kill("supervisor")
    eventually(lambda: native.SUPERVISOR not in living_kinds(engine.root), "the supervisor is gone")
    before = engine.incarnation("writer")
    engine.kill("writer")
    eventually(lambda: native.WRITER not in living_kinds(engine.root), "the writer is gone")
    assert engine.start()["adopted"]
    assert engine.incarnation("writer") == before + 1
    bodies += put_numbers(engine, 5, 5)
    engine.stop()
    assert stored(engine) == bodies


def test_stop_gives_an_orphaned_engine_a_supervisor_first(make_engine):
    engine = make_engine("pool")
    engine.start()
    bodies = put_numbers(engine, 0, 10)
    engine.kill("supervisor")
    eventually(lambda: native.SUPERVISOR not in living_kinds(engine.root), "the supervisor is gone")
    assert engine.stop() is True
    assert living_kinds(engine.root) == [] and not (engine.root / "abort").exists()
    assert stored(engine) == bodies


@pytest.mark.parametrize("mode", EACH_MODE)
def test_a_flusher_killed_just_before_the_stop_does_not_spoil_it(make_engine, mode):
    engine = make_engine(mode)
    engine.start()
    bodies = put_numbers(engine, 0, 50)
    engine.kill("flusher")
    assert engine.stop() is True
    assert not (engine.root / "abort").exists()
    assert stored(engine) == bodies


def test_one_engine_a_store(make_engine):
    engine = make_engine()
    engine.start()
    with pytest.raises(StoreBusyError, match="already"):
        engine.start()
    done = subprocess.run([sys.executable, "-P", "-m", "pyengine.workers.supervisor", str(engine.root)], capture_output=True,
                          text=True, timeout=scaled_timeout_s(60), env={**os.environ, "PYTHONPATH": str(CHECKOUT)})
    assert done.returncode == 5 and "in use by another engine" in done.stderr
    put_numbers(engine, 0, 1)
    engine.stop()


def test_a_stopped_worker_is_resumed_at_stop_to_finish(make_engine):
    engine = make_engine("pool")
    engine.start()
    engine.kill("committer", signal.SIGSTOP)
    bodies = put_numbers(engine, 0, 20)
    engine.stop()
    assert not (engine.root / "abort").exists()
    assert "resumed (SIGCONT)" in (engine.root / "engine.log").read_text()
    assert stored(engine) == bodies


def test_a_frozen_store_refuses_puts_and_is_recovered_by_the_next_start(make_engine):
    engine = make_engine()
    engine.start()
    bodies = put_numbers(engine, 0, 5)
    with engine.memory(writable=True) as memory:
        native.freeze(memory.control, native.FLUSHER, 5, "the flusher could not make a segment durable")
        memory.wake(native.WRITER)
    with pyengine.connect(engine.root, refusals="return") as producer:
        result = producer.put("T", b"refused")
        assert result.status is PutStatus.SERVICE_NOT_AVAILABLE and "read-only" in result.reason
    with pytest.raises(EngineError, match="could not make a segment durable"):
        engine.stop()
    assert living_kinds(engine.root) == [] and (engine.root / "abort").exists()
    with open_crashed_memory(engine.root) as left:
        assert left.shared.slot_end > 0 and not left.shared.mismatch
        assert left.shared.reput_from is None, "queue pages may be lost too: nothing of them is spared"
    engine.start()
    bodies += put_numbers(engine, 5, 5)
    engine.stop()
    assert stored(engine) == bodies


def test_a_stop_that_cannot_write_its_log_tells_the_reason_and_no_line_of_before(make_engine):
    engine = make_engine()
    engine.start()
    engine.fail("the flusher could not make a segment durable")
    with pytest.raises(EngineError, match="not clean: the flusher could not make a segment durable; the next start recovers it"):
        engine.stop()
    assert "ENGINE_RECOVERED" in engine.log()


def test_damage_below_the_watermark_comes_up_read_only_and_changes_nothing(make_engine):
    engine = make_engine("sync")
    engine.start()
    bodies = put_numbers(engine, 0, 50)
    engine.stop()
    segment = engine.root / "commitlog" / ("0" * 20)
    at = segment.read_bytes().index(b"000030")
    flip(segment, at)
    damaged = segment.read_bytes()
    epoch = read_epoch(engine.root)
    outcome = engine.start()
    assert outcome["state"] == "degraded" and "salvage" in outcome["reason"]
    assert " LOG_DAMAGED The log is damaged at" in engine.log()
    assert living_kinds(engine.root) == [native.SUPERVISOR]
    with pytest.raises(EngineUnavailableError, match="damaged"):
        pyengine.connect(engine.root)
    spoiled = bytes([bodies[30][0] ^ 0xFF]) + bodies[30][1:]
    assert stored(engine) == [*bodies[:30], spoiled, *bodies[31:]], "a consumer sees all that is there; a scan fails at the damage"
    beside = check_now(engine.root, load_config(engine.root))
    engine.stop()
    alone = check_now(engine.root, load_config(engine.root))
    assert alone.exit_code == ExitCode.CORRUPTION and any(one.kind == "below watermark" for one in alone.findings)
    assert [one.text for one in beside.findings] == [one.text for one in alone.findings]
    assert segment.read_bytes() == damaged and read_epoch(engine.root) == epoch
    flip(segment, at)
    assert engine.start()["state"] == "running", "restored from a copy"
    engine.stop()
    assert stored(engine) == bodies


def test_by_hand_without_children_as_systemd_does_it(make_engine):
    engine = make_engine()
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    pairs = [word for name, value in engine.settings.items() for word in ("--set", f"{name}={value}")]
    page = (CHECKOUT / "docs" / "operations.md").read_text().split("## Workers one by one")[1]
    owner, worker = [shlex.split(line, comments=True) for line in page.split("```bash\n")[1].split("```")[0].splitlines()]
    assert (owner[0], owner[3], worker[3]) == ("python", "pyengine.workers.supervisor", "pyengine.workers.flusher")

    def command(words, **instead):
        return [sys.executable, *({"STORE": str(engine.root), **instead}.get(word, word) for word in words[1:])]

    supervisor = subprocess.Popen([*command(owner), *pairs], env=environment, stderr=subprocess.PIPE, text=True)
    kinds = sorted(WORKERS["async"])
    workers = [subprocess.Popen(command(worker, **{"pyengine.workers.flusher": f"pyengine.workers.{kind}"}), env=environment)
               for kind in kinds]
    try:
        eventually(lambda: len(living_kinds(engine.root)) == 1 + len(kinds), "all are up")
        with engine.memory() as memory:
            engine.semaphores.add(memory.identity.sysv_semaphore_id)
        bodies = put_numbers(engine, 0, 20)
        before = engine.incarnation("flusher")
        workers[kinds.index("flusher")].kill()
        workers[kinds.index("flusher")].wait()
        workers.append(subprocess.Popen(command(worker), env=environment))
        engine.wait_back("flusher", before)
        bodies += put_numbers(engine, 20, 5)
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(timeout=scaled_timeout_s(60)) == 0
        codes = [worker.wait(timeout=scaled_timeout_s(60)) for worker in workers]
        assert sorted(codes) == [-signal.SIGKILL, *[0] * len(kinds)]
    finally:
        for process in (supervisor, *workers):
            if process.poll() is None:
                process.kill()
                process.wait()
        supervisor.stderr.close()
    assert not (engine.root / "abort").exists() and stored(engine) == bodies


def test_a_stop_after_the_checkpointers_death_leaves_the_store_to_recovery(make_engine):
    engine, environment = make_engine(), {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    root = engine.root
    words = [sys.executable, "-P", "-m", "pyengine.workers.supervisor", str(root), "--no-children"]
    supervisor = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
    checkpointer = subprocess.Popen([*words[:3], "pyengine.workers.checkpointer", str(root)], env=environment)
    try:
        eventually(lambda: native.CHECKPOINTER in living_kinds(root), "it runs")
        with EngineMemory.of(root) as memory:
            engine.semaphores.add(memory.identity.sysv_semaphore_id)
            eventually(lambda: native.load(memory.control.workers[native.CHECKPOINTER], "state") == native.WORKER_READY, "it is ready")
        checkpointer.kill()
        checkpointer.wait()
        supervisor.send_signal(signal.SIGTERM)
        said = supervisor.communicate(timeout=scaled_timeout_s(60))[1]
    finally:
        for process in (checkpointer, supervisor):
            process.kill()
            process.wait()
    assert supervisor.returncode == ExitCode.FAILED and "the checkpointer did not finish" in said and (root / "abort").exists()


def test_the_supervisor_alone_speaks_to_the_service_manager(make_engine):
    engine = make_engine()
    address = f"{engine.root}.notify"
    pairs = [word for name, value in engine.settings.items() for word in ("--set", f"{name}={value}")]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(60)
        supervisor = subprocess.Popen(
            [sys.executable, "-P", "-m", "pyengine.workers.supervisor", str(engine.root), *pairs], stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(CHECKOUT), "NOTIFY_SOCKET": address})
        try:
            assert manager.recv(200) == b"READY=1\nSTATUS=running"
            with engine.memory() as memory:
                engine.semaphores.add(memory.identity.sysv_semaphore_id)
            put_numbers(engine, 0, 1)
            supervisor.send_signal(signal.SIGTERM)
            assert manager.recv(200) == b"STOPPING=1"
            assert supervisor.wait(timeout=scaled_timeout_s(60)) == 0
            manager.settimeout(0.1)
            with pytest.raises(TimeoutError):
                manager.recv(200)
        finally:
            supervisor.kill()
            supervisor.wait()


def test_sighup_ends_no_process_of_an_engine_and_lets_it_take_the_settings_of_the_file(make_engine):
    engine = make_engine()
    engine.start()
    pids = engine.pids()
    for pid in pids.values():
        os.kill(pid, signal.SIGHUP)
    eventually(lambda: "settings were read again: nothing has changed" in engine.log(), "the supervisor says that nothing has changed")
    set_in_file(config_path(engine.root), {"file_reserved_time_hours": 5, "max_message_size_bytes": 1000})
    os.kill(pids["supervisor"], signal.SIGHUP)
    eventually(lambda: "file_reserved_time_hours = 5 (engine.toml), 72 before" in engine.log(), "it has read them")
    assert "max_message_size_bytes = 1000 (engine.toml) needs a restart, 4194304 runs" in engine.log()
    assert read_run_settings(find_folder(engine.root)).file_reserved_time_hours == 5
    whole = config_path(engine.root).read_text()
    config_path(engine.root).write_text("file_reserved_time_hours = soon\n")
    os.kill(pids["supervisor"], signal.SIGHUP)
    eventually(lambda: "the settings stay as they are: " in engine.log(), "a file that is wrong changes nothing")
    assert read_run_settings(find_folder(engine.root)).file_reserved_time_hours == 5
    config_path(engine.root).write_text(whole)
    bodies = put_numbers(engine, 0, 5)
    assert engine.pids() == pids
    engine.stop()
    assert stored(engine) == bodies


def test_a_worker_that_cannot_start_halts_the_start(make_engine, monkeypatch):
    engine = make_engine()
    site = engine.root.parent / "site"
    site.mkdir()
    # seen by one child only: an argument that it refuses
    (site / "sitecustomize.py").write_text(
        "import sys\nif '-m' in sys.orig_argv and 'pyengine.workers.allocator' in sys.orig_argv:\n"
        "    sys.argv += ['--sometimes']\n")
    monkeypatch.setenv("PYTHONPATH", f"{CHECKOUT}:{site}")
    monkeypatch.setenv("LD_PRELOAD", "")  # workers are started by exec then, and each reads that file
    with pytest.raises(EngineError, match="the allocator cannot start"):
        start_engine(engine.root, engine.settings, timeout_s=60)
    assert "--sometimes" in engine.log()
    engine.wait_gone()
    monkeypatch.undo()
    engine.start()
    bodies = put_numbers(engine, 0, 5)
    engine.stop()
    assert stored(engine) == bodies


def test_a_foreign_lock_keeps_us_out_and_says_whose_it_is(make_engine):
    engine = make_engine()
    engine.start()
    engine.stop()
    with held_by_a_broker(engine.root) as pid, pytest.raises(StoreBusyError, match=str(pid)):
        engine.start()
    engine.start()
    engine.stop()


@pytest.mark.parametrize(("prepare", "error", "says"), [
    (lambda root: root.write_text("a file"), NotAStoreError, "not a directory"),
    (lambda root: (root.mkdir(), (root / "holiday.jpg").touch()), NotAStoreError, "not empty"),
    (lambda root: (root.mkdir(), (root / "commitlog").mkdir(), (root / "commitlog" / "stray.tmp").touch()),
     CorruptionError, "stray.tmp"),
])
def test_a_path_that_cannot_be_a_store_is_refused_and_unchanged(make_engine, prepare, error, says):
    engine = make_engine()
    prepare(engine.root)
    with pytest.raises(error, match=says):
        engine.start()
    assert not (engine.root / "abort").exists()


def test_wrong_settings_are_refused_before_anything_is_started(make_engine):
    engine = make_engine()
    with pytest.raises(UsageError, match="flush_disk_type"):
        engine.start(flush_dsk_type="x")
    with pytest.raises(UsageError, match="not allowed"):
        engine.start(flush_disk_type="SOMETIMES")


def test_a_pool_that_does_not_fit_is_refused_and_nothing_is_left(make_engine):
    engine = make_engine("pool")
    with pytest.raises(EngineError, match="transient_store_pool_size"):
        engine.start(mapped_file_size_commit_log_bytes=(1 << 31) - 4096, transient_store_pool_size=64)
    assert find_folder(engine.root).names() == []


def test_an_engine_whose_lock_was_removed_gets_no_second_one_beside_it(make_engine):
    engine = make_engine()
    engine.start()
    supervisor, pids = engine.pid("supervisor"), engine.pids()
    bodies = put_numbers(engine, 0, 10)
    (engine.root / "lock").rename(engine.root / "kept")
    with pytest.raises(StoreBusyError, match="`lock` was removed or replaced"):
        engine.start()
    (engine.root / "kept").rename(engine.root / "lock")
    assert (engine.pid("supervisor"), engine.pids()) == (supervisor, pids)
    bodies += put_numbers(engine, 10, 10)
    engine.stop()
    assert stored(engine) == bodies


def test_stop_of_an_engine_that_does_not_run_returns_false(tmp_path):
    assert stop_engine(tmp_path) is False
    assert supervisor_pid(tmp_path) is None
    assert SharedFolder(tmp_path / "none").names() == []


@pytest.mark.parametrize("is_seen", [False, True], ids=["gone", "ending"])
def test_an_engine_that_ends_by_itself_while_it_is_stopped_counts_as_stopped(make_engine, monkeypatch, request, is_seen):
    """The process of a supervisor shows no command line from the moment on in which it begins to give back its memory."""
    engine = make_engine()
    engine.start()
    put_numbers(engine, 0, 10)

    def end_meanwhile(root):
        monkeypatch.undo()
        ending = threading.Thread(target=engine.stop)
        ending.start()
        if not is_seen:
            ending.join()
        request.addfinalizer(ending.join)

    monkeypatch.setattr(embedded, "supervisor_pid", end_meanwhile)
    assert stop_engine(engine.root) is True
    assert living_kinds(engine.root) == [] and not (engine.root / "abort").exists()


SOCKETLESS = """
import sys
from pyengine.engine import supervisor
def refuse(*_):
    raise OSError(28, "No space left on device")
supervisor.SessionServer = refuse
sys.exit(supervisor.main([sys.argv[1], "--no-children"]))
"""


SLOW_POOL = """
import os, signal, sys
from pyengine.engine import bring_up, supervisor
from pyengine.ipc.shared_objects import SharedFolder
bring_up.POOL_AT_ONCE_BYTES = 1
make = SharedFolder.create
def make_slowly(self, name, size):
    if name == "pool-1":
        os.kill(os.getpid(), signal.SIGTERM)
        supervisor.time.sleep(1)
    return make(self, name, size)
SharedFolder.create = make_slowly
sys.exit(supervisor.main(sys.argv[1:]))
"""


def test_a_stop_waits_for_the_buffer_that_is_being_made(tmp_path):
    settings = [word for name, value in (SMALL | {"transient_store_pool_enable": "true"}).items() for word in ("--set", f"{name}={value}")]
    done = subprocess.run([sys.executable, "-c", SLOW_POOL, tmp_path / "store", *settings], cwd=CHECKOUT, capture_output=True, text=True,
                          timeout=scaled_timeout_s(60))
    assert done.returncode == ExitCode.OK and "ENGINE_STOPPED" in done.stderr and "POOL_SMALLER" not in done.stderr, done.stderr


STOPPED_BEFORE_EXEC = """
import os, signal, sys
from pyengine.engine import supervisor
class Restarting:
    is_stopped = False
    def __init__(self, *_):
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "is_stopped", True))
    def run(self):
        return 0
    @property
    def must_restart(self):
        is_stopped = self.is_stopped
        if not is_stopped:
            os.kill(os.getpid(), signal.SIGTERM)
        return not is_stopped
supervisor.Supervisor = Restarting
os.execv = lambda *_: os._exit(77)
sys.exit(supervisor.main([sys.argv[1]]))
"""


def test_a_request_to_stop_just_before_the_engine_is_started_again_is_not_lost(tmp_path):
    done = subprocess.run([sys.executable, "-c", STOPPED_BEFORE_EXEC, tmp_path], cwd=CHECKOUT, timeout=scaled_timeout_s(60),
                          env={name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"})
    assert done.returncode == ExitCode.OK


class LoggedLatch:
    """A latch that is woken once, or not at all until the first timeout, and again by its close."""

    def __init__(self, log: list[str], *, is_woken: bool) -> None:
        self.log = log
        self.woken = threading.Semaphore(1 if is_woken else 0)
        self.timeouts = 0 if is_woken else 1

    def arm(self) -> None:
        self.log.append("arm")

    def wait(self, timeout_s: float) -> bool:
        if self.timeouts:
            self.timeouts -= 1
            return False
        return self.woken.acquire(timeout=scaled_timeout_s(60))

    def wakeup(self) -> None:
        self.woken.release()


@pytest.mark.parametrize("is_woken", [True, False], ids=["woken", "timeout"])
def test_the_supervisor_looks_after_its_latch_is_armed(monkeypatch, is_woken):
    log: list[str] = []
    latch = LoggedLatch(log, is_woken=is_woken)
    monkeypatch.setattr(os, "eventfd_write", lambda descriptor, number: log.append("look"))
    with selectors.DefaultSelector() as selector:
        bridge = LatchBridge(types.SimpleNamespace(latch=lambda kind: latch), selector)
        eventually(lambda: "look" in log, "it looks")
        bridge.close()
    assert log[:3] == ["arm", "arm", "look"]


def test_a_supervisor_that_gets_no_socket_says_so_and_ends_in_order(tmp_path):
    done = subprocess.run([sys.executable, "-c", SOCKETLESS, tmp_path / "store"], cwd=CHECKOUT, capture_output=True, text=True,
                          timeout=scaled_timeout_s(60))
    assert done.returncode == ExitCode.FAILED, done.stderr
    assert "No space left on device" in done.stderr


NO_PROCESS_FOR_A_CLEANER = """
import sys
from pyengine.engine import children, supervisor
from pyengine.ipc.control_block import EngineMemory
from pyengine.native import control as native
supervisor.READY_TIMEOUT_S, children.SPAWN_RETRY_S = 2, 0.1
start = children.subprocess.Popen
def refuse(command, **named):
    if "pyengine.workers.cleaner" not in command:
        return start(command, **named)
    with EngineMemory.of(sys.argv[1]) as memory:
        print(native.load(memory.control.workers[native.SUPERVISOR], "heartbeat_ns"), flush=True)
    raise OSError(11, "Resource temporarily unavailable")
children.subprocess.Popen = refuse
sys.exit(supervisor.main([*sys.argv[1:], "--report-fd", "1"]))
"""


def test_a_supervisor_whose_workers_cannot_come_up_goes_its_rounds_and_says_why(tmp_path):
    done = subprocess.run([sys.executable, "-c", NO_PROCESS_FOR_A_CLEANER, tmp_path / "store"], cwd=CHECKOUT, capture_output=True,
                          text=True, env=os.environ | {"LD_PRELOAD": ""}, timeout=scaled_timeout_s(60))
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({line for line in lines if isinstance(line, int)}) > 3, done
    error, = [line["error"] for line in lines if isinstance(line, dict) and "error" in line]
    assert "not up after 2 s" in error and "the cleaner could not be started: [Errno 11] Resource temporarily unavailable" in error
