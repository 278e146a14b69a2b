"""How the engine on a store was started, and with which settings.

The first is read off the command line of its supervisor, the second is noted in its shared
memory (ipc/control_block.py).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

import psutil

from pyengine.config import FIXED_NAMES
from pyengine.engine.embedded import supervisor_pid
from pyengine.engine.supervisor import parse_arguments
from pyengine.errors import EngineUnavailableError
from pyengine.ipc.control_block import EngineMemory, read_run_settings

_SUPERVISOR = "pyengine.workers.supervisor"


class StartedBy(enum.Enum):
    """Who keeps the supervisor."""

    BACKGROUND = "pyengine start"
    FOREGROUND = "pyengine start --foreground"  # or whoever runs that: a container, a service manager
    EMBEDDED = "a program that embeds it"
    UNITS = "systemd units"


@dataclass(frozen=True, slots=True)
class Start:
    """A living supervisor's start; `settings` by their own names, as text, without the sizes that the store keeps."""

    pid: int
    by: StartedBy
    settings: dict[str, str]


def launch_settings(root: Path, memory: EngineMemory) -> Start:
    """The start of the engine that runs on `root`. EngineUnavailableError where its processes cannot be looked at."""
    pid = supervisor_pid(root)
    if pid is None:
        raise EngineUnavailableError(f"no supervisor runs on {root}, or it is just starting: `pyengine start {root}` takes its "
                                     "workers over")
    try:
        arguments = parse_arguments(_behind(psutil.Process(pid).cmdline(), _SUPERVISOR))
    except (psutil.Error, ValueError) as error:
        raise EngineUnavailableError(f"cannot tell how the engine on {root} was started (pid {pid}): {error}") from None
    told = read_run_settings(memory.folder).overrides()
    return Start(pid, _started_by(arguments), {name: value for name, value in told.items() if name not in FIXED_NAMES})


def _started_by(arguments) -> StartedBy:
    if arguments.no_children:
        return StartedBy.UNITS
    if arguments.embedder_descriptor >= 0:
        return StartedBy.EMBEDDED
    return StartedBy.BACKGROUND if arguments.report_descriptor >= 0 else StartedBy.FOREGROUND


def _behind(words: list[str], module: str) -> list[str]:
    """The arguments of `python -m module`; ValueError for another command line."""
    return words[words.index(module) + 1:]

