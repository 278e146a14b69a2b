"""The content of a store as one document, which `pyengine inspect --json` prints.

Field names and rules are those of the document that tests/interop/judge prints from the
real RocketMQ store, so that the two can be compared field by field. Where this engine's
reader does more than RocketMQ (it skips filler, it verifies keys), this document
follows RocketMQ. `messages` are read through the queues only and `queries` through the
index only, never from the log directly.

It does not recover or write: of a store that was not stopped it shows the files as they are,
up to the end that a walk through the log finds.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pyengine.errors import disk_error
from pyengine.formats.constants import INDEX_HEADER_BYTES, PROPERTY_KEYS, PROPERTY_UNIQ_KEY
from pyengine.formats.consume_queue import is_ext_address
from pyengine.formats.index_file import HEADER, IndexHeader
from pyengine.formats.record import CaseLabel, Message, decode_properties, decode_record, encode_host, split_keys, total_size
from pyengine.formats.small_file import read_small_file
from pyengine.results import GetResult, GetStatus, ReadLevel
from pyengine.storage.checkpoint import read_checkpoint
from pyengine.storage.consume_queue import ConsumeQueue, QueueEntries, offset_by_time
from pyengine.storage.index_file import RAW_HITS_MAX, KeyQuery, query_raw
from pyengine.storage.message_getter import Wanted
from pyengine.storage.store_reader import StoreReader

MESSAGES_PER_GET = 32
_CHECKPOINT_TIMES = struct.Struct(">qqq")


def inspect(root: str | os.PathLike[str], overrides: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Return the document. Raises NotAStoreError, ConfigError, or StoreRefusedError if RocketMQ would refuse to load the store."""
    settings: dict[str, Any] = dict(overrides or {})
    with StoreReader(root, **settings) as reader:
        view = _StoreView(reader)
        messages, by_time = view.messages_and_times()
        records = list(view.records())
        return {
            "tool": "pyengine-inspect",
            "config": view.config(),
            "before": {
                "abort": (reader.root / "abort").exists(),
                "checkpoint": raw_checkpoint(reader.root),
                "index": index_headers(reader.root),
            },
            "facts": view.facts(),
            "records": records,
            "messages": messages,
            "byTime": by_time,
            "queries": list(view.queries(records)),
            "indexAfter": index_headers(reader.root),
        }


def raw_checkpoint(root: Path) -> dict[str, int] | None:
    """Return the three times from the file; only its length if it is too short, None if it does not exist."""
    try:
        data = read_small_file(root / "checkpoint")
    except (FileNotFoundError, IsADirectoryError):
        return None
    except OSError as error:
        raise disk_error(error, "read", error.filename) from error
    if len(data) < _CHECKPOINT_TIMES.size:
        return {"len": len(data)}
    physic, logics, index = _CHECKPOINT_TIMES.unpack_from(data)
    return {"len": len(data), "physic": physic, "logics": logics, "index": index}


def index_headers(root: Path) -> list[dict[str, Any]]:
    """Return the headers, unchanged, of all files in `index` that are long enough for one."""
    found = []
    folder = root / "index"
    for name in sorted(os.listdir(folder)) if folder.is_dir() else []:
        if not (folder / name).is_file():
            continue
        with open(folder / name, "rb") as file:
            data = file.read(INDEX_HEADER_BYTES)
        if len(data) == INDEX_HEADER_BYTES:
            names = ("beginTs", "endTs", "beginPhy", "endPhy", "slotCount", "indexCount")
            found.append({"file": name, **dict(zip(names, HEADER.unpack(data)))})
    return found


