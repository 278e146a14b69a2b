"""`pyengine serve`: as a main process, as process 1 of a namespace of its own, and the files of containers/."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import pyengine
from fix_cli import SOURCES, command_line, environment, run, spawn
from fix_engine import SMALL, wait_noted
from fix_gateway import Client
from pyengine.cli import serve as serve_module
from pyengine.cli.plan import shared_memory_bytes
from pyengine.cli.serve import QUEUES_WANTED, SESSIONS_WANTED, shm_directory
from pyengine.errors import EngineUnavailableError
from pyengine.gateway import codes
from pyengine.ipc.shared_objects import find_folder
from pyengine.ipc.store_lock import kind_holder, living_kinds
from pyengine.native import control as native
from pyengine.storage.config import SETTINGS, load_config
from waiting import eventually, scaled_timeout_s

CONTAINERS = SOURCES / "containers"
PORTS = {"gateway_namesrv_port": 0, "gateway_broker_port": 0}
SIZES = [word for name, value in (SMALL | PORTS).items() for word in ("--set", f"{name}={value}")]


class Served:
    """A `pyengine serve` of this test."""

    def __init__(self, root: Path, *arguments: object) -> None:
        self.root = root
        self.log = root.parent / f"{root.name}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command_line("serve", root, *SIZES, *arguments), stderr=log, stdout=log, env=environment())

    def said(self) -> str:
        return self.log.read_text()

    def supervisor(self) -> int:
        return eventually(lambda: kind_holder(self.root, native.SUPERVISOR), "a supervisor owns the store")

    def put(self, body: bytes) -> None:
        def stored() -> bool:
            assert self.process.poll() is None, self.said()
            try:
                with pyengine.connect(self.root) as producer:
                    return producer.put("t", body).ok
            except EngineUnavailableError:
                return False

        eventually(stored, "an engine comes up")

    def wait_for(self, text: str) -> str:
        return eventually(lambda: (found := re.search(text, self.said())) and found.group(0), f"it says {text}")

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)

    def clean_up(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        spawn("stop", self.root)


@pytest.fixture
def serve(tmp_path):
    served: list[Served] = []

    def make(*arguments: object, name: str = "store with a blank") -> Served:
        served.append(Served(tmp_path / name, *arguments))
        return served[-1]

    yield make
    for one in served:
        one.clean_up()


def test_it_serves_until_sigterm_and_stops_in_order(serve):
    one = serve()
    one.put(b"1")
    assert one.end() == 0
    assert not (one.root / "abort").exists() and not living_kinds(one.root)
    assert "SIGTERM: the engine is stopped in order" in one.said()
    again = serve()
    again.put(b"2")
    assert again.end(signal.SIGINT) == 0
    with pyengine.open_store(again.root) as reader:
        assert [message.body for message in reader.get_message("t", 0, 0, 9).messages] == [b"1", b"2"]


def test_clients_of_rocketmq_are_served_unless_a_setting_leaves_them_out(serve):
    one = serve()
    port = int(eventually(lambda: re.search(r"name server at \S+:(\d+)", one.said()), "the gateway listens")[1])
    client = Client(port)
    try:
        topics = json.loads(client.ask(codes.GET_ALL_TOPIC_LIST_FROM_NAMESERVER).body)["topicList"]
    finally:
        client.close()
    assert "TBW102" in topics and one.end() == 0
    alone = serve("--set", "gateway_enable=false", name="alone")
    alone.put(b"1")
    assert native.GATEWAY not in living_kinds(alone.root) and alone.end() == 0


def test_a_killed_supervisor_is_started_again_and_takes_the_workers_over(serve):
    one = serve()
    one.put(b"1")
    wait_noted(one.root)
    writer = kind_holder(one.root, native.WRITER)
    before = one.supervisor()
    os.kill(before, signal.SIGKILL)
    eventually(lambda: kind_holder(one.root, native.SUPERVISOR) not in (None, before), "a new supervisor")
    one.wait_for("adopted living workers")
    assert kind_holder(one.root, native.WRITER) == writer
    one.put(b"2")
    assert one.end() == 0
    assert "killed by SIGKILL and is started again" in one.said() and not (one.root / "abort").exists()


def test_a_supervisor_killed_while_it_stops_has_a_successor_that_stops(serve):
    one = serve()
    one.put(b"1")
    wait_noted(one.root)
    os.kill(one.supervisor(), signal.SIGSTOP)  # it cannot begin to stop
    one.process.send_signal(signal.SIGTERM)
    one.wait_for("SIGTERM: the engine")
    os.kill(one.supervisor(), signal.SIGKILL)
    assert one.process.wait(60) == 0
    assert not living_kinds(one.root) and not (one.root / "abort").exists()


@pytest.fixture
def own_signals():
    """What `serve` does to the signals of its process ends with the test."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    while signal.sigtimedwait(serve_module._SIGNALS, 0) is not None:
        pass
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.mark.usefixtures("own_signals")
def test_one_that_is_killed_again_and_again_is_given_up(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(serve_module, "RESTART_PAUSE_S", 0.0)
    init = serve_module.Init(tmp_path / "store", {})
    init._supervisor.words = ("-c", "import os; os.kill(os.getpid(), 9)")
    assert init.run() == 1
    said = capfd.readouterr().err
    assert said.count("is started again") == serve_module.KILLED_MAX - 1 and "given up" in said


@pytest.mark.usefixtures("own_signals")
def test_a_process_that_cannot_be_created_is_tried_again(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(serve_module, "RESTART_PAUSE_S", 0.0)
    refusals = [OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))] * 2
    spawn_really = os.posix_spawn

    def spawn_later(*arguments: object, **options: object) -> int:
        if refusals:
            raise refusals.pop()
        return spawn_really(*arguments, **options)

    monkeypatch.setattr(os, "posix_spawn", spawn_later)
    init = serve_module.Init(tmp_path / "store", {})
    init._supervisor.words = ("-c", "raise SystemExit(6)", "engine")
    assert init.run() == 6
    assert capfd.readouterr().err.count("cannot start engine: Resource temporarily unavailable; trying again") == 2


