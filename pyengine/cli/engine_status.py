"""The status of a store as one document: from the shared counters if an engine runs, else from the files.

Read-only: nothing is created or changed. The fields that every document has: state, role, mode,
read_only, reason, positions, workers, sessions. `replication` has one shape for both roles: its
`links` are a master's slaves, or a slave's one link to its master (docs/replication.md).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyengine.engine_config import DAY_MS
from pyengine.errors import DiskError, EngineUnavailableError, StoreBusyError, UsageError
from pyengine.formats.consume_queue import is_filler
from pyengine.formats.paths import StorePaths
from pyengine.ipc.cleaning import Cleaning, held_segments
from pyengine.ipc.control_block import MODE_NAMES, ROLE_NAMES, STATE_NAMES, EngineMemory, Identity, boot_ns, now_ms
from pyengine.ipc.crashed_engine_memory import left_memory
from pyengine.ipc.heartbeat import is_alive, is_stopped
from pyengine.ipc.live_reader import LiveWatermark
from pyengine.ipc.replication import LinkLook, Replication, ReplicationLook
from pyengine.ipc.sessions import producers_attached
from pyengine.ipc.shared_objects import CONTROL, KIND_NAMES, find_folder, removed_names
from pyengine.ipc.statistics import Statistics, put_totals, read_statistics, schedule_offsets
from pyengine.ipc.statistics import document as document_of
from pyengine.ipc.store_lock import living_kinds, look, name_processes
from pyengine.native import cleaning as native_cleaning
from pyengine.native import control as native
from pyengine.native import obstacles as native_obstacles
from pyengine.native.flush import monotonic_ns
from pyengine.results import ReadLevel
from pyengine.storage.checkpoint import abort_file_exists
from pyengine.storage.config import EngineConfig, load_config
from pyengine.storage.file_system import used_ratio
from pyengine.storage.later_format import later_things
from pyengine.storage.recovery.report import copy_note
from pyengine.storage.replication_state import ReplicationStateFile
from pyengine.storage.watermark import DurableWatermark, read_watermark

if TYPE_CHECKING:
    from pyengine._native import ms_control, ms_worker
    from pyengine.storage.store_reader import StoreReader

WORKER_STATES = {
    native.WORKER_ABSENT: "absent", native.WORKER_STARTING: "starting", native.WORKER_READY: "ready",
    native.WORKER_STOPPING: "stopping", native.WORKER_FAILED: "failed",
}
STILL_MS = 10_000      # workers go round every five seconds at least (pyengine/engine/worker.py)
MOVES = {"flusher": ("flushed", "committed"), "committer": ("committed", "wrote"), "reputter": ("reput_from", "committed")}
CLOCK_AHEAD_MS = 60_000
CLOCK_SET_MS = DAY_MS
CLOCK_IDLE_MS = 180 * DAY_MS  # a store may be idle for long; after half a year the clock is as likely to be wrong
POSITIONS = ("wrote", "committed", "flushed", "reput_from", "confirm")
SLAVE = "SLAVE"


def engine_status(root: Path, settings: dict[str, str]) -> dict[str, Any]:
    """The status document of the store at `root`."""
    living = living_kinds(root)
    why_unseen = ""
    if living:
        try:
            with EngineMemory.attach(find_folder(root), writable=False) as memory:
                document = _live(root, memory, living)[0]
                return document | {"verified": _verified(read_watermark(root).watermark, document["positions"]["min"])}
        except EngineUnavailableError as error:  # not published yet, or of another user
            why_unseen = str(error)
    return _from_files(root, settings, living, why_unseen)


def live_status(root: Path) -> tuple[dict[str, Any], Statistics | None] | None:
    """The status document of a running engine and the figures in it; None where no engine's counters can be seen.

    Cheap enough for several calls a second: no file of the store is read.
    """
    try:
        if not (living := living_kinds(root)):
            return None
        with EngineMemory.attach(find_folder(root), writable=False) as memory:
            return _live(root, memory, living)
    except (EngineUnavailableError, DiskError):
        return None


def _live(root: Path, memory: EngineMemory, living: list[int]) -> tuple[dict[str, Any], Statistics | None]:
    control, identity = memory.control, memory.identity
    state = memory.state
    obstacles = _obstacles(memory)
    workers = [_worker(control.workers[kind], kind, kind in living) | {"obstacle": obstacles[kind]}
               for kind in range(len(KIND_NAMES))]
    positions = {"min": native.load_position(control.min_offset)}
    positions |= {name: native.load_position(getattr(control, name)) for name in POSITIONS}
    sessions = _sessions(control)
    frozen = native.load(control.state, "frozen") != 0
    refused = native.load(control.state, "refuse_puts")
    is_final = frozen or state in (native.STATE_READ_ONLY, native.STATE_DEGRADED)
    read_only = is_final or bool(refused & (native.REFUSE_DISK_FULL | native.REFUSE_UNWRITABLE))
    wrote, store_timestamp_ms = native.committed_slot(control)
    figures = _figures(memory)
    disk = _disk(memory)
    replication = live_replication(memory)
    document = {
        # "stopping" is a phase of a running engine
        "state": "running" if state == native.STATE_STOPPING else STATE_NAMES[state],
        "stopping": state == native.STATE_STOPPING or bool(refused & native.REFUSE_STOPPING),
        "role": ROLE_NAMES[identity.role],
        "mode": MODE_NAMES[identity.mode],
        "read_only": read_only,
        "reason": (is_final and native.reason(control) or _why_lost(root, memory.missing_names(), living)
                   or _why(refused, living, disk) or _why_still(control, identity, workers, positions) or _first(obstacles)
                   or why_unlinked(replication) or native.reason(control) or _why_clock(identity, store_timestamp_ms)),
        "positions": positions,
        "workers": [one for one in workers if one["pid"] or one["state"] != "absent"],
        "sessions": len(sessions),
        "producers_attached": producers_attached(identity.sysv_semaphore_id),
        "session_list": sessions,
        "store": str(root),
        "store_uuid": str(identity.store_uuid),
        "epoch": identity.epoch,
        "created_ms": identity.created_ms,
        "last_store_timestamp_ms": store_timestamp_ms,
        "clock_back_ms": native.load(control.writer, "clock_back_ms"),
        "undrained_bytes": positions["wrote"] - positions["committed"],
        "behind_bytes": positions["committed"] - positions["reput_from"],
        "unflushed_bytes": positions["wrote"] - positions["flushed"],
        "syncs": native.load(control.flusher, "syncs"),
        "sync_ms_mean": _mean_ms(native.load(control.flusher, "sync_ns_total"), native.load(control.flusher, "syncs")),
        "sync_ms_max": native.load(control.flusher, "sync_ns_max") / 1e6,
        **_puts(control),
        "disk": disk,
        "refused_puts": native.load(control.writer, "refused"),
        "unclean": False,
        "statistics": _statistics(root, identity.created_ms, figures) if figures is not None else None,
        "schedule_message_offset": _schedule(root, memory),
        "replication": replication,
    }
    return document, figures


def _puts(control: ms_control) -> dict[str, int]:
    """Messages and bytes put since this epoch began, of one committed pass."""
    messages, size_bytes = put_totals(control)
    return {"put_messages": messages, "put_bytes": size_bytes}


def _figures(memory: EngineMemory) -> Statistics | None:
    """Everything that is counted; None for the engine of another version."""
    try:
        return read_statistics(memory)
    except EngineUnavailableError:
        return None


def _statistics(root: Path, created_ms: int, figures: Statistics) -> dict[str, Any]:
    """The figures as docs/statistics.md names them."""
    return {"boot_timestamp_ms": created_ms, "runtime_s": max(0, now_ms() - created_ms) / 1000, **document_of(figures),
            "commit_log_disk_ratio": used_ratio(StorePaths(root).commit_log),
            "consume_queue_disk_ratio": used_ratio(StorePaths(root).consume_queue)}


def _schedule(root: Path, memory: EngineMemory) -> dict[str, dict[str, int]]:
    """By delay level: the next offset to be delivered, the level's end, and what lies between."""
    try:
        levels = schedule_offsets(root, memory)
    except EngineUnavailableError:
        return {}
    return {str(level): {"offset": one.offset, "max": one.end, "pending": one.pending} for level, one in levels.items()}


