"""The common part of every worker: who may start, what ends it, what it leaves."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from pyengine.engine import log_file, worker
from pyengine.engine.kinds import WorkerExit
from pyengine.engine.log_file import log_event
from pyengine.errors import EngineUnavailableError
from pyengine.events import Event
from pyengine.ipc.store_lock import living_kinds
from pyengine.native import control as native
from pyengine.storage.config import config_path, set_in_file
from waiting import eventually, scaled_timeout_s

KIND = native.CLEANER
# A worker whose service counts rounds and drains three times; it fails as the second argument says.
SCRIPT = """
import sys
from pyengine.engine import worker
from pyengine._native import lib
from pyengine.errors import DiskError
how = sys.argv.pop() if sys.argv[-1].startswith("fail") else ""
class Service:
    never_idle, records_rounds, blocked_reason, blocked_errno = False, False, "", 0
    def __init__(self, attached):
        if how == "fail-boot":
            raise DiskError("no disk today")
        if how == "fail-boot-full":
            raise DiskError("no room today", errno=28)
        if how == "fail-boot-built":
            lib.ms_of_newer_sources()
        self.left = 3
    def work(self):
        if how == "fail-work":
            raise ValueError("a defect")
        if how == "fail-work-files":
            raise OSError(24, "Too many open files", "somewhere")
        self.blocked_reason = "something in the way" if how == "fail-slow" else ""
        return False
    def pause_s(self):
        return 0.05
    def wait(self, latch, timeout_s):
        latch.wait(timeout_s)
    def drain(self):
        self.left -= 1
        return self.left >= 0
    def close(self):
        print("closed", self.left, file=sys.stderr, flush=True)
sys.exit(worker.main(7, "A worker for tests.", Service)())
"""


def idle_worker(make_owner):
    """An owner and its worker, which has nothing to do."""
    owner = make_owner()
    owner.publish()
    child = owner.spawn("", script=SCRIPT)
    owner.wait_ready(KIND)
    return owner, child


def test_a_worker_goes_round_until_sigterm_then_drains_and_leaves(make_owner):
    owner, child = idle_worker(make_owner)
    line = owner.worker(KIND)
    assert (line.pid, line.incarnation) == (child.pid, 1)
    assert living_kinds(owner.root) == [native.SUPERVISOR, KIND]
    first = native.load(line, "heartbeat_ns")
    eventually(lambda: native.load(line, "heartbeat_ns") > first, "a heartbeat on an idle worker")
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=scaled_timeout_s(30)) == WorkerExit.CLEAN
    assert "closed -1" in child.stderr.read()
    assert native.load(line, "state") == native.WORKER_ABSENT
    assert living_kinds(owner.root) == [native.SUPERVISOR]


def test_a_worker_runs_with_the_settings_of_its_engine_whatever_is_set_since(make_owner, monkeypatch):
    monkeypatch.setenv("PYENGINE_DELETE_WHEN", "09")
    owner = make_owner()
    owner.config = dataclasses.replace(owner.config, file_reserved_time_hours=77)
    owner.make_rest()
    owner.publish()
    set_in_file(config_path(owner.root), {"file_reserved_time_hours": 5})
    told = SCRIPT.replace("        self.left = 3\n",
                          "        self.left = attached.config.file_reserved_time_hours, attached.config.delete_when\n"
                          "        raise DiskError(str(self.left))\n")
    worker = owner.spawn("", script=told)
    assert "(77, '04')" in worker.communicate(timeout=scaled_timeout_s(60))[1]


def test_a_killed_worker_frees_its_byte_and_the_next_is_another_incarnation(make_owner):
    owner, child = idle_worker(make_owner)
    child.kill()
    child.wait()
    assert living_kinds(owner.root) == [native.SUPERVISOR]
    owner.spawn("", script=SCRIPT)
    owner.wait_ready(KIND, incarnation=2)


def test_a_twin_is_refused_with_its_own_code(make_owner):
    owner, _ = idle_worker(make_owner)
    twin = owner.spawn("", script=SCRIPT)
    assert twin.wait(timeout=scaled_timeout_s(30)) == WorkerExit.ALREADY_RUNNING
    assert "living worker of this kind" in twin.stderr.read()


def test_a_retired_engine_ends_its_workers(make_owner):
    owner, child = idle_worker(make_owner)
    owner.memory.retire()
    assert child.wait(timeout=scaled_timeout_s(30)) == WorkerExit.CLEAN
    assert "closed 3" in child.stderr.read(), "nothing is drained into a store that has another owner"


@pytest.mark.parametrize(("how", "code", "says", "state"), [
    ("fail-boot", WorkerExit.BOOT_FAILED, "cannot start: no disk today", native.WORKER_FAILED),
    ("fail-work", 1, "a defect", native.WORKER_FAILED),
    ("fail-boot-full", WorkerExit.TEMPFAIL, "cannot start: no room today", native.WORKER_FAILED),
    ("fail-boot-built", WorkerExit.BOOT_FAILED, "ms_of_newer_sources': the C module was built from other sources", native.WORKER_FAILED),
    ("fail-work-files", WorkerExit.TEMPFAIL, "somewhere: Too many open files", native.WORKER_FAILED),
])
def test_a_worker_that_fails_says_why(make_owner, how, code, says, state):
    owner = make_owner()
    owner.publish()
    child = owner.spawn("", how, script=SCRIPT)
    assert child.wait(timeout=scaled_timeout_s(30)) == code
    said = child.stderr.read()
    assert says in said and ("Traceback" in said) == (code == 1)
    assert native.load(owner.worker(KIND), "state") == state
    assert says in native.read_blocked_reason(owner.memory.blocked_reasons, KIND)


def test_under_a_service_manager_a_worker_that_fails_at_once_ends_a_while_later(make_owner, monkeypatch, tmp_path):
    """The manager would start it again at once; elsewhere its supervisor makes the pauses."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    owner = make_owner()
    owner.publish()
    child = owner.spawn("", "fail-boot-full", script="import time\ntime.sleep = lambda s: print('waits', s, file=sys.stderr)\n" + SCRIPT)
    assert child.wait(timeout=scaled_timeout_s(30)) == WorkerExit.TEMPFAIL
    assert "waits 5.0" in child.stderr.read()
    waited = []
    monkeypatch.setattr(log_file.time, "sleep", waited.append)
    monkeypatch.setattr(log_file.signal, "signal", lambda number, handler: None)
    log_file.pause_before_restart(log_file.SHORT_LIFE_S)
    assert waited == []
    log_file.pause_before_restart(1.0)
    monkeypatch.delenv("NOTIFY_SOCKET")
    log_file.pause_before_restart(1.0)
    assert waited == [log_file.RESTART_PAUSE_S]


