"""An engine embedded in a Python process: it ends with it, in order, however that ends."""

from __future__ import annotations

import errno
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import pyengine
from fix_engine import EACH_MODE, MODES, SMALL
from fix_owner import CHECKOUT
from pyengine.engine import embedded
from pyengine.engine.embedded import Engine, supervisor_pid
from pyengine.engine.kinds import kinds_for
from pyengine.errors import EngineError, EngineUnavailableError, StoreBusyError, UsageError, passing
from pyengine.ipc import session_client
from pyengine.ipc.shared_objects import find_folder, unlink_semaphores
from pyengine.ipc.store_lock import living_kinds
from pyengine.native import control as native
from pyengine.storage.engine_id import read_epoch
from waiting import eventually, scaled_timeout_s


def bodies(root):
    with pyengine.open_store(root) as store:
        return [message.body for message in store.get_message("T", 0, 0, level="committed").messages]


@pytest.fixture
def root(make_engine):
    """A path whose remains are swept."""
    return make_engine().root


def test_an_embedded_engine_runs_inside_its_block(root):
    with pyengine.Engine(root, **SMALL) as engine:
        assert engine.state == "running" and engine.pid == supervisor_pid(root)
        with engine.connect() as producer:
            assert producer.put("T", b"one").ok
        with engine.open_store() as store:
            assert eventually(lambda: store.get_message("T", 0, 0, level="committed").messages, "visible")[0].body == b"one"
        with pytest.raises(StoreBusyError, match=r"any process uses a running engine by pyengine.connect\(\)"):
            Engine(root).start()
        with pytest.raises(UsageError, match="already"):
            engine.start()
    assert engine.pid is None and living_kinds(root) == [] and not (root / "abort").exists()
    engine.stop()
    with engine:
        assert engine.state == "running"
    assert bodies(root) == [b"one"]


@pytest.mark.parametrize("mode", EACH_MODE)
def test_a_new_store_of_full_size_files_takes_little_of_the_disk(make_engine, mode):
    """Log, queues and index with keys; in pool mode the segments are smaller, because buffers of their size take memory."""
    root = make_engine().root
    settings = {**MODES[mode], **({"mapped_file_size_commit_log_bytes": 256 << 20} if mode == "pool" else {})}
    with pyengine.Engine(root, **settings) as engine, engine.connect() as producer:
        for number in range(6):
            assert producer.put(f"T{number}", b"x", keys=f"k{number}").ok
        with engine.open_store() as store:
            eventually(lambda: store.query_message("T5", "k5", 1), "the index has the last key")
        files = [file.stat() for file in root.rglob("*")]
        assert sum(one.st_blocks for one in files) * 512 <= 120_000_000 < 2 * (256 << 20) < sum(one.st_size for one in files)


def test_the_engine_stops_in_order_when_the_block_raises(root):
    with pytest.raises(ZeroDivisionError), pyengine.Engine(root, **SMALL):
        raise ZeroDivisionError
    assert living_kinds(root) == [] and not (root / "abort").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_it_ends_in_order_with_the_process_that_embeds_it(root, number):
    script = ("import sys, time, pyengine\n"
              f"with pyengine.Engine(sys.argv[1], **{SMALL!r}) as engine:\n"
              "    with engine.connect() as producer:\n"
              "        assert producer.put('T', b'one').ok\n"
              "    print('up', flush=True)\n"
              "    time.sleep(600)\n")
    child = subprocess.Popen([sys.executable, "-c", script, str(root)], stdout=subprocess.PIPE, text=True,
                             stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(CHECKOUT)})
    assert child.stdout.readline() == "up\n"
    child.send_signal(number)
    child.wait(timeout=scaled_timeout_s(60))
    child.stdout.close()
    eventually(lambda: living_kinds(root) == [], "the engine is gone")
    assert not (root / "abort").exists() and bodies(root) == [b"one"]


# How a program may fork without an exec: as Python does, and as a library does, past Python's hooks.
FORKS = {"python": "os.fork", "library": "ctypes.CDLL(None).fork"}
EMBEDDER = """
import ctypes, os, signal, sys, time
import pyengine
with pyengine.Engine(sys.argv[1], **{settings}) as engine:
    child = {fork}()
    if child == 0:
        signal.pause()
    print(child, flush=True)
    sys.stdin.readline()
    {then}
"""


