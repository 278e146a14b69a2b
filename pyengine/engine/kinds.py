"""ONE table of worker kinds; the supervisor, `status` and the unit files follow it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pyengine.ipc.shared_objects import KIND_NAMES
from pyengine.native import control as native

EVERY_MODE = frozenset((native.MODE_MAPPED, native.MODE_POOL, native.MODE_SYNC))


class WorkerExit(enum.IntEnum):
    """How a worker ends. Whatever is not in here (a signal, a traceback's 1) is a crash: it is restarted."""

    CLEAN = 0        # asked to, or its memory was replaced
    USAGE = 2        # wrong arguments, or a setting that it refuses
    ALREADY_RUNNING = 5         # another worker of its kind is alive
    BOOT_FAILED = 70  # it could not come up; the supervisor halts instead of restarting it for ever
    TEMPFAIL = 75      # it could not come up for want of something that may come back (room, descriptors, memory)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of worker.

    `number` is in shared memory and in the lock byte. `modes` are the write paths in which it runs;
    `replicating`: only where there is a master or a slave; `serving`: only where clients of RocketMQ are served.
    `stop_rank`: orderly stops go up this rank, each kind finishing what the ones before it have published. A worker whose
    heartbeat is older than `heartbeat_timeout_s` is killed and restarted; disks may stall, so those that sync are given longer.
    """

    number: int
    stop_rank: int
    heartbeat_timeout_s: float = 30.0
    modes: frozenset[int] = EVERY_MODE
    replicating: bool = False
    serving: bool = False

    @property
    def on_network(self) -> bool:
        """Whether it listens, or connects to another host."""
        return self.replicating or self.serving

    @property
    def name(self) -> str:
        return KIND_NAMES[self.number]

    @property
    def module(self) -> str:
        return f"pyengine.workers.{self.name}"


# In the order of starting. The supervisor itself is not in it: no process restarts that.
KINDS = (
    Kind(native.FLUSHER, stop_rank=4, heartbeat_timeout_s=120.0),
    Kind(native.WRITER, stop_rank=1),
    Kind(native.COMMITTER, stop_rank=2, heartbeat_timeout_s=120.0, modes=frozenset((native.MODE_POOL,))),
    Kind(native.REPUTTER, stop_rank=5, heartbeat_timeout_s=120.0),
    Kind(native.ALLOCATOR, stop_rank=6, heartbeat_timeout_s=120.0),
    Kind(native.CHECKPOINTER, stop_rank=7, heartbeat_timeout_s=120.0),
    Kind(native.SCHEDULER, stop_rank=8, heartbeat_timeout_s=120.0),  # puts are refused by then: what it noted last is durable
    Kind(native.CLEANER, stop_rank=0, heartbeat_timeout_s=120.0),
    Kind(native.REPLICATOR, stop_rank=3, heartbeat_timeout_s=120.0, replicating=True),  # slaves get the last bytes, too
    Kind(native.GATEWAY, stop_rank=-1, serving=True),  # its clients' last puts are answered
)

RESTART_PAUSE_S_FIRST = 0.0
RESTART_PAUSE_S_STEP = 0.1
RESTART_PAUSE_S_MAX = 10.0
HEALTHY_AFTER_S = 10.0  # a worker that lived this long starts with a clean slate


def kinds_for(mode: int, replicates: bool, serves: bool = False) -> tuple[Kind, ...]:
    """The kinds that run in a write path, with or without replication and a gateway, in the order of starting."""
    return tuple(kind for kind in KINDS
                 if mode in kind.modes and (replicates or not kind.replicating) and (serves or not kind.serving))


def restart_pause_s(crashes: int) -> float:
    """How long to wait before restart number `crashes` in a row: at once, then 0.1, 0.2, 0.4 ... 10 s."""
    if crashes <= 1:
        return RESTART_PAUSE_S_FIRST
    return min(RESTART_PAUSE_S_MAX, RESTART_PAUSE_S_STEP * 2.0 ** min(crashes - 2, 20))
