"""The test run itself: what is missing is said, and a required need cannot be skipped."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from needs import NEEDS

HERE = Path(__file__).parent

INI = """
[pytest]
pythonpath = tests
addopts = --import-mode=importlib
markers =
    java
    spark
    ci
    long
"""

SAMPLE = """
import pytest

@pytest.mark.java
def test_with_java(): pass

@pytest.mark.long
def test_long(): pass

@pytest.mark.ci
def test_of_ci(): pass

def test_plain(rng): assert rng.random() < 1

@pytest.mark.spark
def test_inner(monkeypatch): pytest.skip("the inner reason")
"""


@pytest.fixture
def run_sample(tmp_path, monkeypatch):
    """Runs the sample tests under this project's own conftest; gives exit code and output."""
    (tmp_path / "tests").mkdir()
    for name in ("conftest.py", "fix_at_once.py", "needs.py", "waiting.py"):
        shutil.copy(HERE / name, tmp_path / "tests" / name)
    (tmp_path / "pytest.ini").write_text(INI)
    (tmp_path / "tests" / "test_sample.py").write_text(SAMPLE)

    def run(*arguments: str, java: int | None = None, **environ: str) -> tuple[int, str]:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        if java is not None:
            fake = folder / "java"
            fake.write_text(f"#!/bin/sh\necho 'openjdk version \"{java}.0.1\"' >&2\n")
            fake.chmod(0o755)
        kept = {k: v for k, v in os.environ.items() if k not in ("JAVA_HOME", "PYENGINE_REQUIRE", "PYENGINE_LONG")}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "pytest_timeout", "-v", *arguments],
            cwd=tmp_path,
            env={**kept, "PATH": str(folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environ},
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stdout + done.stderr

    return run


def test_tests_left_out_are_counted_by_reason_in_the_table(run_sample):
    code, output = run_sample()
    assert code == 0
    table = output.split(" left out ")[1]
    assert "1  java: no Java was found (JAVA_HOME, PATH)" in table
    assert "1  long: runs with --long or PYENGINE_LONG=1" in table
    assert "1  ci: runs with --ci, as .ci/run does, or --long" in table
    assert "1 passed, 4 skipped" in output.splitlines()[-1]


def test_a_required_need_that_is_absent_fails(run_sample):
    code, output = run_sample(PYENGINE_REQUIRE="java")
    assert code == 1
    assert "left out although PYENGINE_REQUIRE names java: java: no Java was found" in output


def test_a_skip_from_inside_a_test_fails_too_when_its_need_is_required(run_sample):
    code, output = run_sample("-k", "inner", java=21, PYENGINE_REQUIRE="spark")
    assert code == 1
    assert "left out although PYENGINE_REQUIRE names spark" in output


def test_an_old_java_is_no_java(run_sample):
    code, output = run_sample("-k", "with_java", java=11)
    assert code == 0
    assert "java: Java 11 is older than 17" in output


@pytest.mark.parametrize("how", [["--long"], {"PYENGINE_LONG": "1"}, {"PYENGINE_REQUIRE": "long"}])
def test_long_forms_run_when_asked_for(run_sample, how):
    arguments, environ = (how, {}) if isinstance(how, list) else ([], how)
    code, output = run_sample("-k", "test_long", *arguments, **environ)
    assert code == 0
    assert "nothing: every selected test ran" in output


@pytest.mark.parametrize("how", [["--ci"], ["--long"], {"PYENGINE_REQUIRE": "ci"}])
def test_a_ci_test_runs_with_ci_with_long_or_if_required(run_sample, how):
    arguments, environ = (how, {}) if isinstance(how, list) else ([], how)
    code, output = run_sample("-k", "test_of_ci", *arguments, **environ)
    assert code == 0
    assert "nothing: every selected test ran" in output


def test_an_unknown_need_is_a_usage_error(run_sample):
    code, output = run_sample(PYENGINE_REQUIRE="javva")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "PYENGINE_REQUIRE names javva; known are java, maven" in output


@pytest.fixture
def ci_requires(tmp_path):
    """What `.ci/run` requires, in a copy of the project without an environment; `first` goes before PATH."""
    pytest.importorskip("ensurepip", reason="the environment's Python must be able to make it")
    for name in (".ci/run", "scripts/environment.sh", "tests/needs.py", "tests/faults/loop_device.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(HERE.parent / name, tmp_path / name)
    for name, text in (("lint", ""), ("test", 'echo "$PYENGINE_REQUIRE"\n')):
        runner = tmp_path / "scripts" / name
        runner.write_text(f"#!/bin/sh\n{text}")
        runner.chmod(0o755)

    def run(first: Path = tmp_path) -> set[str]:
        kept = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "PYENGINE_REQUIRE")}
        done = subprocess.run([tmp_path / ".ci" / "run"], capture_output=True, text=True, timeout=120,
                              env=kept | {"PATH": f"{first}:{os.environ['PATH']}", "PYENGINE_PYTHON": sys.executable})
        assert done.returncode == 0, done.stderr
        return set(done.stdout.strip().split(","))

    return run


def test_the_whole_check_requires_what_is_there_and_nothing_else(ci_requires, tmp_path):
    there = {name for name in ("maven", "root", "block") if NEEDS[name].absent() is None}
    assert ci_requires() == {"java", "spark"} | there
    folder = tmp_path / "refusing"
    folder.mkdir()
    (folder / "unshare").write_text("#!/bin/sh\nexit 1\n")
    (folder / "unshare").chmod(0o755)
    assert ci_requires(folder) == {"java", "spark"} | there - {"block"}


def test_the_seed_is_printed_and_repeats(run_sample):
    _, output = run_sample(PYENGINE_SEED="12345")
    assert "seed: 12345 (PYENGINE_SEED=12345 repeats it)" in output


def test_a_run_at_once_keeps_the_tests_of_a_file_in_one_process(run_sample):
    _, output = run_sample("-p", "xdist.plugin", "-n", "2")
    places = re.findall(r"^\[(gw\d)\].* tests/test_sample", output, re.M)
    assert len(places) == 5 and len(set(places)) == 1
