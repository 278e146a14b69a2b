"""`pyengine dump STORE index`: headers and entries of the index files (docs/formats.md section 10)."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

from pyengine.cli import output
from pyengine.config import load_config
from pyengine.errors import EngineError, StoreRefusedError
from pyengine.formats.index_file import IndexLayout, unpack_entry, unpack_header
from pyengine.formats.paths import StorePaths, is_index_name


def dump_index(store: Path, settings: dict[str, str], as_json: bool, file_name: str | None, most: int) -> None:
    """Print each index file's header, and its first `most` entries (0: none)."""
    folder = StorePaths(store).index
    names = sorted(path.name for path in folder.iterdir() if is_index_name(path.name)) if folder.is_dir() else []
    if file_name is not None:
        if file_name not in names:
            raise EngineError(f"{store} has no index file {file_name}; it has {', '.join(names) or 'none'}")
        names = [file_name]
    config = load_config(store, settings)
    layout = IndexLayout(config.max_hash_slot_num, config.max_index_num)
    files = [_read(folder / name, layout, most) for name in names]
    if as_json:
        output.write_json({"max_hash_slot_num": layout.max_hash_slot_num, "max_index_num": layout.max_index_num,
                           "files": files})
        return
    output.write_table(
        ("file", "begin time", "end time", "begin position", "end position", "slots used", "count"),
        [(one["name"], output.time_text(one["begin_timestamp_ms"]), output.time_text(one["end_timestamp_ms"]),
          one["begin_physical_offset"], one["end_physical_offset"], one["hash_slot_count"], one["index_count"])
         for one in files])
    for one in files:
        if most:
            output.write_table(("number", "slot", "key hash", "position", "seconds", "previous"),
                               [tuple(entry.values()) for entry in one["entries"]], title=f"entries of {one['name']}")


def _read(path: Path, layout: IndexLayout, most: int) -> dict[str, Any]:
    with path.open("rb") as file:
        if path.stat().st_size != layout.size_bytes:
            raise StoreRefusedError(f"{path} has {path.stat().st_size:,} bytes; with {layout.max_hash_slot_num:,} slots "
                                    f"and {layout.max_index_num:,} entries it must have {layout.size_bytes:,}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            header = unpack_header(view)
            document: dict[str, Any] = {"name": path.name, **header._asdict()}
            if most:
                last = min(header.index_count - 1, layout.max_index_num - 1, most)
                document["entries"] = [_entry(view, layout, number) for number in range(1, last + 1)]
            return document


def _entry(view: mmap.mmap, layout: IndexLayout, number: int) -> dict[str, int]:
    entry = unpack_entry(view, layout.entry_at(number))
    return {"number": number, "slot": layout.slot_of(entry.key_hash), "key_hash": entry.key_hash,
            "physical_offset": entry.physical_offset, "time_diff_s": entry.time_diff_s, "previous": entry.previous}
