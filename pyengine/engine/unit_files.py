"""Make the systemd units for every kind of worker from pyengine/engine/kinds.py; tell whether a kind runs on a store.

    python -m pyengine.engine.unit_files systemd              write them into that folder
    python -m pyengine.engine.unit_files --runs committer STORE    exit 0 if that kind runs in the store's mode, 1 if not
    python -m pyengine.engine.unit_files --up NAME STORE      exit 0 if the store NAME is up; else 1, with the reason

Each store is one instance: pyengine@NAME.target, with the directory /var/lib/pyengine/NAME.
scripts/install-systemd.sh fills in @PYTHON@ and @USER@. systemd stops units in the reverse order
of their start: each unit starts after the units that must stop after it, so that the gateway and
the cleaner stop first and the store stops last.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pyengine.engine.kinds import EVERY_MODE, KINDS, Kind, WorkerExit, kinds_for, kinds_of
from pyengine.engine.log_file import log_event
from pyengine.engine.supervisor import STOP_TIMEOUT_S
from pyengine.errors import EngineError, ExitCode
from pyengine.events import Event
from pyengine.ipc.control_block import MODE_NUMBERS, EngineMemory
from pyengine.ipc.heartbeat import is_alive
from pyengine.ipc.store_lock import living_kinds
from pyengine.native import control as native
from pyengine.storage.config import load_config

STORE = "/var/lib/pyengine/%i"
STORE_WATCHDOG_S = 30
WORKER_STOP_S = 120
STORE_JOB_S = 600  # longest wait of `systemctl start` for a recovery, which continues afterwards
WORKER_JOB_S = 60  # ... for a worker, from the start of its job
UP_S = 10.0        # ... for the reason why the store is not up
ABORT_S = 5  # from the watchdog's SIGABRT to SIGKILL, as the supervisor gives its own children

MADE = "# Made by `python -m pyengine.engine.unit_files systemd` from pyengine/engine/kinds.py: change it there.\n"

# The units drop every right that the workers do not need. They keep: shared memory and semaphores common to all
# units (so no PrivateIPC, no RemoveIPC, and /dev/shm writable), the view of other processes in /proc (which shows whether
# a producer lives), readable home directories (Python may be installed there), mlock and setrlimit (in @system-service).
HARDENING = """\
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
PrivateDevices=yes
PrivateNetwork=yes
RestrictAddressFamilies=AF_UNIX
IPAddressDeny=any
PrivateIPC=no
RemoveIPC=no
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
MemoryDenyWriteExecute=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
SystemCallErrorNumber=EPERM
KeyringMode=private
UMask=0077
"""

# Units that use the network reach this host only. A drop-in with IPAddressAllow= adds the hosts that they may reach.
NETWORK_HARDENING = HARDENING.replace("PrivateNetwork=yes\n", "").replace(
    "IPAddressDeny=any\n", "IPAddressDeny=any\nIPAddressAllow=localhost\n").replace(
    "RestrictAddressFamilies=AF_UNIX\n", "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX\n")


def unit_files() -> dict[str, str]:
    """Return the text of every unit file by its name."""
    units = [_store_unit(), *(_worker_unit(kind) for kind in KINDS)]
    names = [name for name, _ in units]
    return {"pyengine.slice": _slice(), "pyengine@.target": _target(names), METRICS_UNIT: _metrics_unit(), UP_UNIT: _up_unit(names),
            **dict(units)}


def worker_unit(kind: Kind) -> str:
    """Return the name of a kind's template unit."""
    return f"pyengine-{kind.name}@.service"


STORE_UNIT = "pyengine-store@.service"
METRICS_UNIT = "pyengine-metrics@.service"
UP_UNIT = "pyengine-up@.service"


def _slice() -> str:
    return f"""{MADE}
[Unit]
Description=Message logs
"""


def _target(names: Sequence[str]) -> str:
    wants = "\n".join(f"Wants={name.replace('@.', '@%i.')}" for name in names)
    return f"""{MADE}
# No unit is bound to another. Each has Restart=always: a unit that ends for any reason is restarted, also one that ended
# cleanly because another start took over its memory, and the others continue. The start fails, with the reason, if the
# units are not up when their jobs have ended or timed out; systemd still restarts them.

[Unit]
Description=Message log %i
{wants}
Requires={UP_UNIT.replace('@.', '@%i.')}
After={UP_UNIT.replace('@.', '@%i.')}

[Install]
WantedBy=multi-user.target
"""


def _up_unit(names: Sequence[str]) -> str:
    after = " ".join(name.replace("@.", "@%i.") for name in names)
    return f"""{MADE}
# Runs at the target's start only: says whether the store is up, or why not.

[Unit]
Description=Message log %i: up
PartOf=pyengine@%i.target
After={after}

[Service]
Type=oneshot
User=@USER@
Slice=pyengine.slice
Environment=PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
EnvironmentFile=-/etc/pyengine/%i.env
ExecStart=@PYTHON@ -P -m pyengine.engine.unit_files --up %i {STORE}
SyslogIdentifier=pyengine-up
TimeoutStartSec=60

{HARDENING}"""


def _store_unit() -> tuple[str, str]:
    service = _Service(
        "store", "Message log %i: store (recovery, sessions)",
        f"@PYTHON@ -P -m pyengine.workers.supervisor {STORE} --no-children", STORE_WATCHDOG_S,
        f"ExecReload=kill -HUP $MAINPID\nTimeoutStartSec=infinity\nTimeoutStopSec={STOP_TIMEOUT_S:g}\n"
        f"RestartPreventExitStatus={int(WorkerExit.USAGE)} {int(ExitCode.CORRUPTION)}\n", NETWORK_HARDENING, job_s=STORE_JOB_S,
        why="# Owns the store: recovers it, and is ready once workers may attach. If it dies alone, the workers continue, and the\n"
        "# next one takes them over without recovery; so no unit is bound to it. It stops last, and removes `abort` only if\n"
        "# all workers finished what was published. On a slave it asks the master where to begin.\n")
    return STORE_UNIT, service.unit()


