"""Rounds of one engine, of which a process is killed or stopped at each step of the list of failpoints (failpoints.py)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyengine
from crash.acked_producer import make_body
from crash.board import Board
from crash.report import Summary
from crash.rounds import CrashRun
from crash.steps import (
    CLEANING,
    DELAYED,
    EVERY_MODE,
    EXT,
    FAILPOINTS,
    PROMOTED,
    PUTS,
    RECOVERY,
    REPLICATED,
    SLAVE,
    START,
    STOP,
    TABLES,
    Failpoint,
)
from crash.watch import CrashWatch
from pyengine.cli.torture import COMMAND_TIMEOUT_S, HangError, kill, remove_memory, state_of, stopped, wait_for
from pyengine.engine.embedded import start_engine, stop_engine
from pyengine.errors import EngineError, ExitCode, StoreBusyError
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.consume_queue import ENTRY
from pyengine.formats.paths import segment_name
from pyengine.native.failpoints import VARIABLE
from pyengine.storage.consume_queue import find_queue_end

RESTART, CRASH, HANG = WAYS = ("restart", "crash", "hang")
SCENES = (PUTS, CLEANING, DELAYED, START, STOP, RECOVERY, EXT, TABLES, REPLICATED, PROMOTED)
KILLED_THERE = (START, STOP, RECOVERY, TABLES, PROMOTED)  # scenes with their own continuation: restart is the only way
PRODUCER = "acked_producer"
SUPERVISOR = "supervisor"
NUDGE_S = 0.4          # after so long without reaching the step, and longer each time, the run causes something
NUDGES_MAX = 20
TRIES = 3              # to reach a step that is easily missed
MOMENT_S = 0.05
# Reached only while another process does not do its work: step -> the process that is stopped until the step is reached.
HELD = {"segment_wanted": "allocator"}
# Reached only without the dead engine's memory: with it recovery knows the end of the log, and keeps the index.
WITHOUT_MEMORY = ("quarantine_copied", "quarantine_noted", "quarantine_moved", "recovery_index_deleted")
# Steps of one engine that the two engines of a scene pass too, and how they are struck there.
ALSO = {
    REPLICATED: (
        ({"process": "writer", "side": SLAVE},
         ("pass_intended", "tail_intended", "tail_stage_intended", "tail_written", "tail_rolled", "answer_given",
          "commit_slot_filled", "commit_point", "wrote_published", "session_acked_published")),
        ({"process": "writer", "side": SLAVE, "after": "raw_copied"}, ("dead_pass_put_back", "dead_pass_zeroed")),
        ({"process": "replicator"}, ("config_written", "config_renamed")),
    ),
    PROMOTED: (
        ({"process": SUPERVISOR, "modes": EVERY_MODE},
         ("config_written", "config_renamed", "quarantine_copied", "quarantine_noted", "quarantine_moved", "zeros_page_written",
          "zeros_written")),
    ),
}
QUEUES_MANY = 3000
# So that rare steps come soon.
OFTEN = {"max_hash_slot_num": 30, "max_index_num": 120, "flush_interval_consume_queue_ms": 20, "flush_interval_commit_log_ms": 20,
         "flush_delay_offset_interval_ms": 50}


@dataclass
class FailpointSummary(Summary):
    """`struck`: step -> how often; `unreached`: the steps that no process reached; `left_out`: the number of steps that this build
    lacks; `part`: the steps of the scene that were asked for, if not all."""

    scene: str = PUTS
    part: str = ""
    struck: dict[str, int] = field(default_factory=dict)
    unreached: list[str] = field(default_factory=list)
    left_out: int = 0


def points_of(scene: str, mode: str) -> list[Failpoint]:
    """Return the steps that a run of the scene in that mode passes."""
    points = [point for point in FAILPOINTS.values() if point.scene == scene]
    points += [FAILPOINTS[name]._replace(scene=scene, **how) for how, names in ALSO.get(scene, ()) for name in names]
    return [point for point in points if mode in point.modes.split()]


def ways_of(scene: str, asked: list[str] | None) -> tuple[list[str], str]:
    """Return the ways for the steps of the scene, and a sentence about those that were asked for and do not exist there."""
    possible = [RESTART] if scene in KILLED_THERE else list(WAYS)
    left_out = [way for way in asked or () if way not in possible]
    said = f"the scene {scene} has only --way {RESTART}" if left_out else ""
    return [way for way in possible if not asked or way in asked], said


@contextlib.contextmanager
def using_board(board: Board) -> Iterator[None]:
    """Processes that are started in the block use that board."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(board.path)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


class NotReachedError(HangError):
    """No process has reached the armed step."""