@pytest.mark.usefixtures("own_signals")
def test_a_missing_interpreter_is_given_up(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    monkeypatch.setattr(signal, "sigtimedwait", lambda signals, timeout_s: pytest.fail("it waits") if timeout_s else None)
    assert serve_module.Init(tmp_path / "store", {}).run() == 1
    said = capfd.readouterr().err
    assert "cannot start pyengine.workers.supervisor: " in said and "No such file or directory; given up" in said


@pytest.mark.usefixtures("own_signals")
def test_sigterm_ends_it_while_no_supervisor_can_be_created(tmp_path, monkeypatch):
    asked = []

    def refuse(*arguments: object, **options: object) -> int:
        asked.append(arguments)
        if len(asked) > 1:
            pytest.fail("it is tried again after SIGTERM")
        signal.raise_signal(signal.SIGTERM)  # to this thread: others do not block it
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "posix_spawn", refuse)
    assert serve_module.Init(tmp_path / "store", {}).run() == 0


def test_serve_exits_with_the_code_of_the_engines_refusal(serve, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").write_text("")
    assert serve(name="other").process.wait(60) == 2
    running = serve()
    running.put(b"1")
    second = serve()
    assert second.process.wait(60) == 5 and "in use by another engine" in second.said()
    running.put(b"2")


def test_a_process_whose_parent_has_ended_is_collected(serve):
    one = serve()
    one.put(b"1")
    before = one.supervisor()
    wait_noted(one.root)
    writer = kind_holder(one.root, native.WRITER)
    os.kill(before, signal.SIGKILL)
    one.wait_for("adopted living workers")
    os.kill(writer, signal.SIGKILL)  # an orphan by now
    one.put(b"2")
    eventually(lambda: not Path(f"/proc/{writer}").exists(), "it is not a zombie")


def test_with_json_it_begins_with_one_document(serve):
    one = serve("--json")
    one.put(b"1")
    document = json.loads(next(line for line in one.said().splitlines() if line.startswith("{")))
    assert document == {"store": str(one.root), "shm_directory": "/dev/shm", "notes": []}


def test_sighup_reads_the_settings_again(serve):
    one = serve()
    one.put(b"1")
    one.process.send_signal(signal.SIGHUP)
    one.wait_for("settings were read again: nothing has changed")


def test_metrics_and_health_are_beside_it_and_come_back(serve):
    one = serve("--metrics", "127.0.0.1:0")
    one.put(b"1")
    url = one.wait_for(r"http://[\d.:]+/metrics")
    health = url.replace("/metrics", "/readyz")

    def answer(where: str) -> int:
        try:
            with urllib.request.urlopen(where, timeout=10) as response:
                return response.status
        except urllib.error.HTTPError as error:
            return error.code

    assert answer(health) == 200 and answer(url) == 200
    (endpoint,) = [pid for pid in children(one.process.pid) if b"--listen" in command_of(pid)]
    os.kill(endpoint, signal.SIGKILL)
    eventually(lambda: len(re.findall(r"http://\S+/metrics", one.said())) == 2, "it answers again")
    assert "the metrics endpoint has ended (SIGKILL)" in one.said()
    assert one.end() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(endpoint, 0)


def children(pid: int) -> list[int]:
    return [int(one) for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()]


def command_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def test_serve_refuses_a_wrong_setting_before_it_makes_the_store(tmp_path):
    ran = run("serve", tmp_path / "store", "--set", "gateway_broker_port=x")
    assert ran.code == 2 and not (tmp_path / "store").exists()
    assert run("serve", tmp_path / "store", "--metrics", "nowhere").code == 2


# ---- shared memory ----------------------------------------------------------------------


@pytest.fixture
def rooms(monkeypatch):
    """Folders that count as tmpfs, with as many free bytes as the test says."""
    free: dict[str, int] = {}
    monkeypatch.setattr(serve_module, "_free_bytes", lambda folder: free[folder])
    monkeypatch.setattr(serve_module, "file_system_of", lambda folder: "tmpfs" if folder in free else "ext4")
    return free


def test_shared_memory_stays_where_there_is_room(rooms, tmp_path):
    config = load_config(tmp_path, {})
    rooms["/dev/shm"] = shared_memory_bytes(config, SESSIONS_WANTED, QUEUES_WANTED)
    assert shm_directory(tmp_path, config, ["/run"]) == ("/dev/shm", [])


def test_the_roomiest_tmpfs_is_taken_where_there_is_not(rooms, tmp_path):
    config = load_config(tmp_path, {})
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    rooms.update({"/dev/shm": 8 << 20, str(one): 1 << 30, str(two): 2 << 30})
    where, (note,) = shm_directory(tmp_path, config, [str(one), str(two), str(tmp_path)])
    assert where == str(two) and "/dev/shm has 8.0 MiB free" in note and note.endswith(f"shared memory is in {two}")


def test_without_another_tmpfs_the_note_says_what_to_do(rooms, tmp_path):
    config = load_config(tmp_path, {})
    rooms["/dev/shm"] = 8 << 20
    where, (note,) = shm_directory(tmp_path, config, [str(tmp_path)])
    assert where == "/dev/shm" and "--shm-size" in note


def test_a_folder_that_was_set_is_kept_and_a_pool_is_warned_of(tmp_path):
    config = load_config(tmp_path, {"shm_directory": str(tmp_path), "transient_store_pool_enable": "true"})
    where, (note,) = shm_directory(tmp_path, config)
    assert where == str(tmp_path) and "ends with the container" in note


def test_the_shared_memory_of_a_running_engine_is_found_in_its_own_directory(rooms, serve, tmp_path):
    """An engine that still runs is taken over where it is, whatever is free now."""
    one = serve("--set", f"shm_directory={tmp_path}")
    one.put(b"1")
    rooms["/dev/shm"] = 8 << 20
    assert find_folder(one.root).path.parent == tmp_path
    assert shm_directory(one.root, load_config(one.root, {})) == (str(tmp_path), [])


# ---- a container, as far as this host has one -------------------------------------------

INSIDE = """
set -e
mount -t tmpfs -o size=8m tmpfs /dev/shm
mount -t tmpfs -o size=256m tmpfs /run
mount -o bind "$1" "$1"
mount -o remount,ro,bind /
shift
exec "$@"
"""


def can_make_namespaces() -> bool:
    if shutil.which("unshare") is None or os.geteuid() != 0:
        return False
    return subprocess.run(["unshare", "--mount", "--pid", "--ipc", "--fork", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_make_namespaces(), reason="needs root's right to make namespaces")
def test_as_process_1_with_a_read_only_root_and_little_shared_memory(tmp_path):
    root = tmp_path / "store"
    words = [*command_line("serve", root, *SIZES), "--metrics", "127.0.0.1:0"]
    log = tmp_path / "log"
    with log.open("wb") as out:
        outer = subprocess.Popen(
            ["unshare", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc", "sh", "-c", INSIDE, "sh",
             str(tmp_path), *words],
            stdout=out, stderr=out, env=environment(PYTHONDONTWRITEBYTECODE="1"))
    try:
        def inside() -> int:
            assert outer.poll() is None, log.read_text()
            return next(iter(children(outer.pid)), 0)

        init = eventually(inside, "process 1")
        eventually(lambda: outer.poll() is not None or "/metrics" in log.read_text(), "it answers")
        assert re.search(r"/dev/shm has [78]\.\d MiB free.*shared memory is in /run", log.read_text()), log.read_text()

        def within(*arguments: object) -> subprocess.CompletedProcess[str]:
            return subprocess.run(["nsenter", "--target", str(init), "--mount", "--pid", "--ipc", *command_line(*arguments)],
                                  capture_output=True, text=True, timeout=scaled_timeout_s(120),
                                  env=environment(PYTHONDONTWRITEBYTECODE="1"), check=False)

        stored = within("put", root, "--topic", "t", "hello")
        assert stored.returncode == 0 and "PUT_OK" in stored.stdout, stored
        for elsewhere in ([], ["unshare", "--mount", "--pid", "--fork", "--mount-proc"]):  # the host, and a place without its processes
            told = subprocess.run([*elsewhere, *command_line("status", root)], capture_output=True, text=True,
                                  timeout=scaled_timeout_s(120),
                                  env=environment(), check=False)
            assert "runs in another container" in told.stdout and "removed" not in told.stdout, told
        os.kill(init, signal.SIGTERM)
        assert outer.wait(60) == 0, log.read_text()
    finally:
        outer.kill()
        outer.wait(10)
    assert not (root / "abort").exists() and "SIGTERM: the engine is stopped in order" in log.read_text()
    with pyengine.open_store(root) as reader:
        assert reader.get_message("t", 0, 0, 1).messages[0].body == b"hello"


# ---- the files --------------------------------------------------------------------------


def test_the_compose_file_names_settings_and_files_that_exist():
    compose = (CONTAINERS / "compose.yaml").read_text()
    names = re.findall(r"^      PYENGINE_(\w+):", compose, re.M)
    assert names and {name.lower() for name in names} <= SETTINGS.keys()
    paths = re.findall(r"^      - (\.\.?/[^:]+):", compose, re.M)
    assert len(paths) == 2 and all((CONTAINERS / path).is_file() for path in paths)
    assert (CONTAINERS / ".." / re.search(r"dockerfile: (\S+)", compose)[1]).is_file()
    assert re.search(r"rule_files:\n  - (\S+)", (CONTAINERS / "prometheus.yml").read_text())[1] == "alerts.yml"


def test_the_dockerignore_leaves_out_files_that_were_built_locally():
    """In the file that podman and docker both read."""
    left_out = set((SOURCES / ".dockerignore").read_text().split())
    assert {".git", ".venv", "build", "dist", "**/*.so", ".*_cache"} <= left_out and not (SOURCES / ".containerignore").exists()


def test_the_containers_command_is_one(tmp_path):
    words = re.search(r'^CMD \["(.*)"\]$', (CONTAINERS / "Containerfile").read_text(), re.M)[1].split('", "')
    assert words[0] == "serve" and words[1] == "/data" and "VOLUME /data" in (CONTAINERS / "Containerfile").read_text()
    broken = run(*words[:1], tmp_path / "store", *words[2:], "--set", "nosuch=1")
    assert broken.code == 2 and "nosuch" in broken.stderr and "No such option" not in broken.stderr


