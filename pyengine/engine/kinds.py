"""The table of worker kinds, which the supervisor, `status` and the unit files read; what a process of the engine begins with."""

from __future__ import annotations

import enum
import os
import resource
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyengine
from pyengine.formats.small_file import open_standard_streams
from pyengine.ipc.control_block import MODE_NAMES, MODE_NUMBERS
from pyengine.ipc.shared_objects import KIND_NAMES
from pyengine.native import control as native

if TYPE_CHECKING:
    from pyengine._native import ms_identity
    from pyengine.engine_config import EngineConfig

EVERY_MODE = frozenset(MODE_NAMES)


class WorkerExit(enum.IntEnum):
    """Exit codes of a worker. Any other end (a signal, or code 1 after a traceback) is a crash: the worker is restarted."""

    CLEAN = 0        # it was told to end, or another engine replaced its memory
    USAGE = 2        # wrong arguments
    ALREADY_RUNNING = 5         # another worker of its kind is alive
    BOOT_FAILED = 70  # it could not come up; the supervisor halts the engine instead of restarting it forever
    TEMPFAIL = 75      # it could not come up for lack of disk space (or a read-only disk), descriptors or memory: it may later


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of worker.

    `number` identifies it in shared memory and is its byte in the lock file. `modes` are the write paths in which it runs;
    `replicating`: it runs only if the store replicates; `serving`: only if the engine serves RocketMQ clients;
    `serving_grpc`: only if it serves those of RocketMQ 5 by gRPC too.
    `stop_rank`: an orderly stop takes the kinds by ascending rank, and each finishes what the earlier ones have published.
    A worker whose heartbeat is older than `heartbeat_timeout_s` is killed and restarted; the timeout is longer for workers
    that sync, since disks stall.
    """

    number: int
    stop_rank: int
    heartbeat_timeout_s: float = 30.0
    modes: frozenset[int] = EVERY_MODE
    replicating: bool = False
    serving: bool = False
    serving_grpc: bool = False

    @property
    def name(self) -> str:
        return KIND_NAMES[self.number]

    @property
    def module(self) -> str:
        return f"pyengine.workers.{self.name}"


# In the order of starting. The supervisor is not in it, since no process of the engine restarts that.
KINDS = (
    Kind(native.FLUSHER, stop_rank=3, heartbeat_timeout_s=120.0),
    Kind(native.WRITER, stop_rank=1, heartbeat_timeout_s=120.0),  # it syncs when a flusher has died
    Kind(native.COMMITTER, stop_rank=2, heartbeat_timeout_s=120.0, modes=frozenset((native.MODE_POOL,))),
    Kind(native.REPUTTER, stop_rank=6, heartbeat_timeout_s=120.0),
    Kind(native.ALLOCATOR, stop_rank=7, heartbeat_timeout_s=120.0),
    Kind(native.CHECKPOINTER, stop_rank=8, heartbeat_timeout_s=120.0),
    Kind(native.SCHEDULER, stop_rank=4, heartbeat_timeout_s=120.0),  # after the flusher, so that it can note its last puts
    Kind(native.CLEANER, stop_rank=0, heartbeat_timeout_s=120.0),
    Kind(native.REPLICATOR, stop_rank=5, heartbeat_timeout_s=120.0, replicating=True),  # after these: slaves get all, and the notes
    Kind(native.GATEWAY, stop_rank=-1, serving=True),  # before the writer, so that the last puts of its clients are answered
    Kind(native.GRPC, stop_rank=-2, serving_grpc=True),  # likewise before the gateway
)

RESTART_PAUSE_S_STEP = 0.1
RESTART_PAUSE_S_MAX = 10.0
HEALTHY_AFTER_S = 10.0  # the crashes of a worker that lived this long are no longer counted


def kinds_for(mode: int, replicates: bool, serves: bool = False, serves_grpc: bool = False) -> tuple[Kind, ...]:
    """The kinds that run in a write path, with or without replication, gateway and gRPC, in the order of starting."""
    return tuple(kind for kind in KINDS if mode in kind.modes and (replicates or not kind.replicating)
                 and (serves or not kind.serving) and (serves_grpc or not kind.serving_grpc))


def kinds_with(config: EngineConfig) -> tuple[Kind, ...]:
    """Return the kinds that run in an engine with these settings, in the order of starting."""
    return kinds_for(MODE_NUMBERS[config.mode], config.replicates, config.gateway_enable, config.grpc_enable)


def kinds_of(identity: ms_identity) -> tuple[Kind, ...]:
    return kinds_for(identity.mode, bool(identity.replicates), bool(identity.gateway), bool(identity.grpc))


def restart_pause_s(crashes: int) -> float:
    """Return the pause before restart number `crashes` in a row: 0, then 0.1, 0.2, 0.4 ... 10 s."""
    if crashes <= 1:
        return 0.0
    return min(RESTART_PAUSE_S_MAX, RESTART_PAUSE_S_STEP * 2.0 ** min(crashes - 2, 20))


def child_environment() -> dict[str, str]:
    """Return the environment of a child: it must import this same pyengine, whatever its directory and installation."""
    import site

    environment = dict(os.environ)
    environment.pop("PYTHONINSPECT", None)  # at its end it would ask for commands, and exit with 1
    here = str(Path(pyengine.__file__).resolve().parent.parent)
    installed: Iterable[str] = [*site.getsitepackages(), site.getusersitepackages()]
    if here not in map(os.path.realpath, installed):
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{here}{os.pathsep}{inherited}" if inherited else here
    if "PYTHONPATH" in environment:  # a relative one: the supervisor runs in another directory
        environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, environment["PYTHONPATH"].split(os.pathsep)))
    return environment


# Those that Python itself ignores, and those for which each process of the engine sets a handler of its own anyway.
_KEPT_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGHUP, signal.SIGUSR1)


def begin_process() -> None:
    """Undo what the starter of this process may have left: blocked or ignored signals, closed standard descriptors.

    A stop, Ctrl-C, the end of a child and SIGABRT for a hung worker must arrive, whatever a shell or an embedding program does.
    """
    open_standard_streams()
    for number in signal.valid_signals():
        if signal.getsignal(number) is signal.SIG_IGN and number not in _KEPT_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def raise_descriptors(wanted: int) -> int:
    """Raise this process's limit of open files to `wanted`, or to its hard limit if that is lower; its children inherit it.

    Return how many of `wanted` it may have open then.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def without_systemd(environment: dict[str, str]) -> dict[str, str]:
    """Return `environment` without systemd's variables, for a process whose starter reports to the service manager."""
    return {name: value for name, value in environment.items()
            if name not in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")}
