"""The C tests (csrc/tests): plain, and under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "csrc" / "tests"
COMPILER = os.environ.get("CC", "cc")


def sanitizers_link(folder: Path) -> bool:
    """Some compilers come without the sanitizers' libraries."""
    source = folder / "probe.c"
    source.write_text("int main(void) { return 0; }\n")
    flags = ["-fsanitize=address,undefined", "-o", str(folder / "probe")]
    return subprocess.run([COMPILER, *flags, str(source)], capture_output=True).returncode == 0


@pytest.mark.parametrize("flavour", ["plain", "sanitize"])
def test_c_units(flavour, tmp_path, rng):
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no C compiler called {COMPILER}")
    if flavour == "sanitize" and not sanitizers_link(tmp_path):
        pytest.skip("this compiler has no address sanitizer")
    environment = {**os.environ, "CHECK_SEED": str(rng.randrange(1 << 48))}
    run = subprocess.run([FOLDER / "run.sh", f"--{flavour}"], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"passed: {flavour}" in run.stdout
