"""Every row of the table of mutants (mutants/) fits the sources, and the tests that it names notice it.

A writer that is broken on purpose is noticed by the crash rounds, too. (What only a power cut shows:
test_engine_power_cut.py.)
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from faults.mutants import CHECKOUT, SEEN_BY_KILLS, SWITCHED, TABLE, Mutant, Tree, environment
from waiting import scaled_timeout_s

KILLED = [mutant for mutant in TABLE.values() if mutant.killed_by and mutant not in SWITCHED]

TURNS = 6
ROUNDS = 4
ROUNDS_LONG = 12
COMPLAINTS = ("LOST", "WRONG", "DOUBLED", "HANG", "queue ends", "was due", "pyengine check")


def test_each_mutant_fits_its_file():
    """A row whose text is gone no longer tests anything: it is adapted when the code moves."""
    gone = []
    for mutant in TABLE.values():
        try:
            assert mutant.broken((CHECKOUT / mutant.file).read_text()) != ""
        except (AssertionError, OSError) as error:
            gone.append(str(error))
    assert gone == []


def test_each_mutant_names_tests_that_exist_or_says_why_none_can_notice():
    wrong = []
    for mutant in TABLE.values():
        if bool(mutant.killed_by) == bool(mutant.equivalent):
            wrong.append(f"{mutant.id}: neither or both of killed_by and equivalent")
        for test in mutant.killed_by:
            file, _, name = test.partition("::")
            path = CHECKOUT / file
            if not path.exists() or f"def {name.partition('[')[0]}(" not in path.read_text():
                wrong.append(f"{mutant.id}: there is no test {test}")
    assert wrong == []


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return Tree(tmp_path_factory.mktemp("mutants"))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_tests_that_kill_mutants_pass_without_one(tree, proof):
    done = tree.run(None, tuple(sorted({test for mutant in KILLED for test in mutant.killed_by})))
    proof("mutants", "none", held=done.returncode == 0, equivalent=len(TABLE) - len(KILLED) - len(SWITCHED))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.long
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("mutant", KILLED, ids=lambda mutant: f"{mutant.id}-")
def test_a_mutant_is_killed(tree, proof, mutant: Mutant):
    code = tree.run(mutant, mutant.killed_by).returncode
    is_killed = code == 1 or code < 0 or code > 128  # a test failed, or the mutant ended pytest itself by a signal
    proof("mutants", mutant.id, killed=int(is_killed), **{"not caught": int(not is_killed)})
    assert is_killed, f"{mutant.file}: {mutant.breaks}: not noticed by {' '.join(mutant.killed_by)} (rc {code})"


def rounds(broken_build, mutant, tmp_path, rng, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "crash.kills", "writer", "--mode", "async", "--seed", str(rng.randrange(1 << 32)),
               "--no-peer", *options]
    done = subprocess.run(command, cwd=tmp_path, env=environment(broken_build, mutant) | {"TMPDIR": str(tmp_path)},
                          capture_output=True, text=True, timeout=scaled_timeout_s(280))
    print(done.stdout, done.stderr[-2000:])
    return done


@pytest.mark.ci
@pytest.mark.parametrize("mutant", SEEN_BY_KILLS, ids=lambda mutant: mutant.id)
def test_a_broken_writer_is_caught(broken_build, mutant, tmp_path, rng):
    for _ in range(TURNS):
        done = rounds(broken_build, mutant, tmp_path, rng, "--rounds", str(ROUNDS), "--aim", "1")
        if done.returncode != 0:
            break
    assert done.returncode == 1, f"not noticed in {TURNS * ROUNDS} rounds"
    assert any(word in done.stderr for word in COMPLAINTS)


@pytest.mark.ci
def test_the_same_build_with_nothing_broken_holds(broken_build, tmp_path, rng):
    assert rounds(broken_build, None, tmp_path, rng, "--rounds", "2", "--aim", "1").returncode == 0


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mutant", SEEN_BY_KILLS, ids=lambda mutant: mutant.id)
def test_a_broken_writer_is_caught_by_kills_at_any_moment(broken_build, mutant, tmp_path, rng, proof):
    """Not aimed: as the crash scripts kill by default."""
    for turn in range(TURNS):
        done = rounds(broken_build, mutant, tmp_path, rng, "--rounds", str(ROUNDS_LONG))
        if done.returncode != 0:
            break
    proof("broken builds", f"kills: {mutant.breaks}", **{"turns until caught": turn + 1, "not caught": int(done.returncode == 0)})
    assert done.returncode == 1, f"not noticed in {TURNS * ROUNDS_LONG} rounds"
