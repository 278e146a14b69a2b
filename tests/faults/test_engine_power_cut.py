"""Power cuts under a running engine in sync mode: what was acknowledged is in every tree that a cut can leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from crash.audit import recover_and_audit
from crash.in_child import in_child
from crash.watch import EngineWatch, kill, wait_for
from faults.mutants import FORGETS_FOLDER, NEVER_SYNCS, PUBLISHES_BEFORE_SYNC, Mutant, environment
from faults.power_cut import Outcome, build_shim, explore, read_journal, shim_environment
from pyengine.ipc.shared_objects import find_folder

ACKS = 300
STATES = 40
ACKS_LONG = 1200
STATES_LONG = 5000
SETTINGS = {
    "flush_disk_type": "SYNC_FLUSH",
    "mapped_file_size_commit_log_bytes": 64 << 10,
    "mapped_file_size_consume_queue_bytes": 2000,
    "max_hash_slot_num": 100,
    "max_index_num": 400,
}
START = "import sys, json; from pyengine.engine import start_engine; print(start_engine(sys.argv[1], json.loads(sys.argv[2]))['pid'])"


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return build_shim(tmp_path_factory.mktemp("shim"))


def judge_tree(tree: Path, acks: list[bytes]) -> str | None:
    """Recovers the tree as the next start would, and looks for everything that was acknowledged before the cut."""
    rows = [json.loads(line) for line in b"".join(acks).splitlines()]
    if not any((tree / "commitlog").glob("*")):
        return f"{len(rows)} acknowledged, but there is no commit log" if rows else None
    return "; ".join(recover_and_audit(tree, rows)) or None


def record_run(shim: Path, folder: Path, seed: str, environ: dict[str, str], enough: int) -> tuple[Path, Path]:
    """Runs engine and producers until `enough` messages are acknowledged, then kills all; (store, journal)."""
    store, acks, journal = folder / "store", folder / "acks", folder / "journal"
    store.mkdir()
    acks.touch()
    environ = environ | shim_environment(shim, journal, store, acks)
    started = subprocess.run(
        [sys.executable, "-P", "-c", START, str(store), json.dumps(SETTINGS)], env=environ, capture_output=True, text=True, timeout=120
    )
    assert started.returncode == 0, started.stderr
    producers = []
    try:
        for number in range(2):
            command = [sys.executable, "-P", "-m", "crash.acked_producer", str(store), str(acks), "--name", f"p{number}", "--seed", seed]
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
    shim: Path, folder: Path, seed: str, states: int, environ: dict[str, str], *, enough: int = ACKS, stop_at: int = 5
) -> Outcome:
    store, journal = record_run(shim, folder, seed, environ, enough)
    records = read_journal(journal)
    began_s = time.monotonic()
    outcome = explore(records, store, in_child(judge_tree), states=states, seed=seed, scratch=folder / "scratch", stop_at=stop_at)
    print(
        f"seed {seed}: {outcome.states} states of {outcome.records} records, {outcome.acknowledged} acknowledged, "
        f"{len(outcome.bad)} bad, {time.monotonic() - began_s:.1f} s"
    )
    return outcome


def here() -> dict[str, str]:
    checkout = Path(__file__).parents[2]
    return os.environ | {"PYTHONPATH": f"{checkout}{os.pathsep}{checkout / 'scripts'}"}


def test_what_was_acknowledged_survives_every_cut(shim, tmp_path, seed):
    outcome = cut(shim, tmp_path, seed, STATES, here())
    assert outcome.acknowledged >= ACKS
    assert outcome.bad == []


@pytest.mark.parametrize(
    "mutant, states", [(NEVER_SYNCS, 100), (PUBLISHES_BEFORE_SYNC, 400), (FORGETS_FOLDER, 200)], ids=lambda of: getattr(of, "switch", "")
)
def test_a_broken_engine_is_caught(shim, broken_build, tmp_path, seed, mutant: Mutant, states: int):
    outcome = cut(shim, tmp_path, seed, states, environment(broken_build, mutant), stop_at=1)
    assert outcome.bad, f"an engine that {mutant.name} was not noticed in {outcome.states} states"
    print(outcome.bad[0])


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_what_was_acknowledged_survives_thousands_of_cuts(shim, tmp_path, seed):
    outcome = cut(shim, tmp_path, seed, STATES_LONG, here(), enough=ACKS_LONG)
    assert outcome.bad == []
