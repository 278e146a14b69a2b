"""Watching workers: restarts after pauses, silent ones killed, twins adopted, boot failures halt."""

from __future__ import annotations

import errno
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from fix_owner import CHECKOUT
from pyengine.engine.children import NEVER_S, Children
from pyengine.engine.kinds import KINDS, WorkerExit, child_environment
from pyengine.events import Event
from pyengine.ipc.heartbeat import is_stopped
from pyengine.native import control as native
from pyengine.native.flush import monotonic_ns
from pyengine.storage.file_system import HeldStore
from reported import Reported
from waiting import eventually, scaled_timeout_s

FLUSHER = next(kind for kind in KINDS if kind.number == native.FLUSHER)
CHECKPOINTER = next(kind for kind in KINDS if kind.number == native.CHECKPOINTER)
COMMITTER = next(kind for kind in KINDS if kind.number == native.COMMITTER)


class Rig:
    """Children of an owner in the test's own process, with its selector."""

    def __init__(self, owner, *kinds) -> None:
        self.owner = owner
        self.reported = Reported()
        self.selector = selectors.DefaultSelector()
        self.children = Children(owner.memory, owner.lock, self.selector, kinds, HeldStore(owner.root), None, self.reported)

    def pump(self, seconds: float = 0.02) -> None:
        for key, _ in self.selector.select(max(0.0, seconds)):
            key.data()

    def go_until(self, condition, what):
        def step():
            self.pump()
            self.children.tick()
            return condition()
        return eventually(step, what)

    def close(self) -> None:
        self.children.kill()
        self.selector.close()


@pytest.fixture
def rig(make_owner):
    rigs = []

    def make(*kinds, settings=None, **identity):
        owner = make_owner(**identity)
        owner.position(0)
        owner.publish()
        owner.use_settings(**settings or {})
        rigs.append(Rig(owner, *kinds))
        return rigs[-1]

    yield make
    for made in rigs:
        made.close()


def line(rig, kind=FLUSHER):
    return rig.owner.worker(kind.number)


def test_a_worker_is_started_and_stopped(rig):
    made = rig(FLUSHER)
    made.children.start()
    made.go_until(lambda: made.children.all_ready, "ready")
    assert made.children.stop(made.pump, time.monotonic() + 30) == []
    assert native.load(line(made), "state") == native.WORKER_ABSENT and made.reported == []


def test_workers_are_killed_and_waited_for_without_a_free_descriptor(rig):
    made = rig(FLUSHER)
    made.children.start()
    made.go_until(lambda: made.children.all_ready, "ready")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
    try:
        made.children.kill()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "SIGKILL" in made.reported[0] and made.children.not_ready() == ["flusher"]


def test_a_worker_that_keeps_dying_is_restarted_after_growing_pauses(rig):
    made = rig(FLUSHER)
    made.children.start()
    for deaths in range(1, 4):
        made.go_until(lambda: made.children.all_ready, "ready")
        os.kill(native.load(line(made), "pid"), signal.SIGKILL)
        made.go_until(lambda deaths=deaths: native.load(line(made), "restarts") == deaths, "restarted")
    assert made.reported[0].endswith("starting it again") and set(made.reported.events) == {Event.WORKER_ENDED}
    assert made.reported[1].endswith("in 0.1 s") and made.reported[2].endswith("in 0.2 s")
    made.go_until(lambda: made.children.all_ready, "ready again")


@pytest.fixture
def silenced(rig, monkeypatch):
    """silenced(abort_timeout_s): children of which the only one, a flusher, was stopped once it was ready, and its pid."""
    def make(abort_timeout_s):
        monkeypatch.setattr("pyengine.engine.children.ABORT_TIMEOUT_S", abort_timeout_s)
        made = rig(replace(FLUSHER, heartbeat_timeout_s=0.7), settings={"flush_interval_commit_log_ms": 50})
        made.children.start()
        made.go_until(lambda: made.children.all_ready, "ready")
        pid = native.load(line(made), "pid")
        os.kill(pid, signal.SIGSTOP)
        return made, pid

    return make


def test_a_silent_worker_is_aborted_then_killed_and_replaced(silenced):
    """A stopped process cannot even act on SIGABRT."""
    made, first = silenced(0.3)
    made.go_until(lambda: native.load(line(made), "pid") != first and made.children.all_ready, "another one is up")
    assert "made no progress" in made.reported[0] and made.reported.events == [Event.WORKER_STUCK, Event.WORKER_ENDED]
    assert "SIGKILL" in made.reported[1]


