"""A writer is killed at each of its steps, and its successor executes every entry exactly once and in order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from crash.steps import FAILPOINTS
from faults.mutants import FORGETS_UNDO, Mutant, environment
from fix_golden import usual

TESTS = Path(__file__).parents[1]
RARE = {"light_queue_advanced", "session_accused", "session_closed", "queue_table_copying", "freeze_claimed", "freeze_numbered",
        "freeze_reasoned", "freeze_stated", "freeze_complete"}
ALWAYS = {"pass_record_appended", "commit_slot_filled", "commit_point", "rollback_undo_closed", "record_head_encoded"}


def run(broken_build: Path, module: str, *arguments: object, mutant: Mutant | None = None) -> subprocess.CompletedProcess[str]:
    environ = environment(broken_build, mutant)
    environ["PYTHONPATH"] += f":{TESTS}"
    done = subprocess.run([sys.executable, "-P", "-m", module, *map(str, arguments)], env=environ, capture_output=True,
                          text=True, timeout=550)
    print(done.stdout, done.stderr[-3000:])
    return done


def steps(mode: str) -> set[str]:
    from faults.writer_failpoints import steps

    return {point.name for point in steps(mode)}


@pytest.mark.parametrize("mode", usual(["async", "gathered", "sync"], ["sync"], pytest.mark.ci))
def test_each_step_of_a_pass_survives_a_kill(broken_build, mode):
    done = run(broken_build, "faults.writer_failpoints", mode, 2)
    assert done.returncode == 0
    struck = set(json.loads(done.stdout))
    # A writer that always has work does not arm its latch.
    assert steps(mode) - {"latch_arming", "latch_armed", "latch_sleeping"} <= struck <= steps(mode) and struck >= ALWAYS


def test_the_rare_steps_survive_a_kill(broken_build):
    done = run(broken_build, "faults.rare_failpoints")
    assert done.returncode == 0 and set(json.loads(done.stdout)) == RARE <= set(FAILPOINTS)


def test_a_body_that_changes_under_its_copy_is_stored_with_its_own_checksum(broken_build):
    assert run(broken_build, "faults.changed_body").returncode == 0


def test_a_successor_that_forgets_the_undo_list_is_caught(broken_build):
    done = run(broken_build, "faults.writer_failpoints", "async", 1, "pass_queue_advanced", mutant=FORGETS_UNDO)
    assert done.returncode == 1 and "AssertionError" in done.stderr


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_each_passing_of_each_step_survives_a_kill(broken_build, mode, proof):
    done = run(broken_build, "faults.writer_failpoints", mode, 100)
    struck = json.loads(done.stdout) if done.returncode == 0 else {}
    proof("kills", f"a writer alone, at each passing of each step, {mode}", held=done.returncode == 0, steps=len(struck),
          kills=sum(struck.values()))
    assert done.returncode == 0 and sum(struck.values()) > 500
