"""The crash rounds notice a writer that is broken on purpose. (What only a power cut shows: test_engine_power_cut.py.)"""

from __future__ import annotations

import subprocess
import sys

import pytest

from faults.mutants import ANSWERS_EARLY, FORGETS_UNDO, build, environment

TURNS = 5
ROUNDS = 12


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mutant", [ANSWERS_EARLY, FORGETS_UNDO], ids=lambda mutant: mutant.name)
def test_a_broken_writer_is_caught(mutant, tmp_path, rng):
    root = build(mutant, tmp_path)
    for turn in range(TURNS):
        command = [sys.executable, "-P", "-m", "crash.rounds", "writer", "--mode", "async", "--rounds", str(ROUNDS)]
        command += ["--seed", str(rng.randrange(1 << 32))]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment(root) | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=280
        )
        print(done.stderr[-2000:])
        if done.returncode != 0:
            break
    assert done.returncode == 1, f"not noticed in {TURNS * ROUNDS} rounds"
    assert any(word in done.stderr for word in ("LOST", "WRONG", "DOUBLED", "HANG", "queue ends", "was due", "pyengine check"))
