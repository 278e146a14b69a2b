"""Another build of pyengine takes a running engine over: its workers are restarted one by one, or it is refused."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import pyengine
from fix_cli import command_line, environment, run
from fix_engine import EACH_MODE, SMALL, put_numbers, stored
from fix_golden import usual
from pyengine.cli.engine_status import engine_status
from pyengine.engine.embedded import end_supervisor
from pyengine.engine.kinds import kinds_of
from pyengine.errors import CorruptionError, OtherLayoutError, StoreBusyError
from pyengine.ipc.crashed_engine_memory import rebuild_offline, recover_offline
from pyengine.ipc.heartbeat import build_id
from pyengine.ipc.shared_objects import find_folder
from pyengine.ipc.store_lock import kind_holder, living_kinds
from pyengine.native import cleaning, session
from pyengine.native import control as native
from pyengine.storage.config import load_config
from waiting import eventually, scaled_timeout_s


@pytest.fixture(scope="module")
def other_build(tmp_path_factory):
    """Environment of processes that run the same code but for one comment, which is another build."""
    folder = tmp_path_factory.mktemp("other build")
    shutil.copytree(Path(pyengine.__file__).parent, folder / "pyengine", ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "pyengine" / "errors.py").open("a") as file:
        file.write("# another build\n")
    return environment(PYTHONPATH=str(folder))


def start_other(engine, env, *words: str) -> None:
    settings = [word for name, value in engine.settings.items() for word in ("--set", f"{name}={value}")]
    subprocess.run([sys.executable, "-P", "-m", "pyengine", "start", str(engine.root), *settings, *words], env=env, check=True,
                   timeout=scaled_timeout_s(120), capture_output=True)


def builds(engine) -> dict[str, str]:
    with engine.memory() as memory:
        return {kind.name: f"{native.load(memory.control.workers[kind.number], 'build_id'):016x}" for kind in kinds_of(memory.identity)}


def kill_supervisor(engine) -> None:
    engine.kill("supervisor")
    eventually(lambda: native.SUPERVISOR not in living_kinds(engine.root), "the supervisor is dead")


class Puts(threading.Thread):
    """A producer that puts numbers, one after the other, until told to end; each must be acknowledged."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root, self.done, self.count, self.wrong = root, threading.Event(), 0, None

    def run(self) -> None:
        with pyengine.connect(self.root, refusals="return") as producer:
            while not self.done.is_set():
                result = producer.put("T", b"%06d" % self.count)
                if not result.ok:
                    self.wrong = result
                    return
                self.count += 1
                self.done.wait(0.001)  # the test reads all of them

    def end(self) -> list[bytes]:
        self.done.set()
        self.join()
        assert self.wrong is None, self.wrong
        return [b"%06d" % number for number in range(self.count)]


def is_all_ours(engine) -> bool:
    return set(builds(engine).values()) == {build_id()} and all(
        one["state"] == "ready" for one in run("status", engine.root, "--json").document["workers"])


@pytest.mark.parametrize("mode", EACH_MODE)
def test_workers_of_another_build_are_restarted_one_by_one_while_puts_continue(make_engine, other_build, mode):
    engine = make_engine(mode)
    start_other(engine, other_build)
    before = builds(engine)
    assert len(set(before.values())) == 1 and build_id() not in before.values()
    puts = Puts(engine.root)
    puts.start()
    eventually(lambda: puts.count > 100, "puts go on")
    kill_supervisor(engine)
    assert run("status", engine.root).code != 2
    engine.start()
    eventually(lambda: is_all_ours(engine), "every worker runs this build", timeout_s=120)
    count = puts.count
    eventually(lambda: puts.count > count + 100, "puts go on")
    bodies = puts.end()
    said = [line for line in engine.log().splitlines() if "runs another build of pyengine" in line]
    assert [line.split(" the ")[1].split()[0] for line in said][:2] == ["flusher", "writer"]
    assert len(said) == len(before) and "recovered" not in engine.log().rpartition("adopted")[2].lower()
    assert engine.stop()
    assert not (engine.root / "abort").exists() and stored(engine) == bodies


