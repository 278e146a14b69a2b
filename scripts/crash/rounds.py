"""The rounds of the crash scripts: a store under producer processes, of which one kind of process is killed; then an audit.

After each kill acknowledgements must move again within a time limit: a hang is a failure. A share of the kills is aimed: the
process is stopped repeatedly until it is in the middle of an operation.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyengine
from crash.audit import audit, audit_kept, check, read_acked
from crash.report import Summary, tell
from crash.watch import CrashWatch
from pyengine.cli.torture import (
    COMMAND_TIMEOUT_S,
    HangError,
    KillRounds,
    kill,
    kill_all,
    processes_of,
    stopped,
    wait_for,
)
from pyengine.engine.kinds import KINDS
from pyengine.engine_config import MODES
from pyengine.errors import EngineError, ExitCode
from pyengine.formats.constants import SCHEDULE_TOPIC
from pyengine.ipc.control_block import MODE_NAMES
from pyengine.storage.consumer_offset import DelayOffsets

SMALL_FILES = {
    "mapped_file_size_commit_log_bytes": 256 << 10,
    "mapped_file_size_consume_queue_bytes": 20_000,
    "max_hash_slot_num": 1000,
    "max_index_num": 20_000,
}
# So that a cleaner always has something to delete.
RETENTION = {
    "file_reserved_time_hours": 0,
    "delete_when": ";".join(map(str, range(24))),
    "clean_resource_interval_ms": 5,
    "delete_commit_log_files_interval_ms": 1,
    "delete_consume_queue_files_interval_ms": 1,
    "flush_interval_consume_queue_ms": 20,
}
# So that delayed messages are delivered at once, and noted soon.
DELAYS = {"message_delay_level": "0s", "flush_delay_offset_interval_ms": 50, "flush_interval_commit_log_ms": 50}
PRODUCERS = 2
AIM_SHARE = 0.5
AIM_TRIES = 100
AIM_TIMEOUT_S = 0.02
DEATHS_SEEN_MAX = 4
UNDRAINED_TIMEOUT_S = 5.0
EVERYTHING = "everything"
# The kinds of process to kill, each with the modes in which it runs.
VICTIMS = {kind.name: [MODE_NAMES[mode] for mode in sorted(kind.modes)] for kind in KINDS} | dict.fromkeys(
    ("supervisor", "producer", EVERYTHING), tuple(MODES))


class CrashRun(KillRounds):
    """One store, one kind of victim, one mode."""

    def __init__(self, store: Path, scratch: Path, kind: str, mode: str, seed: int, aim: float = AIM_SHARE) -> None:
        has_delayed = kind == "scheduler"
        self.summary = Summary(kind, mode, seed)
        super().__init__(store, SMALL_FILES | MODES[mode] | (RETENTION if kind == "cleaner" else DELAYS if has_delayed else {}),
                         random.Random(f"{seed}/{kind}/{mode}"))
        self.scratch = scratch
        self.kind = kind
        self.aim = aim
        self.has_delayed = has_delayed
        self.producers: list[subprocess.Popen[bytes]] = []
        self.acked: list[Path] = []
        self.recovered_codes = (ExitCode.OK,)
        self._deaths_seen = 0
        self._told = (0, 0)  # kills, and aimed kills that hit, at the end of the last round

    def run(self, rounds: int) -> Summary:
        self.summary.seconds = self.run_rounds(lambda: self.summary.rounds < rounds)
        return self.summary

    @property
    def failures(self) -> list[str]:
        return self.summary.failures

    def end_round(self) -> None:
        """Count the round and print what it did."""
        summary = self.summary
        summary.rounds += 1
        kills, middle = summary.kills - self._told[0], summary.kills_in_the_middle - self._told[1]
        self._told = summary.kills, summary.kills_in_the_middle
        aimed = f", {middle} in the middle of a pass" if middle else ""
        tell(f"round {summary.rounds}: {kills} kill{'' if kills == 1 else 's'} of {self.kind}{aimed}; "
             f"{self.acked_messages():,} messages acknowledged so far")

    def settle(self) -> None:
        if self.kind == "cleaner":
            self.wait_for_deletion()
        self.end_producers()
        if self.has_delayed:
            wait_for("all delayed messages are delivered and noted", self.delayed_are_noted)

    def recover(self, store: Path | None = None) -> None:
        """Run `pyengine recover`, which also drains the dead engine's buffers."""
        command = [sys.executable, "-P", "-m", "pyengine", "recover", str(store or self.store)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
        if done.returncode not in self.recovered_codes:
            raise EngineError(f"pyengine recover ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")

    # -- producers

    def make_producers(self) -> None:
        """Start producers until PRODUCERS of them live; each has a name of its own."""
        self.producers = [process for process in self.producers if process.poll() is None]
        while len(self.producers) < PRODUCERS:
            name = f"p{len(self.acked)}"
            path = self.scratch / f"{name}.acked"
            path.touch()
            self.acked.append(path)
            command = [sys.executable, "-P", "-m", *self.producer_command(), str(path), "--name", name, "--seed", str(self.summary.seed)]
            with open(self.scratch / f"{name}.log", "wb") as log:
                self.producers.append(subprocess.Popen(command, stderr=log))

    def producer_command(self) -> list[str]:
        """Return the module of a producer, and its arguments before its list."""
        return ["crash.acked_producer", *["--delayed=1", "--cancels"] * self.has_delayed, str(self.store)]

    def end_producers(self) -> None:
        for process in self.producers:
            process.terminate()
        for process in self.producers:
            try:
                process.wait(COMMAND_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                raise HangError(f"producer {process.pid} does not end") from None
            if process.returncode not in (0, -signal.SIGTERM):  # by SIGTERM: it had not begun yet
                raise EngineError(f"producer {process.pid} ended with {process.returncode}, see {self.scratch}")
        self.producers = []

    def wait_for_deletion(self) -> None:
        """Wait until a segment is deleted, which the kills must not prevent."""
        with CrashWatch(self.store) as watch:
            wait_for("an old segment is deleted", lambda: watch.positions().min_offset > 0)

    def acked_messages(self) -> int:
        """Return the number of messages on the producers' lists."""
        return sum(path.read_bytes().count(b"\n") for path in self.acked)

    def acked_count(self) -> int:
        """Return the bytes of the producers' lists."""
        return sum(path.stat().st_size for path in self.acked)

    def delayed_are_noted(self) -> bool:
        with pyengine.open_store(self.store) as reader:
            waiting = [reader.queue_range(SCHEDULE_TOPIC, queue_id)[1] for queue_id in reader.topics().get(SCHEDULE_TOPIC, [])]
        return DelayOffsets(self.store).read()[0].get(1, 0) >= max(waiting, default=0)

    # -- kills

    def strike(self) -> None:
        if self.kind == EVERYTHING:
            self.kill_everything()
        elif self.kind == "producer":
            self.summary.kills += 1
            kill(self.rng.choice(self.producers).pid)
        elif self.kind == "supervisor":
            self.kill_supervisor()
        else:
            self.kill_worker()

    def kill_worker(self) -> None:
        with CrashWatch(self.store) as watch:
            pid = wait_for(f"a living {self.kind}", lambda: watch.pids().get(self.kind))
            self.aimed_kill(watch, self.kind, pid)
            wait_for(f"a new {self.kind}", lambda: watch.pids().get(self.kind, pid) != pid)
        self.keep_supervisor_fresh()

    def keep_supervisor_fresh(self) -> None:
        """Replace the supervisor after DEATHS_SEEN_MAX deaths: its pauses before restarts grow, and a new one has none."""
        self._deaths_seen += 1
        if self._deaths_seen >= DEATHS_SEEN_MAX:
            self._deaths_seen = 0
            with CrashWatch(self.store) as watch:
                kill(watch.pid("supervisor"))
            self.start_successor()

    def kill_supervisor(self) -> None:
        """Kill the supervisor: workers and producers go on, and its successor adopts the workers without recovery."""
        with CrashWatch(self.store) as watch:
            workers, epoch = watch.pids(), watch.epoch
            kill(workers.pop("supervisor"))
            self.summary.kills += 1
            self.wait_for_acks()
            adopted = self.start_successor()["adopted"]
            after = watch.pids()
            if not adopted or watch.epoch != epoch or any(after.get(kind) != pid for kind, pid in workers.items()):
                self.summary.failures.append(f"workers were not adopted: {workers} became {after}, epoch {epoch} {watch.epoch}")

    def aimed_kill(self, watch: CrashWatch, kind: str, pid: int) -> None:
        """Kill the process now or, in the share of aimed kills, in the middle of an operation."""
        aim = self.rng.random() < self.aim
        for attempt in range(AIM_TRIES):
            if aim:
                watch.await_work(kind, pid, AIM_TIMEOUT_S)
            with stopped(pid):
                middle = watch.is_mid_operation(kind, pid)
                if middle or not aim or attempt == AIM_TRIES - 1:
                    self.summary.kills += 1
                    self.summary.kills_in_the_middle += middle
                    kill(pid)
                    return

    def kill_engine(self, store: Path) -> None:
        """Kill an engine without its producers, the supervisor first."""
        with CrashWatch(store) as watch:
            pids = watch.pids()
            kill(pids.pop("supervisor"))  # it would start the others again
            victims = list(pids.values())
            self.rng.shuffle(victims)
            for pid in victims:
                kill(pid)
            self.summary.kills += len(victims) + 1

    def kill_all(self, watch: CrashWatch) -> None:
        """Kill the engine and the producers in a random order."""
        self.summary.kills += kill_all(watch, [process.pid for process in self.producers], self.rng)
        for process in self.producers:
            process.wait()
        self.producers = []

    def kill_everything(self) -> None:
        """Kill all processes in a random order, after a stop of the pool's committer, so that the pool has bytes."""
        with CrashWatch(self.store) as watch:
            pids = watch.pids()
            if "committer" in pids:
                os.kill(pids["committer"], signal.SIGSTOP)
                with contextlib.suppress(HangError):
                    wait_for("bytes in the pool", lambda: watch.positions().wrote > watch.positions().committed,
                             UNDRAINED_TIMEOUT_S)
                    time.sleep(self.rng.uniform(0, 0.02))
            self.aimed_kill(watch, "writer", pids["writer"])
            now = watch.positions()
            self.kill_all(watch)
            if "committer" in pids:
                self.summary.undrained_bytes += now.wrote - now.committed
        self.recover()
        self.check_store()
        self.start_engine()

    # -- judgement

    def check_store(self, *, final: bool = False) -> None:
        rows = read_acked(self.acked)
        if self.kind == "cleaner":
            all_rows = rows
            found, rows = audit_kept(self.store, rows, delayed_are_due=final)
            if final and len(rows) == len(all_rows):
                self.summary.failures.append("nothing was deleted, so these kills prove nothing")
        else:
            found = audit(self.store, rows, delayed_are_due=final)
        self.summary.acknowledged = found.acknowledged
        self.summary.checked += found.messages
        self.summary.lost += found.lost
        self.summary.redelivered, self.summary.cancelled = found.redelivered, found.cancelled
        self.summary.failures += found.failures
        self.summary.failures += check(self.store, rows, self.scratch)

    def clean_up(self) -> None:
        for process in self.producers:
            process.kill()
            process.wait()
        for pid in processes_of(self.store, b"crash."):  # one whose start was interrupted is not on the list
            kill(pid)
        super().clean_up()

    def leave(self, *, held: bool) -> None:
        """Remove what the run has outside its folder; called once, at the end."""
