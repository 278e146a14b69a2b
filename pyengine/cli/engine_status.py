"""Builds the status document of a store: from the shared counters if an engine runs, otherwise from the files.

It only reads. Every document has the fields verdict and summary, state, role, mode, read_only,
takes_puts, reason, positions, workers, sessions. `replication` has one shape for both roles: its `links` are a master's
slaves, or a slave's link to its master (docs/replication.md).

The verdict concludes a status in one word and one sentence: each function checks for one problem and returns findings;
`conclude` puts the worst first. docs/operations.md has the table of words.
"""

from __future__ import annotations

import contextlib
import enum
import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pyengine.engine.kinds import kinds_for, kinds_of
from pyengine.engine_config import DAY_MS, SLAVE, keywords
from pyengine.errors import DiskError, EngineUnavailableError, UsageError, command
from pyengine.formats.consume_queue import is_filler
from pyengine.ipc.cleaning import Cleaning
from pyengine.ipc.control_block import (
    MODE_NAMES,
    ROLE_NAMES,
    STATE_NAMES,
    EngineMemory,
    boot_ns,
    difference_from_file,
    now_ms,
    read_rows,
    read_run_settings,
)
from pyengine.ipc.crashed_engine_memory import open_crashed_memory
from pyengine.ipc.heartbeat import build_id, is_alive, is_stopped
from pyengine.ipc.live_reader import dead_engine
from pyengine.ipc.replication import Replication
from pyengine.ipc.sessions import no_room_reason
from pyengine.ipc.shared_objects import KIND_NAMES, NAME_SERVERS, POPS, find_folder
from pyengine.ipc.statistics import Statistics, read_statistics, schedule_offsets
from pyengine.ipc.statistics import document as document_of
from pyengine.ipc.store_lock import living_kinds, read_holder, sentence_if_lost, sentence_if_unseen
from pyengine.native import cleaning as native_cleaning
from pyengine.native import control as native
from pyengine.native.flush import monotonic_ns
from pyengine.native.session import producer_count
from pyengine.results import ReadLevel
from pyengine.storage.checkpoint import abort_file_exists, read_watermark
from pyengine.storage.commit_log import measure_log
from pyengine.storage.consumer_offset import ConsumerOffsets
from pyengine.storage.file_system import used_ratio
from pyengine.storage.later_format import find_later_features
from pyengine.storage.log_holds import read_log_holds
from pyengine.storage.message_store import MessageStore
from pyengine.storage.read_level import FilesWatermark
from pyengine.storage.recovery.recover import copied_note
from pyengine.storage.replication_state import ReplicationStateFile, second_master_sentence

if TYPE_CHECKING:
    from pyengine._native import ms_control, ms_identity, ms_worker
    from pyengine.engine_config import EngineConfig
    from pyengine.storage.checkpoint import DurableWatermark, WatermarkReading
    from pyengine.storage.replication_state import ReadState
    from pyengine.storage.store_reader import StoreReader

STUCK_ROUND_MS = 10_000      # workers do a round at least every five seconds (pyengine/engine/worker.py)
SLAVE_WAIT_S = 2.0     # in which a slave that lags acknowledges something
POLL_INTERVAL_S = 0.02
MOVES = {"flusher": ("flushed", "committed"), "committer": ("committed", "wrote"), "reputter": ("reput_from", "committed")}
NEEDED = {"writer", "allocator", *MOVES}  # the workers that store a message, make it durable, and put it into its queue
CLOCK_AHEAD_MS = 60_000
CLOCK_SET_MS = DAY_MS
GATEWAY_START_MS = 30_000  # in which a gateway comes after its engine, or again
CLOCK_IDLE_MS = 180 * DAY_MS  # a store may be idle for long; after half a year the clock is as likely to be wrong


class Verdict(enum.StrEnum):
    """The words, the worst first."""

    DEGRADED = "degraded"      # recovery found damage: nothing runs, nothing is changed
    READ_ONLY = "read-only"    # a sync failed, or the disk is full or cannot be written: puts are refused
    STUCK = "stuck"            # a position that must move does not, although work waits
    STOPPING = "stopping"
    WARNING = "warning"        # it works, but something needs attention
    RECOVERING = "recovering"  # its owner recovers it or starts
    STOPPED = "stopped"
    OK = "ok"

    @property
    def is_trouble(self) -> bool:
        """Whether the engine fails at its work, for which `pyengine status` exits with 6."""
        return self in (Verdict.DEGRADED, Verdict.READ_ONLY, Verdict.STUCK)