@pytest.fixture
def embed(root):
    """embed(fork, then) -> a process that embeds an engine, has forked a child, and does `then` after the next line."""
    processes, helpers = [], []

    def start(fork, then):
        script = EMBEDDER.format(settings=repr(SMALL), fork=FORKS[fork], then=then)
        processes.append(subprocess.Popen([sys.executable, "-c", script, str(root)], stdin=subprocess.PIPE, text=True,
                                          stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(CHECKOUT)}))
        helpers.append(int(processes[-1].stdout.readline()))
        return processes[-1]

    yield start
    for pid in helpers:
        os.kill(pid, signal.SIGKILL)
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("fork", FORKS)
def test_an_embedded_engine_stops_although_a_forked_child_lives(root, embed, fork):
    embedder = embed(fork, "pass")
    embedder.stdin.write("\n")
    embedder.stdin.flush()
    assert embedder.wait(30) == 0
    assert living_kinds(root) == [] and not (root / "abort").exists()


@pytest.mark.parametrize("fork", FORKS)
def test_an_embedded_engine_ends_with_a_killed_embedder_although_a_forked_child_lives(root, embed, fork):
    embed(fork, "pass").kill()
    eventually(lambda: living_kinds(root) == [], "the engine is gone")
    assert not (root / "abort").exists()


def test_an_embedded_engine_ends_when_its_embedder_becomes_another_program(root, embed):
    embedder = embed("python", "os.execvp('sleep', ['sleep', '600'])")
    embedder.stdin.write("\n")
    embedder.stdin.flush()
    eventually(lambda: living_kinds(root) == [], "the engine is gone")
    assert embedder.poll() is None and not (root / "abort").exists()


def test_a_forked_child_does_not_stop_its_parents_engine(root):
    with pyengine.Engine(root, **SMALL) as engine:
        pid = engine.pid
        child = os.fork()
        if child == 0:
            engine.stop()
            os._exit(engine.pid is not None or engine.state != "stopped")
        assert os.waitpid(child, 0)[1] == 0
        assert engine.pid == supervisor_pid(root) == pid and engine.state == "running"


def test_ctrl_c_in_a_terminal_does_not_reach_the_workers_first(root):
    """A terminal signals a whole process group; supervisor, fork server and workers are in others."""
    with pyengine.Engine(root, **SMALL) as engine:
        groups = {os.getpgid(pid) for pid in (engine.pid, *(int(line.split()[0]) for line in children_of(engine.pid)))}
        assert os.getpgrp() not in groups and len(groups) == 2 + len(kinds_for(native.MODE_MAPPED, False))


def children_of(pid):
    return list(open(f"/proc/{pid}/task/{pid}/children").read().split())


@pytest.mark.parametrize(("script", "says"), [("echo more >&2; echo ImportError: no module >&2", "ends with: ImportError: no module"),
                                              ("true", "says nothing")])
def test_a_supervisor_that_cannot_start_has_its_last_words_in_the_error(root, tmp_path, monkeypatch, script, says):
    broken = tmp_path / "python"
    broken.write_text(f"#!/bin/sh\n{script}\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(EngineError, match=f"^the supervisor ended while starting [(]exit code 1[)]; {root}/engine.log {says}$"):
        pyengine.Engine(root, **SMALL).start()


def test_an_engine_stops_in_order_where_python_stays_interactive_after_a_script(root, monkeypatch):
    monkeypatch.setenv("PYTHONINSPECT", "1")
    with pyengine.Engine(root, **SMALL):
        pass
    assert living_kinds(root) == []


def test_settings_are_typed_or_text(root):
    with pyengine.Engine(root, **SMALL, flushDiskType="SYNC_FLUSH", message_index_enable=False) as engine:
        with engine.connect() as producer:
            assert producer.put("T", b"one", keys="k").ok
        assert engine.state == "running"
    assert not list((root / "index").glob("*"))
    with pytest.raises(UsageError, match="did you mean"):
        Engine(root, flush_dsk_type="x").start()


def test_an_engine_that_loses_its_supervisor_says_so_at_the_end_and_leaves_no_worker(root):
    engine = Engine(root, **SMALL).start()
    with engine.connect() as producer:
        assert producer.put("T", b"one").ok
    os.kill(engine.pid, signal.SIGKILL)
    eventually(lambda: (engine.state, engine.pid) == ("stopped", None), "it knows")
    with pytest.raises(EngineError, match="exit code -9"):
        engine.stop()
    assert living_kinds(root) == [] and not (root / "abort").exists()
    with pyengine.Engine(root, flush_disk_type="SYNC_FLUSH") as again, again.connect() as producer:
        assert producer.put("T", b"two").ok
    assert living_kinds(root) == [] and bodies(root) == [b"one", b"two"]


def test_a_stop_leaves_a_supervisor_alone_that_adopts_the_workers_just_then(root, monkeypatch):
    engine, living = Engine(root, **SMALL).start(), embedded.living_kinds
    os.kill(engine.pid, signal.SIGKILL)
    eventually(lambda: engine.pid is None, "it has ended")
    adopters = []

    def look(*given):
        found = living(*given)
        if not adopters:
            monkeypatch.setattr(embedded, "living_kinds", living)
            adopters.append(embedded.start_engine(root, SMALL)["pid"])
        return found

    monkeypatch.setattr(embedded, "living_kinds", look)
    with pytest.raises(EngineError, match="supervisor .*live on"):
        engine.stop()
    assert adopters == [supervisor_pid(root)] and engine.state == "stopped"
    assert embedded.stop_engine(root)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("program", "error", "says"), [
    (sys.executable, UsageError, "`pyengine start .*connect"), (None, UsageError, "sys.executable is no Python"),
    ("", UsageError, "sys.executable is no Python"), ("uwsgi-python3", UsageError, "uwsgi-python3 is no Python"),
    ("program", UsageError, "program is no Python"), ("python3", EngineError, "cannot be run: No such file")])
