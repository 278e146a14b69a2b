"""`pyengine promote`: make a slave the master."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click
import psutil

from pyengine.cli.engine_status import why_fenced
from pyengine.cli.output import NumberRange, Reply, store_command
from pyengine.engine.bring_up import check_secret
from pyengine.engine.embedded import supervisor_pid
from pyengine.engine_config import SLAVE
from pyengine.errors import EngineError, EngineUnavailableError, ExitCode, StoreBusyError, command
from pyengine.ipc.control_block import ROLE_NAMES, EngineMemory, read_masters, read_run_settings
from pyengine.ipc.store_lock import living_kinds, owning
from pyengine.native import control as native
from pyengine.native.failpoints import failpoint
from pyengine.storage.config import FIXED_NAMES, EngineConfig, config_path, existing_store, load_config, set_in_file
from pyengine.storage.consumer_offset import ConsumerOffsets
from pyengine.storage.durable_file import exclusive
from pyengine.storage.replication_state import ReplicationState, ReplicationStateFile

if TYPE_CHECKING:
    from pyengine._native import ms_control

POLL_INTERVAL_S = 0.05
QUIET_S = 0.5          # a linked slave that receives nothing for so long has everything
UNLINKED_WAIT_S = 1.0  # for the writer to append what arrived before the link was lost
OF_A_SLAVE = ("broker_role", "ha_master_address")


# What started the supervisor and must restart it.
BACKGROUND = "pyengine start"
FOREGROUND = "pyengine serve or start --foreground"  # or by a service manager
EMBEDDED = "a program that embeds it"
UNITS = "systemd units"


@dataclass(frozen=True, slots=True)
class Start:
    """How a living supervisor was started; `settings` are text by pyengine's names, without the sizes that the store keeps."""

    pid: int
    by: str
    settings: dict[str, str]
    uid: int


def launch_settings(root: Path, memory: EngineMemory) -> Start:
    """Return how the engine on `root` was started; EngineUnavailableError if its processes cannot be inspected."""
    pid = supervisor_pid(root)
    if pid is None:
        raise EngineUnavailableError(f"no supervisor runs on {root}, or it is just starting: {command('start', root)} takes its "
                                     "workers over")
    try:
        process = psutil.Process(pid)
        words, uid = process.cmdline(), process.uids().effective
    except psutil.Error as error:
        raise EngineUnavailableError(f"cannot tell how the engine on {root} was started (pid {pid}): {error}") from None
    overrides = read_run_settings(memory.folder).overrides()
    return Start(pid, started_by(words), {name: value for name, value in overrides.items() if name not in FIXED_NAMES}, uid)


def started_by(words: Sequence[str]) -> str:
    """Return what started a supervisor with this command line."""
    if "--no-children" in words:
        return UNITS
    if "--embedder-fd" in words:
        return EMBEDDED
    return BACKGROUND if "--report-fd" in words else FOREGROUND


def require_restartable(root: Path, start: Start, steps: str, *words: object) -> None:
    """Raise StoreBusyError (`steps`) if the command `words` cannot start the engine again as it was, EngineError if another user must."""
    if start.by != BACKGROUND:
        raise StoreBusyError(steps)
    if start.uid != os.geteuid():
        raise EngineError(f"{root} runs as {as_user(start.uid, *words)}")


def as_user(uid: int, *words: object) -> str:
    """Return the user and how to run a command as this user, for a sentence."""
    import pwd

    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:  # in a container
        name = f"#{uid}"
    return f"the user {name}: `sudo -u {quote(name)} {command(*words)[1:]}"


@dataclass(frozen=True, slots=True)
class SlaveProgress:
    """The position of a slave. `master_end`: the newest known end of its master's log since it started, 0 if none."""

    linked: bool
    end: int
    master_end: int

    @property
    def missing_bytes(self) -> int:
        return max(0, self.master_end - self.end)


@click.command()
@store_command
@click.option("--role", type=click.Choice(["ASYNC_MASTER", "SYNC_MASTER"]), default="ASYNC_MASTER", show_default=True,
              help="What it becomes.")
@click.option("--force", is_flag=True, help="Promote also a slave that lacks bytes, or still receives them.")
@click.option("--timeout", "timeout_s", type=NumberRange(min=0), default=10.0, show_default=True,
              help="Longest wait for such a slave, in seconds.")
