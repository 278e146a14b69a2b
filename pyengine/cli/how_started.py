"""How the engine on a store was started, and with which settings: read off its processes.

The kernel knows what nobody has to keep up to date: the command line of the supervisor and
its environment. Workers that an earlier supervisor started may have been told more than
the present one, which took them over; so theirs count where it says nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from pyengine.config import ENV_PREFIX, FIXED_NAMES, load_config, parse_set, setting_name
from pyengine.engine import supervisor_pid
from pyengine.errors import ConfigError, EngineUnavailableError
from pyengine.ipc.control_block import EngineMemory
from pyengine.native import control as native
from pyengine.workers.supervisor import parse_arguments
from pyengine.workers.worker import parse_arguments as parse_worker_arguments

_SUPERVISOR = "pyengine.workers.supervisor"
_WRITER = "pyengine.workers.writer"


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


def how_started(root: Path, memory: EngineMemory) -> Start:
    """The start of the engine that runs on `root`. EngineUnavailableError where its processes cannot be looked at."""
    pid = supervisor_pid(root)
    if pid is None:
        raise EngineUnavailableError(f"no supervisor runs on {root}, or it is just starting: `pyengine start {root}` takes its "
                                     "workers over")
    try:
        process = psutil.Process(pid)
        arguments = parse_arguments(_behind(process.cmdline(), _SUPERVISOR))
        told = _of_environment(process.environ()) | _own_names(arguments.settings)
        writer = psutil.Process(native.load(memory.control.workers[native.WRITER], "pid"))
        before = parse_set(parse_worker_arguments(native.WRITER, "", _behind(writer.cmdline(), _WRITER)).set)
    except (psutil.Error, ValueError) as error:
        raise EngineUnavailableError(f"cannot tell how the engine on {root} was started (pid {pid}): {error}") from None
    settings = {name: value for name, value in (_own_names(before) | told).items() if name not in FIXED_NAMES}
    return Start(pid, _started_by(arguments), settings)


def _started_by(arguments) -> StartedBy:
    if arguments.no_children:
        return StartedBy.UNITS
    if arguments.embedder_descriptor >= 0:
        return StartedBy.EMBEDDED
    return StartedBy.BACKGROUND if arguments.report_descriptor >= 0 else StartedBy.FOREGROUND


def _behind(words: list[str], module: str) -> list[str]:
    """The arguments of `python -m module`; ValueError for another command line."""
    return words[words.index(module) + 1:]


def _own_names(settings: Mapping[str, str]) -> dict[str, str]:
    return {setting_name(key, "--set"): value for key, value in settings.items()}


def _of_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What the environment sets, as text; as the engine read it (config.py), misspelt names left out."""
    named = {name: value for name, value in environ.items() if name.startswith(ENV_PREFIX)}
    try:
        config = load_config(None, {}, named)
    except ConfigError:  # cannot be: the engine has started with it
        return {}
    return {name: value for name, value in config.overrides().items() if config.origins.get(name) == "environment"}
