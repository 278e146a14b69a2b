"""Deliberately broken builds: the project with one line changed, to see that the fault tests notice.

A mutant is a copy of the sources outside the checkout, changed, and built. MUTANTS is the table; `text`
must stand exactly once in its file, so that a mutant whose line has moved on is noticed at once.
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


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    text: str
    becomes: str


ANSWERS_EARLY = Mutant(
    "answers before its commit point",
    "csrc/writer.c",
    "    own->acked = sequence;\n    own->touched = 1;\n    writer->entries++;\n",
    "    own->acked = sequence;\n    own->touched = 1;\n    writer->entries++;\n"
    "    publish_session(own);\n    wake_session(own->session);\n",
)
FORGETS_UNDO = Mutant(
    "does not put back the queue offsets of a dead pass",
    "csrc/writer.c",
    "    for (uint32_t i = count; i-- > 0;) {\n        struct ms_queue_slot *slot = &queues->slot[undo->table_slot[i]];",
    "    for (uint32_t i = 0; i-- > 0;) {\n        struct ms_queue_slot *slot = &queues->slot[undo->table_slot[i]];",
)
NEVER_SYNCS = Mutant(
    "reports a sync that it did not do",
    "csrc/group_commit.c",
    "int failed = fdatasync(group->fd[at]) != 0 ? errno : 0;",
    "int failed = 0;",
)
PUBLISHES_BEFORE_SYNC = Mutant(
    "moves `flushed` before the sync",
    "csrc/group_commit.c",
    "    for (int64_t base = flushed - flushed % group->segment_bytes; base < target; base += group->segment_bytes) {",
    "    ms_control_publish_flushed(control, group->bells, target, time);\n"
    "    for (int64_t base = flushed - flushed % group->segment_bytes; base < target; base += group->segment_bytes) {",
)
FORGETS_FOLDER = Mutant(
    "does not sync the folder of a new file",
    "pyengine/storage/new_file.py",
    "            _sync_or_unlink(folder, folder / name)\n        except BaseException:\n            os.close(descriptor)",
    "        except BaseException:\n            os.close(descriptor)",
)


def build(mutant: Mutant, folder: Path) -> Path:
    """Root of the broken project; processes find it by `environment`."""
    root = folder / "mutant"
    for name in COPIED:
        source = CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.o"))
        else:
            root.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, root / name)
    path = root / mutant.file
    before = path.read_text()
    if before.count(mutant.text) != 1:
        raise AssertionError(f"the mutant that {mutant.name} does not fit {mutant.file} any more: adapt it")
    path.write_text(before.replace(mutant.text, mutant.becomes))
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=root, check=True, capture_output=True, text=True
    )
    return root


def environment(root: Path) -> dict[str, str]:
    """The environment in which `python -m crash.rounds` and the engine are the broken ones."""
    return os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'scripts'}", "PYTHON": sys.executable}
