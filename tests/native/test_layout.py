"""The layouts in shared memory and between the two C modules: a change must come with a new layout version.

`python tests/native/test_layout.py` writes layout.json, and refuses if a changed struct has its old version.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from pyengine._native import ffi, lib

TABLE = Path(__file__).with_name("layout.json")
STRUCTS = {
    "struct ms_control": lib.MS_CONTROL_LAYOUT_VERSION,
    "struct ms_identity": lib.MS_CONTROL_LAYOUT_VERSION,
    "struct ms_state": lib.MS_CONTROL_LAYOUT_VERSION,
    "struct ms_worker": lib.MS_CONTROL_LAYOUT_VERSION,
    "struct ms_commit_slot": lib.MS_CONTROL_LAYOUT_VERSION,
    "struct ms_undo": lib.MS_CONTROL_LAYOUT_VERSION,
    "struct ms_arrivals": lib.MS_CONTROL_LAYOUT_VERSION,
    "struct ms_writer_lines": lib.MS_CONTROL_LAYOUT_VERSION,
    "struct ms_flusher_lines": lib.MS_CONTROL_LAYOUT_VERSION,
    "struct ms_replicator_lines": lib.MS_CONTROL_LAYOUT_VERSION,
    "struct ms_session_slot": lib.MS_CONTROL_LAYOUT_VERSION,
    "struct ms_session_account": lib.MS_CONTROL_LAYOUT_VERSION,
    "struct ms_allocator_line": lib.MS_CONTROL_LAYOUT_VERSION,
    "struct ms_pool_buffer": lib.MS_CONTROL_LAYOUT_VERSION,
    "struct ms_latch": lib.MS_CONTROL_LAYOUT_VERSION,
    "struct ms_position": lib.MS_CONTROL_LAYOUT_VERSION,
    "struct ms_sequence": lib.MS_CONTROL_LAYOUT_VERSION,
    "struct ms_queue_slot": lib.MS_CONTROL_LAYOUT_VERSION,
    "struct ms_queue_table": lib.MS_CONTROL_LAYOUT_VERSION,
    "struct ms_cleaning": lib.MS_CLEANING_LAYOUT_VERSION,
    "struct ms_session": lib.MS_SESSION_LAYOUT_VERSION,
    "struct ms_entry": lib.MS_SESSION_LAYOUT_VERSION,
    "struct ms_completion": lib.MS_SESSION_LAYOUT_VERSION,
    "struct ms_store_stats": lib.MS_STATS_LAYOUT_VERSION,
    "struct ms_put_stats": lib.MS_STATS_LAYOUT_VERSION,
    "struct ms_sync_stats": lib.MS_STATS_LAYOUT_VERSION,
    "struct ms_dispatch_stats": lib.MS_STATS_LAYOUT_VERSION,
    "struct ms_stats_history": lib.MS_STATS_LAYOUT_VERSION,
    "struct ms_stats_sample": lib.MS_STATS_LAYOUT_VERSION,
    "struct ms_stats_snapshot": lib.MS_STATS_LAYOUT_VERSION,
    "struct ms_latency": lib.MS_STATS_LAYOUT_VERSION,
    "struct ms_topic_stats": lib.MS_TOPIC_STATS_LAYOUT_VERSION,
    "struct ms_topic_count": lib.MS_TOPIC_STATS_LAYOUT_VERSION,
    "struct ms_replication": lib.MS_REPLICATION_LAYOUT_VERSION,
    "struct ms_link": lib.MS_REPLICATION_LAYOUT_VERSION,
    "struct ms_blocked_reasons": lib.MS_BLOCKED_REASONS_LAYOUT_VERSION,
    "struct ms_blocked_reason": lib.MS_BLOCKED_REASONS_LAYOUT_VERSION,
    "struct ms_recorder": lib.MS_RECORDER_LAYOUT_VERSION,
    "struct ms_recorder_ring": lib.MS_RECORDER_LAYOUT_VERSION,
    "struct ms_stall_minute": lib.MS_RECORDER_LAYOUT_VERSION,
    "struct ms_stall": lib.MS_RECORDER_LAYOUT_VERSION,
    "struct ms_waiting": lib.MS_RECORDER_LAYOUT_VERSION,
    "struct ms_producer": lib.MS_PRODUCER_CALLS_VERSION,
    "struct ms_producer_calls": lib.MS_PRODUCER_CALLS_VERSION,
}


def layout() -> dict:
    """Return version, size and fields of each struct; a field is offset and type, of a function the whole signature."""
    return {
        name: {"version": version, "bytes": ffi.sizeof(name),
               "fields": {field: f"{found.offset} {found.type.cname}" for field, found in ffi.typeof(name).fields}}
        for name, version in STRUCTS.items()
    }


def check_versions(pinned: dict) -> None:
    for name, now in layout().items():
        was = pinned.get(name, {"version": None})
        if now != was:
            assert now["version"] != was["version"], f"{name} changed: raise its layout version and renew {TABLE.name}"


def test_a_changed_layout_has_a_new_version():
    pinned = json.loads(TABLE.read_text())
    check_versions(pinned)
    assert layout() == pinned, f"renew {TABLE.name}"


def structs_inside(kind) -> set[str]:
    while kind.kind == "array":
        kind = kind.item
    if kind.kind != "struct":
        return set()
    return {kind.cname}.union(*(structs_inside(field.type) for _, field in kind.fields))


def test_every_struct_that_has_a_layout_version_or_is_part_of_such_a_one_is_pinned():
    """What is not in the table could change without a new version."""
    declared = "".join(path.read_text() for path in (Path(__file__).parents[2] / "csrc").glob("*.cdef.h"))
    carrying = {f"struct {name}" for name, body in re.findall(r"struct (ms_\w+) {\n(.*?)\n};", declared, re.DOTALL)
                if re.search(r"\blayout_version\b", body)}
    assert "struct ms_cleaning" in carrying and carrying <= STRUCTS.keys(), carrying - STRUCTS.keys()
    inside = set().union(*(structs_inside(ffi.typeof(name)) for name in STRUCTS))
    assert "struct ms_session_account" in inside and inside <= STRUCTS.keys(), inside - STRUCTS.keys()


def test_every_field_of_one_writer_has_its_own_line():
    of_one_writer = {
        "struct ms_control": ("wrote", "committed", "flushed", "reput_from", "flush_seq", "arrival_seq", "writer", "slot_pass", "allocator",
                              "flusher", "replicator", "confirm_seq", "workers", "latch", "pool", "sessions", "undo"),
        "struct ms_session": ("tail", "waiting", "head", "completion"),
        "struct ms_store_stats": ("put", "sync", "dispatch", "history"),
        "struct ms_recorder": ("for_sync", "for_slave", "ring"),
    }
    for struct, names in of_one_writer.items():
        for name in names:
            assert ffi.offsetof(struct, name) % lib.MS_LINE_BYTES == 0, (struct, name)
    for struct in ("struct ms_position", "struct ms_worker", "struct ms_latch", "struct ms_session_slot", "struct ms_recorder_ring"):
        assert ffi.sizeof(struct) % lib.MS_LINE_BYTES == 0, struct


if __name__ == "__main__":
    check_versions(json.loads(TABLE.read_text()))
    TABLE.write_text(json.dumps(layout(), indent=1) + "\n")
    sys.stdout.write(f"wrote {TABLE}\n")