class _StoreView:
    """A snapshot of a store: every part of the document ends at the same byte of the log."""

    def __init__(self, reader: StoreReader) -> None:
        self._reader = reader
        self._log = reader.commit_log
        self._min_phy = reader.min_physical_offset
        self._max_phy = reader.max_physical_offset(ReadLevel.COMMITTED)
        topics = reader.topics()
        queues = [reader._queue(topic, queue_id) for topic in sorted(topics, key=_java_order) for queue_id in topics[topic]]
        self._queues = [
            QueueEntries(queue, self._max_phy, queue.min_offset_at_load(self._min_phy, max_offset), max_offset)
            for queue in queues
            if queue is not None and (max_offset := queue.max_offset(self._max_phy)) > 0
        ]

    def config(self) -> dict[str, str]:
        """Return the sizes under RocketMQ's names."""
        geometry = self._reader.geometry
        return {
            "mappedFileSizeCommitLog": str(geometry.mapped_file_size_commit_log_bytes),
            "mappedFileSizeConsumeQueue": str(geometry.mapped_file_size_consume_queue_bytes),
            "mappedFileSizeConsumeQueueExt": str(geometry.mapped_file_size_consume_queue_ext_bytes),
            "maxHashSlotNum": str(geometry.max_hash_slot_num),
            "maxIndexNum": str(geometry.max_index_num),
        }

    def facts(self) -> dict[str, Any]:
        """Return the positions that RocketMQ has directly after loading, and the queues with their entries."""
        checkpoint = read_checkpoint(self._reader.root)
        return {
            "minPhy": self._min_phy,
            "maxPhy": self._max_phy,
            "flushedWhere": self._max_phy,
            "committedWhere": self._max_phy,
            "behind": 0,
            "flagBits": 0,
            "checkpoint": {
                "physic": checkpoint.physic_msg_timestamp_ms,
                "logics": checkpoint.logics_msg_timestamp_ms,
                "index": checkpoint.index_msg_timestamp_ms,
                "min": checkpoint.min_timestamp_ms,
                "minIndex": checkpoint.min_timestamp_index_ms,
            },
            "queues": [_queue_facts(entries) for entries in self._queues],
        }

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield every record of the log in order, blanks too; `unreadable` for bytes below the end that are no record."""
        offset = self._min_phy
        while 0 <= offset < self._max_phy:
            segment = self._log.segment_at(offset)
            if segment is None:
                yield {"phy": offset, "unreadable": True}
                return
            end = min(self._max_phy, segment.base + self._log.size_bytes)
            walked = segment.walk(offset, end, limit=end, check_crc=False, check_offset=False)
            while offset < walked.end_offset:
                message = decode_record(segment.view, offset - segment.base)
                yield _record(message, offset, segment.read(offset, offset + message.size_bytes))
                offset += message.size_bytes
            if walked.reason == CaseLabel.BLANK:
                yield {"phy": offset, "size": total_size(segment.view, offset - segment.base), "blank": True}
                offset = segment.base + self._log.size_bytes
            elif offset < end:
                if walked.reason != CaseLabel.RANGE_END:
                    yield {"phy": offset, "unreadable": True}
                return

    def messages_and_times(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return (`messages`, `byTime`): every queue read from the first to the last offset, 32 at a time, then sampled by time."""
        messages: list[dict[str, Any]] = []
        by_time: list[dict[str, Any]] = []
        for entries in self._queues:
            queue, _, min_offset, max_offset = entries
            key = {"topic": queue.topic, "queueId": queue.queue_id}
            times: list[int] = []
            offset = min_offset
            while offset < max_offset:
                result = self._get(entries, offset)
                for message in result.messages:
                    messages.append(_message(message, queue.topic, self._raw(message)))
                    times.append(message.store_timestamp_ms)
                next_offset = result.next_begin_offset
                if next_offset <= offset:
                    messages.append({**key, "stuckAt": offset, "status": result.status.name})
                    break
                if result.status is not GetStatus.FOUND:
                    messages.append({**key, "status": result.status.name, "at": offset, "next": next_offset})
                offset = next_offset
            for timestamp_ms in _times_to_ask(times):
                found = offset_by_time(entries, self._log, timestamp_ms, as_rocketmq=True)
                by_time.append({**key, "ts": timestamp_ms, "offset": found})
            edges = [self._edge(entries, at) for at in (-1, min_offset - 1, max_offset, max_offset + 1, max_offset + 1000)]
            by_time.append({**key, "edges": edges})
        return messages, by_time

    def queries(self, records: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the index's results for each distinct topic and key of the log."""
        keys: dict[str, set[str]] = {}
        for record in records:
            if "props" in record:
                properties = decode_properties(record["props"])
                words = keys.setdefault(record["topic"], set())
                words.update(split_keys(properties.get(PROPERTY_KEYS)))
                if PROPERTY_UNIQ_KEY in properties:
                    words.add(properties[PROPERTY_UNIQ_KEY])
        headers = self._reader.index.headers()
        last = headers[-1][1] if headers else IndexHeader()
        for topic in sorted(keys, key=_java_order):
            for key in sorted(keys[topic], key=_java_order):
                query = KeyQuery(topic, key, RAW_HITS_MAX)
                found = query_raw(self._reader.index, lambda offset: self._reader._message_below(offset, self._max_phy), query)
                has_entries = next(self._reader.index.hits(query), None) is not None
                yield {
                    "topic": topic,
                    "key": key,
                    "phys": [message.physical_offset for message in found],
                    "lastTs": last.end_timestamp_ms if has_entries else 0,
                    "lastPhy": last.end_physical_offset if has_entries else 0,
                }

    def _get(self, entries: QueueEntries, offset: int) -> GetResult:
        return self._reader.getter.get(entries, offset, MESSAGES_PER_GET, Wanted())

    def _edge(self, entries: QueueEntries, at: int) -> dict[str, Any]:
        result = self._get(entries, at)
        return {
            "at": at,
            "status": result.status.name,
            "next": result.next_begin_offset,
            "min": result.min_offset,
            "max": result.max_offset,
            "found": len(result.messages),
        }

    def _raw(self, message: Message) -> bytes:
        """Return the record's original bytes: encoding the decoded message would change text that is not UTF-8."""
        segment = self._log.segment_at(message.physical_offset)
        return b"" if segment is None else segment.read(message.physical_offset, message.physical_offset + message.size_bytes)


def _queue_facts(entries: QueueEntries) -> dict[str, Any]:
    queue, _, min_offset, max_offset = entries
    last = queue.entry(max_offset - 1, max_offset)
    return {
        "topic": queue.topic,
        "queueId": queue.queue_id,
        "min": min_offset,
        "max": max_offset,
        "maxPhy": 0 if last is None else last.physical_offset + last.size_bytes,
        "entries": [_entry(queue, offset, max_offset) for offset in range(min_offset, max_offset)],
    }


def _entry(queue: ConsumeQueue, offset: int, max_offset: int) -> list[int] | dict[str, Any] | None:
    entry = queue.entry(offset, max_offset)
    if entry is None:
        return None
    unit = queue.ext_unit(entry.tags_code) if is_ext_address(entry.tags_code) else None
    if unit is None:
        return list(entry)
    return {
        "phy": entry.physical_offset,
        "size": entry.size_bytes,
        "raw": entry.tags_code,
        "tagsCode": unit.tags_code,
        "storeTs": unit.store_timestamp_ms,
        "bitMap": unit.filter_bit_map.hex() or None,
    }


def _record(message: Message, offset: int, raw: bytes) -> dict[str, Any]:
    return {"phy": offset, **_shared(message, raw), "physField": message.physical_offset, "props": message.raw_properties}


def _message(message: Message, queue_topic: str, raw: bytes) -> dict[str, Any]:
    return {
        "phy": message.physical_offset,
        **_shared(message, raw),
        "queue": queue_topic,
        "tags": message.tags,
        "keys": message.keys,
        "uniq": message.uniq_key,
        "props": message.properties,
        "msgId": message.msg_id,
    }


def _shared(message: Message, raw: bytes) -> dict[str, Any]:
    return {
        "size": message.size_bytes,
        "crc": message.body_crc,
        "queueId": message.queue_id,
        "flag": message.flag,
        "queueOffset": message.queue_offset,
        "sysFlag": message.sys_flag,
        "born": message.born_timestamp_ms,
        "bornHost": _java_host(message.born_host),
        "storeTs": message.store_timestamp_ms,
        "storeHost": _java_host(message.store_host),
        "reconsume": message.reconsume_times,
        "prepared": message.prepared_transaction_offset,
        "bodyLen": len(message.body),
        "bodySha": _sha256(message.body),
        "topic": message.topic,
        "recSha": _sha256(raw),
    }


def _times_to_ask(times: list[int]) -> list[int]:
    """Return the times that `verify` samples: before, at and after both ends, and at and around some midpoints of neighbours."""
    if not times:
        return []
    asked = {0, times[0] - 1, times[0], times[-1], times[-1] + 1000}
    for at in range(0, len(times) - 1, max(1, len(times) // 6)):
        middle = (times[at] + times[at + 1]) // 2
        asked |= {times[at], middle, middle + 1}
    return sorted(asked)


def _java_host(text: str) -> str:
    """Format a host as Java does: eight groups of an IPv6 address; an IPv4-mapped address as IPv4."""
    if not text.startswith("["):
        return text
    data = encode_host(text)
    port = int.from_bytes(data[16:], "big", signed=True)
    if data[:12] == bytes(10) + b"\xff\xff":
        return f"[{'.'.join(map(str, data[12:16]))}]:{port}"
    return f"[{':'.join(format(group, 'x') for group in struct.unpack('>8H', data[:16]))}]:{port}"


def _java_order(text: str) -> bytes:
    """Return a sort key for Java's order of strings: by UTF-16 units."""
    return text.encode("utf-16-be", "surrogatepass")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
