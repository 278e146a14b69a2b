"""What the systemd units in systemd/ ask: whether a kind of worker runs on a store, and whether the store is up.

    python -m pyengine.engine.unit_files --runs committer STORE    exit 0 if that kind runs in the store's mode, 1 if not
    python -m pyengine.engine.unit_files --up NAME STORE      exit 0 if the store NAME is up; else 1, with the reason

Each store is one instance: pyengine@NAME.target, with the directory /var/lib/pyengine/NAME.
systemd stops units in the reverse order of their start: each unit starts after the units that must
stop after it (Kind.stop_rank), so that the gateway and the cleaner stop first and the store stops last.
The units drop every right that the workers do not need. They keep: shared memory and semaphores common to all
units (so no PrivateIPC, no RemoveIPC, and /dev/shm writable), the view of other processes in /proc (which shows whether
a producer lives), readable home directories (Python may be installed there), mlock and setrlimit (in @system-service).
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pyengine.engine.kinds import Kind, WorkerExit, kinds_of, kinds_with
from pyengine.engine.log_file import log_event
from pyengine.errors import EngineError
from pyengine.events import Event
from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.heartbeat import is_alive
from pyengine.ipc.store_lock import living_kinds
from pyengine.native import control as native
from pyengine.storage.config import load_config

STORE_UNIT = "pyengine-store@.service"
UP_S = 10.0  # longest wait for the reason why the store is not up


def worker_unit(kind: Kind) -> str:
    """Return the name of a kind's template unit."""
    return f"pyengine-{kind.name}@.service"


def runs(kind_name: str, root: Path) -> bool:
    """Whether this kind runs in the engine; without one, or during the recovery of a dead one, in one with the store's settings."""
    with contextlib.suppress(EngineError), EngineMemory.of(root) as memory:
        line = memory.control.workers[native.SUPERVISOR]
        is_alive_engine = not memory.retired and is_alive(native.load(line, "pid"), native.load(line, "start_time_ms"))
        if is_alive_engine and native.SUPERVISOR in living_kinds(root, 1):
            return any(kind.name == kind_name for kind in kinds_of(memory.identity))
    config = load_config(root, {})
    kinds = kinds_with(config)
    return any(kind.name == kind_name for kind in kinds)


def why_not_up(name: str, root: Path) -> list[str]:
    """Return a sentence for each unit of the store `name` that is not up; [] once the supervisor and all workers are ready."""
    down, said = [STORE_UNIT], ""
    with contextlib.suppress(EngineError), EngineMemory.of(root) as memory:
        living = living_kinds(root)
        if memory.state == native.STATE_RUNNING and native.SUPERVISOR in living:
            down = [worker_unit(kind) for kind in kinds_of(memory.identity) if kind.number not in living
                    or native.load(memory.control.workers[kind.number], "state") != native.WORKER_READY]
        elif memory.state in (native.STATE_DEGRADED, native.STATE_READ_ONLY):
            said = native.reason(memory.control)
    units = [unit.replace("@.", f"@{name}.") for unit in down]
    return [f"{unit} is not up: {_status_text(unit) or said or f'journalctl -u {unit}'}" for unit in units]


def _status_text(unit: str) -> str:
    """Return the last status text that the unit sent to systemd; "" if systemd cannot be asked."""
    try:
        done = subprocess.run(["systemctl", "show", "-P", "StatusText", unit], capture_output=True, text=True, timeout=UP_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _up(name: str, root: Path) -> int:
    """Print why the store is not up; exit code. A unit has no status text between two restarts: it is polled for up to UP_S."""
    deadline_s = time.monotonic() + UP_S
    while (why := why_not_up(name, root)) and time.monotonic() < deadline_s and any("journalctl" in one for one in why):
        time.sleep(0.1)
    for sentence in why:
        log_event(native.SUPERVISOR, root, Event.START_FAILED, sentence)
    return 1 if why else 0


def main(argv: Sequence[str]) -> int:
    if len(argv) == 3 and argv[0] == "--up":
        return _up(argv[1], Path(argv[2]))
    if len(argv) == 3 and argv[0] == "--runs":
        return 0 if runs(argv[1], Path(argv[2])) else 1
    print(__doc__, file=sys.stderr)
    return WorkerExit.USAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
