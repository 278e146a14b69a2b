"""Each crash script in its short form: something was killed, something acknowledged, nothing lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
KINDS = ("writer", "flusher", "committer", "reputter", "allocator", "checkpointer", "cleaner", "replicator", "supervisor", "producer",
         "everything")
SHORT = [(kind, "pool" if kind == "committer" else "async") for kind in KINDS if kind != "replicator"] + [
    ("writer", "sync"), ("writer", "pool"), ("flusher", "sync"), ("everything", "sync"), ("everything", "pool"),
]  # fmt: skip
LONG_ROUNDS = 60


def run_script(kind: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPTS / f"crash_{kind}.sh", *arguments],
        env=os.environ | {"PYTHON": sys.executable} | environ,
        capture_output=True,
        text=True,
        timeout=900,
    )


def held(kind: str, mode: str, rounds: int, seed: int) -> None:
    done = run_script(kind, "--mode", mode, "--rounds", str(rounds), "--seed", str(seed), "--json")
    print(done.stderr, done.stdout)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["rounds"], summary["lost"], summary["failures"]) == (rounds, 0, [])
    assert summary["kills"] >= rounds and summary["acknowledged"] > 0
    if (kind, mode) == ("everything", "pool"):
        assert summary["undrained_bytes"] > 0
    assert f"seed={seed}" in done.stderr


@pytest.mark.parametrize("kind, mode", SHORT)
def test_nothing_acknowledged_is_lost(kind, mode, rng):
    held(kind, mode, 2, rng.randrange(1 << 32))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["async", "pool", "sync"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_acknowledged_is_lost_in_many_rounds(kind, mode, rng):
    if kind == "committer" and mode != "pool":
        pytest.skip("a committer runs in pool mode only")
    held(kind, mode, LONG_ROUNDS, rng.randrange(1 << 32))


def test_wrong_arguments_are_explained():
    assert "invalid choice: 'mapped'" in run_script("writer", "--mode", "mapped").stderr
    assert "a committer runs in mode pool only" in run_script("committer", "--mode", "sync").stderr
