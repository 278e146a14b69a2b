"""The living are told from the dead, from zombies, and from strangers with the same pid."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import pyengine
from pyengine._native import ffi
from pyengine.errors import StoreBusyError
from pyengine.ipc.crashed_engine_memory import open_crashed_memory
from pyengine.ipc.heartbeat import Heartbeat, build_id, is_alive, process_start_ms
from pyengine.native import control as native


def test_a_process_has_one_start_time_for_every_caller():
    mine = process_start_ms(os.getpid())
    asked = subprocess.run([sys.executable, "-c",
                            f"from pyengine.ipc.heartbeat import process_start_ms as f; print(f({os.getpid()}))"],
                           capture_output=True, text=True, check=True).stdout
    assert int(asked) == mine
    ticks = int(open(f"/proc/{os.getpid()}/stat").read().rsplit(")", 1)[1].split()[19])
    assert mine == ticks * 1000 // os.sysconf("SC_CLK_TCK")


def test_alive_zombie_gone_and_reused_are_told_apart():
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    started = process_start_ms(child.pid)
    assert is_alive(child.pid, started)
    assert not is_alive(child.pid, started - 10), "another process with the same pid"
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert os.kill(child.pid, 0) is None, "a zombie still takes signals"
    assert not is_alive(child.pid, started)
    child.wait()
    child.stdin.close()
    assert process_start_ms(child.pid) is None
    assert not is_alive(0, 0) and not is_alive(-1, 0)


def test_a_worker_that_has_a_pid_has_a_heartbeat(monkeypatch):
    worker, seen, store = ffi.new("struct ms_worker *"), [], native.store

    def stored(part, name, value):
        store(part, name, value)
        if native.load(worker, "pid"):
            seen.append(native.load(worker, "heartbeat_ns"))

    monkeypatch.setattr(native, "store", stored)
    Heartbeat(worker).begin(1234, 5678)
    assert seen and all(seen)


def test_a_build_is_known_by_its_files_alone(tmp_path):
    """A copy of the package in another place is the same build; one changed byte makes another."""
    package = tmp_path / "pyengine"
    shutil.copytree(Path(pyengine.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "cli", "spark"))

    def build() -> str:
        return subprocess.run([sys.executable, "-P", "-c", "from pyengine.ipc.heartbeat import build_id; print(build_id())"],
                              env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True).stdout.strip()

    assert build() == build_id()
    with open(package / "errors.py", "a", encoding="utf-8") as file:
        file.write("# another\n")
    assert build() != build_id()


def test_a_worker_line_has_the_workers_process_state_and_counts():
    block = ffi.new("struct ms_worker *")
    worker = block[0]
    heartbeat = Heartbeat(worker)
    assert heartbeat.begin(1234, 5678) == 1
    assert (worker.pid, worker.start_time_ms, worker.state) == (1234, 5678, native.WORKER_STARTING)
    assert f"{worker.build_id:016x}" == build_id()
    first = worker.heartbeat_ns
    assert first > 0
    heartbeat.record_heartbeat(worked=True)
    heartbeat.record_heartbeat()
    assert worker.passes == 1 and worker.heartbeat_ns >= first
    worker.error_count = 1
    heartbeat.state(native.WORKER_READY)
    assert (worker.error_count, worker.state) == (1, native.WORKER_READY)
    assert Heartbeat(worker).begin(99, 1) == 2
    assert (worker.pid, worker.error_count, worker.passes) == (99, 0, 1)


def test_a_process_that_has_released_a_store_is_not_taken_for_its_engine(make_owner, monkeypatch):
    """Under systemd a worker that lacks something sleeps a while before it ends, its locks given up."""
    monkeypatch.setattr("pyengine.ipc.crashed_engine_memory.EXIT_WAIT_S", 0.0)
    owner = make_owner()
    owner.publish()
    line = owner.control.workers[native.FLUSHER]
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as worker:
        heartbeat = Heartbeat(line)
        heartbeat.begin(worker.pid, process_start_ms(worker.pid))
        with open_crashed_memory(owner.root) as left:
            with pytest.raises(StoreBusyError, match=str(worker.pid)):
                left.require_dead()
            heartbeat.state(native.WORKER_FAILED)
            left.require_dead()