def _disk(memory: EngineMemory) -> dict[str, Any]:
    """What the cleaner's probe saw last, and what the cleaner did since the engine started; empty if it cannot be seen."""
    try:
        with Cleaning(memory.folder) as cleaning:
            block = cleaning.block
            counters = ("used_percent", "queue_used_percent", "usable_bytes", "removed_segments", "removed_bytes",
                        "removed_queue_files", "removed_index_files", "waited_for_holds", "forced_holds")
            return {name: native.load(block, name) for name in counters} | {
                "held_segments": [{"segment": segment, "pid": pid} for segment, pid in held_segments(block)],
                "reason": native_cleaning.reason(block)}
    except EngineUnavailableError:
        return {}


def _why_lost(root: Path, missing: list[str], living: list[int]) -> str:
    """What happens, and what to do, where no process can attach to an engine any more."""
    if not missing:
        return ""
    processes = name_processes(root, living)
    if native.SUPERVISOR in living:
        then = f"the engine stops in order and starts again by itself; if it does not: `pyengine stop {root}`, then start"
    else:
        then = f"its workers end in order by themselves, then `pyengine start {root}` recovers the store"
    return f"{removed_names(missing)}: {then}. Alive: {processes}; kill -9 what does not end"


def _why(refused: int, living: list[int], disk: dict[str, Any]) -> str:
    if refused & (native.REFUSE_DISK_FULL | native.REFUSE_UNWRITABLE):
        return disk.get("reason") or "the disk is full: the store takes puts again once there is room"
    if refused & native.REFUSE_STOPPING:
        return "the engine is stopping"
    if native.SUPERVISOR not in living:
        return "no supervisor is running: dead workers are not restarted; `pyengine start` takes over"
    return ""


