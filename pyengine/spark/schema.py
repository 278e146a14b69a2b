"""The columns of `spark.read.format("pyengine")`: Kafka's names first, then RocketMQ's.

One table has for each column its name and type in Spark, and the column of the log scan (`pyengine.storage.arrow`) from which it
is made. `property.<NAME>` is a column too: the value of that property.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    """A column. `scanned` is the scan's column, "" for one that is made otherwise."""

    name: str
    type: str
    meaning: str
    scanned: str = ""
    in_default: bool = False


COLUMNS = (
    Column("key", "BINARY", "The property KEYS as bytes.", "keys", True),
    Column("value", "BINARY", "The body, decompressed (option `decompress`).", "body", True),
    Column("topic", "STRING", "The topic as the record has it.", "topic", True),
    Column("partition", "INT", "The queue.", "queueId", True),
    Column("offset", "BIGINT", "The message's number in its queue.", "queueOffset", True),
    Column("timestamp", "TIMESTAMP", "When it was stored.", "storeTimestamp", True),
    Column("timestampType", "INT", "1, as in Kafka.", "", True),
    Column("physicalOffset", "BIGINT", "Where it begins in the log.", "physicalOffset", True),
    Column("tags", "STRING", "The property TAGS.", "tags", True),
    Column("keys", "STRING", "The property KEYS: words.", "keys", True),
    Column("properties", "STRING", "All properties as stored: name 0x01 value, joined by 0x02.", "properties", True),
    Column("bornTimestamp", "TIMESTAMP", "The producer's clock.", "bornTimestamp", True),
    Column("bodySize", "INT", "Bytes of the body as stored.", "bodySize", True),
    Column("size", "INT", "Bytes of the whole record.", "size", True),
    Column("bodyCRC", "INT", "The body's checksum as stored.", "bodyCRC", True),
    Column("flag", "INT", "The producer's own flag.", "flag", True),
    Column("sysFlag", "INT", "Compression, transaction type, host kinds.", "sysFlag", True),
    Column("reconsumeTimes", "INT", "How often it was delivered again.", "reconsumeTimes", True),
    Column("preparedTransactionOffset", "BIGINT", "Where the prepared message is in the log, or 0.", "preparedTransactionOffset", True),
    Column("uniqKey", "STRING", "The producer's message id.", "uniqKey"),
    Column("msgId", "STRING", "The offset message id.", "msgId"),
    Column("bornHost", "STRING", "The producer's address.", "bornHost"),
    Column("storeHost", "STRING", "The store's address.", "storeHost"),
    Column("headers", HEADERS_TYPE, "All properties in their order.", "properties"),
    Column("body", "BINARY", "value under RocketMQ's name.", "body"),
    Column("queueId", "INT", "partition under RocketMQ's name.", "queueId"),
    Column("queueOffset", "BIGINT", "offset under RocketMQ's name.", "queueOffset"),
    Column("storeTimestamp", "TIMESTAMP", "timestamp under RocketMQ's name.", "storeTimestamp"),
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


def find_column(name: str) -> Column:
    """Return the column of that name in any case, as in Spark; UsageError with the nearest name."""
    if name[: len(PROPERTY_PREFIX)].lower() == PROPERTY_PREFIX:
        wanted = name[len(PROPERTY_PREFIX) :]
        if wanted and not any(mark in wanted for mark in "\x00\x01\x02"):
            return Column(name, "STRING", f"The property {wanted}.", PROPERTY_PREFIX + wanted)
        raise UsageError(f"column {name!r}: write {PROPERTY_PREFIX}NAME")
    return _named(name, COLUMNS, "", f", {PROPERTY_PREFIX}NAME")


def _named(name: str, columns: Sequence[Column], of_what: str, more: str = "") -> Column:
    for column in columns:
        if column.name.lower() == name.lower():
            return column
    names = [column.name for column in columns]
    known = f": known are {', '.join(names)}{more}"
    raise UsageError(f"unknown column {name!r}{of_what}{did_you_mean(name, names) or known}")


def chosen_columns(options: ReadOptions) -> list[Column]:
    """Return the columns of the option `columns`, or those of schemaMode (without the body if includeBody is false)."""
    mode = MODES.get(options.schema_mode)
    if options.columns:
        columns = [find_column(name) for asked in options.columns for name in (all_names() if asked == "*" else [asked])
                   if asked != "*" or options.include_body or find_column(name).scanned != "body"]
        _refuse_doubles(column.name for column in columns)
    else:
        found = [column for column in COLUMNS if column.in_default] if mode is None else [find_column(name) for name in mode]
        if options.include_headers and all(column.name != "headers" for column in found):
            found.append(find_column("headers"))
        columns = [column for column in found if options.include_body or column.scanned != "body"]
    for name in options.read_columns:
        if name != "*":
            _named(name, columns, " in the option readColumns")
    return columns


def all_names() -> list[str]:
    """Return the columns of `*`: all but `headers`, which repeats the properties."""
    return [column.name for column in COLUMNS if column.name != "headers"]


def schema_text(columns: Iterable[Column]) -> str:
    """Return the columns as DDL, with quoted names. TIMESTAMP alone would depend on spark.sql.timestampType."""
    return ", ".join(f"`{column.name.replace('`', '``')}` {column.type.replace('TIMESTAMP', 'TIMESTAMP_LTZ')}" for column in columns)


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
        columns.append(replace(column, name=field.name))
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

QUEUE_COLUMNS = (
    Column("topic", "STRING", "The topic."),
    Column("partition", "INT", "The queue."),
    Column("minOffset", "BIGINT", "The first message that still exists."),
    Column("maxOffset", "BIGINT", "The offset after the last message."),
    Column("messages", "BIGINT", "maxOffset - minOffset."),
    Column("bytes", "BIGINT", "Bytes of their records; reads every entry."),
    Column("firstPhysicalOffset", "BIGINT", "Where the first is in the log."),
    Column("lastPhysicalOffset", "BIGINT", "Where the last is."),
    Column("committedOffset", "BIGINT", "The next message of the group, null without `group` or a commit."),
    Column("lag", "BIGINT", "How many messages the group has not read."),
)
ENTRY_COLUMNS = (
    Column("topic", "STRING", "The topic."),
    Column("partition", "INT", "The queue."),
    Column("offset", "BIGINT", "The message's number in its queue."),
    Column("physicalOffset", "BIGINT", "Where its record begins in the log."),
    Column("size", "INT", "Bytes of the record."),
    Column("tagsCode", "BIGINT", "The hash of its tag, its delivery time in the schedule topic, or an address in the extension."),
)
GROUP_COLUMNS = (
    Column("group", "STRING", "Each group with an offset in the topic, or the option `group`."),
    *(column for column in QUEUE_COLUMNS if column.name in ("topic", "partition", "minOffset", "maxOffset", "committedOffset", "lag")),
)
VIEWS = {"queue": QUEUE_COLUMNS, "entries": ENTRY_COLUMNS, "groups": GROUP_COLUMNS}


def view_options(given: Mapping[str, str]) -> ReadOptions:
    """Parse the options of a view, with its columns; UsageError says which one is wrong and what is allowed."""
    read = read_options(given, "any")
    known = {name.lower() for name in VIEW_OPTIONS}
    for name in given:
        if name.lower() in BY_KEY and name.lower() not in known:
            raise UsageError(f"option {BY_KEY[name.lower()].key} is for messages; view={read.view} takes {', '.join(VIEW_OPTIONS)}")
    return replace(read, columns=tuple(column.name for column in view_columns(read)))


def view_columns(options: ReadOptions) -> Sequence[Column]:
    """Return the columns of a view: those of the option `columns`, or all."""
    known = VIEWS[options.view]
    if options.columns in ((), ("*",)):
        return known
    _refuse_doubles(options.columns)
    return [_named(name, known, f" of view={options.view}") for name in options.columns]
