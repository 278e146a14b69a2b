"""Power cuts under a running engine on a real file system: what was promised is in every state (block_power_cut.py)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

from faults.block_power_cut import cut
from faults.engine_power_cut import ACKS, COMPANY, here, words
from faults.logged_disk import build_server
from faults.mounts import with_own_mounts
from faults.mutants import FORGETS_TIMED_SYNC, NEVER_SYNCS, PUBLISHES_BEFORE_SYNC, Mutant, environment
from pyengine.cli.replay import MODES
from waiting import eventually

STATES = 10
ENOUGH = 60
TURNS = 5
STATES_LONG = int(os.environ.get("PYENGINE_STATES", "500"))
SCRIPT = Path(__file__).parents[2] / "scripts" / "power_cut.sh"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build_server(tmp_path_factory.mktemp("server"))


@pytest.mark.block
def test_what_was_promised_is_on_the_disk(program, tmp_path, seed, rng):
    """In one of the modes; in the long form in all."""
    outcome = with_own_mounts(cut, program, tmp_path, seed, rng.choice(list(MODES)), STATES, here(), enough=ENOUGH)
    assert (outcome.bad, outcome.states) == ([], STATES)
    assert outcome.acknowledged >= ENOUGH


@pytest.mark.long
@pytest.mark.block
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("company", [(), COMPANY], ids=("alone", "in company"))
@pytest.mark.parametrize("mode", MODES)
def test_what_was_promised_is_on_the_disk_in_many_states(program, tmp_path, seed, proof, mode, company):
    outcome = with_own_mounts(cut, program, tmp_path, seed, mode, STATES_LONG, here(), company, enough=4 * ACKS)
    proof("power cut, blocks", words(mode, company), states=outcome.states, records=outcome.records, acknowledged=outcome.acknowledged,
          checked=outcome.checked, bad=len(outcome.bad))
    assert outcome.bad == []


@pytest.mark.long
@pytest.mark.block
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "mutant, mode",
    [(NEVER_SYNCS, "sync"), (PUBLISHES_BEFORE_SYNC, "sync"), (FORGETS_TIMED_SYNC, "async"), (FORGETS_TIMED_SYNC, "pool")],
    ids=lambda of: getattr(of, "switch", str(of)),
)
def test_a_broken_engine_is_caught_on_the_disk(program, broken_build, tmp_path, seed, proof, mutant: Mutant, mode: str):
    states = 0
    for turn in range(TURNS):  # in some runs the kernel happens to write back soon what is not synced
        folder = tmp_path / str(turn)
        folder.mkdir()
        outcome = with_own_mounts(cut, program, folder, f"{seed}/{turn}", mode, 300, environment(broken_build, mutant), stop_at=1)
        states += outcome.states
        assert len(outcome.caught) == len(outcome.bad), outcome.bad
        if outcome.caught:
            break
    proof("broken builds", f"power cut, blocks: {mutant.name} ({mode})",
          **{"states until caught": states, "not caught": int(not outcome.caught)})
    assert outcome.caught, f"an engine that {mutant.name} was not noticed in {states} states"
    print(outcome.caught[0])


@pytest.mark.long
@pytest.mark.block
@pytest.mark.parametrize("broken", ["", "no-sync"])
def test_the_script_says_what_it_did_to_the_disk(rng, broken):
    command = [SCRIPT, "--block", "--states", "60", "--seed", str(rng.randrange(1 << 32)), "--no-peer", "--json"]
    done = subprocess.run(command + ["--broken", broken] * bool(broken), capture_output=True, text=True, timeout=280,
                          env=os.environ | {"PYTHON": sys.executable})
    print(done.stderr)
    summary = json.loads(done.stdout)
    assert (done.returncode, bool(summary["lost"])) == ((1, True) if broken else (0, False))
    assert summary["acknowledged"] >= ACKS and (broken or summary["checked"] > 0)


@pytest.mark.long
@pytest.mark.block
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment, processes", [("workers.flusher", 3), ("crash.acked_producer", 9)])
def test_a_run_that_is_ended_leaves_no_disk_and_no_process(tmp_path, number, moment, processes):
    """While its engine starts, and while messages are put."""
    environ = os.environ | {"PYTHON": sys.executable, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([SCRIPT, "--block", "--no-peer"], env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                          start_new_session=True) as script:
        try:
            (server,) = eventually(lambda: processes_with("/journal", psutil.Process(script.pid).children()), "a disk is there")
            folder = os.path.dirname(server.cmdline()[1])

            def mine() -> list[psutil.Process]:  # with the engine, which belongs to itself
                return processes_with(folder, psutil.process_iter())

            eventually(lambda: processes_with(moment, mine()), "it has come so far")
            seen = mine()
        finally:
            os.killpg(script.pid, number)
        assert script.wait(60) == 130
    assert len(seen) >= processes
    eventually(lambda: not mine(), "all have ended")


def processes_with(text: str, among: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that have it in their arguments."""
    found = []
    for process in among:
        with contextlib.suppress(psutil.Error):
            if any(text in word for word in process.cmdline()):
                found.append(process)
    return found


def test_who_may_not_mount_is_told(tmp_path):
    (tmp_path / "unshare").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    done = subprocess.run([sys.executable, "-P", "-m", "faults.block_power_cut"], capture_output=True, text=True, timeout=120,
                          env=here() | {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert done.returncode == 2 and done.stderr.startswith("no disk that writes down what reaches it can be made here: ")
