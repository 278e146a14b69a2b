"""`config/queueEnds.json`: where a master's queues ended, for its slave (docs/formats.md section 14).

A slave's log may begin later than its master's. A queue whose messages all lie before has no entry on the slave, which as a master would
use its queue offsets again: groups would not read those messages, and slaves that have the queue would leave them out. So the next
recovery on the slave, while no process uses its queues, makes the last file of each such queue, as a backup keeps it, and removes the
note.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyengine.arguments import INT64_MAX, is_folder_name
from pyengine.errors import FormatError
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.consume_queue import ENTRY, FILLER_BYTES
from pyengine.formats.paths import is_queue_id_name, segment_name
from pyengine.formats.small_file import PARSE_ERRORS, decode_config, encode_config
from pyengine.native.flush import sync_file_system
from pyengine.storage.consume_queue import find_queue_end
from pyengine.storage.durable_file import ConfigFile
from pyengine.storage.durable_writes import MANY_FILES, create_file, create_files, pwrite_all, sync_file
from pyengine.storage.mapped_file import queue_folders
from pyengine.storage.message_store import MessageStore

NAME = "queueEnds.json"
_BATCH = 256  # files that are created together, each an open file

QueueEnds = dict[tuple[str, int], int]  # (topic, queue id) -> the next queue offset


def encode_queue_ends(store: MessageStore, load_end: Callable[[], int]) -> bytes:
    """Return the ends of all queues. Every entry is of a message below the end of the log, which `load_end` returns afterwards."""
    queues: dict[str, dict[int, int]] = {}
    for topic, queue_id, folder in queue_folders(store.consume_queue):
        if end := find_queue_end(folder, store.queue_file_bytes).next_offset:
            queues.setdefault(topic, {})[queue_id] = end
    return encode_config({"end": load_end(), "queues": queues}).encode(errors="replace")


def decode_queue_ends(text: str) -> tuple[int, QueueEnds]:
    """Return (the end of the master's log at that time, the ends of its queues); FormatError for a text of another shape."""
    document: Any = decode_config(text)
    try:
        end, ends = document["end"], {
            (topic, int(queue_id)): number for topic, queues in document["queues"].items() for queue_id, number in queues.items()
            if is_folder_name(topic) and is_queue_id_name(queue_id)}
    except PARSE_ERRORS as error:
        raise FormatError(f"no ends of queues: {error!r}") from error
    if not all(type(number) is int and 0 <= number <= INT64_MAX // CQ_ENTRY_BYTES for number in ends.values()) or type(end) is not int:
        raise FormatError("an end that no queue has")
    return end, ends


def keep_queue_ends(store: MessageStore, min_offset: int, end: int, known: QueueEnds) -> QueueEnds:
    """Make the queues of the note that end later than the `known` ones; return their ends. The log is [min_offset, end).

    A note from beyond the log's end is not used, because messages that the log has lost may be the first of their queues here.
    For the store's owner. Raises DiskFullError, DiskError or FlushError.
    """
    file = ConfigFile(store.config / NAME, decode_queue_ends)
    if (noted := file.read().value) is None:
        return {}
    is_used = 0 < min_offset and noted[0] <= end
    made = {key: queue_end for key, queue_end in noted[1].items() if is_used and queue_end > known.get(key, 0)}
    _make_last_files(store, made)
    for path in (file.path.with_name(f"{NAME}.bak"), file.path):
        path.unlink(missing_ok=True)
    return made


def _make_last_files(store: MessageStore, ends: QueueEnds) -> None:
    size_bytes = store.queue_file_bytes
    files: list[tuple[Path, int]] = []  # the bytes before its last entry
    for (topic, queue_id), queue_end in ends.items():
        start, before_bytes = divmod((queue_end - 1) * CQ_ENTRY_BYTES, size_bytes)
        files.append((store.queue_folder(topic, queue_id) / segment_name(start * size_bytes), before_bytes))
    for first in range(0, len(files), _BATCH):
        batch = files[first : first + _BATCH]
        if len(batch) > 1 and not any(path.exists() for path, _ in batch):  # an interrupted call may have made some
            for descriptor in create_files([str(path) for path, _ in batch], size_bytes, allocate="none") or ():
                os.close(descriptor)
        for path, before_bytes in batch:
            descriptor = (os.open(path, os.O_RDWR | os.O_CLOEXEC) if path.exists()
                          else create_file(path.parent, path.name, size_bytes, allocate="none"))
            try:  # the message of the last entry is deleted: its offset is below the log
                pwrite_all(descriptor, FILLER_BYTES * (before_bytes // CQ_ENTRY_BYTES) + ENTRY.pack(0, 1, 0), 0, path)
            finally:
                os.close(descriptor)
    is_synced = len(files) >= MANY_FILES and sync_file_system(store.consume_queue)
    for path, _ in files:
        sync_file(path, is_synced=is_synced)
