"""The replication part of `status`, `top` and `metrics`: who follows whom, and how far (docs/replication.md).

One shape for both roles: `links` are a master's slaves, or a slave's one link to its master.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyengine.cli import output
from pyengine.errors import EngineUnavailableError
from pyengine.ipc.control_block import ROLE_NAMES, EngineMemory, now_ms
from pyengine.ipc.replication import LinkLook, Replication
from pyengine.native import control as native
from pyengine.storage.replication_state import ReplicationStateFile

SLAVE = "SLAVE"


def live_replication(memory: EngineMemory) -> dict[str, Any] | None:
    """How an engine's replication stands; None where it does not replicate."""
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


def _last(figures) -> dict[str, Any] | None:
    if not figures.last_said:
        return None
    return {"address": figures.last_address, "said": figures.last_said, "at_ms": figures.last_said_ms}


LINK_COLUMNS = ("link", "state", "since", "sent", "acked", "behind", "said")


def link_row(link: dict[str, Any]) -> tuple[object, ...]:
    """One link as a table shows it."""
    return (link["address"], link["state"], output.time_text(link["since_ms"]), _position(link["sent"]), _position(link["acked"]),
            output.size_text(link["behind_bytes"]) if link["behind_bytes"] is not None else "-", link["said"])


def _position(offset: int) -> str:
    return f"{offset:,}" if offset >= 0 else "-"


def replication_facts(replication: dict[str, Any] | None) -> list[tuple[str, object]]:
    """An engine's replication in a line; nothing where there is none."""
    if replication is None or "links" not in replication:
        return []
    if replication["linked"] is not None:
        return [("master", _master_line(replication))]
    bound = ", and queues end there" if replication["dispatch_at"] == "replicated" else ""
    return [("slaves", f"{replication['slaves_connected']} connected, {output.size_text(replication['unconfirmed_bytes'])} not "
                       f"confirmed{bound}")]


def _master_line(replication: dict[str, Any]) -> str:
    address = replication["links"][0]["address"] if replication["links"] else ""
    heard = "nothing heard of it yet" if replication["master_end"] is None else (
        f"heard of at {replication['master_end']:,}, {output.size_text(replication['behind_master_bytes'])} behind")
    return f"{address} {'linked' if replication['linked'] else 'not linked'}, {heard}".strip()
