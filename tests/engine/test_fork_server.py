"""Workers are forked by the supervisor's fork server, and no process can tell them from workers started by exec."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from fix_engine import put_numbers, stored
from pyengine.engine.embedded import start_engine
from pyengine.engine.kinds import child_environment
from pyengine.ipc.shared_objects import find_folder
from pyengine.ipc.store_lock import living_kinds
from pyengine.native import control as native
from waiting import eventually, scaled_timeout_s

FORK_SERVER = "pyengine.engine.fork_server"


def words_of(pid: int) -> list[str]:
    return psutil.Process(pid).cmdline()


def parent_of(pid: int) -> int:
    return psutil.Process(pid).ppid()


def stack_of(pid: int) -> int:
    """Return the address of the stack: a fork has its parent's, an exec gets a new, random one."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[25])


def fork_servers(engine) -> list[int]:
    return [process.pid for process in psutil.process_iter(["cmdline"])
            if (process.info["cmdline"] or [])[3:5] == [FORK_SERVER, str(engine.root)]]


def fork_server(engine) -> int:
    found, = fork_servers(engine)
    return found


def is_forked(engine, kind: str) -> bool:
    return stack_of(engine.pid(kind)) == stack_of(fork_server(engine))


def restarted(engine, kind: str) -> None:
    """Kill a worker and wait until another one is up."""
    before = engine.incarnation(kind)
    engine.kill(kind)
    engine.wait_back(kind, before)


