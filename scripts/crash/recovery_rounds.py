"""Kill everything, then three recoveries in a row; then audit.

    python -m crash.recovery_rounds [--rounds 10] [--depth 3] [--seed N] [--mode async|pool|sync] [--json] [--peer]

Each recovery of a round is a `pyengine recover` or the start of an engine. It is killed at a step of the list of
failpoints or at a random moment. Then one runs to its end, and the audit looks for every acknowledged message.

Exit 0: held. 1: a message was lost, torn, doubled or out of order, or something hung; the store is kept and named.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from crash.board import Board
from crash.report import Summary, crash_parser, ended_in_order, finish
from crash.rounds import CrashRun
from crash.steps import FAILPOINTS, RECOVERY, START, is_built
from crash.watch import CrashWatch
from pyengine.cli.torture import COMMAND_TIMEOUT_S
from pyengine.engine.embedded import start_engine
from pyengine.errors import EngineError
from pyengine.native.failpoints import VARIABLE

DEPTH = 3
AIMED_SHARE = 0.7
# Steps that each recovery after a kill passes; it may pass others.
ALWAYS_PASSED = tuple(f"recovery_{name}" for name in (
    "planned", "marked", "tail_cleared", "log_done", "dispatched", "derived_synced", "checkpoint_written", "abort_removed",
    "marker_removed"))
PASSED_TOO = ("csrc/dispatch.c", "csrc/index_file.c", "csrc/consume_queue.c", "pyengine/storage/durable_writes.py")
SURE_SHARE = 0.7


@dataclass
class RecoverySummary(Summary):
    """`recoveries_killed`: the recoveries that died; one that does not reach its step lives."""

    depth: int = DEPTH
    recoveries_killed: int = 0


class RecoveryRun(CrashRun):
    """Rounds of one death and `depth` killed recoveries."""

    def __init__(self, store: Path, scratch: Path, mode: str, seed: int, depth: int) -> None:
        super().__init__(store, scratch, "recovery", mode, seed)
        self.summary = RecoverySummary("recovery", mode, seed, depth=depth)
        self.board = Board(scratch / "board")
        there = [point for point in FAILPOINTS.values() if is_built(point)]
        self.maybe_passed = [point.name for point in there if point.scene == RECOVERY or point.where in PASSED_TOO]
        self.passed_by_start = [*ALWAYS_PASSED, *(point.name for point in there if point.scene == START)]

    def strike(self) -> None:
        self.kill_everything_at_once()
        for number in range(self.summary.depth):
            self.kill_one_recovery(sure=number == 0)
        self.recover()
        self.check_store()
        self.start_engine()

    def kill_everything_at_once(self) -> None:
        with CrashWatch(self.store) as watch:
            self.aimed_kill(watch, "writer", watch.pids()["writer"])
            self.kill_all(watch)

    def kill_one_recovery(self, *, sure: bool) -> None:
        """Kill a recovery; `sure`: at a step that it certainly passes, as the first one after the kills does."""
        is_start = self.rng.random() < 0.5
        if sure or self.rng.random() < AIMED_SHARE:
            if sure or self.rng.random() < SURE_SHARE:
                self.board.arm(self.rng.choice(self.passed_by_start if is_start else ALWAYS_PASSED))
            else:
                self.board.arm(self.rng.choice(self.maybe_passed), self.rng.choice((1, 2, 5)))
        os.environ[VARIABLE] = str(self.board.path)
        try:
            died = self.die_starting() if is_start else self.die_recovering()
        finally:
            del os.environ[VARIABLE]
            self.board.disarm()
        self.summary.recoveries_killed += died
        self.summary.kills += died

    def die_recovering(self) -> bool:
        command = [sys.executable, "-P", "-m", "pyengine", "recover", str(self.store)]
        timeout_s = COMMAND_TIMEOUT_S if self.is_armed() else self.rng.uniform(0.05, 0.4)
        try:
            return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=timeout_s).returncode < 0
        except subprocess.TimeoutExpired:  # it is killed then
            return True

    def die_starting(self) -> bool:
        """Start an engine whose supervisor dies during the start or at its end; kill the rest; return whether it died so."""
        is_armed = self.is_armed()
        try:
            start_engine(self.store, self.settings, timeout_s=COMMAND_TIMEOUT_S if is_armed else self.rng.uniform(0.05, 0.4))
        except EngineError:
            pass
        died = bool(self.board.struck_pid) or not is_armed
        self.kill_remaining()
        return died

    def is_armed(self) -> bool:
        return self.board.is_armed


@ended_in_order
def main() -> int:
    parser = crash_parser(__doc__, rounds=10)
    parser.add_argument("--depth", type=int, default=DEPTH, help="how many recoveries in a row are killed (3)")
    arguments = parser.parse_args()

    def make(store: Path, scratch: Path) -> RecoveryRun:
        return RecoveryRun(store, scratch, arguments.mode, arguments.seed, arguments.depth)

    def words(summary: RecoverySummary) -> str:
        return f"{summary.recoveries_killed} of {summary.rounds * summary.depth} recoveries killed"

    return finish(arguments, make, lambda run: run.run(arguments.rounds), words)


if __name__ == "__main__":
    sys.exit(main())
