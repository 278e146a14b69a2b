"""Concludes a status in one word and one sentence, from the figures of pyengine/cli/engine_status.py.

Each function checks for one problem and returns findings; `conclude` puts the worst first. docs/operations.md has the table
of words. This module reads only the control block that the caller has mapped, and /proc.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pyengine.engine.kinds import kinds_for
from pyengine.engine_config import DAY_MS
from pyengine.errors import command
from pyengine.ipc.control_block import EngineIdentity, EngineMemory, boot_ns, now_ms
from pyengine.ipc.heartbeat import is_stopped
from pyengine.ipc.shared_objects import KIND_NAMES
from pyengine.native import control as native

if TYPE_CHECKING:
    from pyengine._native import ms_control

STUCK_ROUND_MS = 10_000      # workers do a round at least every five seconds (pyengine/engine/worker.py)
SLAVE_WAIT_S = 2.0     # in which a slave that lags acknowledges something
POLL_INTERVAL_S = 0.02
MOVES = {"flusher": ("flushed", "committed"), "committer": ("committed", "wrote"), "reputter": ("reput_from", "committed")}
NEEDED = {"writer", "allocator", *MOVES}  # the workers that store a message, make it durable, and put it into its queue
CLOCK_AHEAD_MS = 60_000
CLOCK_SET_MS = DAY_MS
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
        Finding(Verdict.READ_ONLY, _why_fenced(refused)),
        Finding(Verdict.STOPPING, "the engine is stopping" if document["stopping"] else ""),
        _supervisor(memory, living, workers),
        Finding(Verdict.STUCK, "; ".join(still)),
        *_blocked_reasons(blocked_reasons),
        *_replication(identity, document["replication"]),
        *(Finding(Verdict.WARNING, f"the gateway is not registered with the name server {one['address']}: {one['problem']}")
          for one in document["name_servers"] if not one["registered"]),
        Finding(Verdict.WARNING, reason),
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
    if document["takes_puts"] or document["role"] == "SLAVE":
        takes = "it takes puts" if document["takes_puts"] else "it follows its master"
    return Finding(Verdict.OK, f"{takes}; {ready} processes are ready; {document['unflushed_bytes']:,} bytes wait for the disk, "
                               f"{document['dispatch_lag_bytes']:,} for their queues")


# ---- what may be wrong -----------------------------------------------------------


def _why_full(refused: int, disk: dict[str, Any]) -> str:
    if not refused & (native.REFUSE_DISK_FULL | native.REFUSE_UNWRITABLE):
        return ""
    return disk.get("reason") or "the disk is full: the store takes puts again once there is room"


def _why_fenced(refused: int) -> str:
    if not refused & native.REFUSE_FENCED:
        return ""
    return ("a master of a higher term has taken this store's place, so puts are refused: start it as that one's slave "
            "(broker_role=SLAVE and ha_master_address=HOST:PORT)")


def _supervisor(memory: EngineMemory, living: Sequence[int], workers: Sequence[dict[str, Any]]) -> Finding:
    """Judge an engine without supervisor: it works on unless a needed worker is dead too."""
    if native.SUPERVISOR in living:
        return Finding(Verdict.WARNING, "")
    kinds = kinds_for(memory.identity.mode, bool(memory.identity.replicates))
    states = {one["kind"]: one["state"] for one in workers}
    dead = [kind.name for kind in kinds if kind.name in NEEDED and states.get(kind.name) not in ("starting", "ready", "stopping")]
    sentence = "no supervisor is running: dead workers are not restarted; `pyengine start` takes over"
    if dead:
        return Finding(Verdict.STUCK, f"{sentence} (dead: {', '.join(dead)})")
    return Finding(Verdict.WARNING, sentence)


def _stuck_workers(control: ms_control, identity: EngineIdentity, workers: Sequence[dict[str, Any]],
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


def _blocked_reasons(blocked_reasons: Sequence[str]) -> Iterable[Finding]:
    """Return the reasons for which workers are blocked."""
    for kind, text in enumerate(blocked_reasons):
        yield Finding(Verdict.STUCK if KIND_NAMES[kind] in NEEDED else Verdict.WARNING, f"{KIND_NAMES[kind]}: {text}" if text else "")


def _replication(identity: EngineIdentity, replication: dict[str, Any] | None) -> Iterable[Finding]:
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


def _why_clock(identity: EngineIdentity, store_timestamp_ms: int) -> str:
    """Return a sentence if this machine's clock and the store's times contradict each other."""
    now = now_ms()
    if store_timestamp_ms - now > CLOCK_AHEAD_MS:
        return (f"the last message was stored {_days(store_timestamp_ms - now)} ahead of this machine's clock: store times do not advance "
                "until the clock reaches it; set the clock right if it is slow")
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
