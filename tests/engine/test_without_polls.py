"""Every wake-up is given: a build in which sleeps that a wake-up should end last for an hour (faults/mutants/without_polls.toml).

Elsewhere a lost wake-up costs 50 to 500 ms and no test notices. Here a process that waits for one waits for ever, and the test's
own deadline ends it. The flusher keeps its timer where flushing goes by time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from crash.board import Board
from faults.mutants import WITHOUT_POLLS, environment
from fix_golden import usual
from fix_parts import MODES
from pyengine.errors import DiskError
from pyengine.native import control as native
from pyengine.native.failpoints import VARIABLE
from pyengine.results import PutStatus
from pyengine.services.service import freeze
from waiting import eventually, scaled_timeout_s

PUTS, PUTS_LONG = 150, 20_000
BY_TIME = {"async": (native.FLUSHER,), "sync": (), "pool": (native.FLUSHER,)}
ALL = (native.ALLOCATOR, native.WRITER, native.FLUSHER, native.COMMITTER, native.REPUTTER)
# argv: store, puts, bytes of a body, "each" to wait until each one is dispatched, or "stream". In the pool a body is
# larger than what is committed by time.
PRODUCER = """
import sys
from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.session_client import open_session
from pyengine.ipc.shared_objects import SharedFolder
from pyengine.native import control as native, waiting
from pyengine.client.producer import Producer
from pyengine.engine_config import EngineConfig
from pyengine.storage.engine_id import read_engine_id
root, puts, body, each = sys.argv[1], int(sys.argv[2]), bytes(int(sys.argv[3])), sys.argv[4] == "each"
memory = EngineMemory.attach(SharedFolder.of(read_engine_id(root)), writable=False)
control = memory.control

def dispatched(end):
    while True:
        seen = waiting.load_sequence(control.arrival_seq)
        if native.load_position(control.reput_from) >= end:
            return
        waiting.wait_for_sequence(control.arrival_seq, seen, 3000)

with Producer(lambda limit_s: open_session(root), EngineConfig()) as producer:
    for _ in range(puts):
        result = producer.put("T", body, timeout_s=3000)
        if result.status != 0:
            sys.exit(f"{result.status.name}: {result.reason}")
        if each:
            dispatched(result.physical_offset + result.size_bytes)
    dispatched(result.physical_offset + result.size_bytes)
"""
# argv: store. Puts once for each line.
STEPS = """
import sys
from pyengine.client.producer import Producer
from pyengine.engine_config import EngineConfig
from pyengine.ipc.session_client import open_session
with Producer(lambda limit_s: open_session(sys.argv[1]), EngineConfig()) as producer:
    for _ in sys.stdin:
        assert producer.put("T", b"x", timeout_s=3000).status == 0
        print("put", flush=True)
"""


@pytest.fixture
def make_sleepers(make_parts, broken_build):
    """make_sleepers(mode) -> Parts with a reputter, and the environment, in which nothing looks again by itself."""

    def make(mode: str):
        environ = environment(broken_build, *WITHOUT_POLLS)
        parts = make_parts(more=(native.REPUTTER,), environments={kind: environ for kind in ALL if kind not in BY_TIME[mode]},
                           **MODES[mode])
        parts.owner.environment = environ
        return parts

    return make


def wait_asleep(pid: int, what: str) -> None:
    """Wait until the process is asleep at 30 polls in a row: it has no work left."""
    looks = [False] * 30

    def is_asleep() -> bool:
        looks.append(psutil.Process(pid).status() == psutil.STATUS_SLEEPING)
        return all(looks[-30:])

    eventually(is_asleep, what)


def run(parts, puts: int, body_bytes: int, how: str) -> subprocess.Popen[str]:
    return parts.owner.spawn("", str(puts), str(body_bytes), how, script=PRODUCER)


@pytest.mark.parametrize("how", usual(["each", "stream"], ["each"]))
@pytest.mark.parametrize("mode", usual(MODES, ["sync"], pytest.mark.ci))
def test_no_worker_or_producer_waits_for_ever_for_a_wake_up(make_sleepers, request, mode, how):
    """Put, commit, flush and dispatch, over many rolls; each sleeps before each put, or all the time something comes."""
    parts = make_sleepers(mode)
    puts = PUTS_LONG if request.config.run_long else PUTS
    child = run(parts, puts, 20_000 if mode == "pool" else 2000, how)
    _, said = child.communicate(timeout=scaled_timeout_s(60) if puts == PUTS else 1800)
    assert (child.returncode, said) == (0, "")
    assert native.load_position(parts.control.wrote) > 3 * 65536


@pytest.mark.ci
def test_each_of_many_producers_is_woken_by_the_sync_that_it_waits_for(make_sleepers, request):
    """One puts while the others' sync is under way: it sleeps until the one after it, and nothing else may wake it."""
    parts = make_sleepers("sync")
    puts = PUTS_LONG if request.config.run_long else PUTS
    children = [run(parts, puts, 500, "stream") for _ in range(4)]
    for child in children:
        _, said = child.communicate(timeout=scaled_timeout_s(60) if puts == PUTS else 1800)
        assert (child.returncode, said) == (0, "")


