"""`pyengine status` of a store whose owner is alive: what the shared counters say."""

from __future__ import annotations

import errno

import pytest

from broker_lock import held_by_a_broker
from fix_cli import changes, picture, run, spawn
from pyengine.engine_config import DAY_MS
from pyengine.ipc import store_lock
from pyengine.ipc.control_block import now_ms
from pyengine.ipc.store_lock import StoreLock
from pyengine.native import control as native
from pyengine.native.flush import monotonic_ns
from pyengine.storage.ofd_lock import EXCLUSIVE, ByteLock

FIXED_FIELDS = {"state", "role", "read_only", "reason", "positions", "workers", "sessions"}


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
    assert document["positions"] == {"min": 0, "wrote": 4096, "committed": 4096, "flushed": 1024, "reput_from": 2048,
                                     "confirm": 0}
    assert (document["unflushed_bytes"], document["behind_bytes"], document["undrained_bytes"]) == (3072, 2048, 0)
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
    assert "fdatasync failed" in document["reason"]


def test_a_full_disk_is_told(owner):
    owner.publish()
    native.store(owner.control.state, "refuse_puts", native.REFUSE_DISK_FULL)
    document = status(owner)
    assert document["read_only"] and "disk is full" in document["reason"]


def ready(owner, kind, *, heartbeat_age_s):
    """The test's own process as a living worker that went round so long ago."""
    owner.lock.take_kind(kind)
    line, mine = owner.worker(kind), owner.worker(native.SUPERVISOR)
    for field in ("pid", "start_time_ms"):
        native.store(line, field, native.load(mine, field))
    native.store(line, "heartbeat_ns", monotonic_ns() - heartbeat_age_s * 10**9)
    native.store(line, "state", native.WORKER_READY)


def test_a_disk_that_hangs_is_told_with_what_waits_for_it(owner):
    owner.publish()
    ready(owner, native.FLUSHER, heartbeat_age_s=138)
    native.store_position(owner.control.flushed, 1024)
    reason = status(owner)["reason"]
    assert "the flusher" in reason and "has not finished a round for 1" in reason and "disk that does not answer" in reason
    assert "flushed stays at 1024 and 3072 bytes wait" in reason and "writer" not in reason


def test_a_pass_that_takes_so_long_that_puts_are_refused_is_told(owner):
    owner.publish()
    ready(owner, native.WRITER, heartbeat_age_s=0)
    native.store(owner.control.writer, "pass_started_ms", now_ms() - 138_000)
    reason = status(owner)["reason"]
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
def test_a_clock_that_cannot_be_right_is_told(make_owner, last_days, created_days, says):
    owner = make_owner(created_ms=now_ms() + created_days * DAY_MS)
    owner.make_rest()
    (owner.root / "commitlog").mkdir()
    owner.position(4096)
    for slot in owner.control.slots:
        slot.store_timestamp_ms = now_ms() + last_days * DAY_MS
    owner.publish()
    assert says in status(owner)["reason"] and bool(says) == bool(status(owner)["reason"])


def test_an_engine_that_stops_is_still_running(owner):
    owner.publish(native.STATE_STOPPING)
    assert (status(owner)["state"], status(owner)["stopping"]) == ("running", True)


def test_an_owner_that_has_not_published_is_recovering(owner):
    assert status(owner)["state"] == "recovering"


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
        document = status(owner)
        assert document["state"] == "running" and "no supervisor" in document["reason"]
        assert {one["kind"]: one["state"] for one in document["workers"]} == {
            "supervisor": "dead", "writer": "ready", "flusher": "dead"}
        assert next(one for one in document["workers"] if one["kind"] == "writer")["restarts"] == 2


def test_memory_of_a_dead_engine_is_no_running_engine(owner):
    owner.publish()
    owner.lock.close()
    assert status(owner)["state"] == "stopped"


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