def test_the_silence_of_a_pause_of_the_supervisor_and_its_workers_is_forgiven(silenced):
    """A container that is paused: the supervisor runs again first, and looks twice before a worker does."""
    made, pid = silenced(0.3)
    eventually(lambda: is_stopped(pid) and monotonic_ns() - native.load(line(made), "heartbeat_ns") > 700_000_000, "it is silent")
    made.children.tick()
    made.children.tick()
    os.kill(pid, signal.SIGCONT)
    assert made.reported == [] and made.children.all_ready


def test_pauses_of_the_supervisor_alone_keep_no_silent_worker(silenced, monkeypatch):
    made, _ = silenced(0.1)
    clock = time.monotonic()
    monkeypatch.setattr("pyengine.engine.children.time.monotonic", lambda: clock)
    for step_s in (0.01, 0.09, 0.15) * 20:  # each third round a pause
        clock += step_s
        made.children.tick()
    assert "has made no progress" in made.reported[0]


def test_a_worker_that_loops_leaves_a_trace(rig, monkeypatch, capfd):
    made = rig(replace(FLUSHER, heartbeat_timeout_s=0.7), settings={"flush_interval_commit_log_ms": 3600000})
    made.children.start()  # an idle flusher with so long an interval is silent for longer than heartbeat_timeout_s
    made.go_until(lambda: any("SIGABRT" in text for text in made.reported), "aborted")
    assert "Fatal Python error: Aborted" in capfd.readouterr().err


def test_a_worker_that_cannot_come_up_halts_instead_of_being_tried_for_ever(rig):
    made = rig(COMMITTER, mode=native.MODE_SYNC)
    made.children.start()
    made.go_until(lambda: made.children.halted, "halted")
    assert made.children.halted.startswith("the committer cannot start")
    assert native.load(line(made, COMMITTER), "restarts") == 0


def test_a_worker_that_lacks_room_or_descriptors_is_tried_for_as_long_as_it_takes(rig, monkeypatch):
    """Six times, where five boot failures of another cause halt the engine; and status knows."""
    monkeypatch.setattr("pyengine.engine.kinds.RESTART_PAUSE_S_STEP", 0.0)
    made = rig(FLUSHER)
    made.children.start()
    made.go_until(lambda: made.children.all_ready, "ready")
    real, left = subprocess.Popen, iter(range(6))

    def popen(command, **named):
        for _ in left:
            return real([sys.executable, "-c", f"raise SystemExit({int(WorkerExit.TEMPFAIL)})"], **named)
        return real(command, **named)

    monkeypatch.setattr("pyengine.engine.children.subprocess.Popen", popen)
    os.kill(native.load(line(made), "pid"), signal.SIGKILL)
    made.go_until(lambda: native.load(line(made), "restarts") == 7, "tried again")
    assert "exit code 75" in native.read_blocked_reason(made.owner.memory.blocked_reasons, native.SUPERVISOR) and not made.children.halted
    made.go_until(lambda: made.children.all_ready, "ready again")
    assert native.read_blocked_reason(made.owner.memory.blocked_reasons, native.SUPERVISOR) == ""


def test_a_new_supervisor_clears_its_predecessors_sentence_about_a_worker(rig):
    made = rig(FLUSHER)
    native.write_blocked_reason(made.owner.memory.blocked_reasons, native.SUPERVISOR,
                                "flusher (pid 5) ended with SIGKILL; starting it again")
    successor = Rig(made.owner, FLUSHER)
    try:
        successor.children.start()
        successor.go_until(lambda: successor.children.all_ready, "ready")
        successor.children.tick()
        assert native.read_blocked_reason(made.owner.memory.blocked_reasons, native.SUPERVISOR) == ""
    finally:
        successor.close()


def test_the_reason_that_no_session_can_be_opened_is_published_until_it_is_over(rig):
    made = rig(FLUSHER)
    made.children.start()
    made.go_until(lambda: made.children.all_ready, "ready")
    told = []
    for reason in ("no session can be opened: Too many open files", "no session can be opened: Too many open files", ""):
        made.children.no_session = reason
        made.children.tick()
        told.append(native.read_blocked_reason(made.owner.memory.blocked_reasons, native.SUPERVISOR))
    assert told == ["no session can be opened: Too many open files"] * 2 + [""]


def test_an_old_blocked_reason_is_not_why_a_worker_cannot_start_now(rig, monkeypatch):
    """It fails before it attaches, so that it says nothing itself; the line is of a worker before it."""
    made = rig(FLUSHER)
    native.write_blocked_reason(made.owner.memory.blocked_reasons, native.FLUSHER, "no room for a while")
    real = subprocess.Popen
    monkeypatch.setattr("pyengine.engine.children.subprocess.Popen", lambda command, **named: real(
        [sys.executable, "-c", f"raise SystemExit({int(WorkerExit.BOOT_FAILED)})"], **named))
    made.children.start()
    made.go_until(lambda: made.children.halted, "halted")
    assert made.children.halted == "the flusher cannot start: its message is in the log above"