def is_dead(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def start_by_exec(monkeypatch):
    """Engines that are started from now on have no fork server."""
    monkeypatch.setenv("LD_PRELOAD", "")


def test_workers_are_forked_and_children_of_the_supervisor_under_their_own_command_lines(make_engine):
    engine = make_engine()
    engine.start()
    supervisor, server = engine.pid("supervisor"), fork_server(engine)
    assert parent_of(server) == supervisor and os.getpgid(server) == server
    for kind, pid in engine.pids().items():
        if kind != "supervisor":
            words = words_of(pid)
            assert words[:5] == [sys.executable, "-P", "-m", f"pyengine.workers.{kind}", str(engine.root)] and words[5] == "--store-fd"
            assert is_forked(engine, kind) and parent_of(pid) == supervisor
            assert os.getpgid(pid) == pid and os.getsid(pid) == os.getsid(supervisor)
    found = subprocess.run(["pgrep", "-f", f"pyengine.workers.flusher {engine.root}"], capture_output=True, text=True)
    assert found.stdout.split() == [str(engine.pid("flusher"))]
    engine.stop()
    assert fork_servers(engine) == []


def test_a_forked_worker_has_what_a_worker_started_by_exec_has(make_engine, monkeypatch):
    """Descriptors, signals, limits, environment, stdin: nothing of the supervisor's leaks into it."""
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere")
    seen = []
    for preload in (None, ""):
        if preload is not None:
            monkeypatch.setenv("LD_PRELOAD", preload)
        engine = make_engine("sync")
        engine.start()
        assert len(fork_servers(engine)) == (preload is None)
        pids = {kind: pid for kind, pid in engine.pids().items() if kind != "supervisor"}
        seen.append({kind: look(engine, pid) for kind, pid in pids.items()})
        engine.stop()
    forked, executed = seen
    assert forked == executed


def look(engine, pid: int) -> dict[str, object]:
    proc = Path(f"/proc/{pid}")
    folder = str(find_folder(engine.root).path)

    def target(link: Path) -> str:
        try:
            name = os.readlink(link)
        except FileNotFoundError:
            return "STORE/closed meanwhile"
        name = name.replace(str(engine.root), "STORE").replace(folder, "SHM").replace(folder.rpartition("-")[2], "ID")
        return re.sub(r"\d{4,}|\[\d+\]|-\d+$", "N", name)

    status = dict(line.split(":\t", 1) for line in (proc / "status").read_text().splitlines())
    environment = dict(word.split("=", 1) for word in (proc / "environ").read_text().split("\0") if word)
    environment.pop("LD_PRELOAD", None)
    return {
        "descriptors": [name for name in sorted(target(link) for link in (proc / "fd").iterdir())
                        if not name.startswith("STORE/") or name in ("STORE/lock", "STORE/engine.log")],  # the others come and go
        "stdin": os.readlink(proc / "fd" / "0"),
        "signals": {name: status[name] for name in ("SigBlk", "SigIgn", "SigCgt")},
        "limits": (proc / "limits").read_text(),
        "name": status["Name"], "umask": status["Umask"],
        "environment": environment,
        "cwd": os.readlink(proc / "cwd"),
        "words": [word.replace(str(engine.root), "STORE") for word in words_of(pid)],
    }


def test_a_fork_server_holds_no_file_of_the_store(make_engine):
    engine = make_engine("pool")
    engine.start()
    put_numbers(engine, 0, 3)
    server = Path(f"/proc/{fork_server(engine)}")
    held = {int(link.name): os.readlink(link) for link in (server / "fd").iterdir()}
    assert held.pop(0) == os.devnull and held.pop(1) == held.pop(2) == str(engine.root / "engine.log")
    held = {link for link in held.values() if not link.startswith("socket:")}
    assert held == {str(engine.root)}  # the folder alone, which the workers inherit
    maps = (server / "maps").read_text()
    assert str(engine.root) not in maps and str(find_folder(engine.root).path) not in maps
    assert "/dev/shm" not in maps and len(list((server / "task").iterdir())) == 1
    engine.stop()


@pytest.mark.parametrize("serves", [False, True])
def test_a_fork_server_loads_what_the_workers_of_its_engine_need(make_engine, serves):
    engine = make_engine(gateway_enable=serves, gateway_namesrv_port=0, gateway_broker_port=0)
    engine.start()
    assert ("_asyncio." in Path(f"/proc/{fork_server(engine)}/maps").read_text()) is serves, "only the gateway's modules import asyncio"
    assert is_forked(engine, "gateway" if serves else "writer")
    engine.stop()


def test_a_worker_that_was_killed_is_forked_again_and_its_end_is_known(make_engine):
    engine = make_engine("sync")
    engine.start()
    for kind in ("writer", "flusher", "cleaner"):
        restarted(engine, kind)
        assert is_forked(engine, kind) and parent_of(engine.pid(kind)) == engine.pid("supervisor")
    bodies = put_numbers(engine, 0, 10)
    assert engine.log().count("ended with SIGKILL") == 3
    engine.stop()
    assert stored(engine) == bodies


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.ci)])
def test_without_its_fork_server_a_supervisor_starts_workers_by_exec(make_engine, number):
    engine = make_engine()
    engine.start()
    server = fork_server(engine)
    stack = stack_of(server)
    os.kill(server, number)
    restarted(engine, "flusher")
    restarted(engine, "writer")
    assert stack_of(engine.pid("flusher")) != stack and stack_of(engine.pid("writer")) != stack
    eventually(lambda: not psutil.pid_exists(server), "it was waited for")
    bodies = put_numbers(engine, 0, 10)
    engine.stop()
    assert stored(engine) == bodies and fork_servers(engine) == []


@pytest.mark.parametrize("stopped", [pytest.param(False, marks=pytest.mark.ci), True])
def test_a_fork_server_ends_with_its_supervisor_and_the_successor_has_its_own(make_engine, stopped):
    engine = make_engine()
    engine.start()
    first = fork_server(engine)
    if stopped:
        os.kill(first, signal.SIGSTOP)
    supervisor, workers = engine.pid("supervisor"), engine.pids()
    os.kill(supervisor, signal.SIGKILL)
    eventually(lambda: is_dead(supervisor) and is_dead(first), "both are gone")
    eventually(lambda: native.SUPERVISOR not in living_kinds(engine.root), "its last thread has released the lock")
    assert start_engine(engine.root, engine.settings, timeout_s=60)["adopted"]
    assert engine.pids() == workers | {"supervisor": engine.pid("supervisor")}
    restarted(engine, "writer")
    assert is_forked(engine, "writer") and fork_server(engine) != first
    bodies = put_numbers(engine, 0, 5)
    engine.stop()
    assert stored(engine) == bodies


