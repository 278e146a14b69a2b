"""The columns of `spark.read.format("pyengine")`: Kafka's names first, then RocketMQ's.

One table has for each column its name and type in Spark, and the column of the log scan (`pyengine.storage.arrow`) from which it
is made. `property.<NAME>` is a column too: the value of that property.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyengine.errors import UsageError, did_you_mean
from pyengine.spark.options import BY_KEY, ReadOptions, read_options

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

PROPERTY_PREFIX = "property."
HEADERS_TYPE = "ARRAY<STRUCT<key: STRING, value: BINARY>>"
TIMESTAMP_TYPE = 1  # Kafka's LogAppendTime: `timestamp` is the store time, not the producer's


@dataclass(frozen=True, slots=True)
class Column:
    """A column. `scanned` is the scan's column, "" for timestampType, which is the same in every row."""

    name: str
    type: str
    scanned: str
    in_default: bool
    meaning: str


COLUMNS = (
    Column("key", "BINARY", "keys", True, "The property KEYS as bytes."),
    Column("value", "BINARY", "body", True, "The body, decompressed (option `decompress`)."),
    Column("topic", "STRING", "topic", True, "The topic as the record has it."),
    Column("partition", "INT", "queueId", True, "The queue."),
    Column("offset", "BIGINT", "queueOffset", True, "The message's number in its queue."),
    Column("timestamp", "TIMESTAMP", "storeTimestamp", True, "When it was stored."),
    Column("timestampType", "INT", "", True, "1, as in Kafka."),
    Column("physicalOffset", "BIGINT", "physicalOffset", True, "Where it begins in the log."),
    Column("tags", "STRING", "tags", True, "The property TAGS."),
    Column("keys", "STRING", "keys", True, "The property KEYS: words."),
    Column("properties", "STRING", "properties", True, "All properties as stored: name 0x01 value, joined by 0x02."),
    Column("bornTimestamp", "TIMESTAMP", "bornTimestamp", True, "The producer's clock."),
    Column("bodySize", "INT", "bodySize", True, "Bytes of the body as stored."),
    Column("size", "INT", "size", True, "Bytes of the whole record."),
    Column("bodyCRC", "INT", "bodyCRC", True, "The body's checksum as stored."),
    Column("flag", "INT", "flag", True, "The producer's own flag."),
    Column("sysFlag", "INT", "sysFlag", True, "Compression, transaction type, host kinds."),
    Column("reconsumeTimes", "INT", "reconsumeTimes", True, "How often it was delivered again."),
    Column("preparedTransactionOffset", "BIGINT", "preparedTransactionOffset", True,
           "Where the prepared message is in the log, or 0."),
    Column("uniqKey", "STRING", "uniqKey", False, "The producer's message id."),
    Column("msgId", "STRING", "msgId", False, "The offset message id."),
    Column("bornHost", "STRING", "bornHost", False, "The producer's address."),
    Column("storeHost", "STRING", "storeHost", False, "The store's address."),
    Column("headers", HEADERS_TYPE, "properties", False,
           "All properties in their order."),
    Column("body", "BINARY", "body", False, "value under RocketMQ's name."),
    Column("queueId", "INT", "queueId", False, "partition under RocketMQ's name."),
    Column("queueOffset", "BIGINT", "queueOffset", False, "offset under RocketMQ's name."),
    Column("storeTimestamp", "TIMESTAMP", "storeTimestamp", False, "timestamp under RocketMQ's name."),
)
MODES = {
    "kafka": ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType"),
    "rocketmq": (
        "topic", "flag", "body", "properties", "queueId", "queueOffset", "bornTimestamp", "storeTimestamp", "physicalOffset",
        "tags",
        "keys", "uniqKey", "msgId", "bodySize", "size", "bodyCRC", "sysFlag", "reconsumeTimes", "preparedTransactionOffset",
        "bornHost", "storeHost",
    ),
    "full": tuple(column.name for column in COLUMNS if column.name not in ("headers", "body", "queueId", "queueOffset", "storeTimestamp")),
}
_BY_NAME = {column.name.lower(): column for column in COLUMNS}


def find_column(name: str) -> Column:
    """Return the column of that name in any case, as in Spark; UsageError with the nearest name."""
    if name[: len(PROPERTY_PREFIX)].lower() == PROPERTY_PREFIX:
        wanted = name[len(PROPERTY_PREFIX) :]
        if wanted and not any(mark in wanted for mark in "\x00\x01\x02"):
            return Column(name, "STRING", PROPERTY_PREFIX + wanted, False, f"The property {wanted}.")
        raise UsageError(f"column {name!r}: write {PROPERTY_PREFIX}NAME")
    column = _BY_NAME.get(name.lower())
    if column is None:
        names = [column.name for column in COLUMNS]
        known = f": known are {', '.join(names)}, {PROPERTY_PREFIX}NAME"
        raise UsageError(f"unknown column {name!r}{did_you_mean(name, names) or known}")
    return column


