"""scripts/upgrade.sh: this version and another one take turns with a store."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
SCRIPT = CHECKOUT / "scripts" / "upgrade.sh"


def has(revision: str) -> bool:
    asked = ["git", "-C", CHECKOUT, "cat-file", "-e", f"{revision}^{{commit}}"]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("revision", ["a719f76", "HEAD~1"], ids=["last release", "the commit before"])
def test_another_version_and_this_one_take_turns(revision, tmp_path):
    if not has(revision):
        pytest.skip(f"the history of this checkout does not have {revision}")
    done = subprocess.run([SCRIPT, revision], cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("read back by both versions after each step\n")


def test_a_revision_that_is_not_there_is_named(tmp_path):
    done = subprocess.run([SCRIPT, "no-such-revision"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "no-such-revision" in done.stderr
