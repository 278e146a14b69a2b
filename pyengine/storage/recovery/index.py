"""Which index files can be believed, and from where the log's keys must be entered again.

RocketMQ deletes, after a crash, every index file whose end time is later than the
checkpoint's index time, and never cuts an index with the log (IndexService.load).
Then it enters only the keys of the segment where recovery began; older keys of the
deleted file are lost for good. Here they are entered again from where the last believed
file ends (docs/compatibility.md).

    label     what                                                decision
    short     another length than header, slots and entries make  delete
    senseless counts or offsets that no index has                 delete
    unsynced  abort file, and end time after the checkpoint's     delete
    beyond    its last key is of a record that the log lost       delete
    orphaned  follows a file that is deleted                      delete
    sound     everything else                                     keep

Index files are made from the log, so what is deleted here is not kept anywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pyengine.errors import FormatError
from pyengine.formats.constants import INDEX_HEADER_BYTES
from pyengine.formats.index_file import IndexHeader, IndexLayout, unpack_header
from pyengine.formats.paths import Root, StorePaths
from pyengine.storage.mapped_file import index_file_names
from pyengine.storage.message_store import MessageStore
from pyengine.storage.new_file import sync_folder


@dataclass(frozen=True, slots=True)
class IndexFileState:
    """One index file on the disk; `label` is its row of the table above."""

    path: Path
    header: IndexHeader
    label: str


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """`deleted` newest first, so that a crash leaves a row of files without a gap."""

    kept: tuple[IndexFileState, ...]
    deleted: tuple[IndexFileState, ...]
    enter_from: int | None  # physical offset from which keys are entered again; None: nowhere


def plan_index(store: MessageStore, synced_time_ms: int | None, log_min: int, log_end: int) -> IndexPlan:
    """Judge every index file against the log [log_min, log_end). Reads only.

    `synced_time_ms`: after a crash, the checkpoint's index time, beyond which nothing is
    believed; None after an orderly stop, or when the undo of the put under way was kept.
    """
    layout = store.geometry.index_layout
    files: list[IndexFileState] = []
    for file in list_index_files(store):
        label = "orphaned" if files and files[-1].label != "sound" else ""
        files.append(_judge(file, layout, synced_time_ms, log_end, label))
    kept = tuple(file for file in files if file.label == "sound")
    deleted = tuple(file for file in reversed(files) if file.label != "sound")
    enter_from = None
    if deleted or synced_time_ms is not None:
        enter_from = max(kept[-1].header.end_physical_offset, log_min) if kept else log_min
    return IndexPlan(kept, deleted, enter_from)


def delete_index_files(files: Sequence[IndexFileState]) -> None:
    """Unlink them in this order, durable. May be done twice."""
    for file in files:
        file.path.unlink(missing_ok=True)
    if files:
        sync_folder(files[0].path.parent)


def list_index_files(root: Root) -> list[Path]:
    """Index files, oldest first; other names are skipped, as RocketMQ does."""
    folder = StorePaths(root).index
    try:
        return [folder / name for name in index_file_names(folder)]
    except FileNotFoundError:
        return []


def keys_in_index(root: Root) -> int:
    """How many keys the headers of all index files tell of."""
    count = 0
    for file in list_index_files(root):
        with contextlib.suppress(FormatError):
            count += max(0, read_index_header(file).index_count - 1)
    return count


def synced_index_time_ms(store: MessageStore) -> int:
    """What the checkpoint may say when all index files are synced: the end time of the newest full one, 0 without."""
    newest = 0
    for file in list_index_files(store):
        header = read_index_header(file)
        if store.geometry.index_layout.is_full(header.index_count):
            newest = header.end_timestamp_ms
    return newest


def makes_sense(header: IndexHeader, layout: IndexLayout) -> bool:
    """False for counts or offsets that no index has. Times may run backwards: RocketMQ follows the clock."""
    return (
        0 <= header.begin_physical_offset <= header.end_physical_offset
        and 0 <= header.hash_slot_count < max(header.index_count, 1)
        and header.index_count <= layout.max_index_num
    )


def _judge(
    file: Path, layout: IndexLayout, synced_time_ms: int | None, log_end: int, label: str
) -> IndexFileState:
    if file.stat().st_size != layout.size_bytes:
        return IndexFileState(file, IndexHeader(), label or "short")
    header = read_index_header(file)
    if not label:
        if not makes_sense(header, layout):
            label = "senseless"
        elif synced_time_ms is not None and header.end_timestamp_ms > synced_time_ms:
            label = "unsynced"
        elif header.index_count > 1 and header.end_physical_offset >= log_end:
            label = "beyond"
        else:
            label = "sound"
    return IndexFileState(file, header, label)


def read_index_header(file: Path) -> IndexHeader:
    """The header of an index file of any length; FormatError when it has none."""
    with open(file, "rb") as opened:
        return unpack_header(opened.read(INDEX_HEADER_BYTES))