def test_the_same_build_restarts_nothing(make_engine):
    engine = make_engine()
    engine.start()
    before = engine.pids()
    kill_supervisor(engine)
    engine.start()
    put_numbers(engine, 0, 3)
    after = engine.pids()
    assert after.pop("supervisor") != before.pop("supervisor") and after == before and "another build" not in engine.log()


@pytest.mark.ci
def test_a_worker_that_does_not_finish_is_killed_and_replaced(make_engine, other_build):
    """Under load a writer always has more to do."""
    engine = make_engine()
    start_other(engine, other_build)
    puts = Puts(engine.root)
    puts.start()
    eventually(lambda: puts.count > 10, "puts go on")
    kill_supervisor(engine)
    checkpointer = engine.pid("checkpointer")
    engine.start()
    os.kill(checkpointer, signal.SIGSTOP)  # SIGTERM waits until it is resumed, which never happens
    eventually(lambda: is_all_ours(engine), "every worker runs this build", timeout_s=120)
    assert not Path(f"/proc/{checkpointer}").exists() or engine.pid("checkpointer") != checkpointer
    puts.end()


def test_take_over_ends_the_supervisor_and_not_the_engine(make_engine, other_build):
    engine = make_engine()
    start_other(engine, other_build)
    put_numbers(engine, 0, 3)
    supervisor = engine.pid("supervisor")
    refused = run("start", engine.root)
    assert refused.code == 5 and kind_holder(engine.root, native.SUPERVISOR) == supervisor
    ran = run("start", engine.root, "--take-over")
    assert ran.code == 0 and "living workers were taken over" in ran.stdout
    eventually(lambda: is_all_ours(engine), "every worker runs this build", timeout_s=120)
    assert engine.pid("supervisor") != supervisor
    eventually(lambda: stored(engine) == [b"000000", b"000001", b"000002"], "all are dispatched")


@pytest.mark.parametrize(("options", "code", "sentence"), [
    (["--set", "sessions_max=9"], 5, "sessions_max = 9 (--set) is asked for"), (["--foreground", "--json"], 2, "--foreground"),
])
def test_a_take_over_that_would_be_refused_leaves_the_supervisor_alone(make_engine, options, code, sentence):
    engine = make_engine()
    engine.start()
    supervisor = engine.pid("supervisor")
    ran = run("start", engine.root, "--take-over", *options)
    assert (ran.code, kind_holder(engine.root, native.SUPERVISOR)) == (code, supervisor) and sentence in ran.stderr + ran.stdout


def test_the_engine_of_a_program_that_embeds_it_is_not_taken_over(tmp_path):
    with pyengine.Engine(tmp_path / "store", **SMALL) as engine:
        supervisor = engine.pid
        ran = run("start", engine.path, "--take-over")
        assert ran.code == 5 and "stop the program that embeds it" in ran.stderr, ran
        assert (engine.state, engine.pid) == ("running", supervisor)


def test_the_engine_of_a_containers_main_process_is_not_taken_over(tmp_path):
    root = tmp_path / "store"
    words = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
    with subprocess.Popen(command_line("serve", root, *words, "--set", "gateway_enable=false"), env=environment()) as served:
        try:
            assert run("wait", root, "--timeout", scaled_timeout_s(60)).code == 0
            supervisor = kind_holder(root, native.SUPERVISOR)
            ran = run("start", root, "--take-over")
            assert ran.code == 5 and f"kill -TERM {supervisor}" in ran.stderr, ran
            assert kind_holder(root, native.SUPERVISOR) == supervisor and served.poll() is None
        finally:
            served.terminate()
    assert served.returncode == 0