def test_a_living_worker_of_another_supervisor_is_adopted(rig):
    made = rig(FLUSHER)
    stranger = made.owner.spawn("pyengine.workers.flusher")
    made.owner.wait_ready(native.FLUSHER)
    made.children.start()
    assert made.children.all_ready and native.load(line(made), "pid") == stranger.pid
    stranger.kill()
    stranger.wait()
    made.go_until(lambda: made.children.all_ready and native.load(line(made), "incarnation") == 2, "replaced")
    assert "an unknown code" in made.reported[0]


def test_a_twin_that_was_first_is_adopted(rig):
    """Both start at once; the loser says so with its own exit code, the winner is watched."""
    made = rig(FLUSHER)
    made.children.start()
    stranger = made.owner.spawn("pyengine.workers.flusher")
    made.go_until(lambda: made.children.all_ready or stranger.poll() is not None, "one of them is up")
    made.go_until(lambda: made.children.all_ready, "and watched")
    assert native.load(line(made), "incarnation") == 1


def test_stop_reports_a_worker_that_does_not_finish_and_kills_it(rig):
    made = rig(FLUSHER)
    made.children.start()
    made.go_until(lambda: made.children.all_ready, "ready")
    assert made.children.stop(made.pump, time.monotonic()) == ["the flusher did not finish in time"]
    assert not made.owner.lock.kind_taken(native.FLUSHER)


def test_a_stopped_worker_is_resumed_to_finish(rig):
    made = rig(FLUSHER)
    made.children.start()
    made.go_until(lambda: made.children.all_ready, "ready")
    os.kill(pid := native.load(line(made), "pid"), signal.SIGSTOP)
    eventually(lambda: is_stopped(pid), "it is stopped")
    assert made.children.stop(made.pump, time.monotonic() + 60) == []
    assert native.load(line(made), "state") == native.WORKER_ABSENT and "SIGCONT" in made.reported[0]


def test_an_adopted_worker_that_is_stopped_is_resumed_and_its_silence_forgiven(rig):
    made = rig(FLUSHER, settings={"flush_interval_commit_log_ms": 50})
    worker = made.owner.spawn("pyengine.workers.flusher")
    eventually(lambda: native.load(line(made), "state") == native.WORKER_READY, "it is up")
    os.kill(worker.pid, signal.SIGSTOP)
    eventually(lambda: is_stopped(worker.pid), "it is stopped")
    native.store(line(made), "heartbeat_ns", 1)
    made.children.start()
    made.go_until(lambda: native.load(line(made), "heartbeat_ns") > 1, "it goes round")
    assert made.children.all_ready and worker.poll() is None and native.load(line(made), "incarnation") == 1
    assert len(made.reported) == 1 and "SIGCONT" in made.reported[0]


def test_a_worker_that_dies_while_it_is_to_finish_is_started_once_more(rig, monkeypatch):
    monkeypatch.setattr("pyengine.engine.children.is_stopped", lambda pid: False)
    made = rig(FLUSHER)
    made.children.start()
    made.go_until(lambda: made.children.all_ready, "ready")
    first = native.load(line(made), "pid")
    os.kill(first, signal.SIGSTOP)

    victims = [first]

    def pump(seconds):
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        victims.clear()
        made.pump(seconds)

    assert made.children.stop(pump, time.monotonic() + 60) == []
    assert native.load(line(made), "incarnation") == 2 and native.load(line(made), "state") == native.WORKER_ABSENT


def test_an_adopted_worker_that_is_killed_while_it_finishes_is_started_once_more(rig, monkeypatch):
    made, sent, really_send = rig(FLUSHER), [], signal.pidfd_send_signal
    made.owner.spawn("pyengine.workers.flusher")
    made.owner.wait_ready(native.FLUSHER)
    made.children.start()

    def send(pidfd, number):
        sent.append(number)
        really_send(pidfd, number if len(sent) > 1 else signal.SIGKILL)

    monkeypatch.setattr(signal, "pidfd_send_signal", send)
    assert made.children.stop(made.pump, time.monotonic() + 60) == [] and sent == [signal.SIGTERM] * 2
    assert native.load(line(made), "incarnation") == 2 and native.load(line(made), "state") == native.WORKER_ABSENT


