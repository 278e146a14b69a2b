"""Kill one kind of process at random moments, again and again, while producers put; then audit.

    python -m crash.rounds KIND [--rounds 20] [--seed N] [--mode async|pool|sync] [--aim 0.5] [--json]

KIND is a worker kind, `supervisor`, `producer`, or `all` (everything at once, then `pyengine recover`).
After each kill acknowledgements must move again within a deadline: a hang is a failure. A share of the
kills (--aim) is aimed: the process is stopped again and again until it stands in the middle of something.

Exit 0: held. 1: something acknowledged was lost, something torn, doubled or reordered was served, or a
hang. The store of a failed run is kept and named.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from crash.audit import audit, check, read_acked, still_kept
from crash.watch import EngineWatch, HangError, kill, stopped, wait_for
from pyengine.cli.replay import MODES
from pyengine.engine import start_engine, stop_engine
from pyengine.errors import EngineError, ExitCode
from pyengine.ipc.shared_objects import find_folder

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
PRODUCERS = 2
AIM_SHARE = 0.5
AIM_TRIES = 100
AIM_PATIENCE_S = 0.02
MOMENT_MS_MAX = 60.0
COMMAND_PATIENCE_S = 120.0
UNDRAINED_PATIENCE_S = 5.0
POOL_ONLY = ("committer",)


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
        self.settings = SMALL_FILES | MODES[mode] | (RETENTION if kind == "cleaner" else {})
        self.summary = Summary(kind, mode, seed)
        self.producers: list[subprocess.Popen] = []
        self.acked: list[Path] = []

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
            self.end_producers()
            stop_engine(self.store)
            self.look_over()
        except HangError as error:
            self.summary.failures.append(f"HANG: {error}")
        except EngineError as error:
            self.summary.failures.append(f"{type(error).__name__}: {error}")
        finally:
            self.end_everything()
            self.summary.seconds = round(time.monotonic() - began_s, 1)
        return self.summary

    # -- the engine

    def start_engine(self) -> dict[str, object]:
        return start_engine(self.store, self.settings, timeout_s=COMMAND_PATIENCE_S)

    def recover(self) -> None:
        """As an operator would: the command, which drains what the dead engine left in its buffers."""
        command = [sys.executable, "-P", "-m", "pyengine", "recover", str(self.store)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_PATIENCE_S)
        if done.returncode != ExitCode.OK:
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
            command += ["--name", name, "--seed", str(self.summary.seed)]
            with open(self.scratch / f"{name}.log", "wb") as log:
                self.producers.append(subprocess.Popen(command, stderr=log))

    def end_producers(self) -> None:
        for process in self.producers:
            process.terminate()
        for process in self.producers:
            try:
                process.wait(COMMAND_PATIENCE_S)
            except subprocess.TimeoutExpired:
                raise HangError(f"producer {process.pid} does not end") from None
            if process.returncode not in (0, -signal.SIGTERM):  # the latter: it had not begun yet
                raise EngineError(f"producer {process.pid} ended with {process.returncode}, see {self.scratch}")
        self.producers = []

    def wait_for_acks(self) -> None:
        """New acknowledgements from now on; HangError if none come."""
        before = self.acked_bytes()
        wait_for("acknowledgements move", lambda: self.acked_bytes() > before)

    def acked_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.acked)

    # -- kills

    def strike(self) -> None:
        if self.kind == "all":
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

    def kill_supervisor(self) -> None:
        """Workers and producers go on without it; its successor adopts them and recovers nothing."""
        with EngineWatch(self.store) as watch:
            workers, epoch = watch.pids(), watch.epoch
            kill(workers.pop("supervisor"))
            self.summary.kills += 1
            self.wait_for_acks()
            adopted = self.start_engine()["adopted"]
            after = watch.pids()
            if not adopted or watch.epoch != epoch or any(after.get(kind) != pid for kind, pid in workers.items()):
                self.summary.failures.append(f"workers were not adopted: {workers} became {after}, epoch {epoch} {watch.epoch}")

    def aimed_kill(self, watch: EngineWatch, kind: str, pid: int) -> None:
        """Kills now, or (in the share of times that are aimed) as soon as the process stands in the middle of something."""
        aim = self.rng.random() < self.aim
        for attempt in range(AIM_TRIES):
            if aim:
                watch.await_work(kind, pid, AIM_PATIENCE_S)
            with stopped(pid):
                middle = watch.in_the_middle(kind, pid)
                if middle or not aim or attempt == AIM_TRIES - 1:
                    self.summary.kills += 1
                    self.summary.kills_in_the_middle += middle
                    kill(pid)
                    return

    def kill_everything(self) -> None:
        """All processes at once, in any order; the pool's committer is held first, so that bytes wait in the pool."""
        with EngineWatch(self.store) as watch:
            pids = watch.pids()
            if "committer" in pids:
                os.kill(pids["committer"], signal.SIGSTOP)
                with contextlib.suppress(HangError):
                    wait_for("bytes in the pool", lambda: watch.positions().wrote > watch.positions().committed,
                             UNDRAINED_PATIENCE_S)
                    time.sleep(self.rng.uniform(0, 0.02))
            self.aimed_kill(watch, "writer", pids.pop("writer"))
            # The supervisor would start a new writer: it goes first, the others in any order.
            kill(pids.pop("supervisor"))
            victims = [*watch.pids().values(), *(process.pid for process in self.producers)]
            self.rng.shuffle(victims)
            now = watch.positions()
            for pid in victims:
                kill(pid)
            self.summary.kills += len(victims) + 1
            if "committer" in pids:
                self.summary.undrained_bytes += now.wrote - now.committed
        for process in self.producers:
            process.wait()
        self.producers = []
        self.recover()
        self.look_over()
        self.start_engine()

    # -- judgement

    def look_over(self) -> None:
        rows = read_acked(self.acked)
        if self.kind == "cleaner":
            all_rows, rows = rows, still_kept(self.store, rows)
            if len(rows) == len(all_rows):
                self.summary.failures.append("nothing was deleted: these kills have shown nothing")
        found = audit(self.store, rows)
        self.summary.acknowledged = found.acknowledged
        self.summary.checked += found.messages
        self.summary.lost += found.lost
        self.summary.failures += found.failures
        self.summary.failures += check(self.store, rows, self.scratch)

    def end_everything(self) -> None:
        """Whatever of this run still lives is killed, and its shared memory removed."""
        for process in self.producers:
            process.kill()
            process.wait()
        with contextlib.suppress(Exception), EngineWatch(self.store) as watch:
            pids = watch.pids()
            supervisor = pids.pop("supervisor", None)
            for pid in [supervisor, *pids.values()]:
                if pid:
                    kill(pid)
        with contextlib.suppress(EngineError):
            find_folder(self.store).sweep()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ("writer", "flusher", "committer", "reputter", "allocator", "checkpointer", "cleaner", "replicator", "supervisor",
             "producer", "all")
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--mode", choices=list(MODES))
    parser.add_argument("--aim", type=float, default=AIM_SHARE, help="which share of the kills is aimed, 0 to 1")
    parser.add_argument("--json", action="store_true", help="the summary as one JSON document")
    arguments = parser.parse_args()
    mode = arguments.mode or ("pool" if arguments.kind in POOL_ONLY else "async")
    if arguments.kind in POOL_ONLY and mode != "pool":
        parser.error(f"a {arguments.kind} runs in mode pool only")

    scratch = Path(tempfile.mkdtemp(prefix="pyengine-crash-"))
    print(f"seed={arguments.seed} kind={arguments.kind} mode={mode} rounds={arguments.rounds}", file=sys.stderr)
    made = CrashRun
    if arguments.kind == "replicator":
        from crash.replicas import ReplicatorRun as made
    summary = made(scratch / "store", scratch, arguments.kind, mode, arguments.seed, arguments.aim).run(arguments.rounds)
    if arguments.json:
        print(json.dumps(asdict(summary)))
    else:
        print(
            f"{summary.kind} ({summary.mode}): {summary.rounds} rounds, {summary.kills} kills, "
            f"{summary.kills_in_the_middle} of them in the middle of a pass, {summary.acknowledged} acknowledged, "
            f"{summary.checked} checked, {summary.undrained_bytes} bytes undrained at the kill, lost {summary.lost}, "
            f"{summary.seconds} s, seed {summary.seed}"
        )
    for sentence in summary.failures:
        print(sentence, file=sys.stderr)
    if summary.failures:
        print(f"kept: {scratch}", file=sys.stderr)
        return 1
    shutil.rmtree(scratch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