def test_take_over_of_a_store_that_nobody_runs_starts_it(make_engine):
    engine = make_engine()
    engine.start()
    put_numbers(engine, 0, 1)
    engine.stop()
    assert run("start", engine.root, "--take-over").code == 0


PRODUCER = """
import sys
from datetime import timedelta
import pyengine
with pyengine.connect(sys.argv[1]) as producer:
    print("connected", flush=True)
    sys.stdin.readline()
    assert producer.put("T", b"once", unique_key="k", once=True).ok
    assert producer.cancel_delayed(producer.put("T", b"later", deliver_at=timedelta(days=1)).msg_id)
    with producer.transaction() as transaction:
        transaction.put("T", b"together")
"""


def test_a_running_producer_needs_no_file_of_the_package_any_more(make_engine, tmp_path):
    """An install of another version replaces the files of programs that run."""
    engine = make_engine()
    engine.start()
    shutil.copytree(Path(pyengine.__file__).parent, tmp_path / "installed" / "pyengine", ignore=shutil.ignore_patterns("__pycache__"))
    with subprocess.Popen([sys.executable, "-P", "-c", PRODUCER, str(engine.root)], env=environment(PYTHONPATH=str(tmp_path / "installed")),
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout.readline() == "connected\n"
        shutil.rmtree(tmp_path / "installed")
        _, said = program.communicate("go\n", timeout=scaled_timeout_s(60))
    assert program.returncode == 0, said
    eventually(lambda: stored(engine) == [b"once", b"together"], "both are dispatched")


@pytest.fixture
def other_layout(make_engine):
    """An engine whose control block says that another version made it; its supervisor does not look. change(False) ends that."""
    engine = make_engine()
    engine.start()
    put_numbers(engine, 0, 2)
    engine.kill("supervisor", signal.SIGSTOP)
    with engine.memory(writable=True) as memory:
        def change(is_other: bool) -> None:
            memory.control.identity.layout_version = native.LAYOUT_VERSION - is_other

        change(True)
        yield engine, change
        change(False)


def test_an_engine_of_another_layout_is_refused_at_once_and_lives_on(other_layout):
    engine, change = other_layout
    supervisor = kind_holder(engine.root, native.SUPERVISOR)
    ran = run("start", engine.root, "--take-over")
    assert ran.code == 1 and "another version of pyengine" in ran.stderr, ran
    assert "another version of pyengine" in run("status", engine.root).stdout
    assert kind_holder(engine.root, native.SUPERVISOR) == supervisor, "it was not killed"
    with pytest.raises(OtherLayoutError, match=f"layout {native.LAYOUT_VERSION - 1}"):
        end_supervisor(engine.root, load_config(engine.root))
    os.kill(supervisor, signal.SIGKILL)
    eventually(lambda: native.SUPERVISOR not in living_kinds(engine.root), "it is dead")
    writer = kind_holder(engine.root, native.WRITER)
    ran = run("start", engine.root)
    assert ran.code == 5 and "docs/upgrades.md" in ran.stderr and kind_holder(engine.root, native.WRITER) == writer, ran
    change(False)
    engine.start()
    assert kind_holder(engine.root, native.WRITER) == writer
    eventually(lambda: stored(engine) == [b"000000", b"000001"], "both are dispatched")


@pytest.mark.parametrize("name", usual(["cleaning", "session"], ["session"], pytest.mark.ci))
def test_an_engine_whose_other_objects_differ_is_refused_at_once_and_lives_on(make_engine, name):
    """The control block's layout is the same, and that of what readers or producers share with workers is not."""
    engine = make_engine()
    engine.start()
    with pyengine.connect(engine.root) as producer:
        assert producer.put("T", b"000000").ok
        engine.kill("supervisor", signal.SIGSTOP)
        folder = find_folder(engine.root)
        [path] = folder.path.glob(f"{name}*")
        supervisor, writer = (kind_holder(engine.root, kind) for kind in (native.SUPERVISOR, native.WRITER))
        with folder.attach(path.name) as shared:
            block = {"cleaning": cleaning, "session": session}[name].view(shared.memory)
            block.layout_version -= 1
            ran = run("start", engine.root, "--take-over")
            assert ran.code == 1 and f"another version of pyengine (the layout of {path.name} in shared memory is not" in ran.stderr, ran
            assert kind_holder(engine.root, native.SUPERVISOR) == supervisor, "it was not killed"
            os.kill(supervisor, signal.SIGKILL)
            eventually(lambda: native.SUPERVISOR not in living_kinds(engine.root), "it is dead")
            ran = run("start", engine.root)
            assert ran.code == 5 and "docs/upgrades.md" in ran.stderr and kind_holder(engine.root, native.WRITER) == writer, ran
            block.layout_version += 1
        engine.start()
        assert producer.put("T", b"000001").ok
    assert kind_holder(engine.root, native.WRITER) == writer
    eventually(lambda: stored(engine) == [b"000000", b"000001"], "both are dispatched")


def change_layout(engine, by: int) -> None:
    """Let the control block say that another version made it, or, by +1, that this one did."""
    with find_folder(engine.root).attach("control") as shared:
        native.view_control(shared.memory).identity.layout_version += by


def killed_with_undrained_pool(engine) -> list[bytes]:
    """Kill an engine whose pool alone has some acknowledged messages, which are returned; its memory is of another layout."""
    engine.start()
    engine.suspend("committer")
    bodies = put_numbers(engine, 0, 20)
    engine.kill_all()
    change_layout(engine, -1)
    return bodies


def test_the_pool_of_a_killed_engine_of_another_layout_stays_for_its_version(make_engine):
    engine = make_engine("pool")
    bodies = killed_with_undrained_pool(engine)
    config, said = load_config(engine.root), rf"layout {native.LAYOUT_VERSION - 1} .* start and stop the store once with that version"
    for attempt in (engine.start, lambda: recover_offline(engine.root, config), lambda: rebuild_offline(engine.root, config),
                    lambda: recover_offline(engine.root, config, dry_run=True)):
        with pytest.raises(CorruptionError, match=said):
            attempt()
    assert "start and stop the store once with that version" in engine_status(engine.root, {})["reason"]
    change_layout(engine, 1)
    engine.start()
    eventually(lambda: stored(engine) == bodies, "all are drained and dispatched")


def test_the_pool_of_a_killed_engine_of_another_layout_can_be_given_up(make_engine):
    engine = make_engine("pool")
    killed_with_undrained_pool(engine)
    report = recover_offline(engine.root, load_config(engine.root), accept_loss=True)
    assert "is given up" in report.shared_state and find_folder(engine.root).names() == []
    engine.start()
    assert stored(engine) == []


def test_without_a_pool_the_files_of_a_killed_engine_of_another_layout_are_enough(make_engine):
    engine = make_engine("async")
    engine.start()
    bodies = put_numbers(engine, 0, 20)
    engine.kill_all()
    change_layout(engine, -1)
    engine.start()
    eventually(lambda: stored(engine) == bodies, "all are dispatched")


def test_an_engine_of_another_layout_whose_lock_was_removed_gets_no_second_one_beside_it(make_engine):
    engine = make_engine("async")
    engine.start()
    bodies, pids = put_numbers(engine, 0, 10), engine.pids()
    engine.suspend("supervisor")  # or it sees that the block was written over
    change_layout(engine, -1)
    (engine.root / "lock").rename(engine.root / "kept")
    with pytest.raises(StoreBusyError, match="`lock` was removed or replaced") as caught:
        engine.start()
    assert all(str(pid) in str(caught.value) for pid in pids.values())
    (engine.root / "kept").rename(engine.root / "lock")
    change_layout(engine, 1)
    engine.kill("supervisor", signal.SIGCONT)
    bodies += put_numbers(engine, 10, 10)
    assert engine.pids() == pids
    eventually(lambda: stored(engine) == bodies, "all are dispatched")
