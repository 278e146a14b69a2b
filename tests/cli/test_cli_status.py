"""`pyengine status` of a store whose owner is alive: what the shared counters say, and what they come to."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess

import pytest

import pyengine
from broker_lock import held_by_a_broker
from fix_cli import changes, command_line, environment, picture, run, spawn
from fix_small_disk import fill
from pyengine.cli import engine_status
from pyengine.engine_config import DAY_MS
from pyengine.ipc import store_lock
from pyengine.ipc.control_block import now_ms
from pyengine.ipc.heartbeat import Heartbeat, build_id, is_stopped, process_start_ms
from pyengine.ipc.store_lock import StoreLock
from pyengine.native import control as native
from pyengine.native.flush import monotonic_ns
from pyengine.storage.ofd_lock import EXCLUSIVE, ByteLock
from waiting import eventually, scaled_timeout_s

FIXED_FIELDS = {"verdict", "summary", "state", "role", "read_only", "reason", "positions", "workers", "sessions"}


@pytest.fixture
def owner(make_owner):
    """A store that this test's process owns as a supervisor does, its log ending at 4096."""
    owner = make_owner()
    owner.make_rest()
    (owner.root / "commitlog").mkdir()
    owner.position(4096)
    return owner


def status(owner, code: int = 0) -> dict:
    ran = run("status", owner.root, "--json")
    assert ran.code == code, ran
    assert run("status", owner.root).code == code
    assert ran.document.keys() >= FIXED_FIELDS
    return ran.document


def test_a_running_engine_shows_its_counters(owner):
    owner.publish()
    native.store_position(owner.control.flushed, 1024)
    native.store_position(owner.control.reput_from, 2048)
    document = status(owner)
    assert (document["state"], document["role"], document["mode"], document["read_only"], document["reason"]) == (
        "running", "ASYNC_MASTER", "async", False, "")
    assert (document["verdict"], document["findings"], document["takes_puts"]) == ("ok", [], False)
    assert document["summary"].startswith("it takes no puts yet; 0 processes are ready; 3,072 bytes wait for the disk")
    assert document["positions"] == {"min": 0, "wrote": 4096, "committed": 4096, "flushed": 1024, "reput_from": 2048,
                                     "confirm": 0}
    assert (document["unflushed_bytes"], document["dispatch_lag_bytes"], document["undrained_bytes"]) == (3072, 2048, 0)
    supervisor, = document["workers"]
    assert (supervisor["kind"], supervisor["state"], supervisor["restarts"]) == ("supervisor", "starting", 0)
    assert 0 <= supervisor["heartbeat_age_ms"] < 60_000
    assert document["store_uuid"] == str(owner.engine_id.uuid)


def test_sessions_are_counted_and_listed(owner):
    owner.publish()
    line = owner.control.sessions[9]
    native.store(line, "state", native.SESSION_OPEN)
    native.store(line, "pid", 77)
    native.store(line, "ring_bytes", 65536)
    document = status(owner)
    assert document["sessions"] == 1
    assert document["session_list"][0] | {"slot": 9, "pid": 77, "state": "open",
                                          "ring_bytes": 65536} == document["session_list"][0]
    assert "64.0 KiB" in run("status", owner.root).stdout


def test_a_frozen_store_is_read_only_names_the_cause_and_exits_with_6(owner):
    owner.publish()
    native.freeze(owner.control, native.FLUSHER, errno.EIO, "fdatasync failed: Input/output error")
    native.store(owner.control.state, "state", native.STATE_READ_ONLY)
    document = status(owner, code=6)
    assert (document["state"], document["read_only"]) == ("read_only", True)
    assert "fdatasync failed" in document["reason"] and len(document["findings"]) == 1


def test_status_reports_a_full_disk_as_read_only(owner):
    owner.publish()
    native.store(owner.control.state, "refuse_puts", native.REFUSE_DISK_FULL)
    document = status(owner, code=6)
    assert document["read_only"] and "disk is full" in document["reason"] and document["verdict"] == "read-only"
    assert run("status", owner.root).stdout.startswith("read-only: the disk is full")


def ready(owner, kind, *, heartbeat_age_s, pid=None):
    """A process, else the test's own, as a living worker that went round so long ago."""
    owner.lock.take_kind(kind)
    line = owner.worker(kind)
    native.store(line, "pid", pid or os.getpid())
    native.store(line, "start_time_ms", process_start_ms(pid or os.getpid()))
    native.store(line, "heartbeat_ns", monotonic_ns() - heartbeat_age_s * 10**9)
    native.store(line, "state", native.WORKER_READY)


