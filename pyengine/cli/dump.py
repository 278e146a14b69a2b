"""`pyengine dump` and `inspect`: print the structures of a store field by field, or its content as one document.

The fields of the control block come from the layout that C was compiled with, so none can be missing. OWNERS names the
process that writes each (the longest prefix of the field's path counts).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyengine._native import ffi
from pyengine.cli import output
from pyengine.cli.output import Reply, store_command
from pyengine.errors import EngineError, StoreRefusedError, UsageError
from pyengine.formats import consume_queue, index_file
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.consume_queue import is_ext_address, is_filler, is_live
from pyengine.formats.index_file import IndexLayout, unpack_header
from pyengine.formats.paths import StorePaths, is_index_name
from pyengine.formats.small_file import read_or_none, unpack_checkpoint
from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.shared_objects import KIND_NAMES
from pyengine.native import control as native
from pyengine.storage.config import existing_store, load_config
from pyengine.storage.mapped_file import list_segments, mapped

if TYPE_CHECKING:
    from pyengine._native import ms_control

# Path prefix -> the process that writes it. [] stands for an element of an array.
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
    "flush_seq": "flusher; the worker that fails first; the writer after a refusal, in sync mode",
    "arrival_seq": "reputter; flusher and replicator for the levels that they move",
    "settings_seq": "supervisor",
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
    "latch[].arms": "writer",
    "pool[]": "writer takes, committer gives back",
    "sessions[]": "supervisor",
    "sessions[].state": "supervisor opens and marks dead, writer frees",
    "sessions[].bad_entry": "writer",
    "slots[]": "writer",
    "undo": "writer",
    "arrivals": "reputter",
}
_PADDING = ("pad", "pad2", "reserved")


@click.command()
@click.argument("what", type=click.Choice(["checkpoint", "index", "queue", "control"]))
@store_command
@click.option("--topic", default=None, help="queue: the topic.")
@click.option("--queue-id", type=click.IntRange(min=0), default=None, help="queue: the queue's number.")
@click.option("--offset", type=click.IntRange(min=0), default=None, help="queue: first entry. Default: the oldest.")
@click.option("--file", "file_name", default=None, help="index: this file only, by name.")
@click.option("--entries", is_flag=True, help="index: print the entries too.")
@click.option("--max", "most", type=click.IntRange(min=1), default=64, show_default=True,
              help="queue, index: at most this many entries.")
def dump(store: Path, what: str, settings: dict[str, str], most: int, **part: Any) -> Reply:
    """Print a store's files or shared memory, field by field.

    \b
    checkpoint  its three store times
    queue       entries of one consume queue: position, size, tag code
    index       header of each index file; with --entries the chained entries too
    control     the control block in shared memory: field, offset, owner, value

    \b
    Examples:
      pyengine dump queue STORE --topic orders --queue-id 0 --offset 10 --max 5
    """
    existing_store(store)
    if what == "checkpoint":
        return dump_checkpoint(store)
    if what == "queue":
        if part["topic"] is None or part["queue_id"] is None:
            raise UsageError("dump queue STORE needs --topic and --queue-id")
        return dump_queue(store, settings, part["topic"], part["queue_id"], part["offset"], most)
    if what == "index":
        return dump_index(store, settings, part["file_name"], most if part["entries"] else 0)
    return dump_control(store)


def dump_checkpoint(store: Path) -> Reply:
    """Show the checkpoint; EngineError if the store has none, FormatError if it is too short."""
    data = read_or_none(StorePaths(store).checkpoint)
    if data is None:
        raise EngineError(f"{store} has no checkpoint file; a store without one is recovered from its first segment")
    times = unpack_checkpoint(data)
    rows = [(name, getattr(times, name)) for name in (
        "physic_msg_timestamp_ms", "logics_msg_timestamp_ms", "index_msg_timestamp_ms",
        "min_timestamp_ms", "min_timestamp_index_ms")]
    return Reply({**dict(rows), "file_bytes": len(data)}, lambda: output.write_table(
        ("field", "value", "time"), [(name, str(value), output.time_text(value)) for name, value in rows]))


def dump_queue(store: Path, settings: dict[str, str], topic: str, queue_id: int, offset: int | None, most: int) -> Reply:
    """Show up to `most` entries from `offset` on, without the zeros after the queue's end."""
    if "/" in topic or topic in ("", ".", ".."):
        raise UsageError(f"{topic!r} is not a topic")
    folder = StorePaths(store).queue_folder(topic, queue_id)
    if not folder.is_dir():
        raise EngineError(f"{store} has no queue {queue_id} of topic {topic}")
    size_bytes = load_config(store, settings).mapped_file_size_consume_queue_bytes
    entries: list[tuple[int, consume_queue.ConsumeQueueEntry]] = []
    for segment in list_segments(folder, size_bytes):
        first = segment.start_offset // CQ_ENTRY_BYTES
        with mapped(segment.path) as view:
            for at in range(0, len(view) - CQ_ENTRY_BYTES + 1, CQ_ENTRY_BYTES):
                number = first + at // CQ_ENTRY_BYTES
                if offset is not None and number < offset:
                    continue
                entry = consume_queue.unpack_entry(view, at)
                if not is_live(entry) or len(entries) == most:
                    break
                entries.append((number, entry))
        if len(entries) == most:
            break
    document = {"topic": topic, "queue_id": queue_id, "entries": [
        {"queue_offset": number, **entry._asdict(), "filler": is_filler(entry)} for number, entry in entries]}
    return Reply(document, lambda: output.write_table(("offset", "position", "size", "tag code", ""), [
        (number, *entry, "filler" if is_filler(entry) else "extension" if is_ext_address(entry.tags_code) else "")
        for number, entry in entries]))


