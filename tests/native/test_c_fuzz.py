"""The C parsers under ASan and UBSan, on the corpus of csrc/fuzz and mutations of it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FUZZ = Path(__file__).parents[2] / "csrc" / "fuzz"
COMPILER = os.environ.get("CC", "cc")
RUNS_LONG = int(os.environ.get("PYENGINE_FUZZ_RUNS", "500000"))
TARGETS = sorted(path.stem for path in FUZZ.glob("fuzz_*.c"))


@pytest.fixture(scope="module")
def build(tmp_path_factory) -> Path:
    """A folder for the compiled sources, which all tests of this module share."""
    return tmp_path_factory.mktemp("fuzz-build")


def fuzz(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no C compiler called {COMPILER}")
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    built = subprocess.run([COMPILER, "-fsanitize=address,undefined", "-o", folder / "probe", probe], capture_output=True)
    if built.returncode != 0 or subprocess.run([folder / "probe"], capture_output=True).returncode != 0:
        pytest.skip("programs of this compiler do not run with -fsanitize=address,undefined")
    return subprocess.run([FUZZ / "run.sh", *map(str, arguments)], capture_output=True, text=True,
                          env={**os.environ, "TMPDIR": str(folder)})


@pytest.mark.ci
def test_no_parser_has_an_error_on_hostile_bytes(tmp_path, rng, build):
    done = fuzz("--build", build, "--runs", 3000, "--seed", rng.randrange(1 << 31), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.removeprefix("passed: ") for line in done.stdout.splitlines() if line.startswith("passed")] == TARGETS


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_parser_has_an_error_on_two_million_hostile_inputs(tmp_path, rng, proof):
    done = fuzz("--runs", RUNS_LONG, "--seed", rng.randrange(1 << 31), folder=tmp_path)
    passed = sum(line.startswith("passed") for line in done.stdout.splitlines())
    proof("fuzz", "C parsers, ASan and UBSan", held=done.returncode == 0, targets=passed, inputs=passed * RUNS_LONG,
          bad=int(done.returncode != 0))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.ci
def test_a_planted_overread_is_found_and_its_input_kept(tmp_path, build):
    done = fuzz("--build", build, "--planted-bug", "--runs", 20000, "--seed", 1, "fuzz_scan", folder=tmp_path)
    assert done.returncode == 1 and "failed: fuzz_scan" in done.stderr, done.stdout + done.stderr
    (kept,) = tmp_path.glob("fuzz_scan-*")
    assert kept.stat().st_size > 0


def test_each_target_has_a_corpus():
    assert sorted(f"fuzz_{path.name}" for path in (FUZZ / "corpus").iterdir() if any(path.iterdir())) == TARGETS
