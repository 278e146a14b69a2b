"""Messages as commands show them: one JSON object, or one row of a table, each."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pyengine.cli import output

if TYPE_CHECKING:
    from pyengine.formats.record import Message

BODY_COLUMN_MOST = 60


def message_document(message: Message) -> dict[str, Any]:
    """All of a message. `body` is its text; a body that is not UTF-8 stands in `body_base64` instead."""
    document: dict[str, Any] = {
        "topic": message.topic,
        "queue_id": message.queue_id,
        "queue_offset": message.queue_offset,
        "physical_offset": message.physical_offset,
        "size_bytes": message.size_bytes,
        "msg_id": message.msg_id,
        "store_timestamp_ms": message.store_timestamp_ms,
        "store_host": message.store_host,
        "born_timestamp_ms": message.born_timestamp_ms,
        "born_host": message.born_host,
        "tags": message.tags,
        "keys": message.keys,
        "properties": message.properties,
        "flag": message.flag,
        "sys_flag": message.sys_flag,
        "reconsume_times": message.reconsume_times,
        "prepared_transaction_offset": message.prepared_transaction_offset,
        "body_bytes": len(message.body),
    }
    try:
        document["body"] = message.body.decode("utf-8")
    except UnicodeDecodeError:
        document["body_base64"] = base64.b64encode(message.body).decode("ascii")
    return document


def write_message_table(messages: Iterable[Message]) -> None:
    """One row a message, bodies cut to a line."""
    output.write_table(
        ("topic", "queue", "offset", "position", "stored", "tags", "keys", "bytes", "body"),
        [(message.topic, message.queue_id, message.queue_offset, message.physical_offset,
          output.time_text(message.store_timestamp_ms), message.tags, message.keys, len(message.body),
          output.body_text(message.body, BODY_COLUMN_MOST)) for message in messages])


def write_message(message: Message) -> None:
    """One message in full, its body last."""
    document = message_document(message)
    properties = document.pop("properties")
    document.pop("body", None)
    document.pop("body_base64", None)
    for name in ("store_timestamp_ms", "born_timestamp_ms"):
        document[name] = f"{document[name]} ({output.time_text(document[name])})"
    output.write_facts([*document.items(), *((f"property {name}", value) for name, value in properties.items())])
    print()
    print(output.body_text(message.body))