def dump_index(store: Path, settings: dict[str, str], file_name: str | None, most: int) -> Reply:
    """Show each index file's header, and its first `most` entries (0: none)."""
    folder = StorePaths(store).index
    names = sorted(path.name for path in folder.iterdir() if is_index_name(path.name)) if folder.is_dir() else []
    if file_name is not None:
        if file_name not in names:
            raise EngineError(f"{store} has no index file {file_name}; it has {', '.join(names) or 'none'}")
        names = [file_name]
    config = load_config(store, settings)
    layout = IndexLayout(config.max_hash_slot_num, config.max_index_num)
    files = [_index_file(folder / name, layout, most) for name in names]
    return Reply({"max_hash_slot_num": layout.max_hash_slot_num, "max_index_num": layout.max_index_num, "files": files},
                 lambda: _print_index(files))


def _print_index(files: list[dict[str, Any]]) -> None:
    output.write_rows(
        files, "name begin_timestamp_ms end_timestamp_ms begin_physical_offset end_physical_offset hash_slot_count index_count")
    for one in files:
        if "entries" in one:
            output.write_rows(one["entries"], "number slot key_hash physical_offset time_diff_s previous", f"entries of {one['name']}")


def _index_file(path: Path, layout: IndexLayout, most: int) -> dict[str, Any]:
    size_bytes = path.stat().st_size
    if size_bytes != layout.size_bytes:
        raise StoreRefusedError(f"{path} has {size_bytes:,} bytes; with {layout.max_hash_slot_num:,} slots "
                                f"and {layout.max_index_num:,} entries it must have {layout.size_bytes:,}")
    with mapped(path) as view:
        header = unpack_header(view)
        document: dict[str, Any] = {"name": path.name, **header._asdict()}
        if most:
            last = min(header.index_count - 1, layout.max_index_num - 1, most)
            entries = ((number, index_file.unpack_entry(view, layout.entry_at(number))) for number in range(1, last + 1))
            document["entries"] = [{"number": number, "slot": layout.slot_of(entry.key_hash), **entry._asdict()}
                                   for number, entry in entries]
        return document


def owner_of(path: str) -> str:
    """Return the process that writes a field; "" if it is unknown."""
    plain = re.sub(r"\[\d+\]", "[]", path)
    fitting = (prefix for prefix in OWNERS if plain == prefix or plain.startswith((f"{prefix}.", f"{prefix}_", f"{prefix}[")))
    return OWNERS.get(max(fitting, key=len, default=""), "")


