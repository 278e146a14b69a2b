"""The crash rounds notice a writer that is broken on purpose. (What only a power cut shows: test_engine_power_cut.py.)"""

from __future__ import annotations

import subprocess
import sys

import pytest

from faults.mutants import SEEN_BY_KILLS, environment

TURNS = 6
ROUNDS = 4
ROUNDS_LONG = 12
COMPLAINTS = ("LOST", "WRONG", "DOUBLED", "HANG", "queue ends", "was due", "pyengine check")


def rounds(broken_build, mutant, tmp_path, rng, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "crash.rounds", "writer", "--mode", "async", "--seed", str(rng.randrange(1 << 32)),
               "--no-peer", *options]
    done = subprocess.run(command, cwd=tmp_path, env=environment(broken_build, mutant) | {"TMPDIR": str(tmp_path)},
                          capture_output=True, text=True, timeout=280)
    print(done.stdout, done.stderr[-2000:])
    return done


@pytest.mark.parametrize("mutant", SEEN_BY_KILLS, ids=lambda mutant: mutant.switch)
def test_a_broken_writer_is_caught(broken_build, mutant, tmp_path, rng):
    for _ in range(TURNS):
        done = rounds(broken_build, mutant, tmp_path, rng, "--rounds", str(ROUNDS), "--aim", "1")
        if done.returncode != 0:
            break
    assert done.returncode == 1, f"not noticed in {TURNS * ROUNDS} rounds"
    assert any(word in done.stderr for word in COMPLAINTS)


def test_the_same_build_with_nothing_broken_holds(broken_build, tmp_path, rng):
    assert rounds(broken_build, None, tmp_path, rng, "--rounds", "2", "--aim", "1").returncode == 0


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mutant", SEEN_BY_KILLS, ids=lambda mutant: mutant.switch)
def test_a_broken_writer_is_caught_by_kills_at_any_moment(broken_build, mutant, tmp_path, rng, proof):
    """Not aimed: as the crash scripts kill by default."""
    for turn in range(TURNS):
        done = rounds(broken_build, mutant, tmp_path, rng, "--rounds", str(ROUNDS_LONG))
        if done.returncode != 0:
            break
    proof("broken builds", f"kills: {mutant.name}", **{"turns until caught": turn + 1, "not caught": int(done.returncode == 0)})
    assert done.returncode == 1, f"not noticed in {TURNS * ROUNDS_LONG} rounds"
