"""The log file of a running engine: renamed when it is large, opened again when it was moved."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fix_cli import environment
from fix_engine import put_numbers, stored
from fix_golden import usual
from pyengine.engine import log_file
from waiting import eventually, scaled_timeout_s


def log_of(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/fd/2")


def processes(engine) -> dict[str, int]:
    """Supervisor, workers and the fork server by their pids."""
    found = {name: pid for name, pid in engine.pids().items() if pid}
    children = Path(f"/proc/{found['supervisor']}/task/{found['supervisor']}/children").read_text().split()
    return found | {f"child {pid}": int(pid) for pid in children}


@pytest.fixture
def engine(make_engine):
    engine = make_engine()
    engine.start()
    return engine


def all_write_to(engine, path: Path) -> bool:
    return all(log_of(pid) == str(path) for name, pid in processes(engine).items() if not name.startswith("child"))


def is_new(path: Path) -> bool:
    try:
        return path.stat().st_size < log_file.BYTES_MAX
    except FileNotFoundError:  # the old one is set aside, and the new one is not made yet
        return False


def test_a_large_log_is_renamed_while_the_engine_runs(engine):
    path = engine.root / "engine.log"
    first = path.read_text()
    os.truncate(path, log_file.BYTES_MAX + 1)  # as if so much had been written
    eventually(lambda: all_write_to(engine, path) and is_new(path), "every process has the new one")
    assert (engine.root / "engine.log.1").read_bytes().startswith(first.encode())
    put_numbers(engine, 0, 5)
    incarnation = engine.incarnation("writer")
    engine.kill("writer")
    engine.wait_back("writer", incarnation)
    eventually(lambda: "writer" in engine.log() and "SIGKILL" in engine.log(), "the death is told in the new one")
    assert all_write_to(engine, path), "the worker that was forked since has it too"
    os.truncate(path, log_file.BYTES_MAX + 1)
    eventually(lambda: is_new(path), "and again")
    assert sorted(one.name for one in engine.root.glob("engine.log*")) == ["engine.log", "engine.log.1"]
    assert stored(engine) == [b"%06d" % number for number in range(5)]


@pytest.mark.parametrize("how", [*usual(["moved", "moved away"], [], pytest.mark.ci), "removed"])
def test_a_log_that_another_program_moves_is_opened_again(engine, how, tmp_path):
    path = engine.root / "engine.log"
    if how == "removed":
        path.unlink()
    else:
        path.rename(path.with_name("engine.log-20261124") if how == "moved" else tmp_path / "elsewhere")
    eventually(lambda: path.exists() and all_write_to(engine, path), "every process has the new one")
    incarnation = engine.incarnation("flusher")
    engine.kill("flusher")
    engine.wait_back("flusher", incarnation)
    eventually(lambda: "SIGKILL" in engine.log() and all_write_to(engine, path), "a new worker has it too")


def test_sigusr1_ends_no_process_and_opens_the_log_at_once(engine):
    path = engine.root / "engine.log"
    before = engine.pids()
    path.rename(path.with_name("engine.log.7"))
    for pid in processes(engine).values():
        os.kill(pid, signal.SIGUSR1)
    eventually(lambda: path.exists() and all_write_to(engine, path), "every process has the new one")
    put_numbers(engine, 0, 1)
    assert engine.pids() == before


PROGRAM = """
import os, sys
from pathlib import Path
from pyengine.engine import log_file
log_file.BYTES_MAX = 10
log = log_file.LogFile(Path(sys.argv[1]), turns=True)
print("x" * 100, file=sys.stderr, flush=True)
{act}
log.check()
print("y", flush=True)
print("z", file=sys.stderr, flush=True)
"""


def run_program(root: Path, act: str = "", **streams: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", PROGRAM.format(act=act), str(root)], env=environment(), check=True,
                          timeout=scaled_timeout_s(60), **streams)


def test_stdout_is_redirected_only_if_it_was_the_log(tmp_path):
    with log_file.open_log(tmp_path) as log:
        run_program(tmp_path, stdout=log, stderr=log)
    assert (tmp_path / "engine.log").read_text() == "y\nz\n" and (tmp_path / "engine.log.1").read_text() == "x" * 100 + "\n"
    with log_file.open_log(tmp_path) as log:
        done = run_program(tmp_path, stdout=subprocess.PIPE, stderr=log)
    assert done.stdout == b"y\n" and (tmp_path / "engine.log").read_text() == "z\n"


def test_a_stderr_that_is_no_log_is_unchanged(tmp_path):
    done = run_program(tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.stderr == b"x" * 100 + b"\nz\n" and not list(tmp_path.iterdir())


def test_the_old_log_is_used_if_a_new_one_cannot_be_created(tmp_path):
    act = "os.rename(Path(sys.argv[1]) / 'engine.log', Path(sys.argv[1]) / 'engine.log.2'); os.mkdir(Path(sys.argv[1]) / 'engine.log')"
    with log_file.open_log(tmp_path) as log:
        run_program(tmp_path, act, stdout=log, stderr=log)
    assert (tmp_path / "engine.log.2").read_text() == "x" * 100 + "\ny\nz\n"


def test_the_service_manager_gets_a_path_of_any_bytes(tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        log_file.notify("STATUS=cannot open " + os.fsdecode(b"/store/\xff"), "WATCHDOG=1")
        assert manager.recv(1000) == b"STATUS=cannot open /store/\xff\nWATCHDOG=1"


def test_a_process_without_a_free_descriptor_survives_a_notification(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        log_file.notify("WATCHDOG=1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