def test_a_blocked_worker_publishes_its_reason(make_owner):
    owner = make_owner()
    owner.publish()
    owner.spawn("", "fail-slow", script=SCRIPT)
    eventually(lambda: native.read_blocked_reason(owner.memory.blocked_reasons, KIND) == "something in the way", "said")


def test_a_worker_goes_on_while_it_can_open_no_file(make_owner):
    owner, child = idle_worker(make_owner)
    line = owner.worker(KIND)
    resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    looked_ns = time.monotonic_ns() + 3_000_000_000  # by then it has looked for its supervisor
    eventually(lambda: child.poll() is not None or native.load(line, "heartbeat_ns") > looked_ns, "heartbeats go on")
    assert child.poll() is None


def test_a_log_that_cannot_be_written_stops_no_worker(monkeypatch):
    asked = []

    class Full:
        def write(self, text):
            asked.append(text)
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    log_event(KIND, None, Event.WORK_BLOCKED, "the disk is full")
    assert asked


def untouched(owner):
    return owner.worker(KIND).incarnation == 0 and living_kinds(owner.root) in ([], [native.SUPERVISOR])


@pytest.mark.parametrize("state", [native.STATE_RECOVERING, native.STATE_DEGRADED, native.STATE_STOPPED])
def test_a_worker_waits_bounded_for_a_store_that_is_not_served(make_owner, state):
    owner = make_owner()
    owner.publish(state)
    child = owner.spawn("", "--wait", "0.1", script=SCRIPT)
    assert child.wait(timeout=scaled_timeout_s(30)) == WorkerExit.BOOT_FAILED
    assert "waited 0.1 s" in child.stderr.read()
    assert untouched(owner)


def test_a_worker_does_not_wait_for_the_engine_of_a_folder_that_was_removed(tmp_path):
    root = tmp_path / "s"
    root.mkdir()
    descriptor = os.open(root, os.O_RDONLY)
    try:
        root.rmdir()
        done = subprocess.run([sys.executable, "-c", SCRIPT, str(root), "--store-fd", str(descriptor), "--wait", "1000"],
                              pass_fds=[descriptor], capture_output=True, text=True, timeout=scaled_timeout_s(30), check=False)
    finally:
        os.close(descriptor)
    assert done.returncode == WorkerExit.BOOT_FAILED and f"cannot start: {root} was removed" in done.stderr