def test_a_worker_killed_just_before_a_stop_is_up_again_before_the_first_one_ends(rig):
    """Until its end is seen it looks ready."""
    made = rig(FLUSHER, CHECKPOINTER)
    made.children.start()
    made.go_until(lambda: made.children.all_ready, "ready")
    victim = native.load(line(made, CHECKPOINTER), "pid")
    os.kill(victim, signal.SIGKILL)
    os.waitid(os.P_PID, victim, os.WEXITED | os.WNOWAIT)
    seen = []

    def pump(seconds):
        made.pump(seconds)
        seen.append((native.load(line(made), "state"), native.load(line(made, CHECKPOINTER), "incarnation")))

    assert made.children.stop(pump, time.monotonic() + 60) == []
    assert (native.WORKER_READY, 1) in seen
    assert {incarnation for state, incarnation in seen if state != native.WORKER_READY} == {2}


def test_a_halting_engine_does_not_wait_long_for_a_worker_that_never_came_up(rig, monkeypatch):
    real = subprocess.Popen
    monkeypatch.setattr("pyengine.engine.children.HALTED_TIMEOUT_S", 0.1)
    monkeypatch.setattr("pyengine.engine.children.subprocess.Popen", lambda command, **named: real(["sleep", "3600"], **named))
    made = rig(FLUSHER)
    made.children.start()
    made.children.halted = "not up after 60 s: flusher"
    assert made.children.stop(made.pump, NEVER_S) == ["the flusher did not come up"]


def test_a_system_without_processes_to_give_is_asked_again(rig, monkeypatch):
    made = rig(FLUSHER)
    real, refusals = subprocess.Popen, iter([OSError(11, "Resource temporarily unavailable")])

    def popen(*arguments, **named):
        for refusal in refusals:
            raise refusal
        return real(*arguments, **named)

    monkeypatch.setattr("pyengine.engine.children.SPAWN_RETRY_S", 0.05)
    monkeypatch.setattr("pyengine.engine.children.subprocess.Popen", popen)
    made.children.start()
    assert "temporarily unavailable" in made.reported[0] and not made.children.all_ready
    assert native.read_blocked_reason(made.owner.memory.blocked_reasons, native.SUPERVISOR) == made.reported[0]
    made.go_until(lambda: made.children.all_ready, "started after all")


def test_without_a_descriptor_workers_are_stopped_in_order(rig, monkeypatch):
    made = rig(FLUSHER)
    made.children.start()
    made.go_until(lambda: made.children.all_ready, "ready")

    def refused(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("pyengine.engine.children.is_stopped", refused)
    assert made.children.stop(made.pump, time.monotonic() + 60) == []
    assert native.load(line(made), "state") == native.WORKER_ABSENT


def test_a_worker_that_the_full_selector_does_not_take_is_started_again_later(rig, monkeypatch):
    made = rig(FLUSHER)
    register, refusals = made.selector.register, iter([OSError(errno.ENOSPC, "No space left on device")])

    def register_later(*arguments):
        for refusal in refusals:
            raise refusal
        return register(*arguments)

    monkeypatch.setattr("pyengine.engine.children.SPAWN_RETRY_S", 0.05)
    monkeypatch.setattr(made.selector, "register", register_later)
    made.children.start()
    assert "No space left" in native.read_blocked_reason(made.owner.memory.blocked_reasons, native.SUPERVISOR)
    made.go_until(lambda: made.children.all_ready, "started after all")


def test_without_a_descriptor_to_watch_it_a_worker_is_started_again_later_and_not_left_alone(rig, monkeypatch):
    made = rig(FLUSHER)
    real, refusals, started = os.pidfd_open, iter([OSError(24, "Too many open files")]), []

    def pidfd_open(pid):
        started.append(pid)
        for refusal in refusals:
            raise refusal
        return real(pid)

    monkeypatch.setattr("pyengine.engine.children.SPAWN_RETRY_S", 0.05)
    monkeypatch.setattr("pyengine.engine.children.os.pidfd_open", pidfd_open)
    made.children.start()
    assert "Too many open files" in native.read_blocked_reason(made.owner.memory.blocked_reasons, native.SUPERVISOR)
    made.go_until(lambda: made.children.all_ready, "started after all")
    assert len(started) == 2 and not os.path.exists(f"/proc/{started[0]}")


def test_children_find_these_packages_from_anywhere(tmp_path):
    """Also where the current directory holds packages of the same names."""
    for name in ("workers", "pyengine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the wrong package')\n")
    done = subprocess.run([sys.executable, "-P", "-m", "pyengine.workers.flusher", "--help"], cwd=tmp_path, env=child_environment(),
                          capture_output=True, text=True, timeout=scaled_timeout_s(60))
    assert done.returncode == 0, done.stderr
    assert str(CHECKOUT) in child_environment()["PYTHONPATH"].split(os.pathsep)[0]
