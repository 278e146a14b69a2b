"""The C module inside Python, built with AddressSanitizer and UndefinedBehaviorSanitizer.

A copy of the sources is built with PYENGINE_SANITIZE=address, and tests run there in a pytest of
their own, with the sanitizers' libraries loaded first and Python's own allocator off, so that every
buffer from Python is guarded too. Reports go to files: one from a worker whose death a test takes
in its stride counts as well. Leaks are not looked for: Python keeps what it likes until exit.
The C code alone, and its threads under TSan: tests/native/test_c_units.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from waiting import scaled_timeout_s

ROOT = Path(__file__).parents[1]
SOURCES = ("csrc", "pyengine", "workers", "pyspark_pyengine", "pyspark_pyengine_queue.py", "tests", "scripts", "docs", "setup.py",
           "pyproject.toml", "README.md")
NOT_SOURCES = shutil.ignore_patterns("__pycache__", "*.so", "*.o", "target", "_native.c")
COMPILER = os.environ.get("CC", "cc")
LIBRARIES = ("libasan.so", "libubsan.so")

# What runs programs of its own under sanitizers, dies of a fault on purpose, or starts a JVM, which lives on faults.
LEFT_OUT = [
    "--deselect=tests/native/test_c_units.py",
    "--deselect=tests/native/test_c_fuzz.py",
    "--deselect=tests/native/test_session_guard.py",
    "--deselect=tests/ipc/test_control_block.py::test_a_producer_cannot_write_the_control_block",
    "-m", "not java and not spark and not maven",
]
SHORT = ["tests/native", "tests/client/test_producer.py", "tests/client/test_front.py", "-k", "not kill"]
LONG = ["tests/native", "tests/storage", "tests/services", "tests/ipc", "tests/client/test_producer.py", "tests/client/test_front.py"]


def sanitizer_libraries() -> list[str]:
    """Paths of the compiler's sanitizer libraries; skips the test where there are none."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no C compiler called {COMPILER}")
    paths = []
    for library in LIBRARIES:
        asked = subprocess.run([COMPILER, f"-print-file-name={library}"], capture_output=True, text=True)
        path = Path(asked.stdout.strip())
        if asked.returncode or not path.is_absolute() or not path.exists():
            pytest.skip(f"this compiler has no {library}")
        paths.append(str(path.resolve()))
    return paths


# Half of a process's start and most of its memory: the stack of each allocation, and what is kept of freed memory.
LIGHT = "malloc_context_size=4:quarantine_size_mb=16"
# Loaded at the start of every Python process. libubsan's own log_path goes astray where libasan is
# loaded before it: the call that sets it lands in libasan.
SITE = """import ctypes
ctypes.CDLL({library!r}).__sanitizer_set_report_path({path!r})
"""


@dataclass(frozen=True)
class SanitizedTree:
    """A copy of the sources with a sanitized C module."""

    folder: Path
    reports: Path
    libraries: list[str]

    def run(self, *arguments: str, timeout_s: float, seed: int = 0) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "LD_PRELOAD": " ".join(self.libraries),
            "PYTHONMALLOC": "malloc",
            "PYTHONPATH": str(self.folder),
            "ASAN_OPTIONS": f"detect_leaks=0:{LIGHT}:log_path={self.reports}/address",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "PYENGINE_REQUIRE": "",
            "PYENGINE_LONG": "0",
            "PYENGINE_SEED": str(seed),
        }
        return subprocess.run(
            [sys.executable, *arguments], cwd=self.folder, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=scaled_timeout_s(timeout_s))

    def take_reports(self) -> str:
        """Return what the sanitizers wrote since the last call."""
        texts = []
        for path in sorted(self.reports.iterdir()):
            texts.append(f"{path.name}:\n{path.read_text(errors='replace')[:8000]}")
            path.unlink()
        return "\n".join(texts)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> SanitizedTree:
    libraries = sanitizer_libraries()
    folder = tmp_path_factory.mktemp("sanitized")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=NOT_SOURCES)
        else:
            shutil.copy2(ROOT / name, folder / name)
    reports = folder / "reports"
    reports.mkdir(mode=0o777)
    site = SITE.format(library=libraries[1], path=os.fsencode(reports / "undefined"))
    (folder / "sitecustomize.py").write_text(site)
    built = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=folder, text=True, timeout=scaled_timeout_s(240),
        env={**os.environ, "PYENGINE_SANITIZE": "address"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert built.returncode == 0, built.stdout
    return SanitizedTree(folder, reports, libraries)


@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "call"), [
    ("heap-buffer-overflow", "lib.ms_crc32(0, memory, len(memory) + 1000)"),
    ("misaligned address", "lib.ms_columns_fill(ffi.cast('struct ms_record *', memory + 1), 1, "
                           "ffi.new('struct ms_column *', {'kind': lib.MS_COLUMN_SYS_FLAG, 'data': memory}), 1)"),
])
def test_the_sanitizers_are_awake(tree, kind, call):
    """A read beyond its buffer, and one from an unaligned address, end the process with a report."""
    code = f"from pyengine._native import ffi, lib; memory = ffi.new('uint8_t[4096]'); {call}"
    run = tree.run("-c", code, timeout_s=60)
    assert run.returncode != 0
    assert kind in tree.take_reports()


def run_tests(tree: SanitizedTree, chosen: list[str], seed: int, timeout_s: float) -> None:
    command = ["-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *LEFT_OUT, *chosen]
    run = tree.run(*command, timeout_s=timeout_s, seed=seed)
    reports = tree.take_reports()
    assert reports == "", reports
    assert run.returncode == 0, run.stdout[-20_000:]
    assert " passed" in run.stdout.splitlines()[-1], run.stdout[-2000:]


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_the_c_module_is_clean_under_sanitizers(tree, rng):
    run_tests(tree, SHORT, rng.randrange(1 << 32), timeout_s=560)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_all_that_uses_the_c_module_is_clean_under_sanitizers(tree, rng):
    run_tests(tree, LONG, rng.randrange(1 << 32), timeout_s=2300)