def fields(control: ms_control) -> Iterator[dict[str, Any]]:
    """Yield every field of a mapped block; of tables only the elements in use."""
    used = _used(control)
    yield from _walk("", ffi.typeof("struct ms_control"), 0, control, used)


def _used(control: ms_control) -> dict[str, set[int]]:
    """Return which elements of the large arrays are in use."""
    open_sessions = {slot for slot in range(len(control.sessions))
                     if native.load(control.sessions[slot], "state") != native.SESSION_FREE}
    undone = set(range(min(native.load(control.undo, "count"), len(control.undo.old_offset))))
    return {"sessions": open_sessions, "slots[0].sessions": open_sessions, "slots[1].sessions": open_sessions,
            "pool": set(range(min(control.identity.pool_buffers, len(control.pool)))),
            "undo.old_offset": undone, "undo.table_slot": undone,
            "arrivals.end": {slot for slot, end in enumerate(control.arrivals.end) if end}}


def _walk(path: str, kind: Any, at: int, value: Any, used: dict[str, set[int]]) -> Iterator[dict[str, Any]]:
    if kind.kind == "struct":
        for name, field in kind.fields:
            if name not in _PADDING:
                yield from _walk(f"{path}.{name}" if path else name, field.type, at + field.offset,
                                 getattr(value, name), used)
    elif kind.kind == "array" and ffi.sizeof(kind.item) == 1:
        yield _field(path, at, kind, _bytes_text(bytes(ffi.buffer(value))))
    elif kind.kind == "array":
        step = ffi.sizeof(kind.item)
        for number in range(kind.length):
            if path not in used or number in used[path]:
                yield from _walk(f"{path}[{number}]", kind.item, at + number * step, value[number], used)
    else:
        yield _field(path, at, kind, int(value))


def _field(path: str, at: int, kind: Any, value: int | str) -> dict[str, Any]:
    return {"field": _with_kind(path), "offset": at, "size_bytes": ffi.sizeof(kind), "owner": owner_of(path), "value": value}


def _bytes_text(data: bytes) -> str:
    text = data.rstrip(b"\0")
    return text.decode("utf-8", "backslashreplace") if text.isascii() and text.decode().isprintable() else data.hex()


def dump_control(store: Path) -> Reply:
    """Show the control block of the engine that runs, or last ran, on the store."""
    with EngineMemory.of(store) as memory:
        found = list(fields(memory.control))
        size_bytes = ffi.sizeof("struct ms_control")
    return Reply({"size_bytes": size_bytes, "fields": found}, lambda: output.write_rows(
        [field | {"value": str(field["value"])} for field in found], "offset size_bytes field value owner"))


def _with_kind(path: str) -> str:
    """Replace a worker's number by its kind: workers[3].pid -> workers[flusher].pid."""
    if path.startswith("workers["):
        number, rest = path.removeprefix("workers[").split("]", 1)
        return f"workers[{KIND_NAMES[int(number)]}]{rest}"
    return path


@click.command()
@store_command
def inspect(store: Path, settings: dict[str, str]) -> Reply:
    """Show positions, records, queues and queries. It reads them as they are, also beside an engine or broker.

    \b
    Example:
      pyengine inspect STORE --json --set mappedFileSizeConsumeQueue=1000 > store.json
    """
    from pyengine.storage.inspect import inspect as inspect_store

    document = inspect_store(existing_store(store), settings)
    return Reply(document, lambda: _print_content(document))


def _print_content(document: dict[str, Any]) -> None:
    facts = document["facts"]
    output.write_facts([
        ("log begins at", facts["minPhy"]), ("log ends at", facts["maxPhy"]),
        ("records", len(document["records"])), ("messages in queues", len(document["messages"])),
        ("keys in the log", len(document["queries"])),
        ("found by key", sum(1 for query in document["queries"] if query["phys"]))])
    print()
    output.write_rows(facts["queues"], "topic queueId min max entries")
