"""Power cuts under a running engine: what was promised is in every tree that a cut can leave (engine_power_cut.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from faults.engine_power_cut import ACKS, COMPANY, IN_TURN, MAPPED, cut, here, words
from faults.mutants import (
    CLAIMS_UNSYNCED,
    COMMITS_UNSYNCED,
    FORGETS_FOLDER,
    FORGETS_RECOVERY_SYNC,
    FORGETS_REMOVED,
    FORGETS_TIMED_SYNC,
    NEVER_SYNCS,
    NOTES_EARLY,
    PUBLISHES_BEFORE_SYNC,
    Mutant,
    environment,
)
from faults.power_cut import build_shim
from fix_golden import usual
from waiting import scaled_timeout_s

STATES = 30
ACKS_LONG = 1200
STATES_LONG = int(os.environ.get("PYENGINE_STATES", "5000"))
SCRIPT = Path(__file__).parents[2] / "scripts" / "power_cut.sh"


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return build_shim(tmp_path_factory.mktemp("shim"))


SOME_COMPANY = ("delayed", "consumers")


def with_company(company):
    return "+".join(company) or "alone"


@pytest.mark.parametrize("mode, company", usual([("sync", SOME_COMPANY), ("async", COMPANY), ("pool", COMPANY)], [("sync", SOME_COMPANY)],
                                                pytest.mark.ci),
                         ids=lambda of: of if isinstance(of, str) else with_company(of))
def test_promised_data_survives_every_power_cut(shim, tmp_path, seed, mode, company):
    outcome = cut(shim, tmp_path, seed, mode, STATES, here(), company)
    assert outcome.acknowledged >= ACKS
    assert outcome.bad == []


@pytest.mark.parametrize("mode, then", [  # the default run has it on a disk: test_block_power_cut.py
    *usual([("async", "recover"), ("sync", "rebuild"), ("async", "salvage"), ("async", "cut"), ("async", "read")], [], pytest.mark.ci),
    *usual([("sync", "recover"), ("pool", "recover"), ("sync", "cut"), ("pool", "read")], [])])
def test_results_of_a_repair_or_read_after_a_kill_survive_every_power_cut(shim, tmp_path, seed, mode, then):
    outcome = cut(shim, tmp_path, seed, mode, STATES, here(), then=then)
    assert outcome.acknowledged >= 1
    assert outcome.bad == []


@pytest.mark.ci
@pytest.mark.parametrize(
    "mutant, mode, then",
    [(FORGETS_RECOVERY_SYNC, "async", "recover"), (FORGETS_RECOVERY_SYNC, "sync", "rebuild"),
     (FORGETS_RECOVERY_SYNC, "async", "salvage"), (FORGETS_RECOVERY_SYNC, "async", "cut"), (CLAIMS_UNSYNCED, "async", "read")],
    ids=lambda of: getattr(of, "id", of),
)
def test_a_repair_or_read_after_a_kill_without_a_sync_is_caught(shim, broken_build, tmp_path, seed, proof, mutant: Mutant, mode, then):
    outcome = cut(shim, tmp_path, seed, mode, 400, environment(broken_build, mutant), then=then, stop_at=1)
    proof("broken builds", f"power cut: {mutant.breaks} ({mode}, then {then})",
          **{"states until caught": outcome.states, "not caught": int(not outcome.caught)})
    assert len(outcome.caught) == len(outcome.bad), outcome.bad
    assert outcome.caught, f"an engine that {mutant.breaks} was not noticed in {outcome.states} states"
    print(outcome.caught[0])


@pytest.mark.ci
@pytest.mark.parametrize(
    "mutant, mode, company, states",
    [(NEVER_SYNCS, "sync", (), 100), (PUBLISHES_BEFORE_SYNC, "sync", (), 400), (FORGETS_FOLDER, "sync", (), 200),
     (FORGETS_TIMED_SYNC, "async", (), 200), (FORGETS_TIMED_SYNC, "pool", (), 200),
     *(pytest.param(*one, marks=pytest.mark.long) for one in [
         (NOTES_EARLY, "async", ("delayed",), 2000), (NOTES_EARLY, "pool", COMPANY, 2000),
         (FORGETS_REMOVED, "sync", ("cleaning",), 2000), (FORGETS_REMOVED, "async", COMPANY, 2000),
         (COMMITS_UNSYNCED, "sync", ("consumers",), 1000), (COMMITS_UNSYNCED, "pool", COMPANY, 1000)])],
    ids=lambda of: getattr(of, "id", with_company(of) if isinstance(of, tuple) else str(of)),
)
def test_a_broken_engine_is_caught(shim, broken_build, tmp_path, seed, proof, mutant: Mutant, mode, company, states):
    outcome = cut(shim, tmp_path, seed, mode, states, environment(broken_build, mutant), company, stop_at=1)
    proof("broken builds", f"power cut: {mutant.breaks} ({words(mode, company)})",
          **{"states until caught": outcome.states, "not caught": int(not outcome.caught)})
    assert len(outcome.caught) == len(outcome.bad), outcome.bad
    assert outcome.caught, f"an engine that {mutant.breaks} was not noticed in {outcome.states} states"
    print(outcome.caught[0])


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("company", IN_TURN, ids=with_company)
@pytest.mark.parametrize("mode", MAPPED)
def test_promised_data_survives_thousands_of_power_cuts(shim, tmp_path, seed, proof, mode, company):
    outcome = cut(shim, tmp_path, seed, mode, STATES_LONG, here(), company, enough=ACKS_LONG)
    proof("power cut", words(mode, company), states=outcome.states, records=outcome.records, acknowledged=outcome.acknowledged,
          bad=len(outcome.bad))
    assert outcome.bad == []


def test_help_takes_no_disk(tmp_path):
    (tmp_path / "unshare").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    environ = os.environ | {"PYTHON": sys.executable, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([SCRIPT, "--block", "--help"], env=environ, capture_output=True, text=True, timeout=scaled_timeout_s(120))
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: power_cut.sh --block" in done.stdout and "--file-system" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("broken", ["", "no-sync"])
def test_the_power_cut_script_reports_lost_data_only_of_a_broken_build(rng, broken):
    command = [SCRIPT, "--rounds", "1", "--states", "120", "--seed", str(rng.randrange(1 << 32)), "--no-peer", "--json"]
    done = subprocess.run(command + ["--broken", broken] * bool(broken), capture_output=True, text=True, timeout=scaled_timeout_s(280))
    print(done.stderr)
    summary = json.loads(done.stdout)
    assert (done.returncode, bool(summary["lost"])) == ((1, True) if broken else (0, False))
    assert summary["acknowledged"] >= ACKS and summary["checked"] > 0
