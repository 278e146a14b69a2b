"""The extension part of the whole-store check: every unit that an entry names is there and is its message's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pyengine.errors import StoreRefusedError
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.consume_queue import ENTRY, ConsumeQueueExtUnit, is_ext_address
from pyengine.formats.paths import StorePaths
from pyengine.formats.record import I32, I64, SYS_FLAG_AT, store_timestamp_at
from pyengine.storage.check.report import Findings
from pyengine.storage.check.segments import LogSegments
from pyengine.storage.consume_queue import ConsumeQueue
from pyengine.storage.geometry import Geometry
from pyengine.storage.mapped_file import MappingCache
from pyengine.storage.recovery.queues import QueueState

_TIME_READABLE_BYTES = 68 + 8  # behind a 20-byte host


def check_extensions(
    root: Path, geometry: Geometry, log: LogSegments, queues: Sequence[QueueState], findings: Findings
) -> None:
    """Look at all queues that have an extension; others cost one look for the folder."""
    if not StorePaths(root).consume_queue_ext.is_dir():
        return
    cache = MappingCache()
    for queue in queues:
        reader = ConsumeQueue(
            queue.topic, queue.queue_id, queue.folder, StorePaths(root).queue_ext_folder(queue.topic, queue.queue_id),
            queue.size_bytes, geometry.mapped_file_size_consume_queue_ext_bytes, cache,
        )
        try:
            _check_queue(root, queue, reader, log, findings)
        except StoreRefusedError as error:
            findings.error("extension", f"consumequeue_ext/{queue.topic}/{queue.queue_id}", None,
                           str(error).replace(f"{root}/", ""))


def _check_queue(root: Path, queue: QueueState, reader: ConsumeQueue, log: LogSegments, findings: Findings) -> None:
    for file in queue.files:
        name = str(file.path.relative_to(root))
        used = min(queue.end - file.start_offset, queue.size_bytes)
        if used <= 0:
            break
        with open(file.path, "rb") as opened:
            entries = opened.read(used)
        for at, (offset, _, tags_code) in enumerate(ENTRY.iter_unpack(entries[: used - used % CQ_ENTRY_BYTES])):
            if is_ext_address(tags_code) and log.min_offset <= offset < log.end:
                wrong = _wrong(reader.ext_unit(tags_code), offset, log)
                if wrong:
                    findings.error("extension", name, at * CQ_ENTRY_BYTES,
                                   f"the unit that entry {file.start_offset // CQ_ENTRY_BYTES + at} names {wrong}")


def _wrong(unit: ConsumeQueueExtUnit | None, offset: int, log: LogSegments) -> str:
    if unit is None:
        return "is not there"
    segment = log.view_at(offset)
    if segment is None:
        return ""
    base, _, view = segment
    if offset - base + _TIME_READABLE_BYTES > len(view):
        return ""  # no record begins there: the check of the entries tells
    (sys_flag,) = I32.unpack_from(view, offset - base + SYS_FLAG_AT)
    (stored_ms,) = I64.unpack_from(view, offset - base + store_timestamp_at(sys_flag))
    if unit.store_timestamp_ms == stored_ms:
        return ""
    return f"has the store time {unit.store_timestamp_ms}, its message {stored_ms}"