@pytest.mark.parametrize("point", ["latch_arming", pytest.param("latch_armed", marks=pytest.mark.ci), "latch_sleeping"])
def test_a_put_while_the_writer_goes_to_sleep_is_seen(make_parts, broken_build, tmp_path, point):
    board = Board(tmp_path / "board")
    environ = environment(broken_build, *WITHOUT_POLLS) | {VARIABLE: str(tmp_path / "board")}
    parts = make_parts(environments={native.WRITER: environ})
    own = environment(broken_build, *WITHOUT_POLLS)  # so that its wait does not ring again
    words = [sys.executable, "-P", "-c", STEPS, str(parts.owner.root)]
    with subprocess.Popen(words, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            for number in range(2):
                if number == 1:  # it stops after this put, since it sleeps already after the one before
                    wait_asleep(parts.workers[native.WRITER].pid, "the writer waits for the next put")
                    board.arm(point, 1, "stop", "writer")
                child.stdin.write("go\n")
                child.stdin.flush()
                assert child.stdout.readline() == "put\n"
            eventually(lambda: board.struck_pid == parts.workers[native.WRITER].pid, "stopped there")
            child.stdin.write("go\n")
            child.stdin.flush()
            wait_asleep(child.pid, "it has put")
            os.kill(board.struck_pid, signal.SIGCONT)
            said, _ = child.communicate(timeout=scaled_timeout_s(30))
        finally:
            child.kill()  # one that no wake-up reaches ends by nothing else
        assert (child.returncode, said) == (0, "put\n")


def test_an_end_that_comes_while_a_loop_in_c_arms_its_latch_is_seen(make_parts, broken_build, tmp_path):
    board = Board(tmp_path / "board")
    environ = environment(broken_build, *WITHOUT_POLLS) | {VARIABLE: str(tmp_path / "board")}
    parts = make_parts(more=(native.REPUTTER,), environments={native.REPUTTER: environ})
    reputter = parts.workers[native.REPUTTER]
    with parts.producer() as producer:
        board.arm("latch_arming", 1, "stop", "reputter")
        assert producer.put("T", b"1").ok
        eventually(lambda: board.struck_pid == reputter.pid, "stopped before it arms")
        reputter.send_signal(signal.SIGTERM)
        parts.owner.memory.wake(native.REPUTTER)  # its latch is not armed: nothing is posted
        os.kill(reputter.pid, signal.SIGCONT)

        def has_ended() -> bool:
            parts.owner.memory.wake(native.REPUTTER)  # as the supervisor does until it has ended
            return reputter.poll() is not None

        eventually(has_ended, "it ends")


def test_an_answer_that_comes_after_its_sync_is_over_is_waited_for_itself(make_parts, broken_build, tmp_path):
    """The flusher may be done before the writer, which woke it, goes on: no sync follows, and its number is not raised again."""
    environ = environment(broken_build, *WITHOUT_POLLS)
    boards = {kind: Board(tmp_path / kind) for kind in ("writer", "producer")}
    theirs = {kind: environ | {VARIABLE: str(board.path)} for kind, board in boards.items()}
    boards["writer"].arm("pass_published", 1, "stop", "writer")
    boards["producer"].arm("producer_entry_published", 1, "stop", "")
    parts = make_parts(more=(native.REPUTTER,), mode=native.MODE_SYNC,
                       environments=dict.fromkeys(ALL, environ) | {native.WRITER: theirs["writer"]})
    control = parts.control
    parts.owner.environment = theirs["producer"]
    child = run(parts, 1, 100, "stream")
    eventually(lambda: boards["producer"].struck_pid == child.pid, "its entry is published")
    parts.owner.memory.latch(native.WRITER).wakeup()
    eventually(lambda: boards["writer"].struck_pid == parts.workers[native.WRITER].pid, "the flusher was woken")
    eventually(lambda: native.load_position(control.flushed) == native.load_position(control.wrote) > 0, "synced")
    wait_asleep(parts.workers[native.FLUSHER].pid, "the flusher has raised its number")
    os.kill(child.pid, signal.SIGCONT)
    wait_asleep(child.pid, "the put waits")
    os.kill(parts.workers[native.WRITER].pid, signal.SIGCONT)
    _, said = child.communicate(timeout=scaled_timeout_s(120))
    assert (child.returncode, said) == (0, "")


def test_a_freeze_ends_every_wait_for_a_sync(make_sleepers):
    parts = make_sleepers("sync")
    parts.kill(native.FLUSHER)
    child = run(parts, 1, 100, "stream")
    eventually(lambda: native.load_position(parts.control.wrote) > 0, "appended")
    wait_asleep(child.pid, "the put waits for the sync")
    freeze(parts.owner.memory, parts.owner.root, native.SUPERVISOR, DiskError("the disk failed", errno=5))
    _, said = child.communicate(timeout=scaled_timeout_s(120))
    assert child.returncode == 1 and PutStatus.PUT_OK.name not in said and "nput/output" in said, said