def _why_still(control: ms_control, identity: Identity, workers: list[dict[str, Any]], positions: dict[str, int]) -> str:
    """Which workers are in one round, or the writer in one pass, for longer than a disk that answers would take."""
    told = []
    pass_ms = native.load(control.writer, "pass_started_ms")
    pass_age_ms = max(0, now_ms() - pass_ms) if pass_ms else 0
    for one in workers:
        alive = one["state"] in ("ready", "stopping")
        age_ms = one["heartbeat_age_ms"] or 0
        refuses = one["kind"] == "writer" and pass_age_ms > identity.os_page_cache_busy_timeout_ms
        if not alive or age_ms < STILL_MS and not refuses:
            continue
        text = f"the {one['kind']} (pid {one['pid']}) has not finished a round for {max(age_ms, pass_age_ms * refuses) / 1000:.0f} s"
        text += ", and puts are refused (OS_PAGECACHE_BUSY)" if refuses else ""
        moved, until = MOVES.get(one["kind"], ("", ""))
        if moved and (waiting := positions[until] - positions[moved]) > 0:
            text += f", {moved} stays at {positions[moved]} and {waiting} bytes wait"
        told.append(text + (": a signal has stopped it (kill -CONT)" if is_stopped(one["pid"]) else ""))
    return "; ".join(told) + ": look for a disk that does not answer (dmesg, df)" if told else ""


def _why_clock(identity: Identity, store_timestamp_ms: int) -> str:
    """Where this machine's clock and the store's times cannot both be right."""
    now = now_ms()
    if store_timestamp_ms - now > CLOCK_AHEAD_MS:
        return (f"the last message was stored {_days(store_timestamp_ms - now)} ahead of this machine's clock: store times do not advance "
                "until the clock reaches it; set the clock right if it is behind")
    set_ms = (now - identity.created_ms) - (boot_ns() - identity.created_boot_ns) // 1_000_000 if identity.created_boot_ns else 0
    if set_ms > CLOCK_SET_MS:
        return (f"this machine's clock was set forward by {_days(set_ms)} since the engine started: if that is wrong, set it back, "
                "or messages count as expired and new ones are stored in the future")
    if 0 < store_timestamp_ms < now - CLOCK_IDLE_MS and not identity.replay_clock:
        return (f"this machine's clock is {_days(now - store_timestamp_ms)} ahead of the last message: if that is wrong, set it right, "
                "or messages count as expired and new ones are stored in the future")
    return ""


def _days(ms: int) -> str:
    return f"{ms / DAY_MS:.0f} days" if ms >= 2 * DAY_MS else f"{ms / 60_000:.0f} min"


def _obstacles(memory: EngineMemory) -> list[str]:
    """By kind: what keeps that worker from its work."""
    try:
        block = memory.open_obstacles()
    except EngineUnavailableError:
        return [""] * len(KIND_NAMES)
    return [native_obstacles.read(block, kind) for kind in range(len(KIND_NAMES))]


def _first(obstacles: list[str]) -> str:
    return next((f"{KIND_NAMES[kind]}: {text}" for kind, text in enumerate(obstacles) if text), "")