def promote(store: Path, settings: dict[str, str], role: str, force: bool, timeout_s: float) -> Reply:
    """Turn a slave into a master, which takes puts.

    It changes config/engine.toml, and restarts a running slave. Without ha_secret_file make sure that the old
    master takes no puts (docs/replication.md).

    Exit codes: 0 it is a master now; 1 refused, or not started again; 5 it runs under systemd, in the
    foreground or embedded: the sentence says what to do; 6 a master, but it takes no puts: a note says why.

    \b
    Example:
      pyengine promote STORE
    """
    root = existing_store(store)
    notes: list[str] = []
    if living_kinds(root):
        document = _promote_running(root, settings, role, force, timeout_s, notes)
    else:
        document = {"running": False, "was": promote_stopped(root, settings, role, force, notes)}
    document = {"store": str(root), "role": role, "was": SLAVE, **document, "notes": notes}
    is_degraded = "pid" in document and not document["running"]
    how = f", running (pid {document['pid']})" if document["running"] else "; `pyengine start` runs it as one"
    how = f", but it takes no puts (pid {document['pid']})" if is_degraded else how
    return Reply(document, "\n".join([f"{root} is a master now ({role}){how}", *(f"note: {note}" for note in notes)]),
                 ExitCode.DEGRADED if is_degraded else ExitCode.OK)


def _promote_running(root: Path, settings: dict[str, str], role: str, force: bool, timeout_s: float,
                     notes: list[str]) -> dict[str, Any]:
    from pyengine.engine.embedded import start_engine, stop_engine

    with EngineMemory.of(root) as memory:
        if ROLE_NAMES[memory.identity.role] != SLAVE:
            is_fenced = native.load(memory.control.state, "refuse_puts") & native.REFUSE_FENCED
            hint = f", but fenced: to make it the only one again, first {command('stop', root)}, then give --force" if is_fenced else ""
            raise EngineError(f"{root} is a master already ({ROLE_NAMES[memory.identity.role]}){hint}")
        start = launch_settings(root, memory)
        slave = load_config(root, start.settings)
        told = read_masters(memory.folder)[:1] if slave.learns_master else []
        master = slave.ha_master_address or "".join(told)
        peers = _peers(load_config(root, start.settings | settings), master)
        more = [word for name, value in (("ha_secret_file", slave.ha_secret_file), ("ha_master_address", master), *peers.items())
                for word in ("--set", f"{name}={value}")] if peers else []
        require_restartable(root, start, manual_steps(root, start, role, more), "promote", root, "--role", role)
        kept = {name: value for name, value in start.settings.items() if name not in OF_A_SLAVE} | settings
        kept["broker_role"] = role
        kept |= peers
        check_secret(root, load_config(root, kept))  # what is wrong for a master is an error while it still runs as a slave
        standing = _wait_until_caught_up(memory.control, timeout_s)
    judge(standing, force, notes, master if peers else "")
    with exclusive(ConsumerOffsets(root).path):
        pass  # _write_role() takes this lock: while another process holds it, the slave runs on
    failpoint("promotion_judged")
    stop_engine(root)
    failpoint("promotion_stopped")
    with owning(root):
        _write_role(root, role, notes, peers)
    try:
        ready = start_engine(root, kept)
    except EngineError as error:
        raise EngineError(f"{root} is a master now ({role}), but its engine did not start again: {error}") from error
    noted = ReplicationStateFile(root).read().state
    reasons = [str(ready["reason"])] if ready["state"] != "running" else []
    reasons += [why_fenced(native.REFUSE_FENCED, root)] if noted is not None and noted.is_fenced else []  # it has asked its peers
    notes += reasons
    return {"running": not reasons, "pid": ready["pid"], "end": standing.end,
            "master_end": standing.master_end or None, "was_linked": standing.linked, "missing_bytes": standing.missing_bytes}


def manual_steps(root: Path, start: Start, role: str, more: Sequence[str]) -> str:
    """`more`: options that `promote` needs, since it does not have the settings of the stopped slave's start."""
    promotion = command("promote", root, "--role", role, *more)
    set_by_it = OF_A_SLAVE + ("ha_peers",) * any(word.startswith("ha_peers=") for word in more)
    if start.by == UNITS:
        name = root.absolute().name
        target, unit = quote(f"pyengine@{name}.target"), quote(f"pyengine-store@{name}.service")
        return (f"{root} runs under systemd. Take {' and '.join(f'PYENGINE_{each.upper()}' for each in set_by_it)} out of its settings "
                f"(/etc/pyengine/{name}.env), then `systemctl stop {target} {unit}`, {promotion}, "
                f"`systemctl start {target}`")
    return f"{_advice(root, start)}, then {promotion}, then start it as before, without {' and '.join(set_by_it)}"


def take_over_steps(root: Path, start: Start) -> str:
    if start.by == UNITS:
        target = quote(f"pyengine@{root.absolute().name}.target")
        return f"{root} runs under systemd: `systemctl restart {target}` replaces all of its processes, in order"
    return f"{_advice(root, start)}, then start it as before"


def _advice(root: Path, start: Start) -> str:
    stop = "stop the program that embeds it" if start.by == EMBEDDED else f"stop it (kill -TERM {start.pid})"
    return f"{root} was started by {start.by}, which this command cannot do for you: {stop}"


def _progress(control: ms_control) -> SlaveProgress:
    return SlaveProgress(native.load(control.replicator, "linked") != 0, native.load_position(control.wrote),
                    native.load(control.replicator, "master_end"))