def test_a_program_that_is_its_own_interpreter_starts_no_supervisor(tmp_path, monkeypatch, program, error, says, shared):
    """A frozen one would start itself, and that again, without end."""
    monkeypatch.setattr(sys, "executable", program and str(tmp_path / program))  # none is there
    if says.startswith("`"):
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(error, match=says):
        Engine(tmp_path / "store", shared=shared, **SMALL).start()
    assert living_kinds(tmp_path / "store") == []


@pytest.mark.parametrize(("name", "real"), [("Python", None), ("python3", "interpreter-3.11"), ("interpreter", "python3")])
def test_a_python_is_known_by_either_of_its_names(root, tmp_path, monkeypatch, name, real):
    program = tmp_path / name
    if real:
        program.symlink_to(tmp_path / real)
    (tmp_path / (real or name)).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    with Engine(root, **SMALL) as engine:
        assert engine.state == "running"


@pytest.mark.parametrize("shared", [False, True])
def test_an_engine_whose_disk_failed_while_it_ran_is_degraded_and_can_be_joined(make_engine, shared):
    made = make_engine()
    engine = pyengine.Engine(made.root, shared=shared, **SMALL).start()
    with made.memory(writable=True) as memory:
        native.freeze(memory.control, native.FLUSHER, errno.EIO, "a segment cannot be made durable")
    assert (engine.state, engine.reason) == ("degraded", "a segment cannot be made durable")
    if shared:
        other = pyengine.Engine(made.root, shared=True, **SMALL).start()
        assert other.state == "degraded"
        other.stop()
    with pytest.raises(EngineError, match="a segment cannot be made durable"):
        engine.stop()


@pytest.mark.parametrize("shared", [False, True])
def test_an_engine_has_its_last_state_while_no_file_can_be_opened(root, shared):
    with pyengine.Engine(root, shared=shared, **SMALL) as engine:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            assert (engine.state, engine.reason) == ("running", "") and f"Engine('{root}', running" in repr(engine)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert engine.state == "stopped"


@pytest.mark.parametrize("shared", [pytest.param(False, marks=pytest.mark.ci), True])
def test_a_stopped_engine_says_at_once_that_it_is(root, monkeypatch, shared):
    engine = pyengine.Engine(root, shared=shared, **SMALL)
    monkeypatch.setattr(session_client.time, "sleep", lambda _: pytest.fail("it waits"))
    with pytest.raises(EngineUnavailableError, match="is stopped: start"):
        engine.connect()
    monkeypatch.undo()
    with engine, engine.connect() as producer:
        assert producer.put("T", b"x").ok
    with pytest.raises(EngineUnavailableError, match="is stopped: start"):
        engine.connect(timeout_s=3600)
    with pyengine.Engine(root, **SMALL), engine.connect() as producer:  # another one's
        assert producer.put("T", b"x").ok


def test_without_engine_connect_says_how_to_start_one(root):
    with pytest.raises(EngineUnavailableError, match="does not exist: .*or the path is wrong; `pyengine start .*; waited 0.1 s"):
        pyengine.connect(root, timeout_s=0.1)
    with pyengine.Engine(root, **SMALL):
        pass
    with pytest.raises(EngineUnavailableError, match="no engine is running on .*`pyengine start [^;]*$"):
        pyengine.connect(root, timeout_s=0)
    assert find_folder(root).names() == []