class FailpointRun(CrashRun):
    """One store, one scene, one mode; every step in every way."""

    def __init__(self, store: Path, scratch: Path, scene: str, mode: str, seed: int) -> None:
        super().__init__(store, scratch, {CLEANING: "cleaner", DELAYED: "scheduler"}.get(scene, scene), mode, seed)
        self.settings |= OFTEN | ({"enable_consume_queue_ext": True} if scene == EXT else {})
        self.scene = scene
        if scene in (RECOVERY, PROMOTED):  # damaged bytes go to quarantine
            self.recovered_codes = (ExitCode.OK, ExitCode.REPAIRED)
        self.summary = FailpointSummary("failpoints", mode, seed, scene=scene)
        self.board = Board(scratch / "board")
        self.victim = store

    def go_through(self, points: list[Failpoint], ways: list[str], nth: int) -> FailpointSummary:
        """Strike each step in each way; return the summary."""
        all_steps = [step for point in points for way in ways for step in self.steps_of(point, way)]
        steps = iter(all_steps)
        self.strike = lambda: self.strike_at(*next(steps), nth)
        with using_board(self.board):
            summary = self.run(len(all_steps))
        if summary.unreached:
            summary.failures.append(f"never reached: {', '.join(summary.unreached)}")
        return summary

    def steps_of(self, point: Failpoint, way: str) -> list[tuple[Failpoint, str, str]]:
        """Return (point, way, side) for each strike at this step."""
        return [(point, way, point.side)]

    def strike_at(self, point: Failpoint, way: str, side: str, nth: int) -> None:
        print(f"{point.name} {way} {side}".rstrip(), file=sys.stderr)
        try:
            if self.scene == RECOVERY:
                self.in_recovery(point, nth)
            elif self.scene == START:
                self.in_start(point)
            elif self.scene == STOP:
                self.in_stop(point)
            else:
                self.in_life(point, way, nth)
        except NotReachedError:
            self.summary.unreached.append(point.name)
            self.board.disarm()
            return
        except (HangError, EngineError) as error:
            raise type(error)(f"at {point.name}, {way} {side}: {error}") from error
        self.summary.struck[point.name] = self.summary.struck.get(point.name, 0) + 1
        self.summary.kills += way != HANG

    # -- while the engine lives

    def in_life(self, point: Failpoint, way: str, nth: int) -> None:
        pid = self.come_to(point, way, nth)
        if way == RESTART:
            self.after_death(point, pid)
        else:
            wait_for(f"{point.process} is stopped", lambda: state_of(pid) == "T")
            if way == CRASH:
                self.kill_all_around(pid)
                self.recover(self.victim)
                self.check_store()
                self.start_engine()
            else:
                time.sleep(MOMENT_S)
                os.kill(pid, signal.SIGCONT)
        self.make_producers()
        self.wait_for_acks()

    def come_to(self, point: Failpoint, way: str, nth: int) -> int:
        """Return the process that died at the step, or is stopped there.

        A step that only the successor of a dead process passes is armed after that death. On a busy machine the successor may
        have passed it by then, so that another process has to die.
        """
        action = "kill" if way == RESTART else "stop"
        if not point.after:
            self.board.arm(point.name, nth, action, point.process)
            return self.reached(point)
        first = FAILPOINTS[point.after]
        for _ in range(TRIES):
            self.board.arm(first.name, 1, "kill", first.process)
            self.reached(first)
            self.board.arm(point.name, 1, action, point.process)
            with contextlib.suppress(NotReachedError):
                return self.reached(point, NUDGES_MAX // 2)
        raise NotReachedError

    def reached(self, point: Failpoint, nudges_max: int = NUDGES_MAX) -> int:
        """Wait until a process has reached the armed step, and return it; cause something if that takes long."""
        if self.scene == TABLES:
            threading.Thread(target=self.put_to_many_queues, daemon=True).start()
        with self.held(HELD.get(point.name)):
            for nudge in range(nudges_max):
                with contextlib.suppress(HangError):
                    return wait_for(point.name, lambda: self.board.struck_pid, NUDGE_S * (nudge + 1))
                self.nudge(point, nudge)
        raise NotReachedError

    @contextlib.contextmanager
    def held(self, kind: str | None) -> Iterator[None]:
        if kind is None:
            yield
            return
        with CrashWatch(self.victim) as watch, stopped(wait_for(f"a living {kind}", lambda: watch.pids().get(kind))):
            yield

    def nudge(self, point: Failpoint, number: int) -> None:
        """Put to a new queue, and replace a producer or, each fourth time, the process of the step."""
        name = f"{point.name}-{number}-{self.summary.rounds}"
        threading.Thread(target=self.put_to_new_queue, args=(name,), daemon=True).start()
        if number % 4 != 3 or point.process in (SUPERVISOR, PRODUCER):
            kill(self.producers[number % len(self.producers)].pid)
            self.make_producers()
        else:
            with CrashWatch(self.store) as watch:
                kill(watch.pids().get(point.process, 0) or self.producers[0].pid)

    def put_to_new_queue(self, name: str) -> None:
        with contextlib.suppress(EngineError), pyengine.connect(self.store) as producer:
            producer.put(f"crash-{name}", make_body(name, 0, b""), timeout_s=1.0)

    def put_to_many_queues(self) -> None:
        with contextlib.suppress(EngineError), pyengine.connect(self.store) as producer:
            for number in range(QUEUES_MANY):
                producer.put_async("crash-many", make_body("many", number, b""), queue_id=number)

    def after_death(self, point: Failpoint, pid: int) -> None:
        wait_for(f"{point.process} is dead", lambda: state_of(pid) in ("", "Z"))
        if point.process == SUPERVISOR:
            self.start_successor()
        elif point.process != PRODUCER:
            with CrashWatch(self.victim) as watch:
                wait_for(f"a new {point.process}", lambda: watch.pids().get(point.process, pid) != pid)
            self.keep_supervisor_fresh()

    def kill_all_around(self, pid: int) -> None:
        """Kill all others while that process is stopped at the step, then it; the supervisor is stopped meanwhile (torture.kill_all)."""
        with CrashWatch(self.victim) as watch:
            supervisor = watch.pid(SUPERVISOR)
            with stopped(supervisor):
                for victim in (*watch.pids().values(), *(process.pid for process in self.producers)):
                    if victim not in (pid, supervisor):
                        kill(victim)
                kill(pid)
                kill(supervisor)
        for process in self.producers:
            process.wait()
        self.producers = []
        self.board.disarm()

    # -- while it does not

    def in_recovery(self, point: Failpoint, nth: int) -> None:
        """Kill a recovery, after everything was killed, at the step; the next one recovers the store."""
        with CrashWatch(self.store) as watch:
            wait_for("queues that can be damaged", lambda: watch.positions().reput_from > 0)
        self.kill_everything_now()
        self.damage(point)
        self.board.arm(point.name, nth, "kill", "recover")
        command = [sys.executable, "-P", "-m", "pyengine", "recover", str(self.store)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
        if done.returncode != -signal.SIGKILL or not self.board.struck_pid:
            print(f"recover ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}", file=sys.stderr)
            self.start_engine()
            raise NotReachedError
        self.recover()
        self.check_store()
        self.start_engine()

    def kill_everything_now(self) -> None:
        with CrashWatch(self.store) as watch:
            pids = watch.pids()
            if "committer" in pids:  # so that something waits in the pool
                os.kill(pids["committer"], signal.SIGSTOP)
                with contextlib.suppress(HangError):
                    wait_for("bytes in the pool", lambda: watch.positions().wrote > watch.positions().committed, 2.0)
            self.kill_all_around(pids["writer"])

    def damage(self, point: Failpoint) -> None:
        """Make what no kill leaves: bytes after the log's end, also a segment of them; or remove the dead engine's memory."""
        with CrashWatch(self.store) as watch:
            end = watch.positions().slot_end
        if point.name in WITHOUT_MEMORY:
            remove_memory(self.store)
        if point.name == "recovery_queue_cut":
            self.add_entry_beyond(end)
        if not point.name.startswith(("quarantine_", "zeros_", "recovery_segment_gone", "recovery_tail_cleared")):
            return
        segments = sorted(self.store.glob("commitlog/*"))
        size = segments[-1].stat().st_size
        with open(segments[-1].with_name(f"{int(segments[-1].name) + size:020d}"), "wb") as file:
            file.write(self.rng.randbytes(size))
        path = segments[0].with_name(f"{end - end % size:020d}")
        if path.exists():
            room = size - end % size
            with open(path, "r+b") as file:
                file.seek(end % size + min(64, room // 2))
                file.write(self.rng.randbytes(min(4000, room - room // 2)))

    def add_entry_beyond(self, log_end: int) -> None:
        """Append an entry to one queue whose message is beyond the log's end."""
        size = int(self.settings["mapped_file_size_consume_queue_bytes"])
        for folder in sorted(self.store.glob("consumequeue/*/*")):
            at = find_queue_end(folder, size).next_offset * CQ_ENTRY_BYTES
            path = folder / segment_name(at - at % size)
            if path.exists():
                with open(path, "r+b") as file:
                    file.seek(at % size)
                    file.write(ENTRY.pack(log_end + 4096, 200, 0))
                return

    def in_start(self, point: Failpoint) -> None:
        """Kill the supervisor while it starts; the next start recovers the store."""
        self.end_producers()
        self.kill_everything_now()
        self.board.arm(point.name, 1, "kill", SUPERVISOR)
        with contextlib.suppress(EngineError):
            start_engine(self.store, self.settings, timeout_s=COMMAND_TIMEOUT_S)
        self.live_on(was_struck=bool(self.board.struck_pid))

    def live_on(self, *, was_struck: bool) -> None:
        self.board.disarm()
        with contextlib.suppress(StoreBusyError):  # the step was not reached, and the engine runs
            self.start_engine()
        self.make_producers()
        self.wait_for_acks()
        if not was_struck:
            raise NotReachedError

    def in_stop(self, point: Failpoint) -> None:
        """Kill a process in an orderly stop: the stop finishes, or the next start recovers."""
        self.end_producers()
        self.board.arm(point.name, 1, "kill", point.process)
        with contextlib.suppress(EngineError):
            stop_engine(self.store)
        self.live_on(was_struck=bool(self.board.struck_pid))