def _mean_ms(total_ns: int, count: int) -> float:
    return total_ns / count / 1e6 if count else 0.0


def _worker(line: ms_worker, kind: int, holds_its_byte: bool) -> dict[str, Any]:
    pid, start_time_ms = native.load(line, "pid"), native.load(line, "start_time_ms")
    state = WORKER_STATES.get(native.load(line, "state"), "unknown")
    if state in ("starting", "ready", "stopping") and not (holds_its_byte and is_alive(pid, start_time_ms)):
        state = "dead"
    return {
        "kind": KIND_NAMES[kind], "pid": pid, "state": state, "restarts": native.load(line, "restarts"),
        "heartbeat_age_ms": max(0, (monotonic_ns() - native.load(line, "heartbeat_ns")) // 1_000_000) if pid else None,
        "incarnation": native.load(line, "incarnation"), "passes": native.load(line, "passes"),
        "errors": native.load(line, "error_count"),
    }


def _sessions(control: ms_control) -> list[dict[str, Any]]:
    found = []
    for slot in range(len(control.sessions)):
        line = control.sessions[slot]
        state = native.load(line, "state")
        if state != native.SESSION_FREE:
            found.append({
                "slot": slot, "state": "open" if state == native.SESSION_OPEN else "dead",
                "pid": native.load(line, "pid"), "uid": native.load(line, "uid"),
                "generation": native.load(line, "generation"), "ring_bytes": native.load(line, "ring_bytes"),
                "bad_entry": native.load(line, "bad_entry")})
    return found


def _from_files(root: Path, settings: dict[str, str], living: list[int], why_unseen: str) -> dict[str, Any]:
    config = load_config(root, settings)
    holder = look(root)
    unclean = abort_file_exists(root)
    state, reason, undrained_bytes = "stopped", "", 0
    if holder.kind == "foreign":
        reason = f"it is open in {holder.who}: no engine can start here until that is stopped"
    elif any(kind != native.SUPERVISOR for kind in living):
        state, reason = "running", f"its counters cannot be seen: {why_unseen}"
        with contextlib.suppress(EngineUnavailableError, PermissionError):  # another user's may not be listed
            if CONTROL not in (folder := find_folder(root)).names():
                reason = _why_lost(root, [str(folder.path / CONTROL)], living)
    elif holder.kind == "owner" or living:
        state, reason = "recovering", "its owner is recovering it or starting"
    elif unclean:
        with left_memory(root) as left:
            undrained_bytes = left.undrained_bytes
        reason = "it was not stopped in an orderly way: the next start recovers it"
        if undrained_bytes:
            reason += f"; {undrained_bytes:,} acknowledged bytes are in shared memory only and are drained then"
    later = "; ".join(one.sentence for one in later_things(root))
    if later and not reason:
        reason = f"RocketMQ 5 has written to it, so no engine starts here: {later}"
    watermark = read_watermark(root)
    noted = noted_replication(root)
    positions = _positions_from_files(root, settings, unclean, noted)
    if watermark.is_copied and watermark.watermark is not None:
        reason = copy_note(positions["wrote"], watermark.watermark.flushed) + (f"; {reason}" if reason else "")
    return {
        "state": state, "stopping": False, "role": _role(config, noted), "mode": config.mode, "read_only": False,
        "reason": reason or watermark.damage, "positions": positions,
        "workers": [], "sessions": 0, "producers_attached": 0, "session_list": [], "store": str(root),
        "undrained_bytes": undrained_bytes, "unclean": unclean,
        "statistics": None,
        "replication": noted,
        "durable_watermark": watermark.watermark.flushed if watermark.watermark else None,
        "verified": _verified(watermark.watermark, positions["min"]),
    }


def _verified(watermark: DurableWatermark | None, min_offset: int) -> dict[str, Any] | None:
    """The part of the log that the watermark covers, and whether that is all of it; None without a watermark."""
    if watermark is None:
        return None
    start = max(watermark.verified_from, min_offset, 0)
    return {"from": start, "to": watermark.flushed, "whole": watermark.verified_from <= max(min_offset, 0)}


def _role(config: EngineConfig, noted: dict[str, Any] | None) -> str:
    """What its settings say; where they say nothing, in which role it ran last."""
    return config.broker_role if "broker_role" in config.origins else (noted or {}).get("role", config.broker_role)


def _positions_from_files(root: Path, settings: dict[str, str], unclean: bool,
                          noted: dict[str, Any] | None) -> dict[str, int]:
    """What the files say: the log's end is found by reading it; after a crash `reput_from` is where the queues end.

    `flushed` is what a reader may claim now; 0 where that cannot be told.
    """
    from pyengine.storage.store_reader import open_store

    with open_store(root, watermark=None, **settings) as store:
        end = store.max_physical_offset(ReadLevel.COMMITTED)
        flushed = 0
        with contextlib.suppress(UsageError, StoreBusyError), contextlib.closing(LiveWatermark(root, store.commit_log)) as marks:
            flushed = marks.limit(ReadLevel.FLUSHED)
        return {"min": store.min_physical_offset, "wrote": end, "committed": end, "flushed": flushed,
                "reput_from": _queued_end(store, end) if unclean else end,
                "confirm": min(end, noted["confirm"]) if noted and "confirm" in noted else 0}


def _queued_end(store: StoreReader, end: int) -> int:
    """Where the last message that is in a queue ends, at most `end`."""
    queued = max(0, store.min_physical_offset)
    for topic, queue_ids in store.topics().items():
        for queue_id in queue_ids:
            queue = store.queue(topic, queue_id)
            max_offset = queue.max_offset(end) if queue else 0
            entry = queue.entry(max_offset - 1, max_offset) if queue and max_offset else None
            if entry is not None and not is_filler(entry):
                queued = max(queued, entry.physical_offset + entry.size_bytes)
    return queued


def live_replication(memory: EngineMemory) -> dict[str, Any] | None:
    """The state of an engine's replication; None where it does not replicate."""
    control, identity = memory.control, memory.identity
    if not identity.replicates:
        return None
    committed, confirm = native.load_position(control.committed), native.load_position(control.confirm)
    is_slave = ROLE_NAMES[identity.role] == SLAVE
    master_end = native.load(control.replicator, "master_end") if is_slave else 0
    document: dict[str, Any] = {
        "dispatch_at": "replicated" if identity.dispatch_at else "committed",
        "min_in_sync_replicas": identity.min_in_sync_replicas,
        "slaves_connected": native.load(control.replicator, "slaves_connected"),
        "unconfirmed_bytes": max(0, committed - confirm),
        "linked": bool(native.load(control.replicator, "linked")) if is_slave else None,
        "master_end": master_end or None,
        "received": native.load_position(control.received) if is_slave else None,
        "behind_master_bytes": max(0, master_end - native.load_position(control.wrote)) if master_end else None,
    }
    try:
        with Replication(memory.folder) as replication:
            figures = replication.look()
            links = [_link(one, committed) for one in replication.links()]
    except EngineUnavailableError:
        return document | {"links": []}
    return document | {
        "listening_port": figures.listening_port or None, "connections": figures.connections, "refused": figures.refused,
        "closed": figures.closed, "last_closed": _last(figures), "links": links}


def noted_replication(root: Path) -> dict[str, Any] | None:
    """What a stopped store has noted; None where it never replicated."""
    state, said = ReplicationStateFile(root).read()
    if state is None:
        return {"said": said} if said else None
    return {"role": state.role, "confirm": state.confirm, "dispatch_at": state.dispatch_at,
            "master_end": state.master_end or None, "said": said}


def why_unlinked(replication: dict[str, Any] | None) -> str:
    """A slave without its master, as a reason; "" where nothing is wrong."""
    if replication is None or replication["linked"] is not False:
        return ""
    said = [link["said"] for link in replication["links"] if link["said"]]
    if any(link["state"] == "handshake" for link in replication["links"]):
        return "it compares its log with its master's"
    return "it is not linked to its master" + (f": {said[0]}" if said else "")


def _link(look: LinkLook, committed: int) -> dict[str, Any]:
    known = look.acked if look.acked >= 0 else look.start
    return {
        "address": look.address, "state": look.state, "since_ms": look.since_ms, "start": look.start, "sent": look.sent,
        "acked": look.acked, "acked_age_ms": max(0, now_ms() - look.acked_ms) if look.acked_ms else None,
        "behind_bytes": max(0, committed - known) if known >= 0 else None, "bytes": look.bytes, "frames": look.frames,
        "said": look.said}


def _last(figures: ReplicationLook) -> dict[str, Any] | None:
    if not figures.last_said:
        return None
    return {"address": figures.last_address, "said": figures.last_said, "at_ms": figures.last_said_ms}