def test_status_reports_a_hanging_disk_with_the_bytes_that_wait_for_it(owner):
    owner.publish()
    ready(owner, native.FLUSHER, heartbeat_age_s=138)
    native.store_position(owner.control.flushed, 1024)
    document = status(owner, code=6)
    reason = document["reason"]
    assert (document["verdict"], document["summary"]) == ("stuck", reason)
    assert "the flusher" in reason and "has not finished a round for 1" in reason and "disk that does not answer" in reason
    assert "flushed stays at 1024 and 3072 bytes wait" in reason and "writer" not in reason


def test_status_reports_a_writers_pass_so_long_that_puts_are_refused(owner):
    owner.publish()
    ready(owner, native.WRITER, heartbeat_age_s=0)
    native.store(owner.control.writer, "pass_started_ms", now_ms() - 138_000)
    reason = status(owner, code=6)["reason"]
    assert "the writer" in reason and "puts are refused (OS_PAGECACHE_BUSY)" in reason and "for 1" in reason


def test_a_worker_that_goes_round_is_no_reason(owner):
    owner.publish()
    ready(owner, native.FLUSHER, heartbeat_age_s=0)
    native.store_position(owner.control.flushed, 1024)
    assert status(owner)["reason"] == ""


@pytest.mark.parametrize(("last_days", "created_days", "says"), [
    (365, 0, "the last message was stored 365 days ahead of this machine's clock"),
    (0, -365, "this machine's clock was set forward by 365 days since the engine started"),
    (-365, 0, "this machine's clock is 365 days ahead of the last message"),
    (-90, 0, "")])
def test_status_reports_a_clock_that_cannot_be_right(make_owner, last_days, created_days, says):
    owner = make_owner(created_ms=now_ms() + created_days * DAY_MS)
    owner.make_rest()
    (owner.root / "commitlog").mkdir()
    owner.position(4096)
    for slot in owner.control.slots:
        slot.store_timestamp_ms = now_ms() + last_days * DAY_MS
    owner.publish()
    assert says in status(owner)["reason"] and bool(says) == bool(status(owner)["reason"])


def test_status_reports_a_worker_stopped_by_a_signal_at_once(owner):
    owner.publish()
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            ready(owner, native.REPUTTER, heartbeat_age_s=0, pid=child.pid)
            native.store_position(owner.control.reput_from, 4000)
            assert status(owner)["verdict"] == "ok"
            child.send_signal(signal.SIGSTOP)
            eventually(lambda: is_stopped(child.pid), "it is stopped")
            document = status(owner, code=6)
            assert (document["verdict"], document["summary"]) == (
                "stuck", f"the reputter (pid {child.pid}) goes no rounds, reput_from stays at 4000 and 96 bytes wait: a signal has "
                         f"stopped it: kill -CONT {child.pid}")
        finally:
            child.kill()


def test_processes_of_two_builds_are_told(owner):
    owner.publish()
    ready(owner, native.FLUSHER, heartbeat_age_s=0)
    native.store(owner.worker(native.FLUSHER), "build_id", native.load(owner.worker(native.SUPERVISOR), "build_id"))
    assert status(owner)["verdict"] == "ok"
    native.store(owner.worker(native.FLUSHER), "build_id", 0xABC)
    document = status(owner)
    assert document["verdict"] == "warning" and "its processes run 2 builds of pyengine (0000000000000abc: flusher; " in document["summary"]
    assert next(one for one in document["workers"] if one["kind"] == "supervisor")["build"] == document["build"] == build_id()


def test_settings_that_differ_from_the_file_are_told(owner):
    owner.publish()
    path = owner.root / "config" / "engine.toml"
    was = path.read_text()
    path.write_text(was + "put_timeout_ms = 7000\n")
    document = status(owner)
    assert document["verdict"] == "warning" and "put_timeout_ms = 7000 in the file, 10000 runs" in document["summary"]
    path.write_text("put_timeout_ms = \n")
    assert "no program can connect, and the next start will be refused" in status(owner)["summary"]
    path.write_text(was)
    assert status(owner)["verdict"] == "ok"


def test_settings_of_the_command_line_go_before_the_file(owner):
    owner.publish()
    owner.use_settings(put_timeout_ms=9000, origins={"put_timeout_ms": "--set"})
    path = owner.root / "config" / "engine.toml"
    path.write_text(path.read_text() + "put_timeout_ms = 7000\n")
    assert status(owner)["verdict"] == "ok"


