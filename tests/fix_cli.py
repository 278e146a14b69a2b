"""Runs commands: in this process (fast), or as real subprocesses; and pictures of a folder to compare."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from pyengine.cli.main import main
from waiting import scaled_timeout_s

SOURCES = Path(__file__).resolve().parents[1]
# No JSON, or JSON that no parser takes.
HOSTILE_JSON = {"objects": b'{"a":' * 100_000, "lists": b"[" * 100_000, "number": b"1" * 100_000, "bytes": b"\xff\xfe", "nul": b"\0"}


@dataclass(frozen=True)
class Ran:
    """The exit code and output of a command."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        """stdout as the one JSON document that it must be."""
        return json.loads(self.stdout)


def run(*arguments: object, stdin: str | bytes | None = None) -> Ran:
    """`pyengine ARGUMENTS` in this process; an exception that reached the top is raised again."""
    result = CliRunner().invoke(main, [str(one) for one in arguments], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.stdout, result.stderr)


def environment(**extra: str) -> dict[str, str]:
    """The environment of a subprocess that imports pyengine from these sources, free of PYENGINE_ settings, and of the size
    of a terminal, which would go before that of the test's own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYENGINE_") and name not in ("LINES", "COLUMNS")}
    return kept | {"PYTHONPATH": str(SOURCES)} | extra


def command_line(*arguments: object) -> list[str]:
    """argv of `python -m pyengine ARGUMENTS`."""
    return [sys.executable, "-m", "pyengine", *(str(one) for one in arguments)]


def spawn(*arguments: object, env: dict[str, str] | None = None, stdin: bytes | None = None, **options: Any) -> Ran:
    """`python -m pyengine ARGUMENTS` as a process of its own, to its end."""
    done = subprocess.run(command_line(*arguments), input=stdin, capture_output=True, env=env or environment(),
                          timeout=scaled_timeout_s(120), check=False, **options)
    return Ran(done.returncode, done.stdout.decode(), done.stderr.decode())


def picture(root: Path) -> dict[str, tuple[int, int, str]]:
    """(mode, mtime in ns, SHA-256) of every file and folder under `root`: equal pictures, untouched tree."""
    found = {}
    for path in sorted([root, *root.rglob("*")]):
        state = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path.relative_to(root))] = (state.st_mode, state.st_mtime_ns, content)
    return found


def without_override() -> None:
    """For preexec_fn: take root's power to pass over file permissions away from the child."""
    import ctypes

    drop_from_bounding_set, dac_override, dac_read_search = 24, 1, 2
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (dac_override, dac_read_search):
        libc.prctl(drop_from_bounding_set, capability, 0, 0, 0)


def changes(before: dict[str, tuple[int, int, str]], after: dict[str, tuple[int, int, str]]) -> list[str]:
    """Names that differ between two pictures."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
