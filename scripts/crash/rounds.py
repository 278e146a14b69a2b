"""Kill one kind of process at random moments, again and again, while producers put; then audit.

    python -m crash.rounds KIND [--rounds 20] [--seed N] [--mode async|pool|sync] [--aim 0.5] [--json] [--peer]

KIND is a worker kind, `supervisor`, `producer`, or `everything` (all at once, then `pyengine recover`).
After each kill acknowledgements must move again within a deadline: a hang is a failure. A share of the
kills (--aim) is aimed: the process is stopped again and again until it stands in the middle of something.

With the scheduler as victim some messages are delayed: each must be delivered, maybe twice. At the end the
real RocketMQ opens the store, where there is one (--peer, --no-peer).

Exit 0: held. 1: something acknowledged was lost, something torn, doubled or reordered was served, or a
hang. The store of a failed run is kept and named.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyengine
from crash.audit import audit, audit_kept, check, read_acked
from crash.report import add_common_options, as_failure, ended_in_order, finish
from crash.watch import EngineWatch, HangError, kill, kill_all, stopped, wait_for
from pyengine.cli.replay import MODES
from pyengine.engine.embedded import start_engine, stop_engine
from pyengine.engine.kinds import KINDS
from pyengine.errors import EngineError, ExitCode, StoreBusyError
from pyengine.formats.constants import SCHEDULE_TOPIC
from pyengine.ipc.shared_objects import find_folder
from pyengine.ipc.store_lock import living_kinds
from pyengine.storage.delay_offset import DelayOffsets

SMALL_FILES = {
    "mapped_file_size_commit_log_bytes": 256 << 10,
    "mapped_file_size_consume_queue_bytes": 20_000,
    "max_hash_slot_num": 1000,
    "max_index_num": 20_000,
}
# For a cleaner there must always be something to delete.
RETENTION = {
    "file_reserved_time_hours": 0,
    "delete_when": ";".join(map(str, range(24))),
    "clean_resource_interval_ms": 5,
    "delete_commit_log_files_interval_ms": 1,
    "delete_consume_queue_files_interval_ms": 1,
    "flush_interval_consume_queue_ms": 20,
}
# Delivered at once, and noted soon.
DELAYS = {"message_delay_level": "0s", "flush_delay_offset_interval_ms": 50, "flush_interval_commit_log_ms": 50}
PRODUCERS = 2
AIM_SHARE = 0.5
AIM_TRIES = 100
AIM_TIMEOUT_S = 0.02
MOMENT_MS_MAX = 60.0
COMMAND_TIMEOUT_S = 120.0
DEATHS_SEEN_MAX = 4
UNDRAINED_TIMEOUT_S = 5.0
POOL_ONLY = ("committer",)
EVERYTHING = "everything"
VICTIMS = (*(kind.name for kind in KINDS), "supervisor", "producer", EVERYTHING)


@dataclass
class Summary:
    """What a run did; `failures` empty means that everything held."""

    kind: str
    mode: str
    seed: int
    rounds: int = 0
    kills: int = 0
    kills_in_the_middle: int = 0
    undrained_bytes: int = 0
    acknowledged: int = 0
    checked: int = 0
    lost: int = 0
    redelivered: int = 0
    peer: str = ""
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


class CrashRun:
    """One store, one kind of victim, one mode."""

    def __init__(self, store: Path, scratch: Path, kind: str, mode: str, seed: int, aim: float = AIM_SHARE) -> None:
        self.store = store
        self.scratch = scratch
        self.kind = kind
        self.aim = aim
        self.rng = random.Random(f"{seed}/{kind}/{mode}")
        self.has_delayed = kind == "scheduler"
        self.settings = SMALL_FILES | MODES[mode]
        self.settings |= RETENTION if kind == "cleaner" else DELAYS if self.has_delayed else {}
        self.summary = Summary(kind, mode, seed)
        self.producers: list[subprocess.Popen] = []
        self.acked: list[Path] = []
        self.recovered_codes = (ExitCode.OK,)
        self._deaths_seen = 0

    def run(self, rounds: int) -> Summary:
        began_s = time.monotonic()
        try:
            self.start_engine()
            for _ in range(rounds):
                self.make_producers()
                self.wait_for_acks()
                time.sleep(self.rng.uniform(0, MOMENT_MS_MAX) / 1000)
                self.strike()
                self.summary.rounds += 1
                if self.summary.failures:
                    return self.summary
            self.make_producers()
            self.wait_for_acks()
            if self.kind == "cleaner":
                self.wait_for_deletion()
            self.end_producers()
            if self.has_delayed:
                wait_for("all delayed messages are delivered and noted", self.delayed_are_noted)
            stop_engine(self.store)
            self.look_over(final=True)
        except HangError as error:
            self.summary.failures.append(f"HANG: {error}")
        except Exception as error:  # whatever it was, the run has not held, and its summary says so
            self.summary.failures.append(as_failure(error))
        finally:
            self.end_everything()
            self.summary.seconds = round(time.monotonic() - began_s, 1)
        return self.summary

    # -- the engine

    def start_engine(self) -> dict[str, object]:
        return start_engine(self.store, self.settings, timeout_s=COMMAND_TIMEOUT_S)

    def start_successor(self, start: Callable[[], dict[str, object]] | None = None) -> dict[str, object]:
        """Start a supervisor behind a dead one. A worker that it was just starting may hold its lock for a moment."""
        start = start or self.start_engine
        deadline_s = time.monotonic() + UNDRAINED_TIMEOUT_S
        while True:
            try:
                return start()
            except StoreBusyError:
                if time.monotonic() > deadline_s:
                    raise
            time.sleep(0.01)

    def recover(self, store: Path | None = None) -> None:
        """As an operator would: the command, which drains what the dead engine left in its buffers."""
        command = [sys.executable, "-P", "-m", "pyengine", "recover", str(store or self.store)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
        if done.returncode not in self.recovered_codes:
            raise EngineError(f"pyengine recover ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")

    # -- producers

    def make_producers(self) -> None:
        """Keeps PRODUCERS of them alive; a new one has a name that none had before."""
        self.producers = [process for process in self.producers if process.poll() is None]
        while len(self.producers) < PRODUCERS:
            name = f"p{len(self.acked)}"
            path = self.scratch / f"{name}.acked"
            path.touch()
            self.acked.append(path)
            command = [sys.executable, "-P", "-m", "crash.acked_producer", str(self.store), str(path)]
            command += ["--name", name, "--seed", str(self.summary.seed)] + ["--delayed"] * self.has_delayed
            with open(self.scratch / f"{name}.log", "wb") as log:
                self.producers.append(subprocess.Popen(command, stderr=log))

    def end_producers(self) -> None:
        for process in self.producers:
            process.terminate()
        for process in self.producers:
            try:
                process.wait(COMMAND_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                raise HangError(f"producer {process.pid} does not end") from None
            if process.returncode not in (0, -signal.SIGTERM):  # the latter: it had not begun yet
                raise EngineError(f"producer {process.pid} ended with {process.returncode}, see {self.scratch}")
        self.producers = []

    def wait_for_acks(self) -> None:
        """New acknowledgements from now on; HangError if none come."""
        before = self.acked_bytes()
        wait_for("acknowledgements move", lambda: self.acked_bytes() > before)

    def wait_for_deletion(self) -> None:
        """Few kills may have come before the first segment went: what they left must not keep it from going."""
        with EngineWatch(self.store) as watch:
            wait_for("an old segment is deleted", lambda: watch.positions().min_offset > 0)

    def acked_bytes(self) -> int:
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
        with EngineWatch(self.store) as watch:
            pid = wait_for(f"a living {self.kind}", lambda: watch.pids().get(self.kind))
            self.aimed_kill(watch, self.kind, pid)
            wait_for(f"a new {self.kind}", lambda: watch.pids().get(self.kind, pid) != pid)
        self.keep_supervisor_fresh()

    def keep_supervisor_fresh(self) -> None:
        """A supervisor starts what dies again and again after growing pauses; its successor begins anew, and adopts."""
        self._deaths_seen += 1
        if self._deaths_seen >= DEATHS_SEEN_MAX:
            self._deaths_seen = 0
            with EngineWatch(self.store) as watch:
                kill(watch.pid("supervisor"))
            self.start_successor()

    def kill_supervisor(self) -> None:
        """Workers and producers go on without it; its successor adopts them and recovers nothing."""
        with EngineWatch(self.store) as watch:
            workers, epoch = watch.pids(), watch.epoch
            kill(workers.pop("supervisor"))
            self.summary.kills += 1
            self.wait_for_acks()
            adopted = self.start_successor()["adopted"]
            after = watch.pids()
            if not adopted or watch.epoch != epoch or any(after.get(kind) != pid for kind, pid in workers.items()):
                self.summary.failures.append(f"workers were not adopted: {workers} became {after}, epoch {epoch} {watch.epoch}")

    def aimed_kill(self, watch: EngineWatch, kind: str, pid: int) -> None:
        """Kills now, or (in the share of times that are aimed) as soon as the process stands in the middle of something."""
        aim = self.rng.random() < self.aim
        for attempt in range(AIM_TRIES):
            if aim:
                watch.await_work(kind, pid, AIM_TIMEOUT_S)
            with stopped(pid):
                middle = watch.in_the_middle(kind, pid)
                if middle or not aim or attempt == AIM_TRIES - 1:
                    self.summary.kills += 1
                    self.summary.kills_in_the_middle += middle
                    kill(pid)
                    return

    def kill_all(self, watch: EngineWatch) -> None:
        """Engine and producers, in any order."""
        self.summary.kills += kill_all(watch, [process.pid for process in self.producers], self.rng)
        for process in self.producers:
            process.wait()
        self.producers = []

    def kill_everything(self) -> None:
        """All processes at once, in any order; the pool's committer is held first, so that bytes wait in the pool."""
        with EngineWatch(self.store) as watch:
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
        self.look_over()
        self.start_engine()

    # -- judgement

    def look_over(self, *, final: bool = False) -> None:
        rows = read_acked(self.acked)
        if self.kind == "cleaner":
            all_rows = rows
            found, rows = audit_kept(self.store, rows, delayed_are_due=final)
            if final and len(rows) == len(all_rows):
                self.summary.failures.append("nothing was deleted: these kills have shown nothing")
        else:
            found = audit(self.store, rows, delayed_are_due=final)
        self.summary.acknowledged = found.acknowledged
        self.summary.checked += found.messages
        self.summary.lost += found.lost
        self.summary.redelivered = found.redelivered
        self.summary.failures += found.failures
        self.summary.failures += check(self.store, rows, self.scratch)

    def end_everything(self) -> None:
        """Whatever of this run still lives is killed, and its shared memory removed."""
        for process in self.producers:
            process.kill()
            process.wait()
        try:
            self.end_whatever_lives()
        except Exception as error:
            self.summary.failures.append(f"not all of it could be ended: {as_failure(error)}")
        with contextlib.suppress(EngineError):
            find_folder(self.store).sweep()

    def leave(self, *, held: bool) -> None:
        """Called once, after everything; what the run has outside its folder goes."""

    def end_whatever_lives(self) -> None:
        kill_engine(self.store)
        wait_for("the store is let go", lambda: not living_kinds(self.store))