def test_workers_are_started_by_exec_while_ld_preload_is_set(make_engine, start_by_exec):
    engine = make_engine()
    engine.start()
    assert fork_servers(engine) == []
    assert len({stack_of(pid) for pid in engine.pids().values()}) == len(engine.pids())
    restarted(engine, "flusher")
    engine.stop()


# ---- the fork server alone, in a process of its own that adopts orphans -----------


def run(tmp_path, code: str) -> str:
    """Return what a program prints that has `server`, a fork server, and `start(*arguments)` for a flusher's main."""
    before = """
        import os, signal, sys, time
        from pathlib import Path
        from pyengine.engine.fork_server import ForkServer
        from pyengine.engine.kinds import KINDS
        from pyengine.storage.file_system import HeldStore

        sys.path.insert(0, TESTS)
        from waiting import eventually

        def start(*arguments, kind="flusher"):
            return server.start_worker([sys.executable, "-P", "-m", f"pyengine.workers.{kind}", *arguments])

        def no_children():
            try:
                os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True

        server = ForkServer(HeldStore("/"), KINDS)
        assert server._pid
        """
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(before).replace("TESTS", repr(str(Path(__file__).parents[1]))) + textwrap.dedent(code))
    done = subprocess.run([sys.executable, "-P", program], env=child_environment(), capture_output=True, text=True,
                          timeout=scaled_timeout_s(120))
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_exit_code_is_that_of_the_worker(tmp_path):
    said = run(tmp_path, """
        codes = [start("--help").wait(), start("/nowhere", "--wait", "0").wait(), start("--nonsense").wait()]
        print(codes)
        child = start("/nowhere", "--wait", "60")
        child.kill()
        print(child.wait(), child.wait())
        server.close()
        assert no_children()
        """)
    assert "[0, 70, 2]" in said and "-9 None" in said and "usage: python -m pyengine.workers.flusher" in said


def test_a_traceback_ends_a_worker_with_1(tmp_path):
    said = run(tmp_path, """
        print("code", start(kind="nonsense").wait())
        server.close()
        """)
    assert "code 1" in said and "No module named 'pyengine.workers.nonsense'" in said


def test_a_worker_that_the_supervisor_does_not_answer_ends_and_is_waited_for(tmp_path):
    run(tmp_path, """
        import json, socket
        gate, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [sys.executable, "-P", "-m", "pyengine.workers.flusher", "/nowhere", "--wait", "60"]
        socket.send_fds(server._channel, [json.dumps(words).encode()], [theirs.fileno()])
        theirs.close()
        pid = int(gate.recv(32))
        assert os.getppid() != pid and Path(f"/proc/{pid}/cmdline").read_text().split(chr(0))[3:5] == words[3:5]
        gate.close()
        eventually(lambda: server.tick() or not os.path.exists(f"/proc/{pid}"), "it has ended")
        assert start("--help").wait() == 0
        server.close()
        assert no_children()
        """)


def test_a_fork_server_that_has_ended_is_waited_for_and_asked_no_more(tmp_path):
    for end in ("os.kill(server._pid, signal.SIGKILL)", "server._channel.close()"):
        run(tmp_path, f"""
            {end}
            eventually(lambda: server.tick() or server._pid == 0, "it has ended")
            assert start("--help") is None and no_children()
            server.close()
            """)


def test_a_fork_server_that_cannot_fork_leaves_the_start_to_exec(tmp_path):
    run(tmp_path, """
        server.close()
        left = [os.fork]

        def fork():
            if not left:
                raise OSError(11, "Resource temporarily unavailable")
            return left.pop()()

        os.fork = fork
        server = ForkServer(HeldStore("/"), KINDS)
        assert server._pid and start("--help") is None
        server.close()
        assert no_children()
        """)