def test_a_worker_polls_seldom_for_a_store_that_is_not_served_for_long(tmp_path, monkeypatch):
    now_s, sleeps_s = 0.0, []

    def sleep(seconds):
        nonlocal now_s
        now_s += seconds
        sleeps_s.append(seconds)

    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=sleep))
    with pytest.raises(EngineUnavailableError, match="waited 30 s"):
        worker.attach(KIND, tmp_path / "none", 30)
    assert max(sleeps_s[:40]) < 0.1 and len(sleeps_s) < 300


def test_a_worker_started_early_begins_when_the_owner_is_ready(make_owner):
    owner = make_owner()
    child = owner.spawn("", script=SCRIPT)
    owner.publish(native.STATE_RECOVERING)
    native.store(owner.control.state, "state", native.STATE_RUNNING)
    owner.wait_ready(KIND)
    assert child.poll() is None


def test_a_worker_never_serves_the_remains_of_a_dead_engine(make_owner):
    """The control block says running, but no process owns the store."""
    owner = make_owner()
    owner.publish()
    owner.lock.close()
    child = owner.spawn("", "--wait", "0.1", script=SCRIPT)
    assert child.wait(timeout=scaled_timeout_s(30)) == WorkerExit.BOOT_FAILED
    assert "no supervisor is running" in child.stderr.read()
    assert untouched(owner)


def test_a_worker_keeps_off_old_memory_while_a_new_owner_comes_up(make_owner):
    """The new supervisor holds its byte already, the block is still its dead predecessor's."""
    owner = make_owner()
    owner.publish()
    owner.worker(native.SUPERVISOR).start_time_ms -= 10
    child = owner.spawn("", "--wait", "0.1", script=SCRIPT)
    assert child.wait(timeout=scaled_timeout_s(30)) == WorkerExit.BOOT_FAILED
    assert "dead engine" in child.stderr.read()
    assert untouched(owner)


@pytest.mark.parametrize(("arguments", "code", "says"), [
    ((), 2, "STORE"),
    (("STORE", "--bogus"), 2, "bogus"),
    (("STORE", "--wait", "0"), WorkerExit.BOOT_FAILED, "no engine has ever run"),
])
def test_wrong_arguments_get_one_sentence(tmp_path, arguments, code, says):
    arguments = [str(tmp_path) if word == "STORE" else word for word in arguments]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, timeout=scaled_timeout_s(60))
    assert done.returncode == code and says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("text", ['flush_disk_typ = "SYNC_FLUSH"\n', "=\n"])
def test_a_settings_file_that_was_spoilt_ends_no_engine(make_engine, text):
    """A worker that is restarted takes the settings that run, and its sessions do so too."""
    engine = make_engine(gateway_enable=True, gateway_broker_port=0, gateway_namesrv_port=0)
    engine.start()
    with config_path(engine.root).open("a") as file:
        file.write(text)
    for kind in ("flusher", "scheduler", "gateway"):
        pid = engine.pid(kind)
        engine.kill(kind)
        eventually(lambda kind=kind, pid=pid: engine.pid(kind) not in (0, pid), f"a new {kind}")
    with engine.memory() as memory:
        eventually(lambda: all(native.load(memory.control.workers[kind], "state") == native.WORKER_READY
                               for kind in (native.FLUSHER, native.SCHEDULER, native.GATEWAY)), "all are ready")
        assert native.load(memory.control.workers[native.FLUSHER], "restarts") == 1


def test_help_says_what_the_worker_does():
    done = subprocess.run([sys.executable, "-c", SCRIPT, "--help"], capture_output=True, text=True, timeout=scaled_timeout_s(60))
    assert done.returncode == 0 and "A worker for tests." in done.stdout


def test_a_worker_notifies_the_service_manager_of_ready_watchdog_and_stopping(make_owner, tmp_path):
    owner = make_owner()
    owner.publish()
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    channel.bind(str(tmp_path / "notify"))
    channel.settimeout(30)
    script = f"import os; os.environ.update(NOTIFY_SOCKET={str(tmp_path / 'notify')!r}, WATCHDOG_USEC='100000')\n" + SCRIPT
    child = owner.spawn("", script=script)
    try:
        assert channel.recv(100) == b"READY=1"
        assert channel.recv(100) == b"WATCHDOG=1"
        child.send_signal(signal.SIGTERM)
        told = b"WATCHDOG=1"
        while told == b"WATCHDOG=1":
            told = channel.recv(100)
        assert told == b"STOPPING=1"
    finally:
        channel.close()