@pytest.mark.parametrize(("kind", "verdict", "code"), [(native.ALLOCATOR, "stuck", 6), (native.CLEANER, "warning", 0)])
def test_a_worker_that_cannot_be_started_again_is_graded_by_what_lacks_it(owner, kind, verdict, code):
    owner.publish()
    for number in {native.WRITER, native.FLUSHER, native.REPUTTER, native.ALLOCATOR, kind}:
        ready(owner, number, heartbeat_age_s=0)
    native.store(owner.worker(kind), "pid", 2**22 - 1)
    native.write_blocked_reason(owner.memory.blocked_reasons, native.SUPERVISOR, "the worker could not be started")
    document = status(owner, code)
    assert (document["verdict"], document["summary"]) == (verdict, "supervisor: the worker could not be started")


def test_the_worst_is_the_word_and_the_rest_follows(owner):
    owner.publish()
    native.store(owner.control.state, "refuse_puts", native.REFUSE_DISK_FULL)
    ready(owner, native.FLUSHER, heartbeat_age_s=138)
    for slot in owner.control.slots:
        slot.store_timestamp_ms = now_ms() + DAY_MS
    document = status(owner, code=6)
    assert [finding["verdict"] for finding in document["findings"]] == ["read-only", "stuck", "warning"]
    first, second, third, *_ = run("status", owner.root).stdout.splitlines()
    assert first.startswith("read-only: the disk is full") and second.startswith("also stuck: the flusher")
    assert third.startswith("also warning: the last message was stored")


def test_an_engine_that_stops_is_still_running(owner):
    owner.publish(native.STATE_STOPPING)
    assert (status(owner)["state"], status(owner)["stopping"], status(owner)["verdict"]) == ("running", True, "stopping")


def test_an_engine_whose_supervisor_ended_during_the_stop_is_stuck(owner):
    owner.publish(native.STATE_STOPPING)
    owner.lock.close()
    with StoreLock(owner.root) as worker_lock:
        worker_lock.share()
        worker_lock.take_kind(native.WRITER)
        document = status(owner, code=6)
    assert (document["stopping"], document["verdict"]) == (True, "stuck") and "`pyengine stop` finishes that" in document["summary"]
    assert "is stopping" not in str(document["findings"])


def test_an_owner_that_has_not_published_is_recovering(owner):
    document = status(owner)
    assert (document["state"], document["verdict"], document["summary"]) == (
        "recovering", "recovering", "its owner is recovering it or starting")


def test_a_dead_worker_and_a_dead_supervisor_are_told(owner):
    """A worker holds its byte, the supervisor does not, and another worker's process is gone."""
    owner.publish()
    living = owner.worker(native.SUPERVISOR)
    for kind, pid in ((native.WRITER, living.pid), (native.FLUSHER, 2**22 - 1)):
        line = owner.worker(kind)
        native.store(line, "pid", pid)
        native.store(line, "start_time_ms", living.start_time_ms)
        native.store(line, "state", native.WORKER_READY)
        native.store(line, "restarts", 2)
    owner.lock.close()
    with StoreLock(owner.root) as worker_lock:
        worker_lock.share()
        worker_lock.take_kind(native.WRITER)
        document = status(owner, code=6)
        assert document["state"] == "running" and "no supervisor" in document["reason"] and "dead: flusher" in document["reason"]
        assert document["verdict"] == "stuck"
        assert {one["kind"]: one["state"] for one in document["workers"]} == {
            "supervisor": "dead", "writer": "ready", "flusher": "dead"}
        assert next(one for one in document["workers"] if one["kind"] == "writer")["restarts"] == 2