def has_looked(monkeypatch):
    """The event of a wait's second pause: it has found nothing twice."""
    pauses, event, pause_s = [], threading.Event(), session_client.Patience.pause_s

    def counted(patience, error):
        pauses.append(error)
        if len(pauses) > 1:
            event.set()
        return pause_s(patience, error)

    monkeypatch.setattr(session_client.Patience, "pause_s", counted)
    return event


@pytest.mark.parametrize("existed", [False, pytest.param(True, marks=pytest.mark.ci)], ids=["no store yet", "a stopped store"])
def test_connect_and_consume_wait_for_an_engine_that_is_started_later(root, monkeypatch, existed):
    """Processes of one store are started in any order; what the store's file says is read when it is there."""
    if existed:
        with pyengine.Engine(root, **SMALL):
            pass
    looked = has_looked(monkeypatch)
    with ThreadPoolExecutor() as pool:
        connected = pool.submit(pyengine.connect, root, timeout_s=60)
        consumed = pool.submit(pyengine.consume, root, "T", group="G", timeout_s=60)
        assert looked.wait(30)
        with pyengine.Engine(root, **SMALL), connected.result() as producer, consumed.result() as consumer:
            assert producer.put("T", b"x").ok
            assert [message.body for message in consumer.pull(timeout_s=60)] == [b"x"]
            # Into a second file of the queue: the files of this store have another size than those of a store without settings.
            assert producer.put_many("T", [b"%d" % number for number in range(310)], queue_id=0).ok
            got: list[bytes] = []
            eventually(lambda: got.extend(message.body for message in consumer.pull(timeout_s=1)) or len(got) == 310, "all of them")


def test_a_new_producer_is_not_told_to_start_an_engine_that_restarts_by_itself(root):
    with pyengine.Engine(root, **SMALL):
        epoch = read_epoch(root)
        folder = find_folder(root)
        shutil.rmtree(folder.path)
        unlink_semaphores(folder.short_id)
        while read_epoch(root) == epoch:
            with pyengine.connect(root, timeout_s=scaled_timeout_s(60)), pyengine.consume(root, "T", group="G"):
                pass
        with pyengine.connect(root) as producer:
            assert producer.put("T", b"x").ok


@pytest.mark.parametrize("call", ["connect(root, timeout_s=600)",
                                  pytest.param("consume(root, 'T', group='G', timeout_s=600)", marks=pytest.mark.ci),
                                  pytest.param("run_consumer(root, 'T', 'G', print, timeout_s=600)", marks=pytest.mark.ci),
                                  "asyncio.run(pyengine.run_consumer_async(root, 'T', 'G', handle, timeout_s=600))"])
def test_ctrl_c_ends_the_wait_for_an_engine(tmp_path, call):
    program = f"""
import asyncio, sys
import pyengine
async def handle(message): pass
root = sys.argv[1]
try:
    {call if call.startswith("asyncio") else "pyengine." + call}
    print("ended")
except KeyboardInterrupt:
    print("interrupted")
"""
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "none")], cwd=CHECKOUT, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True) as process:
        assert "waiting up to" in process.stderr.readline()  # after a second it says what it waits for
        process.send_signal(signal.SIGINT)
        out = process.communicate(timeout=scaled_timeout_s(60))[0]
    assert out == ("ended\n" if "run_consumer" in call else "interrupted\n")


