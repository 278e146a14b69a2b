"""Power cuts under a running engine: one recorded run, and the trees that cuts of it could leave, each recovered and judged.

    python -m faults.engine_power_cut [--rounds 1] [--states 200] [--seed N] [--mode async|pool|sync] [--broken SWITCH]
                                      [--json] [--peer]

A round is one run of an engine under producers whose system calls are written down, and `--states` trees made from
that journal. What was promised must be in every one: in sync mode each acknowledgement; in the async modes `flushed`,
as the engine showed it: the log reaches it, and what was acknowledged is there, whole and in order, up to where the
log ends. With --broken the engine is a build that is broken on purpose (mutants.py), and must be caught.

Exit 0: held. 1: something promised was lost, torn, doubled or out of order.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from crash.audit import audit, read_acked
from crash.in_child import InChild
from crash.report import add_common_options, finish
from crash.rounds import CrashRun, Summary, processes_of
from crash.watch import EngineWatch, kill, wait_for
from faults.mapped_pages import PageWatch
from faults.memory_folder import memory_folder
from faults.mutants import MUTANTS, build, environment
from faults.power_cut import Outcome, build_shim, explore, read_journal, shim_environment
from pyengine.cli.replay import MODES
from pyengine.config import load_config
from pyengine.errors import EngineError
from pyengine.ipc.shared_objects import find_folder
from pyengine.storage.recovery import recover
from pyengine.storage.recovery_report import RecoveryState

ACKS = 300
CALLS_A_CHILD = 200
FAILURES_SHOWN = 5
SETTINGS = {
    "mapped_file_size_commit_log_bytes": 64 << 10,
    "mapped_file_size_consume_queue_bytes": 2000,
    "max_hash_slot_num": 100,
    "max_index_num": 400,
    "flush_interval_commit_log_ms": 30,
    "commit_interval_commit_log_ms": 10,
    "transient_store_pool_size": 3,
}
MAPPED = {"sync": ("index",), "async": ("commitlog", "index"), "pool": ("index",)}  # folders that are written through mappings
START = "import sys, json; from pyengine.engine import start_engine; start_engine(sys.argv[1], json.loads(sys.argv[2]))"


def judge_tree(mode: str, checked: mmap.mmap, tree: Path, acks: list[bytes]) -> str | None:
    """Recovers the tree as the next start would, and looks for everything that had been promised before the cut."""
    lines = [json.loads(line) for line in b"".join(acks).splitlines()]
    flushed = max((line["flushed"] for line in lines if "flushed" in line), default=0)
    rows = [line for line in lines if "flushed" not in line]
    if not any((tree / "commitlog").glob("*")):
        is_lost = flushed or rows and mode == "sync"
        return f"{len(rows)} acknowledged, {flushed} flushed, but there is no commit log" if is_lost else None
    report = recover(tree, load_config(tree, environ={}).geometry)
    if report.state is not RecoveryState.RECOVERED:
        return report.sentence
    if report.end_offset < flushed:
        return f"LOST: the log was flushed up to {flushed} and ends at {report.end_offset}"
    if mode != "sync":
        rows = below(rows, report.end_offset)
    found = audit(tree, rows)
    checked[:8] = (int.from_bytes(checked[:8], "little") + found.messages).to_bytes(8, "little")
    return "; ".join(found.failures) or None


def below(rows: list[dict], end: int) -> list[dict]:
    """Those that are known to lie in a log that ends there."""
    return [row for row in rows if row["physical_offset"] is not None and row["physical_offset"] < end]


def record_run(shim: Path, folder: Path, seed: str, mode: str, environ: dict[str, str], enough: int) -> tuple[Path, Path]:
    """Runs engine and producers until `enough` messages are acknowledged, then kills all; (store, journal)."""
    store, acks, journal = folder / "store", folder / "acks", folder / "journal"
    store.mkdir()
    acks.touch()
    environ = environ | shim_environment(shim, journal, store, acks, MAPPED[mode])
    run_engine(store, acks, seed, mode, environ, enough, lambda: PageWatch(store, journal, MAPPED[mode]))
    return store, journal


def run_engine(store: Path, acks: Path, seed: str, mode: str, environ: dict[str, str], enough: int,
               watch: Callable[[], contextlib.AbstractContextManager]) -> None:
    """Engine and producers, watched, until `enough` messages are acknowledged; then all are killed."""
    producers = []
    try:
        started = subprocess.run(
            [sys.executable, "-P", "-c", START, str(store), json.dumps(SETTINGS | MODES[mode])], env=environ, capture_output=True,
            text=True, timeout=120
        )
        assert started.returncode == 0, started.stderr
        with watch():
            for number in range(2):
                command = [sys.executable, "-P", "-m", "crash.acked_producer", str(store), str(acks), "--name", f"p{number}",
                           "--seed", seed]
                producers.append(subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL))
            wait_for("acknowledgements", lambda: acks.read_bytes().count(b"\n") >= enough, patience_s=120)
    finally:
        for producer in producers:
            producer.kill()
            producer.wait()
        end_engine(store)


def end_engine(store: Path) -> None:
    """Kills it, its supervisor first, wherever it stands, and removes its memory."""
    for pid in processes_of(store, b"workers.supervisor"):
        kill(pid)
    with contextlib.suppress(EngineError):
        with EngineWatch(store) as watch:
            for pid in watch.pids().values():
                kill(pid)
        find_folder(store).sweep()


def cut(
    shim: Path, folder: Path, seed: str, mode: str, states: int, environ: dict[str, str], *, enough: int = ACKS, stop_at: int = 5
) -> Outcome:
    store, journal = record_run(shim, folder, seed, mode, environ, enough)
    records = read_journal(journal)
    with memory_folder(folder / "scratch") as scratch:
        return judge_states(mode, seed, lambda judge: explore(records, store, judge, states=states, seed=seed, scratch=scratch,
                                                              stop_at=stop_at))


def judge_states(mode: str, seed: str, exploring: Callable[[Callable[[Path, list[bytes]], str | None]], Outcome]) -> Outcome:
    """What `exploring` finds with the judge that it is given, told on stderr."""
    began_s = time.monotonic()
    checked = mmap.mmap(-1, 4096)  # the judge is in children
    with contextlib.closing(InChild(functools.partial(judge_tree, mode, checked), calls=CALLS_A_CHILD)) as judge:
        outcome = exploring(judge)
    print(
        f"seed {seed}, {mode}: {outcome.states} states of {outcome.records} records, {outcome.acknowledged} acknowledged, "
        f"{len(outcome.bad)} bad, {time.monotonic() - began_s:.1f} s", file=sys.stderr
    )
    outcome.checked = int.from_bytes(checked[:8], "little")
    return outcome


def here() -> dict[str, str]:
    checkout = Path(__file__).parents[2]
    return os.environ | {"PYTHONPATH": f"{checkout}{os.pathsep}{checkout / 'scripts'}"}


@dataclass
class PowerCutSummary(Summary):
    """`states`: trees that were recovered and judged, of `records` system calls and stores."""

    states: int = 0
    records: int = 0


class PowerCutRun(CrashRun):
    """Rounds of one recorded run and its trees. The store of the last one stays, recovered as after a kill."""

    kind = "power cut"

    def __init__(self, scratch: Path, mode: str, seed: int, states: int, environ: dict[str, str]) -> None:
        super().__init__(scratch / "store", scratch, self.kind, mode, seed)
        self.settings |= SETTINGS
        self.summary = PowerCutSummary(self.kind, mode, seed)
        self.mode, self.states, self.environ = mode, states, environ
        self.program = self.build()

    def build(self) -> Path:
        """The C that writes down."""
        return build_shim(self.scratch)

    def cut(self, folder: Path, seed: str) -> Outcome:
        """One round in an empty folder; leaves `store` and `acks` there."""
        return cut(self.program, folder, seed, self.mode, self.states, self.environ, stop_at=FAILURES_SHOWN)

    def run(self, rounds: int) -> PowerCutSummary:
        began_s = time.monotonic()
        for number in range(rounds):
            folder = self.scratch / f"round-{number}"
            folder.mkdir()
            outcome = self.cut(folder, f"{self.summary.seed}/{number}")
            self.summary.rounds += 1
            self.summary.states += outcome.states
            self.summary.records += outcome.records
            self.summary.acknowledged += outcome.acknowledged
            self.summary.checked += outcome.checked
            self.summary.lost += len(outcome.bad)
            self.summary.failures += [f"state {state}, cut behind record {point}: {sentence}"
                                      for point, state, sentence in outcome.bad]
            self.store = folder / "store"
            end = recover(self.store, load_config(self.store, environ={}).geometry).end_offset
            rows = [row for row in read_acked([folder / "acks"]) if "flushed" not in row]
            if self.mode == "pool":  # what was in its buffers alone is gone
                rows = below(rows, end)
            (folder / "rows").write_text("".join(json.dumps(row) + "\n" for row in rows))
            self.acked = [folder / "rows"]
            if outcome.bad:
                break
        self.summary.seconds = round(time.monotonic() - began_s, 1)
        return self.summary


def main(words: str | None = __doc__, rig: type[PowerCutRun] = PowerCutRun) -> int:
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser, rounds=1)
    parser.add_argument("--mode", choices=list(MODES), default="sync")
    parser.add_argument("--states", type=int, default=200, help="states for each recorded run (200)")
    parser.add_argument("--broken", choices=[mutant.switch for mutant in MUTANTS],
                        help="an engine broken in this way: must be caught")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pyengine-broken-") as place:
        environ = here()
        if arguments.broken:
            environ = environment(build(Path(place)), next(mutant for mutant in MUTANTS if mutant.switch == arguments.broken))

        def make(store: Path, scratch: Path) -> PowerCutRun:
            return rig(scratch, arguments.mode, arguments.seed, arguments.states, environ)

        return finish(arguments, make, lambda run: run.run(arguments.rounds),
                      lambda summary: f"{summary.states} states of {summary.records} records")


if __name__ == "__main__":
    sys.exit(main())