@pytest.mark.parametrize("kind, served", [("gateway", {"gateway": 1}), ("grpc", {"gateway": 1, "grpc": 1})])
def test_a_process_that_serves_clients_is_missed_beyond_a_start_and_a_restart(make_owner, monkeypatch, kind, served):
    """Its unit may not have been started, or have given it up: then clients cannot connect, and the engine has no other trouble."""
    owner = make_owner(**served)
    owner.make_rest()
    owner.publish()
    created_ns, number = owner.memory.identity.created_boot_ns, {"gateway": native.GATEWAY, "grpc": native.GRPC}[kind]
    line, missed = owner.worker(number), [f"warning: the {kind} does not run"]

    def found(age_s: int) -> list[str]:
        monkeypatch.setattr(engine_status, "boot_ns", lambda: created_ns + age_s * 10**9)
        return [f"{each['verdict']}: {each['sentence'].partition(', so its clients cannot connect: ')[0]}"
                for each in status(owner)["findings"]]

    with StoreLock(owner.root) as worker_lock:
        worker_lock.share()
        if kind == "grpc":
            worker_lock.take_kind(native.GATEWAY)
        assert [found(age_s) for age_s in (1, 29, 30, 3600)] == [[], [], missed, missed]
        Heartbeat(line).begin(2**22 - 1, 1)
        native.store(line, "heartbeat_ns", monotonic_ns() + 3600 * 10**9)
        assert found(3600) == []  # it has just died, and is started again
        native.store(line, "heartbeat_ns", monotonic_ns() - 30 * 10**9)
        assert found(3600) == missed
        worker_lock.take_kind(number)
        assert found(3600) == []
    native.store(owner.control.state, "state", native.STATE_STOPPING)
    assert found(3600) == ["stopping: the engine is stopping"]


def test_memory_of_a_dead_engine_is_no_running_engine(owner):
    owner.publish()
    owner.lock.close()
    assert status(owner)["state"] == status(owner)["verdict"] == "stopped"
    assert run("status", owner.root).stdout.startswith("stopped: no engine runs; `pyengine start")


def test_a_start_that_a_broker_refuses_leaves_nothing_and_status_names_the_broker(golden):
    store = golden("basic")
    with held_by_a_broker(store.root) as pid:
        before = picture(store.root)
        for refused in (run("start", store.root), spawn("start", store.root, "--foreground")):
            assert refused.code == 5 and f"pid {pid}" in refused.stderr and "RocketMQ broker" in refused.stderr
        shown = run("status", store.root, "--json").document
        assert shown["state"] == "stopped" and f"open in another program (pid {pid})" in shown["reason"]
        assert "RocketMQ broker" in run("status", store.root).stdout
        assert changes(before, picture(store.root)) == []


def test_a_lock_of_another_container_is_a_brokers_too(golden, monkeypatch):
    store = golden("basic")
    lock = ByteLock(EXCLUSIVE, 0, 1, pid=0)
    monkeypatch.setattr(store_lock, "find_lock", lambda descriptor, byte: lock if byte == 0 else None)
    assert "runs in another container" in run("status", store.root, "--json").document["reason"]
    assert run("start", store.root).code == 5


def test_what_a_killed_engine_left_is_not_judged_while_the_next_start_recovers(owner):
    """This process has the lock of a supervisor; the one that shared memory names, with a text of its own, has ended."""
    owner.publish()
    owner.lock.own()
    native.store(owner.worker(native.SUPERVISOR), "pid", 2**22 - 1)
    native.write_blocked_reason(owner.memory.blocked_reasons, native.SUPERVISOR, "the worker could not be started")
    document = status(owner)
    assert (document["verdict"], document["state"]) == ("recovering", "recovering") and "recovering it or starting" in document["summary"]


def test_an_engine_whose_pids_are_those_of_a_container_shows_its_counters(owner):
    owner.publish()
    native.store(owner.worker(native.SUPERVISOR), "pid", 2**22 - 1)
    document = status(owner)
    assert document["state"] == "running" and "not visible here" in document["summary"]


@pytest.mark.root
def test_from_another_pid_namespace_status_and_stop_say_where_to_run_them(make_engine):
    engine = make_engine()
    engine.start()

    def elsewhere(*arguments) -> str:
        return subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", *command_line(*arguments)], env=environment(),
                              capture_output=True, text=True, timeout=scaled_timeout_s(60)).stdout

    document = json.loads(elsewhere("status", engine.root, "--json"))
    assert document["verdict"] == "warning" and "its processes are not visible here" in document["summary"]
    assert "in another pid namespace" in elsewhere("stop", engine.root, "--json")
    assert status(engine)["verdict"] == "ok"


@pytest.mark.root
def test_an_engine_whose_shared_memory_has_no_room_for_a_session_says_so_until_it_has(make_small_disk, make_engine):
    disk = make_small_disk("16m")
    engine = make_engine(shm_directory=str(disk), session_ring_bytes=1 << 20)
    engine.start()
    eventually(lambda: status(engine)["verdict"] == "ok", "ready")
    fill(disk / "other")
    eventually(lambda: status(engine)["verdict"] == "warning", "it is noticed")
    assert f"no session can be opened: {disk} has no room" in status(engine)["summary"]
    (disk / "other").unlink()
    eventually(lambda: status(engine)["verdict"] == "ok", "there is room again")
    pyengine.connect(engine.root).close()