def kill_engine(store: Path) -> None:
    """Kills it, supervisor first, whether it has got as far as its control block or not."""
    for module in (b"pyengine.workers.supervisor", b"pyengine.workers."):
        for pid in processes_of(store, module):
            kill(pid)
    with contextlib.suppress(EngineError), EngineWatch(store) as watch:
        for pid in watch.pids().values():
            kill(pid)


def processes_of(store: Path, module: bytes) -> list[int]:
    """Processes `python -m MODULE... STORE ...`, by what they were started as; `module` is how the name begins."""
    found = []
    paths = {os.fsencode(store), os.fsencode(store.resolve())}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            if b"-m" in words[:-1] and words[words.index(b"-m") + 1].startswith(module) and not paths.isdisjoint(words):
                found.append(int(path.name))
    return found


@ended_in_order
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=VICTIMS, metavar="KIND", help=", ".join(VICTIMS))
    add_common_options(parser)
    parser.add_argument("--mode", choices=list(MODES))
    parser.add_argument("--aim", type=float, default=AIM_SHARE, help="which share of the kills is aimed, 0 to 1")
    arguments = parser.parse_args()
    mode = arguments.mode or ("pool" if arguments.kind in POOL_ONLY else "async")
    if arguments.kind in POOL_ONLY and mode != "pool":
        parser.error(f"a {arguments.kind} runs in mode pool only")

    def make(store: Path, scratch: Path) -> CrashRun:
        made = CrashRun
        if arguments.kind == "replicator":
            from crash.replicas import ReplicatorRun as made
        return made(store, scratch, arguments.kind, mode, arguments.seed, arguments.aim)

    def words(summary: Summary) -> str:
        return (f"{summary.kills_in_the_middle} of them in the middle of a pass, "
                f"{summary.undrained_bytes} bytes undrained at the kill"
                + (f", {summary.redelivered} delayed messages delivered again" if summary.redelivered else ""))

    return finish(arguments, make, lambda run: run.run(arguments.rounds), words)


if __name__ == "__main__":
    sys.exit(main())