def _wait_until_caught_up(control: ms_control, timeout_s: float) -> SlaveProgress:
    """Wait until the slave has all known bytes and, while linked, receives nothing for QUIET_S; or until the timeout."""
    began_s = still_since_s = time.monotonic()
    standing = _progress(control)
    while True:
        now_s = time.monotonic()
        limit_s = timeout_s if standing.linked else min(timeout_s, UNLINKED_WAIT_S)
        still = not standing.linked or now_s - still_since_s >= QUIET_S
        if (not standing.missing_bytes and still) or now_s - began_s >= limit_s:
            return standing
        time.sleep(POLL_INTERVAL_S)
        before, standing = standing, _progress(control)
        if (standing.end, standing.master_end) != (before.end, before.master_end):
            still_since_s = time.monotonic()


def judge(standing: SlaveProgress, force: bool, notes: list[str], told_at: str = "") -> None:
    """Raise EngineError if bytes are known to be missing and `force` is not set; otherwise add notes.

    `told_at`: the address at which the new master tells the old one, "" if it does not.
    """
    if standing.missing_bytes:
        text = (f"{standing.missing_bytes:,} bytes are missing here: it has its master's log up to {standing.end}, and the log's "
                f"last known end is {standing.master_end}")
        if not force:
            raise EngineError(f"{text}: wait until it has caught up (`pyengine status`), or give --force to promote it without them")
        notes.append(text)
    if standing.linked:
        told = f"is told at {told_at}" if told_at else "is not informed"
        notes.append(f"its master was still linked and {told}: make sure that it takes no puts, then start it as a slave of this one")
    elif not standing.master_end:
        notes.append("it has received nothing from its master, so the end of the master's log is unknown")
    else:
        notes.append(f"the last known end of its master's log is {standing.master_end}; later messages are unknown")


def promote_stopped(root: Path, settings: dict[str, str], role: str, force: bool, notes: list[str]) -> str | None:
    """Promote a stopped slave; return its role before, None if unknown; EngineError if it is not a slave.

    Its role comes from engine.toml, or from its last start.
    """
    with owning(root):
        slave = load_config(root, settings)
        configured = slave.broker_role
        noted, problem = ReplicationStateFile(root).read()
        last = noted.role if noted else configured
        is_fenced = noted is not None and noted.is_fenced
        if SLAVE not in (last, configured) and not problem and not (force and is_fenced):
            more = ""
            if noted is not None and is_fenced:
                by = "a master of a higher term has taken its place" if noted.fenced_by > noted.term else (
                    f"{noted.second_master} is a master of its term too")
                more = (f": {by}. Start it as that one's slave, or give --force to make it the master again: then the other one refuses "
                        "puts once both meet")
            raise EngineError(f"{root} is not a slave: its role is {last}{more}")
        if noted is not None and noted.role == SLAVE:
            judge(SlaveProgress(False, noted.confirm, noted.master_end), force, notes)
        else:
            notes.append("it does not run, so the end of its master's log is unknown")
        peers = _peers(slave, slave.ha_master_address)
        was = SLAVE if SLAVE in (last, configured) else None
        if was and not peers:
            notes.append("the old master is not told unless ha_peers names it, since ha_secret_file or ha_master_address is not given "
                         "here. Set it, or make sure that the old master takes no puts (docs/replication.md)")
        _write_role(root, role, notes, peers)
        given = load_config(root, settings)
        notes += [f"{name} is also set by --set or the environment, which win: leave it out there, or give {value}"
                  for name, value in {"broker_role": role, **peers}.items() if getattr(given, name) != value]
        return was


def _peers(slave: EngineConfig, master_address: str) -> dict[str, str]:
    """Return `ha_peers` of the new master, the old one's address before those that are set, if terms count: they need a secret."""
    if not slave.ha_secret_file or not master_address:
        return {}
    others = (text.strip() for text in slave.ha_peers.split(","))
    return {"ha_peers": ", ".join(dict.fromkeys([master_address, *filter(None, others)]))}


def _write_role(root: Path, role: str, notes: list[str], peers: dict[str, str]) -> None:
    """Write the settings, then the note: after a crash in between the store starts in neither role until this runs again.

    Of a slave its own acknowledgements are removed first. They may be from a time as a master, and its offsets are those of the last one,
    which may have been reset to where they were.
    """
    file = ReplicationStateFile(root)
    noted = file.read()
    if noted.problem:
        notes.append(noted.problem)
    if noted.state is None or noted.state.role == SLAVE or noted.problem:
        ConsumerOffsets(root).void_acknowledgements()
    set_in_file(config_path(root), {"broker_role": role, **peers}, ("ha_master_address",))
    failpoint("promotion_set")
    term = max(noted.state.term, noted.state.fenced_by) + 1 if noted.state else 1
    file.write(ReplicationState(role, noted.state.confirm if noted.state else 0, term=term))
    failpoint("promotion_noted")
