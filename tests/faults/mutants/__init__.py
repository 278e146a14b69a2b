"""Deliberately broken builds: the project with one line changed, to see that the tests notice.

The *.toml files beside this one are the table, a section for each mutant:

    [id]
    breaks = 'what it does wrong'
    file = 'csrc/writer.c'
    old = 'text that occurs exactly once in the file'
    new = 'what replaces it'
    killed_by = ['tests/native/test_writer.py::test_name']   or   equivalent = 'why no test can tell'

Their texts are compared with the sources by each run (test_mutants.py), which fails for a mutant whose text is gone:
adapt the row to the code. `scripts/test --long tests/faults/test_mutants.py -k mutant_is_killed` tries each, alone in a
copy of the checkout (`Tree`), in which the tests of `killed_by` must fail.

Those with BROKEN in `new` (switched.toml, without_polls.toml) are all in one build, whose processes read from the
environment variable PYENGINE_BROKEN which of them are on. Kills and power cuts search that build for hours (`build`,
`environment`). It has the failpoints of the C code too (scripts/crash/steps.py); without the variable it is sound.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).parents[3]
COPIED = ("csrc", "pyengine", "workers", "scripts", "setup.py", "pyproject.toml")
NOT_SOURCES = shutil.ignore_patterns("__pycache__", "*.so", "*.o", ".*", "target", "build", "*.egg-info")
SWITCH = "PYENGINE_BROKEN"
KILL_TIMEOUT_S = 900
TEST_TIMEOUT_S = 150  # a mutant for which a test waits for ever is noticed, too


@dataclass(frozen=True)
class Mutant:
    """One row of the table."""

    id: str
    breaks: str
    file: str
    old: str
    new: str
    killed_by: tuple[str, ...] = ()
    equivalent: str = ""

    @property
    def is_c(self) -> bool:
        return self.file.endswith((".c", ".h"))

    @property
    def is_switched(self) -> bool:
        return "BROKEN" in self.new

    def broken(self, text: str, is_on: str = "") -> str:
        """The file's text with this mutant in it. AssertionError: its `old` is not there exactly once."""
        if text.count(self.old) != 1:
            raise AssertionError(f"mutant {self.id} ({self.breaks}) does not fit {self.file} any more, its text occurs "
                                 f"{text.count(self.old)} times: adapt its row in tests/faults/mutants")
        return text.replace(self.old, self.new.replace("BROKEN", is_on))


def _table() -> dict[str, Mutant]:
    rows: dict[str, Mutant] = {}
    for path in sorted(Path(__file__).parent.glob("*.toml")):
        for name, row in tomllib.loads(path.read_text()).items():
            if name in rows:
                raise ValueError(f"{path.name}: there is another mutant {name}")
            rows[name] = Mutant(name, **row | {"killed_by": tuple(row.get("killed_by", ()))})
    return rows


TABLE = _table()
ANSWERS_EARLY = TABLE["early-answer"]
FORGETS_UNDO = TABLE["no-undo"]
NEVER_SYNCS = TABLE["no-sync"]
PUBLISHES_BEFORE_SYNC = TABLE["early-flushed"]
FORGETS_FOLDER = TABLE["no-folder-sync"]
FORGETS_TIMED_SYNC = TABLE["no-timed-sync"]
NOTES_EARLY = TABLE["early-note"]
FORGETS_REMOVED = TABLE["no-removal-sync"]
COMMITS_UNSYNCED = TABLE["no-commit-sync"]
FORGETS_RECOVERY_SYNC = TABLE["no-recovery-sync"]
CLAIMS_UNSYNCED = TABLE["no-reader-sync"]
SWITCHED = tuple(mutant for mutant in TABLE.values() if mutant.is_switched)
SEEN_BY_KILLS = (ANSWERS_EARLY, FORGETS_UNDO)
WITHOUT_POLLS = (TABLE["no-poll-latch"], TABLE["no-poll-futex"])
SEEN_BY_POWER_CUTS = tuple(mutant for mutant in SWITCHED if mutant not in (*SEEN_BY_KILLS, *WITHOUT_POLLS))


class Tree:
    """A copy of the checkout, built, in which one mutant at a time is tried."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        shutil.copytree(CHECKOUT, self.root, ignore=NOT_SOURCES, symlinks=True)
        _without_optimizer(self.root)
        _build_c(self.root)
        self.is_sound = True

    def run(self, mutant: Mutant | None, tests: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        """Those tests in a pytest of its own, with this mutant or with none."""
        compiled = mutant is not None and mutant.is_c
        path = self.root / mutant.file if mutant else None
        before = path.read_text() if path else ""
        try:
            if path:
                path.write_text(mutant.broken(before))
            if compiled or not self.is_sound:
                _build_c(self.root)
                self.is_sound = not compiled
            command = [sys.executable, "-m", "pytest", "--ci", "-q", "-x", "-p", "no:cacheprovider",
                       "-o", f"timeout={TEST_TIMEOUT_S}", *tests]
            return subprocess.run(command, cwd=self.root, capture_output=True, text=True, timeout=KILL_TIMEOUT_S,
                                  env=os.environ | {"PYTHONPATH": str(self.root), "PYENGINE_REQUIRE": "", "PYENGINE_LONG": "0"})
        finally:
            if path:
                path.write_text(before)


def build(folder: Path) -> Path:
    """Root of the project with all switched mutants in it; processes find it by `environment`."""
    root = folder / "broken"
    for name in COPIED:
        source = CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=NOT_SOURCES, symlinks=True)
        else:
            root.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, root / name)
    for mutant in SWITCHED:
        path = root / mutant.file
        path.write_text(mutant.broken(path.read_text(), _is_on(mutant)))
    for name in {mutant.file for mutant in SWITCHED if mutant.is_c}:
        path = root / name
        path.write_text("extern char *getenv(const char *name);\n" + path.read_text())
    _without_optimizer(root)
    _build_c(root, PYENGINE_BUILD_FAILPOINTS="1")
    return root


def _without_optimizer(root: Path) -> None:
    """Nearly all of a build is the optimizer's time."""
    for name in ("csrc/build_native.py", "setup.py"):
        path = root / name
        path.write_text(path.read_text().replace('"-O2", "-g"', '"-O0"'))


def _build_c(root: Path, **environ: str) -> None:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
    subprocess.run(command, cwd=root, check=True, capture_output=True, text=True, env=os.environ | environ)


def _is_on(mutant: Mutant) -> str:
    if mutant.is_c:
        return f'(getenv("{SWITCH}") && __builtin_strstr(getenv("{SWITCH}"), ",{mutant.id},"))'
    return f'(",{mutant.id}," in __import__("os").environ.get("{SWITCH}", ""))'


def environment(root: Path, *mutants: Mutant | None) -> dict[str, str]:
    """The environment in which `python -m crash.kills` and the engine are of that build, with those mutants on or none."""
    path = f"{root}{os.pathsep}{root / 'scripts'}"
    on = "".join(f",{mutant.id}," for mutant in mutants if mutant)
    return os.environ | {"PYTHONPATH": path, "PYTHON": sys.executable, SWITCH: on}