def chosen_columns(options: ReadOptions) -> list[Column]:
    """Return the columns of the option `columns`, or those of schemaMode (without the body if includeBody is false)."""
    if not options.columns:
        mode = MODES.get(options.schema_mode)
        found = [column for column in COLUMNS if column.in_default] if mode is None else [find_column(name) for name in mode]
        if options.include_headers and all(column.name != "headers" for column in found):
            found.append(find_column("headers"))
        return [column for column in found if options.include_body or column.scanned != "body"]
    columns = [find_column(name) for asked in options.columns for name in (all_names() if asked == "*" else [asked])]
    _refuse_doubles(column.name for column in columns)
    return columns


def all_names() -> list[str]:
    """Return the columns of `*`: all but `headers`, which repeats the properties."""
    return [column.name for column in COLUMNS if column.name != "headers"]


def schema_text(columns: Iterable[Column]) -> str:
    """Return the columns as DDL, with quoted names."""
    return ", ".join(f"`{column.name.replace('`', '``')}` {column.type}" for column in columns)


def columns_of_schema(schema: StructType, options: ReadOptions) -> list[Column]:
    """Return the columns of a user's `.schema(...)`, in its order; UsageError for an unknown name or another type.

    A schema chooses columns and does not convert them: each type must be the column's own.
    """
    columns = []
    for field in schema.fields:
        column = find_column(field.name)
        own, asked = column.type, field.dataType.simpleString().upper()
        if asked != own.upper().replace(" ", ""):
            raise UsageError(f"column {column.name} is of type {own}, not {asked}: a schema chooses columns, cast "
                             f"them afterwards")
        columns.append(Column(field.name, column.type, column.scanned, column.in_default, column.meaning))
    _refuse_doubles(column.name for column in columns)
    if options.columns and [column.name.lower() for column in columns] != [column.name.lower()
                                                                           for column in chosen_columns(options)]:
        raise UsageError("the option columns and .schema() name different columns: give one of them")
    return columns


def _refuse_doubles(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            raise UsageError(f"column {name!r} is named twice")
        seen.add(name.lower())


# -- the columns of the option `view` ---------------------------------------------------

VIEW_OPTIONS = ("path", "view", "group", "subscribe", "subscribePattern", "assign", "columns", "minPartitions", "readLevel", "allowMissing",
                  "failOnDataLoss", "onCorrupt", "fileSystem")

# name, type, what it is
QUEUE_COLUMNS = (
    ("topic", "STRING", "The topic."),
    ("partition", "INT", "The queue."),
    ("minOffset", "BIGINT", "The first message that still exists."),
    ("maxOffset", "BIGINT", "The offset after the last message."),
    ("messages", "BIGINT", "maxOffset - minOffset."),
    ("bytes", "BIGINT", "Bytes of their records; reads every entry."),
    ("firstPhysicalOffset", "BIGINT", "Where the first is in the log."),
    ("lastPhysicalOffset", "BIGINT", "Where the last is."),
    ("committedOffset", "BIGINT", "The next message of the group, null without `group` or a commit."),
    ("lag", "BIGINT", "How many messages the group has not read."),
)
ENTRY_COLUMNS = (
    ("topic", "STRING", "The topic."),
    ("partition", "INT", "The queue."),
    ("offset", "BIGINT", "The message's number in its queue."),
    ("physicalOffset", "BIGINT", "Where its record begins in the log."),
    ("size", "INT", "Bytes of the record."),
    ("tagsCode", "BIGINT", "The hash of its tag, its delivery time in the schedule topic, or an address in the extension."),
)
GROUP_COLUMNS = (
    ("group", "STRING", "Each group with an offset in the topic, or the option `group`."),
    *(column for column in QUEUE_COLUMNS if column[0] in ("topic", "partition", "minOffset", "maxOffset", "committedOffset", "lag")),
)
VIEWS = {"queue": QUEUE_COLUMNS, "entries": ENTRY_COLUMNS, "groups": GROUP_COLUMNS}


def view_options(given: Mapping[str, str]) -> ReadOptions:
    """Parse the options of a view, with its columns; UsageError says which one is wrong and what is allowed."""
    read = read_options(given, "any")
    known = {name.lower() for name in VIEW_OPTIONS}
    for name in given:
        if name.lower() in BY_KEY and name.lower() not in known:
            raise UsageError(f"option {BY_KEY[name.lower()].key} is for messages; view={read.view} takes {', '.join(VIEW_OPTIONS)}")
    return replace(read, columns=_view_columns(read.view, read.columns))


def _view_columns(view: str, asked: tuple[str, ...]) -> tuple[str, ...]:
    names = {name.lower(): name for name, *_ in VIEWS[view]}
    if not asked or asked == ("*",):
        return tuple(names.values())
    for name in asked:
        if name.lower() not in names:
            known = f": known are {', '.join(names.values())}"
            raise UsageError(f"unknown column {name!r} of view={view}{did_you_mean(name, names.values()) or known}")
    _refuse_doubles(asked)
    return tuple(names[name.lower()] for name in asked)


def types_of(view: str) -> dict[str, str]:
    """Return the types of a view's columns."""
    return {name: kind for name, kind, _ in VIEWS[view]}
