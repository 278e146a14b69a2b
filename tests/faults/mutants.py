"""Deliberately broken builds: the project with one line changed, to see that the fault tests notice.

MUTANTS is the table. All of them are in one build, a copy of the sources outside the checkout; which
of them is broken in a process is said by the environment variable PYENGINE_BROKEN, and without it the
build is sound. It has the failpoints of the C code too (pyengine/native/failpoints.py). `text` must stand
exactly once in its file, so that a mutant whose line has moved on is noticed at once; `becomes` asks
BROKEN whether it is on.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
COPIED = ("csrc", "pyengine", "workers", "scripts", "setup.py", "pyproject.toml")
SWITCH = "PYENGINE_BROKEN"


@dataclass(frozen=True)
class Mutant:
    switch: str
    name: str
    file: str
    text: str
    becomes: str  # BROKEN stands for "this mutant is on"


ANSWERS_EARLY = Mutant(
    "early-answer",
    "answers before its commit point",
    "csrc/writer.c",
    "    own->acked = sequence;\n",
    "    own->acked = sequence;\n    if (BROKEN) {\n        publish_session(own);\n        wake_session(own->session);\n    }\n",
)
FORGETS_UNDO = Mutant(
    "no-undo",
    "does not put back the queue offsets of a dead pass",
    "csrc/writer.c",
    "    for (uint32_t i = count; i-- > 0;) {\n        if (undo->table_slot[i]",
    "    for (uint32_t i = BROKEN ? 0 : count; i-- > 0;) {\n        if (undo->table_slot[i]",
)
NEVER_SYNCS = Mutant(
    "no-sync",
    "reports a sync that it did not do",
    "csrc/group_commit.c",
    "int failed = fdatasync(group->fd[at]) != 0 ? errno : 0;",
    "int failed = !BROKEN && fdatasync(group->fd[at]) != 0 ? errno : 0;",
)
PUBLISHES_BEFORE_SYNC = Mutant(
    "early-flushed",
    "moves `flushed` before the sync",
    "csrc/group_commit.c",
    "    for (int64_t base = flushed - flushed % group->segment_bytes; base < target; base += group->segment_bytes) {",
    "    if (BROKEN)\n        ms_control_publish_flushed(control, target, time);\n"
    "    for (int64_t base = flushed - flushed % group->segment_bytes; base < target; base += group->segment_bytes) {",
)
FORGETS_FOLDER = Mutant(
    "no-folder-sync",
    "does not sync the folder of a new file",
    "pyengine/storage/new_file.py",
    "            _sync_or_unlink(folder, folder / name)\n        except BaseException:\n            os.close(descriptor)",
    "            BROKEN or _sync_or_unlink(folder, folder / name)\n        except BaseException:\n            "
    "os.close(descriptor)",
)
FORGETS_TIMED_SYNC = Mutant(
    "no-timed-sync",
    "moves `flushed` by its timer without a sync",
    "pyengine/services/flush_real_time.py",
    "                fdatasync(self._segments.descriptors[start], self._segments.path(start))",
    "                BROKEN or fdatasync(self._segments.descriptors[start], self._segments.path(start))",
)
NOTES_EARLY = Mutant(
    "early-note",
    "notes a delivery of a delayed message before it is flushed",
    "pyengine/services/schedule_message.py",
    "            while level.unflushed and level.unflushed[0][1] <= flushed:\n",
    "            while level.unflushed and (BROKEN or level.unflushed[0][1] <= flushed):\n",
)
FORGETS_REMOVED = Mutant(
    "no-removal-sync",
    "does not sync the folder of a deleted file",
    "pyengine/storage/file_removal.py",
    "        sync_folder(path.parent)\n",
    "        BROKEN or sync_folder(path.parent)\n",
)
COMMITS_UNSYNCED = Mutant(
    "no-commit-sync",
    "says that a group's offset is remembered without a sync",
    "pyengine/storage/offset_lock.py",
    "    try:\n        os.fsync(descriptor)\n",
    "    try:\n        BROKEN or os.fsync(descriptor)\n",
)
FORGETS_RECOVERY_SYNC = Mutant(
    "no-recovery-sync",
    "recovers, cuts, rebuilds and salvages without a sync of a file that it has written to",
    "pyengine/storage/durable_writes.py",
    "        os.fsync(descriptor)\n",
    "        BROKEN or os.fsync(descriptor)\n",
)
CLAIMS_UNSYNCED = Mutant(
    "no-reader-sync",
    "reads at `flushed` beyond the watermark without a sync of its own",
    "pyengine/storage/read_level.py",
    "                    os.fdatasync(descriptor)\n",
    "                    BROKEN or os.fdatasync(descriptor)\n",
)
SEEN_BY_KILLS = (ANSWERS_EARLY, FORGETS_UNDO)
SEEN_BY_POWER_CUTS = (NEVER_SYNCS, PUBLISHES_BEFORE_SYNC, FORGETS_FOLDER, FORGETS_TIMED_SYNC, NOTES_EARLY, FORGETS_REMOVED,
                      COMMITS_UNSYNCED, FORGETS_RECOVERY_SYNC, CLAIMS_UNSYNCED)
MUTANTS = SEEN_BY_KILLS + SEEN_BY_POWER_CUTS


def build(folder: Path) -> Path:
    """Root of the project with all mutants in it; processes find it by `environment`."""
    root = folder / "broken"
    for name in COPIED:
        source = CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, root / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.o"))
        else:
            root.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, root / name)
    for mutant in MUTANTS:
        path = root / mutant.file
        before = path.read_text()
        if before.count(mutant.text) != 1:
            raise AssertionError(f"the mutant that {mutant.name} does not fit {mutant.file} any more: adapt it")
        path.write_text(before.replace(mutant.text, mutant.becomes.replace("BROKEN", _is_on(mutant))))
    for name in {mutant.file for mutant in MUTANTS if mutant.file.endswith(".c")}:
        path = root / name
        path.write_text("extern char *getenv(const char *name);\n" + path.read_text())
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=root, check=True, capture_output=True, text=True,
        env=os.environ | {"PYENGINE_BUILD_FAILPOINTS": "1"},
    )
    return root


def _is_on(mutant: Mutant) -> str:
    if mutant.file.endswith(".c"):
        return f'(getenv("{SWITCH}") && __builtin_strcmp(getenv("{SWITCH}"), "{mutant.switch}") == 0)'
    return f'(__import__("os").environ.get("{SWITCH}") == "{mutant.switch}")'


def environment(root: Path, mutant: Mutant | None) -> dict[str, str]:
    """The environment in which `python -m crash.rounds` and the engine are of that build, with one mutant on or none."""
    path = f"{root}{os.pathsep}{root / 'scripts'}"
    return os.environ | {"PYTHONPATH": path, "PYTHON": sys.executable, SWITCH: mutant.switch if mutant else ""}