class Finding(NamedTuple):
    """One problem that was found."""

    verdict: Verdict
    sentence: str


def conclude(findings: Iterable[Finding], otherwise: Finding) -> dict[str, Any]:
    """Return the fields `verdict`, `summary`, `reason` and `findings` of a status; from `otherwise` if nothing was found."""
    found = [finding for finding in findings if finding.sentence]
    order = list(Verdict)
    found.sort(key=lambda finding: order.index(finding.verdict))  # stable: of one word the first finding
    first = found[0] if found else otherwise
    return {"verdict": str(first.verdict), "summary": first.sentence, "reason": found[0].sentence if found else "",
            "findings": [{"verdict": str(finding.verdict), "sentence": finding.sentence} for finding in found]}


def judge(memory: EngineMemory, lost: str, living: Sequence[int], blocked_reasons: Sequence[str],
          document: dict[str, Any]) -> list[Finding]:
    """Return all problems of a running engine.

    `lost` says that no process can attach to it any more. `document`: its positions, workers, disk, replication, name servers and times.
    """
    control, identity, workers = memory.control, memory.identity, document["workers"]
    refused = native.load(control.state, "refuse_puts")
    frozen = native.load(control.state, "frozen") != 0 or memory.state == native.STATE_READ_ONLY
    reason = native.reason(control)
    still = list(_stuck_workers(control, identity, workers, document["positions"]))
    return [
        Finding(Verdict.DEGRADED, (reason or "recovery refused the store") if memory.state == native.STATE_DEGRADED else ""),
        Finding(Verdict.READ_ONLY, (reason or "the store is frozen") if frozen else ""),
        Finding(Verdict.STUCK, lost),
        Finding(Verdict.READ_ONLY, _why_full(refused, document["disk"])),
        Finding(Verdict.READ_ONLY, why_fenced(refused, document["store"])),
        _supervisor(memory, living, document),
        Finding(Verdict.STUCK, "; ".join(still)),
        Finding(Verdict.WARNING, "its processes are not visible here, so their state is unknown: run this in the engine's pid namespace "
                                 "(docs/containers.md)" if _all_dead(workers, living) else ""),
        *_blocked_workers(blocked_reasons, _needed_and_dead(memory, workers)),
        *_replication(identity, document["replication"]),
        *_absent_gateways(memory, living, document),
        *(Finding(Verdict.WARNING, f"the gateway is not registered with the name server {one['address']}: {one['problem']}")
          for one in document["name_servers"] if not one["registered"]),
        Finding(Verdict.WARNING, "" if frozen or memory.state == native.STATE_DEGRADED else reason),
        Finding(Verdict.WARNING, _why_clock(identity, document["last_store_timestamp_ms"])),
        Finding(Verdict.WARNING, _why_mixed(workers)),
    ]


