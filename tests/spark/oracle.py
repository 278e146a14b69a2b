"""What the data source must give, row by row, made by the pure-Python record parser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pyengine.formats.paths import parse_segment_name
from pyengine.formats.record import Message
from pyengine.storage.store_reader import StoreReader
from record_bytes import iter_records

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _time(timestamp_ms: int) -> datetime:
    return EPOCH + timedelta(milliseconds=timestamp_ms)


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


VALUES: dict[str, Callable[[Message], Any]] = {
    "key": lambda m: _bytes(m.keys),
    "value": lambda m: m.body,
    "topic": lambda m: m.topic,
    "partition": lambda m: m.queue_id,
    "offset": lambda m: m.queue_offset,
    "timestamp": lambda m: _time(m.store_timestamp_ms),
    "timestampType": lambda m: 1,
    "physicalOffset": lambda m: m.physical_offset,
    "tags": lambda m: m.tags,
    "keys": lambda m: m.keys,
    "properties": lambda m: m.raw_properties,
    "bornTimestamp": lambda m: _time(m.born_timestamp_ms),
    "bodySize": lambda m: len(m.body),
    "size": lambda m: m.size_bytes,
    "bodyCRC": lambda m: m.body_crc,
    "flag": lambda m: m.flag,
    "sysFlag": lambda m: m.sys_flag,
    "reconsumeTimes": lambda m: m.reconsume_times,
    "preparedTransactionOffset": lambda m: m.prepared_transaction_offset,
    "uniqKey": lambda m: m.uniq_key,
    "msgId": lambda m: m.msg_id,
    "bornHost": lambda m: m.born_host,
    "storeHost": lambda m: m.store_host,
    "headers": lambda m: headers(m.raw_properties),
    "body": lambda m: m.body,
    "queueId": lambda m: m.queue_id,
    "queueOffset": lambda m: m.queue_offset,
    "storeTimestamp": lambda m: _time(m.store_timestamp_ms),
}


def headers(text: str) -> list[dict[str, Any]] | None:
    """All properties in their order, as name and value."""
    pieces = [piece.partition("\x01") for piece in text.split("\x02")]
    return [{"key": name, "value": value.encode()} for name, _, value in pieces if name and value] or None


def log_messages(root: Path, limit: int | None = None) -> list[Message]:
    """Every message of the log that ends at or below `limit` (default: the log's end), in its order."""
    return list(_messages(root, limit))


def _messages(root: Path, limit: int | None) -> Iterator[Message]:
    with StoreReader(root) as reader:
        if limit is None:
            limit = reader.max_physical_offset("committed")
    for path in sorted((root / "commitlog").iterdir()):
        data = path.read_bytes()
        start = parse_segment_name(path.name)
        assert start is not None
        for record in iter_records(data, start, start, min(start + len(data), max(start, limit))):
            if isinstance(record, Message):
                yield record


def row(message: Message, columns: list[str]) -> tuple:
    """One row, as Arrow and Spark give it."""
    return tuple(
        message.properties.get(name.removeprefix("property.")) if name.startswith("property.") else VALUES[name](message)
        for name in columns
    )


def rows(messages: list[Message], columns: list[str]) -> list[tuple]:
    return [row(message, columns) for message in messages]
