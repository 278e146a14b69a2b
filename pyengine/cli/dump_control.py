"""`pyengine dump STORE control`: the shared control block, field by field, with offset and owner.

The fields come from the layout that C was compiled with, so nothing can be left out;
who writes each is told by OWNERS (the longest prefix of the field's path counts).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pyengine._native import ffi
from pyengine.cli import output
from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.shared_objects import KIND_NAMES, find_folder
from pyengine.native import control as native

# Path prefix -> the one process that writes it. [] stands for an element of an array.
OWNERS = {
    "identity": "supervisor, before it is published",
    "state": "supervisor",
    "state.frozen": "the first worker that fails",
    "state.reason": "the first worker that fails, else supervisor",
    "state.refuse_puts": "supervisor; cleaner when the disk is full or read-only; a bit each",
    "min_offset": "cleaner; supervisor at start",
    "wrote": "writer",
    "committed": "committer; writer without a pool",
    "flushed": "flusher",
    "reput_from": "reputter",
    "confirm": "replicator",
    "received": "replicator",
    "flush_seq": "flusher; whoever freezes",
    "arrival_seq": "reputter",
    "session_seq": "supervisor",
    "confirm_seq": "replicator",
    "writer": "writer",
    "slot_pass": "writer",
    "allocator": "allocator",
    "flusher": "flusher",
    "replicator": "replicator",
    "index_progress": "reputter",
    "workers[]": "that worker",
    "workers[].restarts": "supervisor",
    "latch[]": "that worker clears it, the worker that wakes it sets it",
    "pool[]": "writer takes, committer gives back",
    "sessions[]": "supervisor",
    "sessions[].state": "supervisor opens and marks dead, writer frees",
    "sessions[].bad_entry": "writer",
    "slots[]": "writer",
    "undo": "writer",
}
_PADDING = ("pad", "pad2", "reserved")


class Field(NamedTuple):
    """One number or text of the block."""

    path: str
    offset: int
    size_bytes: int
    owner: str
    value: Any


def owner_of(path: str) -> str:
    """Who writes a field; "" for one that nobody is known to write."""
    plain = "".join("[]" if piece.isdecimal() else piece for piece in _pieces(path))
    fitting = (prefix for prefix in OWNERS if plain == prefix or plain.startswith((f"{prefix}.", f"{prefix}_", f"{prefix}[")))
    return OWNERS.get(max(fitting, key=len, default=""), "")


def _pieces(path: str) -> list[str]:
    return path.replace("[", "\0").replace("]", "\0").split("\0")


def fields(control: Any) -> Iterator[Field]:
    """Every field of a mapped block; of tables only the elements in use."""
    used = _used(control)
    yield from _walk("", ffi.typeof("struct ms_control"), 0, control, used)


def _used(control: Any) -> dict[str, set[int]]:
    """Which elements of the big arrays say something."""
    open_sessions = {slot for slot in range(len(control.sessions))
                     if native.load(control.sessions[slot], "state") != native.SESSION_FREE}
    undone = set(range(min(native.load(control.undo, "count"), len(control.undo.old_offset))))
    return {"sessions": open_sessions, "slots[0].sessions": open_sessions, "slots[1].sessions": open_sessions,
            "pool": set(range(min(control.identity.pool_buffers, len(control.pool)))),
            "undo.old_offset": undone, "undo.table_slot": undone}


def _walk(path: str, kind: Any, at: int, value: Any, used: dict[str, set[int]]) -> Iterator[Field]:
    if kind.kind == "struct":
        for name, field in kind.fields:
            if name not in _PADDING:
                yield from _walk(f"{path}.{name}" if path else name, field.type, at + field.offset,
                                 getattr(value, name), used)
    elif kind.kind == "array" and ffi.sizeof(kind.item) == 1:
        yield Field(path, at, ffi.sizeof(kind), owner_of(path), _bytes_text(bytes(ffi.buffer(value))))
    elif kind.kind == "array":
        step = ffi.sizeof(kind.item)
        for number in range(kind.length):
            if path not in used or number in used[path]:
                yield from _walk(f"{path}[{number}]", kind.item, at + number * step, value[number], used)
    else:
        yield Field(path, at, ffi.sizeof(kind), owner_of(path), int(value))


def _bytes_text(data: bytes) -> str:
    text = data.rstrip(b"\0")
    return text.decode("utf-8", "backslashreplace") if text.isascii() and text.decode().isprintable() else data.hex()


class Place(NamedTuple):
    """A field as the layout has it: of an array only the first element, with the number of elements and their distance."""

    path: str
    offset: int
    size_bytes: int
    owner: str
    repeats: str


def layout(path: str = "", kind: Any = None, at: int = 0, repeats: str = "") -> Iterator[Place]:
    """Every field of the control block, without any block at hand: what docs/shared_memory.md shows."""
    kind = ffi.typeof("struct ms_control") if kind is None else kind
    if kind.kind == "struct":
        for name, field in kind.fields:
            if name not in _PADDING:
                yield from layout(f"{path}.{name}" if path else name, field.type, at + field.offset, repeats)
    elif kind.kind == "array" and ffi.sizeof(kind.item) > 1:
        times = f"{'n' if kind.length is None else kind.length} x {ffi.sizeof(kind.item)}"
        yield from layout(f"{path}[]", kind.item, at, f"{repeats}, {times}" if repeats else times)
    else:
        yield Place(path, at, ffi.sizeof(kind), owner_of(path), repeats)


def dump_control(store: Path, as_json: bool) -> None:
    """Print the control block of the engine that runs, or last ran, on the store."""
    with EngineMemory.attach(find_folder(store), writable=False) as memory:
        found = list(fields(memory.control))
        size_bytes = ffi.sizeof("struct ms_control")
    named = [field._replace(path=_with_kind(field.path)) for field in found]
    if as_json:
        output.write_json({"size_bytes": size_bytes, "fields": [
            {"field": field.path, "offset": field.offset, "size_bytes": field.size_bytes, "owner": field.owner,
             "value": field.value} for field in named]})
        return
    output.write_table(("offset", "bytes", "field", "value", "owner"),
                       [(field.offset, field.size_bytes, field.path, str(field.value), field.owner) for field in named])


def _with_kind(path: str) -> str:
    """workers[3].pid -> workers[flusher].pid"""
    if path.startswith("workers["):
        number, rest = path.removeprefix("workers[").split("]", 1)
        return f"workers[{KIND_NAMES[int(number)]}]{rest}"
    return path