def conclude_unseen(document: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `conclude` for a store without visible shared memory. `document`: its state and reason."""
    words = {"stopped": Verdict.STOPPED, "recovering": Verdict.RECOVERING, "running": Verdict.WARNING}
    verdict = words[document["state"]]
    if not document["reason"] and verdict is Verdict.STOPPED:
        return conclude((), Finding(verdict, f"no engine runs; {command('start', document['store'])} starts one"))
    return conclude([Finding(verdict, document["reason"])], Finding(verdict, ""))


def all_is_well(document: dict[str, Any]) -> Finding:
    """Return the sentence for an engine without problems."""
    ready = sum(1 for one in document["workers"] if one["state"] == "ready")
    takes = "it takes no puts yet"
    if document["takes_puts"] or document["role"] == SLAVE:
        takes = "it takes puts" if document["takes_puts"] else "it follows its master"
    return Finding(Verdict.OK, f"{takes}; {ready} processes are ready; {document['unflushed_bytes']:,} bytes wait for the disk, "
                               f"{document['dispatch_lag_bytes']:,} for their queues")


# ---- what may be wrong -----------------------------------------------------------


def _why_full(refused: int, disk: dict[str, Any]) -> str:
    if not refused & (native.REFUSE_DISK_FULL | native.REFUSE_UNWRITABLE):
        return ""
    return disk.get("reason") or "the disk is full: the store takes puts again once there is room"


def why_fenced(refused: int, root: str | os.PathLike[str]) -> str:
    """Return why the engine on `root` refuses puts with these bits for another master's sake, "" if it does not."""
    if not refused & native.REFUSE_FENCED:
        return ""
    noted = ReplicationStateFile(root).read().state
    if noted is not None and noted.second_master and noted.fenced_by <= noted.term:
        return second_master_sentence(noted.second_master)
    or_equal = "" if noted is not None and noted.is_fenced else ", or one of the same term goes on"  # its note is not written yet
    return (f"a master of a higher term has taken this store's place{or_equal}, so puts are refused: start it as that one's slave "
            "(broker_role=SLAVE and ha_master_address=HOST:PORT)")


def _supervisor(memory: EngineMemory, living: Sequence[int], document: dict[str, Any]) -> Finding:
    """Judge a stop, and an engine without supervisor: it works on unless a needed worker is dead too."""
    if native.SUPERVISOR in living:
        return Finding(Verdict.STOPPING, "the engine is stopping" if document["stopping"] else "")
    if document["stopping"]:
        return Finding(Verdict.STUCK, "the supervisor ended while it stopped the engine: `pyengine stop` finishes that, `pyengine start` "
                                      "takes over")
    sentence = "no supervisor is running: dead workers are not restarted; `pyengine start` takes over"
    if dead := _needed_and_dead(memory, document["workers"]):
        return Finding(Verdict.STUCK, f"{sentence} (dead: {', '.join(dead)})")
    return Finding(Verdict.WARNING, sentence)


def _all_dead(workers: Sequence[dict[str, Any]], living: Sequence[int]) -> bool:
    """Whether no process that holds its lock is alive by its pid: they are hidden, or this is the memory of an engine before them."""
    states = {one["kind"]: one["state"] for one in workers}
    return all(states.get(KIND_NAMES[kind]) == "dead" for kind in living)


def _needed_and_dead(memory: EngineMemory, workers: Sequence[dict[str, Any]]) -> list[str]:
    kinds = kinds_for(memory.identity.mode, bool(memory.identity.replicates))
    states = {one["kind"]: one["state"] for one in workers}
    return [kind.name for kind in kinds if kind.name in NEEDED and states.get(kind.name) not in ("starting", "ready", "stopping")]


def _absent_gateways(memory: EngineMemory, living: Sequence[int], document: dict[str, Any]) -> Iterable[Finding]:
    """Judge the processes that serve clients: each may be absent for as long as its start or restart takes."""
    if memory.state not in (native.STATE_RUNNING, native.STATE_READ_ONLY) or document["stopping"]:
        return
    seen_ms = {one["kind"]: one["heartbeat_age_ms"] for one in document["workers"] if one["pid"]}
    for kind in kinds_of(memory.identity):
        absent_ms = seen_ms.get(kind.name, _age_ms(memory.identity))
        if (kind.serving or kind.serving_grpc) and kind.number not in living and absent_ms >= GATEWAY_START_MS:
            yield Finding(Verdict.WARNING, f"the {kind.name} does not run, so its clients cannot connect: start its unit, or read in "
                                           "the log why it ended")


def _stuck_workers(control: ms_control, identity: ms_identity, workers: Sequence[dict[str, Any]],
                   positions: dict[str, int]) -> Iterable[str]:
    """Yield sentences about workers that a signal has stopped, or whose round (or the writer's pass) takes longer than a
    working disk needs."""
    pass_ms = native.load(control.writer, "pass_started_ms")
    pass_age_ms = max(0, now_ms() - pass_ms) if pass_ms else 0
    for one in workers:
        if one["state"] not in ("ready", "stopping"):
            continue
        age_ms = one["heartbeat_age_ms"] or 0
        refuses = one["kind"] == "writer" and pass_age_ms > identity.os_page_cache_busy_timeout_ms
        stopped = is_stopped(one["pid"])
        if age_ms < STUCK_ROUND_MS and not refuses and not stopped:
            continue
        text = f"the {one['kind']} (pid {one['pid']}) "
        is_silent = age_ms >= STUCK_ROUND_MS or refuses
        text += f"has not finished a round for {max(age_ms, pass_age_ms * refuses) / 1000:.0f} s" if is_silent else "goes no rounds"
        text += ", and puts are refused (OS_PAGECACHE_BUSY)" if refuses else ""
        moved, until = MOVES.get(one["kind"], ("", ""))
        if moved and (waiting := positions[until] - positions[moved]) > 0:
            text += f", {moved} stays at {positions[moved]} and {waiting} bytes wait"
        yield text + (f": a signal has stopped it: kill -CONT {one['pid']}" if stopped else
                      ": look for a disk that does not answer (dmesg, df)")


def _blocked_workers(blocked_reasons: Sequence[str], dead: Sequence[str]) -> Iterable[Finding]:
    """Return the reasons for which workers are blocked; `dead`: the needed workers that the supervisor must start."""
    for kind, text in enumerate(blocked_reasons):
        is_needed = bool(dead) if kind == native.SUPERVISOR else KIND_NAMES[kind] in NEEDED
        yield Finding(Verdict.STUCK if is_needed else Verdict.WARNING, f"{KIND_NAMES[kind]}: {text}" if text else "")


def _replication(identity: ms_identity, replication: dict[str, Any] | None) -> Iterable[Finding]:
    if replication is None or "links" not in replication:
        return
    if replication["linked"] is not None:
        yield _link_to_master(replication)
        return
    required, connected = identity.min_in_sync_replicas, replication["slaves_connected"]
    if identity.role == native.SYNC_MASTER and connected < required:
        waiting = replication["unconfirmed_bytes"]
        yield Finding(Verdict.STUCK if waiting else Verdict.WARNING,
                      f"{connected} of {required} required slaves are connected, so puts answer SLAVE_NOT_AVAILABLE; {waiting} bytes are "
                      "not confirmed")


def _link_to_master(replication: dict[str, Any]) -> Finding:
    links = replication["links"]
    if replication["linked"]:
        return Finding(Verdict.OK, "")
    if any(link["state"] == "handshake" for link in links):
        return Finding(Verdict.WARNING, "it compares its log with its master's")
    details = [link["detail"] for link in links if link["detail"]]
    return Finding(Verdict.STUCK, "it is not linked to its master" + (f": {details[0]}" if details else ""))


def stalled_slaves(role: int, read: Callable[[], dict[str, Any] | None]) -> list[Finding]:
    """Return findings for slaves that lag and acknowledge nothing within SLAVE_WAIT_S; return at once if none lags.

    `read` reads the state of the replication.
    """
    first = _lagging(read())
    stay, deadline_s = first, time.monotonic() + SLAVE_WAIT_S
    while stay and time.monotonic() < deadline_s:
        time.sleep(POLL_INTERVAL_S)
        now = _lagging(read())
        stay = {address: link for address, link in stay.items() if address in now and now[address]["acked"] == link["acked"]}
    verdict = Verdict.STUCK if role == native.SYNC_MASTER else Verdict.WARNING
    return [Finding(verdict, f"the slave {address} lags {link['lag_bytes']} bytes and acknowledged nothing for {SLAVE_WAIT_S:g} s: "
                             "look at its disk and at the network") for address, link in stay.items()]


def _lagging(replication: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    if replication is None or replication["linked"] is not None:
        return {}
    return {link["address"]: link for link in replication["links"] if link["state"] == "transfer" and link["lag_bytes"]}


def _why_clock(identity: ms_identity, store_timestamp_ms: int) -> str:
    """Return a sentence if this machine's clock and the store's times contradict each other."""
    now = now_ms()
    if store_timestamp_ms - now > CLOCK_AHEAD_MS:
        return (f"the last message was stored {_days(store_timestamp_ms - now)} ahead of this machine's clock: store times do not advance "
                "until the clock reaches it; set the clock right if it is slow")
    set_ms = (now - identity.created_ms) - _age_ms(identity) if identity.created_boot_ns else 0
    if set_ms > CLOCK_SET_MS:
        return (f"this machine's clock was set forward by {_days(set_ms)} since the engine started: if that is wrong, set it back, "
                "or messages count as expired and new ones are stored in the future")
    if 0 < store_timestamp_ms < now - CLOCK_IDLE_MS and not identity.replay_clock:
        return (f"this machine's clock is {_days(now - store_timestamp_ms)} ahead of the last message: if that is wrong, set it right, "
                "or messages count as expired and new ones are stored in the future")
    return ""


def _days(ms: int) -> str:
    return f"{ms / DAY_MS:.0f} days" if ms >= 2 * DAY_MS else f"{ms / 60_000:.0f} min"


def _why_mixed(workers: Sequence[dict[str, Any]]) -> str:
    """Return a sentence if processes of the engine run different builds, as after a takeover by another build."""
    by_build: dict[str, list[str]] = {}
    for one in workers:
        if one["build"] and one["state"] in ("starting", "ready", "stopping"):
            by_build.setdefault(one["build"], []).append(one["kind"])
    if len(by_build) < 2:
        return ""
    mix = "; ".join(f"{build}: {', '.join(kinds)}" for build, kinds in sorted(by_build.items()))
    return (f"its processes run {len(by_build)} builds of pyengine ({mix}): `pyengine start --take-over` by the build that is wanted "
            "restarts the others")


# ---- the document ----------------------------------------------------------------------------

WORKER_STATES = {
    native.WORKER_ABSENT: "absent", native.WORKER_STARTING: "starting", native.WORKER_READY: "ready",
    native.WORKER_STOPPING: "stopping", native.WORKER_FAILED: "failed",
}
POSITIONS = ("wrote", "committed", "flushed", "reput_from", "confirm")


def engine_status(root: Path, settings: dict[str, str]) -> dict[str, Any]:
    """Return the status document of the store at `root`."""
    store = MessageStore(root)
    living = living_kinds(store)
    unseen = ""
    try:
        document = _from_memory(store, living) if living else None
    except EngineUnavailableError as error:  # not published yet, or of another user
        document, unseen = None, str(error)
    # After the memory: the engine may have stopped meanwhile.
    is_unclean, watermark, replication = abort_file_exists(store), read_watermark(store), ReplicationStateFile(store).read()
    if document is None:
        document = _from_files(store, settings, living, is_unclean, watermark, replication, unseen)
    elif document["replication"] is not None:
        noted = replication.state
        document["replication"] |= {"term": noted.term if noted else 0, "fenced_by": noted.fenced_by if noted else 0}
    now = now_ms()
    return document | {
        "space": store.space(),
        "verified": _verified(watermark.watermark, document["positions"]["min"]),
        "log_holds": [{"name": hold.name, "owner": hold.owner, "offset": hold.offset, "expires_ms": hold.expires_ms,
                       "active": hold.is_active(now), "damage": hold.damage} for hold in read_log_holds(store)]}


def live_status(root: Path) -> tuple[dict[str, Any], Statistics | None] | None:
    """Return the status document of a running engine and its figures; None if no engine's counters are visible.

    Of the store's files it reads only delayOffset.json, and of a fenced one replication.json, so several calls a second are cheap.
    """
    try:
        store = MessageStore(root)
        if not (living := living_kinds(store)):
            return None
        with EngineMemory.of(store) as memory:
            return _live(store, memory, living)
    except (EngineUnavailableError, DiskError):
        return None


def _from_memory(store: MessageStore, living: list[int]) -> dict[str, Any]:
    with EngineMemory.of(store) as memory:
        more = stalled_slaves(memory.identity.role, lambda: live_replication(memory))
        with contextlib.suppress(EngineUnavailableError):  # the status reports that trouble already
            more.append(Finding(Verdict.WARNING, difference_from_file(store, read_run_settings(memory.folder))))
        more.append(Finding(Verdict.WARNING, "; ".join(ConsumerOffsets(store).notes())))
        return _live(store, memory, living, more)[0]


def _live(store: MessageStore, memory: EngineMemory, living: list[int],
          more: Sequence[Finding] = ()) -> tuple[dict[str, Any], Statistics | None]:
    """`more`: findings of the caller, in addition to those made here."""
    control, identity = memory.control, memory.identity
    state = memory.state
    blocked_reasons = _blocked_reasons(memory)
    workers = [_worker(control.workers[kind], kind, kind in living) | {"blocked_reason": blocked_reasons[kind]}
               for kind in range(len(KIND_NAMES))]
    if read_holder(store).kind == "owner" and _all_dead(workers, living):  # a start, before it has its own
        raise EngineUnavailableError("its shared memory is that of an engine that was killed")
    positions = {"min": native.load_position(control.min_offset)}
    positions |= {name: native.load_position(getattr(control, name)) for name in POSITIONS}
    sessions = _sessions(control)
    frozen = native.load(control.state, "frozen") != 0
    refused = native.load(control.state, "refuse_puts")
    is_final = frozen or state in (native.STATE_READ_ONLY, native.STATE_DEGRADED)
    read_only = is_final or bool(refused & (native.REFUSE_DISK_FULL | native.REFUSE_UNWRITABLE | native.REFUSE_FENCED))
    put_messages, put_bytes = native.put_totals(control)
    _, store_timestamp_ms = native.committed_slot(control)
    figures = None
    with contextlib.suppress(EngineUnavailableError):  # an engine of another version
        figures = read_statistics(memory)
    syncs = native.load(control.flusher, "syncs")
    disk = _disk(memory)
    replication = live_replication(memory)
    document = {
        # "stopping" is a phase of a running engine
        "state": "running" if state == native.STATE_STOPPING else STATE_NAMES[state],
        "stopping": state == native.STATE_STOPPING or bool(refused & native.REFUSE_STOPPING),
        "role": ROLE_NAMES[identity.role],
        "mode": MODE_NAMES[identity.mode],
        "read_only": read_only,
        "takes_puts": (state == native.STATE_RUNNING and not frozen and not refused and workers[native.WRITER]["state"] == "ready"
                       and _is_open(memory, living)),
        "build": build_id(),
        "positions": positions,
        "workers": [one for one in workers if one["pid"] or one["state"] != "absent"],
        "sessions": len(sessions),
        "producers_attached": producer_count(identity.sysv_semaphore_id),
        "session_list": sessions,
        "store": str(store),
        "store_uuid": str(memory.store_uuid),
        "epoch": identity.epoch,
        "created_ms": identity.created_ms,
        "last_store_timestamp_ms": store_timestamp_ms,
        "clock_back_ms": native.load(control.writer, "clock_back_ms"),
        "undrained_bytes": positions["wrote"] - positions["committed"],
        "dispatch_lag_bytes": positions["committed"] - positions["reput_from"],
        "unflushed_bytes": positions["wrote"] - positions["flushed"],
        "syncs": syncs,
        "sync_ms_mean": native.load(control.flusher, "sync_ns_total") / syncs / 1e6 if syncs else 0.0,
        "sync_ms_max": native.load(control.flusher, "sync_ns_max") / 1e6,
        "put_messages": put_messages, "put_bytes": put_bytes,
        "disk": disk,
        "refused_puts": native.load(control.writer, "refused"),
        "unclean": False,
        "statistics": _statistics(store, identity.created_ms, figures) if figures is not None else None,
        "schedule_message_offset": schedule_offsets(store, memory),
        "replication": replication,
        "broker": _broker(memory),
        "name_servers": [row if workers[native.GATEWAY]["state"] == "ready" else row | {"registered": False, "problem": "no gateway runs"}
                         for row in read_rows(memory.folder, NAME_SERVERS)],
        "pops": _pops(memory),
    }
    findings = [*judge(memory, sentence_if_lost(store, memory.missing_names(), living), living, blocked_reasons, document), *more]
    return conclude(findings, all_is_well(document)) | document, figures


def _age_ms(identity: ms_identity) -> int:
    """Return the time since the engine's start, which a step of the wall clock does not change."""
    return (boot_ns() - identity.created_boot_ns) // 1_000_000


def _is_open(memory: EngineMemory, living: Sequence[int]) -> bool:
    """Whether clients reach the writer: by the gateway, or soon at a start, and without one by new sessions of their own."""
    if memory.identity.gateway:
        is_new = _age_ms(memory.identity) < GATEWAY_START_MS
        return native.GATEWAY in living or is_new and not native.load(memory.control.workers[native.GATEWAY], "incarnation")
    try:
        return native.SUPERVISOR in living and not no_room_reason(memory)
    except OSError:
        return False


def _statistics(store: MessageStore, created_ms: int, figures: Statistics) -> dict[str, Any]:
    """Return the figures by their names in docs/statistics.md."""
    return {"boot_timestamp_ms": created_ms, "runtime_s": max(0, now_ms() - created_ms) / 1000, **document_of(figures),
            "commit_log_disk_ratio": used_ratio(measure_log(store.root).folder),
            "consume_queue_disk_ratio": used_ratio(store.consume_queue)}


def _disk(memory: EngineMemory) -> dict[str, Any]:
    """Return the cleaner's last measurement and what it did since the engine started; empty if not visible."""
    try:
        with Cleaning(memory.folder, writable=False) as cleaning:
            block = cleaning.block
            counters = ("used_percent", "queue_used_percent", "usable_bytes", "removed_segments", "removed_bytes",
                        "removed_queue_files", "removed_index_files", "waited_for_holds", "forced_holds")
            return {name: native.load(block, name) for name in counters} | {
                "held_segments": [{"segment": segment, "pid": pid} for segment, pid in cleaning.held()],
                "reason": native_cleaning.reason(block)}
    except EngineUnavailableError:
        return {}


def _broker(memory: EngineMemory) -> dict[str, Any] | None:
    """Return how routes name the gateway's broker; None without a gateway, and while the settings cannot be read."""
    if memory.identity.gateway:
        with contextlib.suppress(EngineUnavailableError):
            config = read_run_settings(memory.folder)
            return {"cluster": config.broker_cluster_name, "name": config.broker_name, "number": config.number_in_routes}
    return None


def _pops(memory: EngineMemory) -> list[dict[str, Any]]:
    """Return what each group has popped from each topic and not acknowledged, a few seconds ago."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in read_rows(memory.folder, POPS):
        found.setdefault((row["group"], row["topic"]), []).append(row)
    return [{"group": group, "topic": topic, "in_flight": sum(row["in_flight"] for row in rows),
             "attempts": max(row["attempts"] for row in rows), "invisible_until_ms": min(row["invisible_until_ms"] for row in rows)}
            for (group, topic), rows in sorted(found.items())]


def _blocked_reasons(memory: EngineMemory) -> list[str]:
    """Return why each worker is blocked, by kind."""
    try:
        block = memory.open_blocked_reasons()
    except EngineUnavailableError:
        return [""] * len(KIND_NAMES)
    return [native.read_blocked_reason(block, kind) for kind in range(len(KIND_NAMES))]


def _worker(line: ms_worker, kind: int, holds_its_byte: bool) -> dict[str, Any]:
    pid, start_time_ms = native.load(line, "pid"), native.load(line, "start_time_ms")
    state = WORKER_STATES.get(native.load(line, "state"), "unknown")
    if state in ("starting", "ready", "stopping") and not (holds_its_byte and is_alive(pid, start_time_ms)):
        state = "dead"
    return {
        "kind": KIND_NAMES[kind], "pid": pid, "state": state, "errors": native.load(line, "error_count"),
        "heartbeat_age_ms": max(0, (monotonic_ns() - native.load(line, "heartbeat_ns")) // 1_000_000) if pid else None,
        "build": f"{build:016x}" if (build := native.load(line, "build_id")) else "",
        **{name: native.load(line, name) for name in ("restarts", "incarnation", "passes")}}


def _sessions(control: ms_control) -> list[dict[str, Any]]:
    found = []
    for slot in range(len(control.sessions)):
        line = control.sessions[slot]
        state = native.load(line, "state")
        if state != native.SESSION_FREE:
            found.append({
                "slot": slot, "state": "open" if state == native.SESSION_OPEN else "dead",
                **{name: native.load(line, name) for name in ("pid", "uid", "generation", "ring_bytes", "bad_entry")}})
    return found


def _from_files(store: MessageStore, settings: dict[str, str], living: list[int], is_unclean: bool,
                reading: WatermarkReading, replication: ReadState, unseen: str) -> dict[str, Any]:
    state, reason, undrained_bytes = "stopped", "", 0
    holder = read_holder(store)
    if holder.kind == "foreign":
        reason = f"it is open in {holder.description}: no engine can start here until that is stopped"
    elif any(kind != native.SUPERVISOR for kind in living):
        state, reason = "running", f"its counters cannot be seen: {unseen}"
        with contextlib.suppress(EngineUnavailableError, PermissionError):  # another user's may not be listed
            reason = sentence_if_unseen(store, find_folder(store), living) or reason
    elif holder.kind == "owner" or living:
        state, reason = "recovering", "its owner is recovering it or starting"
    elif is_unclean:
        with open_crashed_memory(store) as crashed:
            undrained_bytes = crashed.undrained_bytes
            reason = crashed.unreadable
        reason = reason or "it was not stopped in an orderly way: the next start recovers it"
        if undrained_bytes:
            reason += f"; {undrained_bytes:,} acknowledged bytes are in shared memory only and are drained then"
    later = "; ".join(one.sentence for one in find_later_features(store))
    if later and not reason:
        reason = f"RocketMQ 5 has written to it, so no engine starts here: {later}"
    noted = _noted_replication(replication)
    config, positions = _positions_from_files(store, settings, is_unclean, noted)
    watermark = reading.watermark
    copied, _ = copied_note(MessageStore(store, config.geometry), reading, config)
    if copied and state == "stopped":
        reason = copied + (f"; {reason}" if reason else "")
    document = {
        "state": state, "stopping": False, "role": _role(config, noted), "mode": config.mode, "read_only": False, "takes_puts": False,
        "build": build_id(),
        "reason": reason or reading.damage or "; ".join(ConsumerOffsets(store).notes()), "positions": positions,
        "workers": [], "sessions": 0, "producers_attached": 0, "session_list": [], "store": str(store),
        "undrained_bytes": undrained_bytes, "unclean": is_unclean,
        "statistics": None,
        "replication": noted,
        "broker": None, "name_servers": [], "pops": [],
        "durable_watermark": watermark.flushed if watermark else None,
    }
    return conclude_unseen(document) | document


def _verified(watermark: DurableWatermark | None, min_offset: int) -> dict[str, Any] | None:
    """Return the range of the log that the watermark covers, and whether that is all; None without a watermark."""
    if watermark is None:
        return None
    start = max(watermark.verified_from, min_offset, 0)
    return {"from": start, "to": watermark.flushed, "whole": watermark.verified_from <= max(min_offset, 0)}


def _role(config: EngineConfig, noted: dict[str, Any] | None) -> str:
    """Return the role in its settings; without one there, its last role."""
    return config.broker_role if "broker_role" in config.origins else (noted or {}).get("role", config.broker_role)


def _positions_from_files(store: MessageStore, settings: dict[str, str], unclean: bool,
                          noted: dict[str, Any] | None) -> tuple[EngineConfig, dict[str, int]]:
    """Return the settings, and the positions from the files: the log's end by reading it; after a crash `reput_from` from the queues' ends.

    `flushed` is what a reader may take as durable now; 0 if that is unknown.
    """
    from pyengine.storage.store_reader import StoreReader

    with StoreReader(store, **keywords(settings)) as reader:
        files = FilesWatermark(store, reader.commit_log, partial(dead_engine, store))
        end, flushed = files.limit(ReadLevel.COMMITTED), 0
        with contextlib.suppress(UsageError):
            flushed = files.limit(ReadLevel.FLUSHED)
        return reader.config, {
            "min": reader.min_physical_offset, "wrote": end, "committed": end, "flushed": flushed,
            "reput_from": _queued_end(reader, end) if unclean else end,
            "confirm": min(end, noted["confirm"]) if noted and "confirm" in noted else 0}


def _queued_end(store: StoreReader, end: int) -> int:
    """Return the end of the last message that is in a queue, at most `end`."""
    queued = max(0, store.min_physical_offset)
    for topic, queue_ids in store.topics().items():
        for queue_id in queue_ids:
            queue = store._queue(topic, queue_id)
            max_offset = queue.max_offset(end) if queue else 0
            entry = queue.entry(max_offset - 1, max_offset) if queue and max_offset else None
            if entry is not None and not is_filler(entry):
                queued = max(queued, entry.physical_offset + entry.size_bytes)
    return queued


def live_replication(memory: EngineMemory) -> dict[str, Any] | None:
    """Return the state of an engine's replication; None if it does not replicate."""
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
        "begins_at": max(0, native.load_position(control.min_offset)) if is_slave else None,
        "master_end": master_end or None,
        "received": native.load_position(control.received) if is_slave else None,
        "master_lag_bytes": max(0, master_end - native.load_position(control.wrote)) if master_end else None,
        "master_lag_s": _master_lag_s(control, master_end) if is_slave else None,
    }
    try:
        with Replication(memory.folder) as replication:
            return document | replication.totals() | {"links": [_link(one, committed) for one in replication.links()]}
    except EngineUnavailableError:
        return document | {"links": []}


def _master_lag_s(control: ms_control, master_end: int) -> float | None:
    """Return the age of this slave's newest message while its master has more, otherwise 0; None without a link."""
    wrote, store_timestamp_ms = native.committed_slot(control)
    if not native.load(control.replicator, "linked") or not master_end:
        return None
    return max(0.0, (now_ms() - store_timestamp_ms) / 1e3) if wrote < master_end and store_timestamp_ms > 0 else 0.0


def _noted_replication(noted: ReadState) -> dict[str, Any] | None:
    """Return the replication state in a stopped store's files; None if it never replicated."""
    state, problem = noted
    if state is None:
        return {"problem": problem} if problem else None
    return {"role": state.role, "confirm": state.confirm, "dispatch_at": state.dispatch_at,
            "master_end": state.master_end or None, "term": state.term, "fenced_by": state.fenced_by, "problem": problem}


def _link(link: dict[str, Any], committed: int) -> dict[str, Any]:
    """Return a link with its lag: how long ago the log ended at a slave's position, unknown for a slave's own link."""
    acked_ms, caught_up_ns = link.pop("acked_ms"), link.pop("caught_up_ns")
    known = link["acked"] if link["acked"] >= 0 else link["start"]
    lag_s = max(0.0, (monotonic_ns() - caught_up_ns) / 1e9) if known < committed else 0.0
    return link | {
        "acked_age_ms": max(0, now_ms() - acked_ms) if acked_ms else None, "lag_bytes": max(0, committed - known) if known >= 0 else None,
        "lag_s": lag_s if known >= 0 and caught_up_ns else None}
