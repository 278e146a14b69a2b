"""`pyengine dump STORE queue`: raw entries of one consume queue (docs/formats.md section 8)."""

from __future__ import annotations

from pathlib import Path

from pyengine.cli import output
from pyengine.config import load_config
from pyengine.errors import EngineError, UsageError
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.consume_queue import is_ext_address, is_filler, is_live, unpack_entry
from pyengine.formats.paths import StorePaths
from pyengine.storage.mapped_file import list_segments, mapped


def dump_queue(
    store: Path, settings: dict[str, str], as_json: bool, topic: str, queue_id: int, offset: int | None, most: int
) -> None:
    """Print up to `most` entries from `offset` on, zeros beyond the queue's end left out."""
    if "/" in topic or topic in ("", ".", ".."):
        raise UsageError(f"{topic!r} is no topic")
    folder = StorePaths(store).queue_folder(topic, queue_id)
    if not folder.is_dir():
        raise EngineError(f"{store} has no queue {queue_id} of topic {topic}")
    size_bytes = load_config(store, settings).mapped_file_size_consume_queue_bytes
    entries = []
    for segment in list_segments(folder, size_bytes):
        first = segment.start_offset // CQ_ENTRY_BYTES
        with mapped(segment.path) as view:
            for at in range(0, len(view) - CQ_ENTRY_BYTES + 1, CQ_ENTRY_BYTES):
                number = first + at // CQ_ENTRY_BYTES
                if offset is not None and number < offset:
                    continue
                entry = unpack_entry(view, at)
                if not is_live(entry) or len(entries) == most:
                    break
                entries.append((number, entry))
        if len(entries) == most:
            break
    if as_json:
        output.write_json({"topic": topic, "queue_id": queue_id, "entries": [
            {"queue_offset": number, **entry._asdict(), "filler": is_filler(entry)} for number, entry in entries]})
        return
    output.write_table(("offset", "position", "size", "tag code", ""), [
        (number, *entry, "filler" if is_filler(entry) else "extension" if is_ext_address(entry.tags_code) else "")
        for number, entry in entries])