def _worker_unit(kind: Kind) -> tuple[str, str]:
    later = [worker_unit(other) for other in KINDS if other.stop_rank > kind.stop_rank]
    after = " ".join(name.replace("@.", "@%i.") for name in (STORE_UNIT, *later))
    condition = ""
    if kind.modes != EVERY_MODE or kind.on_network:
        condition = f"ExecCondition=@PYTHON@ -P -m pyengine.engine.unit_files --runs {kind.name} {STORE}\n"
    service = _Service(
        kind.name, f"Message log %i: {kind.name}", f"@PYTHON@ -P -m {kind.module} {STORE}", kind.heartbeat_timeout_s,
        f"{condition}TimeoutStartSec=90\nTimeoutStopSec={WORKER_STOP_S}\nRestartPreventExitStatus={int(WorkerExit.USAGE)}\n",
        NETWORK_HARDENING if kind.on_network else HARDENING, job_s=WORKER_JOB_S, order=f"After={after}\n")
    return worker_unit(kind), service.unit()


@dataclass(frozen=True, slots=True)
class _Service:
    """The parts in which the unit of one process differs from others; whole lines, except the name and the command."""

    name: str
    description: str
    command: str
    heartbeat_timeout_s: float
    times: str
    hardening: str
    job_s: int
    why: str = ""
    order: str = ""

    def unit(self) -> str:
        """Return the text of the unit."""
        return f"""{MADE}{self.why}
[Unit]
Description={self.description}
PartOf=pyengine@%i.target
{self.order}# Gives up only a unit that never gets as far as its work: no other is restarted so often.
StartLimitIntervalSec=60
StartLimitBurst=100
# The longest wait of `systemctl start`; the unit continues after it.
JobRunningTimeoutSec={self.job_s}

[Service]
Type=notify
NotifyAccess=main
User=@USER@
Slice=pyengine.slice
StateDirectory=pyengine/%i
StateDirectoryMode=0700
Environment=PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
# Settings as PYENGINE_NAME=value, the same for all units of a store.
EnvironmentFile=-/etc/pyengine/%i.env
ExecStart={self.command}
SyslogIdentifier=pyengine-{self.name}
Restart=always
RestartSec=200ms
{self.times}# Each round of its loop resets the watchdog. A loop that hangs, or a stopped process, is aborted with a trace, then killed.
WatchdogSec={self.heartbeat_timeout_s:g}
TimeoutAbortSec={ABORT_S}
LimitMEMLOCK=infinity
LimitNOFILE=1048576
OOMScoreAdjust=-500

{self.hardening}"""


def _metrics_unit() -> str:
    return f"""{MADE}
# Not a part of the engine: answers Prometheus from shared memory. METRICS_LISTEN in the settings file sets its address.

[Unit]
Description=Message log %i: metrics
After={STORE_UNIT.replace("@.", "@%i.")}
PartOf=pyengine@%i.target

[Service]
Type=exec
User=@USER@
Slice=pyengine.slice
Environment=PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 METRICS_LISTEN=127.0.0.1:9464
EnvironmentFile=-/etc/pyengine/%i.env
ExecStart=@PYTHON@ -P -m pyengine metrics {STORE} --listen ${{METRICS_LISTEN}}
SyslogIdentifier=pyengine-metrics
Restart=always
RestartSec=5s

{NETWORK_HARDENING}
[Install]
WantedBy=pyengine@%i.target
"""


def runs(kind_name: str, root: Path) -> bool:
    """Whether this kind runs in the engine; without one, or during the recovery of a dead one, in one with the store's settings."""
    try:
        with EngineMemory.of(root) as memory:
            line = memory.control.workers[native.SUPERVISOR]
            is_alive_engine = not memory.retired and is_alive(native.load(line, "pid"), native.load(line, "start_time_ms"))
            if is_alive_engine and native.SUPERVISOR in living_kinds(root, 1):
                return any(kind.name == kind_name for kind in kinds_of(memory.identity))
    except EngineError:
        pass
    config = load_config(root, {})
    kinds = kinds_for(MODE_NUMBERS[config.mode], config.replicates, config.gateway_enable, config.grpc_enable)
    return any(kind.name == kind_name for kind in kinds)


def why_not_up(name: str, root: Path) -> list[str]:
    """Return a sentence for each unit of the store `name` that is not up; [] once the supervisor and all workers are ready."""
    down, said = [STORE_UNIT], ""
    try:
        with EngineMemory.of(root) as memory:
            living = living_kinds(root)
            if memory.state == native.STATE_RUNNING and native.SUPERVISOR in living:
                down = [worker_unit(kind) for kind in kinds_of(memory.identity) if kind.number not in living
                        or native.load(memory.control.workers[kind.number], "state") != native.WORKER_READY]
            elif memory.state in (native.STATE_DEGRADED, native.STATE_READ_ONLY):
                said = native.reason(memory.control)
    except EngineError:
        pass
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
    if len(argv) != 1:
        print(__doc__, file=sys.stderr)
        return WorkerExit.USAGE
    folder = Path(argv[0])
    folder.mkdir(exist_ok=True)
    for name, text in unit_files().items():
        (folder / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
