"""scripts/test runs what failed beside others once more, alone, and hides nothing of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
PASSES = "def test_passes(): pass\n"
FAILS_BESIDE_OTHERS = "import os\ndef test_beside(): assert 'PYTEST_XDIST_WORKER' not in os.environ, 'beside others'\n"
FAILS = "def test_fails(): assert False, 'broken'\n"
SIX_FAIL_BESIDE_OTHERS = """import os, pytest
@pytest.mark.parametrize('n', range(6))
def test_six(n): assert 'PYTEST_XDIST_WORKER' not in os.environ
"""


def scripts_test(folder: Path, tests: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs scripts/test over `tests` (file name -> text) in a checkout of its own whose environment is this one."""
    (folder / "scripts").mkdir(parents=True)
    (folder / "tests").mkdir()
    shutil.copy(SCRIPTS / "test", folder / "scripts/test")
    (folder / "scripts/environment.sh").write_text(
        f"checkout='{folder}'\nnote() {{ printf '%s\\n' \"$*\" >&2; }}\nuse_environment() {{ PYTHON='{sys.executable}'; }}\n"
    )
    (folder / "scripts/java_home.sh").write_text("use_java() { :; }\n")
    (folder / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    for name, text in tests.items():
        (folder / "tests" / name).write_text(text)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    return subprocess.run(["bash", str(folder / "scripts/test"), *arguments], env=environ, capture_output=True, text=True, timeout=200)


@pytest.mark.ci
def test_a_test_that_passes_alone_is_named_and_its_failure_shown(tmp_path):
    done = scripts_test(tmp_path / "a b", {"test_a.py": PASSES, "test_b.py": FAILS_BESIDE_OTHERS})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "AssertionError: beside others" in done.stdout
    assert done.stderr.splitlines()[-2:] == [
        "passed alone, after they had failed beside others (above is how); mend them:",
        "tests/test_b.py::test_beside",
    ]


@pytest.mark.ci
def test_a_test_that_fails_alone_too_fails_the_run(tmp_path):
    done = scripts_test(tmp_path / "tree", {"test_b.py": FAILS_BESIDE_OTHERS, "test_c.py": FAILS})
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
    assert "passed alone" not in done.stderr


@pytest.mark.ci
@pytest.mark.parametrize(
    ("tests", "arguments"),
    [({"test_d.py": SIX_FAIL_BESIDE_OTHERS}, []), ({"test_c.py": FAILS}, ["-n", "0"]), ({"test_c.py": FAILS}, ["tests/test_c.py"])],
    ids=["more-than-five", "one-by-one", "named"],
)
def test_failures_are_not_run_again_if_more_than_five_or_one_by_one_or_named(tmp_path, tests, arguments):
    folder = tmp_path / "tree"
    done = scripts_test(folder, tests, *[str(folder / a) if a.startswith("tests") else a for a in arguments])
    assert done.returncode == 1
    assert "alone" not in done.stderr


@pytest.mark.ci
def test_a_green_run_has_the_closing_line_alone(tmp_path):
    done = scripts_test(tmp_path / "tree", {"test_a.py": PASSES})
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 passed" in done.stdout.splitlines()[-1]
