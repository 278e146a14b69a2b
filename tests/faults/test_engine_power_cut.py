"""Power cuts under a running engine: what was promised is in every tree that a cut can leave.

In sync mode an acknowledgement is the promise. In the async modes it is `flushed`, as the engine showed it: the log
reaches it, and what was acknowledged is there, whole and in order, up to where the log ends.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from crash.audit import audit
from crash.in_child import in_child
from crash.watch import EngineWatch, kill, wait_for
from faults.mapped_pages import PageWatch
from faults.mutants import FORGETS_FOLDER, FORGETS_TIMED_SYNC, NEVER_SYNCS, PUBLISHES_BEFORE_SYNC, Mutant, environment
from faults.power_cut import Outcome, build_shim, explore, read_journal, shim_environment
from pyengine.cli.replay import MODES
from pyengine.config import load_config
from pyengine.ipc.shared_objects import find_folder
from pyengine.storage.recovery import recover
from pyengine.storage.recovery_report import RecoveryState

ACKS = 300
STATES = 30
ACKS_LONG = 1200
STATES_LONG = 5000
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
START = ("import sys, json; from pyengine.engine import start_engine; "
         "print(start_engine(sys.argv[1], json.loads(sys.argv[2]))['pid'])")


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return build_shim(tmp_path_factory.mktemp("shim"))


def judge_tree(mode: str, tree: Path, acks: list[bytes]) -> str | None:
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
        rows = [row for row in rows if row["physical_offset"] is not None and row["physical_offset"] < report.end_offset]
    return "; ".join(audit(tree, rows).failures) or None


def record_run(shim: Path, folder: Path, seed: str, mode: str, environ: dict[str, str], enough: int) -> tuple[Path, Path]:
    """Runs engine and producers until `enough` messages are acknowledged, then kills all; (store, journal)."""
    store, acks, journal = folder / "store", folder / "acks", folder / "journal"
    store.mkdir()
    acks.touch()
    environ = environ | shim_environment(shim, journal, store, acks, MAPPED[mode])
    started = subprocess.run(
        [sys.executable, "-P", "-c", START, str(store), json.dumps(SETTINGS | MODES[mode])], env=environ, capture_output=True,
        text=True, timeout=120
    )
    assert started.returncode == 0, started.stderr
    producers = []
    try:
        with PageWatch(store, journal, MAPPED[mode]):
            for number in range(2):
                command = [sys.executable, "-P", "-m", "crash.acked_producer", str(store), str(acks), "--name", f"p{number}",
                           "--seed", seed]
                producers.append(subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL))
            wait_for("acknowledgements", lambda: acks.read_bytes().count(b"\n") >= enough, patience_s=120)
    finally:
        for producer in producers:
            producer.kill()
            producer.wait()
        end_engine(store, int(started.stdout))
    return store, journal


def end_engine(store: Path, supervisor: int) -> None:
    with EngineWatch(store) as watch:
        kill(supervisor)
        for pid in watch.pids().values():
            kill(pid)
    find_folder(store).sweep()


def cut(
    shim: Path, folder: Path, seed: str, mode: str, states: int, environ: dict[str, str], *, enough: int = ACKS, stop_at: int = 5
) -> Outcome:
    store, journal = record_run(shim, folder, seed, mode, environ, enough)
    records = read_journal(journal)
    began_s = time.monotonic()
    judge = in_child(functools.partial(judge_tree, mode))
    outcome = explore(records, store, judge, states=states, seed=seed, scratch=folder / "scratch", stop_at=stop_at)
    print(
        f"seed {seed}, {mode}: {outcome.states} states of {outcome.records} records, {outcome.acknowledged} acknowledged, "
        f"{len(outcome.bad)} bad, {time.monotonic() - began_s:.1f} s"
    )
    return outcome


def here() -> dict[str, str]:
    checkout = Path(__file__).parents[2]
    return os.environ | {"PYTHONPATH": f"{checkout}{os.pathsep}{checkout / 'scripts'}"}


@pytest.mark.parametrize("mode", MAPPED)
def test_what_was_promised_survives_every_cut(shim, tmp_path, seed, mode):
    outcome = cut(shim, tmp_path, seed, mode, STATES, here())
    assert outcome.acknowledged >= ACKS
    assert outcome.bad == []


@pytest.mark.parametrize(
    "mutant, mode, states",
    [(NEVER_SYNCS, "sync", 100), (PUBLISHES_BEFORE_SYNC, "sync", 400), (FORGETS_FOLDER, "sync", 200),
     (FORGETS_TIMED_SYNC, "async", 200), (FORGETS_TIMED_SYNC, "pool", 200)],
    ids=lambda of: getattr(of, "switch", str(of)),
)
def test_a_broken_engine_is_caught(shim, broken_build, tmp_path, seed, proof, mutant: Mutant, mode: str, states: int):
    outcome = cut(shim, tmp_path, seed, mode, states, environment(broken_build, mutant), stop_at=1)
    proof("broken builds", f"power cut: {mutant.name} ({mode})",
          **{"states until caught": outcome.states, "not caught": int(not outcome.bad)})
    assert outcome.bad, f"an engine that {mutant.name} was not noticed in {outcome.states} states"
    print(outcome.bad[0])


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MAPPED)
def test_what_was_promised_survives_thousands_of_cuts(shim, tmp_path, seed, proof, mode):
    outcome = cut(shim, tmp_path, seed, mode, STATES_LONG, here(), enough=ACKS_LONG)
    proof("power cut", mode, states=outcome.states, records=outcome.records, acknowledged=outcome.acknowledged, bad=len(outcome.bad))
    assert outcome.bad == []
