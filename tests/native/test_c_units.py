"""The C tests (csrc/tests): plain, under ASan and UBSan, and the stress tests under TSan; and without those, on 64-bit ARM.

TSan sees threads only, so the stress tests let threads play the processes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fix_golden import usual

FOLDER = Path(__file__).parents[2] / "csrc" / "tests"
COMPILER = os.environ.get("CC", "cc")


SANITIZERS = {"plain": None, "sanitize": "address,undefined", "thread": "thread"}


def sanitizers_work(sanitizers: str, folder: Path) -> bool:
    """Some compilers come without the sanitizers' libraries, and TSan dislikes some kernels' address layouts."""
    source, program = folder / "probe.c", folder / "probe"
    source.write_text("int main(void) { return 0; }\n")
    built = subprocess.run([COMPILER, f"-fsanitize={sanitizers}", "-o", program, source], capture_output=True)
    return built.returncode == 0 and subprocess.run([program], capture_output=True).returncode == 0


@pytest.mark.parametrize("flavour", usual(SANITIZERS, ["plain"], pytest.mark.ci))
def test_c_units(flavour, tmp_path, rng):
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no C compiler called {COMPILER}")
    sanitizers = SANITIZERS[flavour]
    if sanitizers and not sanitizers_work(sanitizers, tmp_path):
        pytest.skip(f"programs of this compiler do not run with -fsanitize={sanitizers}")
    environment = {**os.environ, "CHECK_SEED": str(rng.randrange(1 << 48))}
    run = subprocess.run([FOLDER / "run.sh", f"--{flavour}"], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"passed: {flavour}" in run.stdout


@pytest.mark.arm
def test_c_units_on_arm(rng):
    environment = {**os.environ, "CHECK_SEED": str(rng.randrange(1 << 48)), "CC": "aarch64-linux-gnu-gcc",
                   "RUN": "qemu-aarch64 -L /usr/aarch64-linux-gnu"}
    tests = sorted(path.stem for path in FOLDER.glob("test_*.c"))
    run = subprocess.run([FOLDER / "run.sh", "--plain", *tests], capture_output=True, text=True, env=environment)
    assert run.returncode == 0 and "passed: plain" in run.stdout, run.stdout + run.stderr