def test_waiting_looks_less_and_less_often_and_not_at_all_for_what_does_not_pass(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(session_client.time, "monotonic", lambda: now_s[0])
    patience, pauses = session_client.Patience(10), []
    missing = passing(EngineUnavailableError("no engine"))
    with pytest.raises(EngineUnavailableError, match="^no engine; waited 10 s$"):
        while True:
            pauses.append(patience.pause_s(missing))
            now_s[0] += pauses[-1]
    assert pauses[0] < 0.05 and max(pauses) >= 0.1 and len(pauses) <= 110 and sum(pauses) == pytest.approx(10)
    for patience, error in ((session_client.Patience(10), EngineUnavailableError("degraded")), (session_client.Patience(0), missing)):
        with pytest.raises(EngineUnavailableError) as raised:
            patience.pause_s(error)
        assert raised.value is error


def test_an_engine_that_was_too_slow_to_stop_is_waited_for_by_the_next_stop(root):
    engine = pyengine.Engine(root, **SMALL).start()
    pid = engine.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(EngineError, match=f"pid {pid}. is still stopping after 0.2 s; `pyengine status"):
            engine.stop(timeout_s=0.2)
        assert engine.pid == pid
    finally:
        os.kill(pid, signal.SIGCONT)
    engine.stop()
    assert (engine.pid, engine.state) == (None, "stopped") and not (root / "abort").exists()


# argv: store, how the program treats signals. It embeds an engine, kills a worker, and stops it; its own signals stay as they are.
SIGNALS = """
import os, signal, sys, threading, time
import pyengine
from pyengine.ipc.control_block import EngineMemory
from pyengine.native import control as native
root, how, settings = sys.argv[1], sys.argv[2], dict(word.split("=") for word in sys.argv[3:])
catchable = set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}
if how == "ignored":
    for number in catchable:
        signal.signal(number, signal.SIG_IGN)
before = {}

def work():
    if how == "blocked":
        signal.pthread_sigmask(signal.SIG_BLOCK, catchable)
    before.update(mask=signal.pthread_sigmask(signal.SIG_BLOCK, []), handlers=[signal.getsignal(number) for number in catchable])
    with pyengine.Engine(root, **settings) as engine, engine.connect() as producer:
        assert producer.put("T", b"one").ok
        with EngineMemory.of(root) as memory:
            for kind in (native.WRITER, native.REPUTTER):
                os.kill(native.load(memory.control.workers[kind], "pid"), signal.SIGKILL)
            assert producer.put("T", b"two", timeout_s=60).ok
            while not all(native.load(memory.control.workers[kind], "restarts") for kind in (native.WRITER, native.REPUTTER)):
                time.sleep(0.01)
    assert before == dict(mask=signal.pthread_sigmask(signal.SIG_BLOCK, []), handlers=[signal.getsignal(number) for number in catchable])
    print("stopped", flush=True)

if how == "blocked":
    thread = threading.Thread(target=work)  # a mask is a thread's
    thread.start()
    thread.join()
else:
    work()
"""


@pytest.mark.parametrize("how", ["blocked", pytest.param("ignored", marks=pytest.mark.ci)])
def test_an_engine_stops_whatever_signals_its_embedder_blocks_or_ignores(root, how):
    words = [sys.executable, "-c", SIGNALS, str(root), how, *(f"{name}={value}" for name, value in SMALL.items())]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=scaled_timeout_s(120))
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "stopped\n", "")
    assert living_kinds(root) == [] and not (root / "abort").exists()
    assert bodies(root) == [b"one", b"two"]


# argv: store, settings. A daemon closes its standard descriptors, and a library writes to them.
CLOSED = """
import os, sys
said = os.fdopen(os.dup(1), "w")
os.closerange(0, 3)
import pyengine
with pyengine.Engine(sys.argv[1], **dict(word.split("=") for word in sys.argv[2:])) as engine, engine.connect() as producer:
    results = []
    for number in range(20):
        results.append(producer.put("T", b"%d" % number))
        for descriptor in range(3):
            os.write(descriptor, b"a library warns " * 500)
    with engine.open_store() as store:
        assert store.wait_for_message("T", 0, 19, timeout_s=60)
        print(*(os.path.realpath(f"/proc/self/fd/{number}") for number in range(3)), file=said)
        assert [message.body for message in store.get_message("T", 0, 0).messages] == [b"%d" % number for number in range(20)]
print("stopped", all(result.ok for result in results), file=said, flush=True)
"""


def test_a_daemon_without_standard_descriptors_embeds_an_engine(root):
    words = [sys.executable, "-c", CLOSED, str(root), *(f"{name}={value}" for name, value in SMALL.items())]
    ran = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=scaled_timeout_s(120))
    assert (ran.returncode, ran.stdout) == (0, "/dev/null /dev/null /dev/null\nstopped True\n")


def test_closed_clients_hold_no_file_of_the_store(make_engine):
    """What they keep open keeps a file system from being unmounted."""
    engine = make_engine("async")
    engine.start()
    with pyengine.connect(engine.root) as producer, producer.transaction(checker=lambda message: "commit") as transaction:
        producer.put("orders", b"in turn")
        transaction.put("orders", b"both or none")
    with pyengine.consume(engine.root, "orders", group="g") as consumer:
        assert consumer.pull(timeout_s=scaled_timeout_s(20))
    with pyengine.open_store(engine.root) as reader:
        assert reader.topics()

    def opened() -> list[str]:
        links = (os.path.join("/proc/self/fd", number) for number in os.listdir("/proc/self/fd"))
        return [path for path in (os.readlink(link) for link in links if os.path.lexists(link)) if path.startswith(str(engine.root))]

    assert opened() == []
