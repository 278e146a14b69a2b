"""The options of `spark.read.format("pyengine")` and of `readStream`: one table, parsed into a ReadOptions.

Names and meanings are those of Spark's Kafka source where it has them; the others are for what this log has and Kafka has not.
Spark ignores the case of option names. An unknown option is an error with the nearest name, since a misspelt filter must not read
everything.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeGuard
from urllib.parse import unquote

from pyengine.arguments import INT32_MAX, INT64_MAX
from pyengine.errors import UsageError, did_you_mean
from pyengine.formats.sql_filter import SqlFilter
from pyengine.results import ReadLevel
from pyengine.settings import UNITS, setting, settings_of
from pyengine.storage.config import FIXED_NAMES, LOG_PATHS, SETTINGS, fold, from_environment

AUTO, ARROW = "auto", "arrow"  # of the option fileSystem
MESSAGES = "messages"          # of the option view
EARLIEST, LATEST = -2, -1  # as in the JSON of Spark's Kafka source
PARTS_MAX = 1_000_000
BATCH_ROWS_MAX, BATCH_BYTES_MAX = 1 << 20, 256 << 20  # those of native.columns, which an options page need not load

Queue = tuple[str, int]
QueueOffsets = dict[str, dict[int, int]]  # topic -> queue id -> offset, or EARLIEST or LATEST
Use = Literal["batch", "stream", "any"]   # what the options are for; any: only what they say of the schema matters


# Schemes of `word:x` without a slash. A path of this host may have a colon, but not after these words.
_SCHEMES = ("file", "s3", "s3a", "s3n", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss", "wasb", "wasbs", "dbfs", "http", "https")
_FILE_URI = re.compile("file:(?://(?:localhost)?(?=/)|(?!//))(/.*)", re.IGNORECASE | re.DOTALL)


def scheme_of(path: str) -> str:
    """Return the scheme of a URI in lower case, "" for a path. A path of this host has none, or `file`."""
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/", path)
    return found[1].lower() if found else ""


def shown(path: str) -> str:
    """Return a path or URI for messages, without the keys that a URI may have before `@` and after `?`."""
    return re.sub("^([A-Za-z][A-Za-z0-9+.-]*://)[^/]*@", r"\1", path).partition("?")[0] if scheme_of(path) else path


def flat(offsets: QueueOffsets | None) -> dict[Queue, int]:
    """Return the offsets by queue."""
    return {(topic, queue_id): offset for topic, queues in (offsets or {}).items() for queue_id, offset in queues.items()}


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """Where a stream begins, as a word: `latest`, `earliest`, `time` (number: ms before now), `last` (number: messages)."""

    word: str
    number: int = 0


def _not_empty(value: str) -> str:
    if not value.strip():
        raise ValueError("give a value")
    return value


def location(value: str) -> str:
    """Return the absolute path of a path or a file: URI, or the URI of another file system; ValueError for other text."""
    uri = _not_empty(value).strip()
    of_host = _FILE_URI.fullmatch(uri)
    if of_host is not None:
        return os.path.abspath(unquote(of_host[1]))
    word, colon, after = uri.partition(":")
    if scheme_of(uri) == "" and not (colon and word.lower() in _SCHEMES):
        return os.path.abspath(value)
    if word.lower() in ("file", "dbfs") or not after.startswith("//"):
        raise ValueError("tasks cannot open this: write a URI like s3://bucket/store or file:///store, or the path where this host mounts "
                         "the file system")
    return uri


def destination(value: str) -> str:
    """Return the location that a job writes to; UsageError if it is neither a path nor a URI."""
    try:
        os.fsencode(value).decode()
        return location(value)
    except UnicodeDecodeError:
        raise UsageError(f"destination {value!r} is not text in UTF-8, which pyarrow needs: give a folder of another name") from None
    except ValueError as error:
        raise UsageError(f"destination {value!r}: {error}") from None


def _file_system(value: str) -> str:
    text = value.strip()
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", text):
        raise ValueError("give auto, arrow, or module:name of a file system that can be imported")
    return text


def _names(value: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in value.split(",") if name.strip()))
    if not names:
        raise ValueError("give names separated by commas")
    return names


def _group(value: str) -> str:
    if not value.strip() or "@" in value:
        raise ValueError("give the name of a consumer group")
    return value


def _pattern(value: str) -> str:
    try:
        re.compile(_not_empty(value))
    except re.error as error:
        raise ValueError(f"this is not a regular expression: {error}") from None
    return value


def _tags(value: str) -> tuple[str, ...]:
    from pyengine.storage.message_getter import parse_subscription

    wanted = parse_subscription(value)
    return tuple(sorted(wanted.tags)) if wanted else ()


def _sql(value: str) -> str | None:
    SqlFilter(value)
    return value


def _queues(value: str) -> dict[str, tuple[int, ...]]:
    document = _json(value, '{"topic": [0, 1]}')
    if not all(isinstance(ids, list) and ids and all(_is_from_0_to(INT32_MAX, one) for one in ids) for ids in document.values()):
        raise ValueError('give JSON like {"topic": [0, 1]}')
    return {topic: tuple(sorted(set(ids))) for topic, ids in document.items()}


def _starting(value: str) -> QueueOffsets | StartingPoint:
    if not re.match(r"\s*-\s*\d", value):
        return _queue_offsets(value, STARTING_EXAMPLE, (EARLIEST, LATEST))
    span = value.strip()[1:].strip()
    return StartingPoint("last", int(span)) if span.isdecimal() else StartingPoint("time", _SPAN.value_of(span))


def _ending(value: str) -> QueueOffsets:
    return _queue_offsets(value, f'give latest or JSON like {{"topic": {{"0": 23, "1": {LATEST}}}}}', (LATEST,))


def _queue_offsets(value: str, example: str, words: tuple[int, ...]) -> QueueOffsets:
    """Parse offsets in JSON; `words`: the negative numbers that stand for a word, such as -1 for latest."""
    document = _json(value, example)
    if not all(isinstance(queues, dict) and queues for queues in document.values()):
        raise ValueError(example)
    found: QueueOffsets = {}
    for topic, queues in document.items():
        for name, offset in queues.items():
            is_allowed = _is_from_0_to(INT64_MAX, offset) or isinstance(offset, int) and offset in words
            if not (is_allowed and name.isdecimal() and int(name) <= INT32_MAX):
                raise ValueError(f"{example}; {topic}: {name}: {offset!r} is not allowed")
            found.setdefault(topic, {})[int(name)] = offset
    return found


def _queue_times(value: str) -> QueueOffsets:
    return _queue_offsets(value, 'give JSON like {"topic": {"0": 1700000000000}}', ())


def _json(value: str, example: str) -> dict[str, Any]:
    try:
        document = json.loads(value)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or not document:
        raise ValueError(example if example.startswith("give") else f"give JSON like {example}")
    return document


def _is_from_0_to(most: int, value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


STARTING_EXAMPLE = f'give earliest or JSON like {{"topic": {{"0": 23, "1": {EARLIEST}}}}}'
# As in Spark's own options: a size may end in MB too, a span of time needs a unit.
_SIZES = UNITS["bytes"] | {f"{letter}b": UNITS["bytes"][letter] for letter in "kmgt"}
_SPANS = {"ms": 1, "millisecond": 1, "milliseconds": 1} | {
    spelling: ms for name, ms in (("second", 1000), ("minute", 60_000), ("hour", 3_600_000), ("day", 86_400_000))
    for spelling in (name, f"{name}s", name[0], name[:3])}


_WHOLE: dict[str, Any] = {"kind": int, "unit": "", "high": INT64_MAX}  # a number without a default


def _option(key: str, default: Any, meaning: str, **row: Any) -> Any:
    """Return a field of ReadOptions with its row. `default` is what a read without the option has."""
    return setting(default, meaning, key=key, **row)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The parsed options of a read. None as an offset or time is not a bound; `sizes` are settings of the store's files and
    of the log's folders, which a task finds nowhere else if they are not those of its engine.toml."""

    path: str = _option("path", "", "The store's root directory; also the argument of `load()`.", parse=location)
    view: str = _option("view", MESSAGES, "What a row is: a message, or one of [Queues](#queues): queue, entries, groups.",
        choices=(MESSAGES, "queue", "entries", "groups"))
    group: str | None = _option("group", None, "With view=queue or view=groups: the consumer group.", parse=_group)
    subscribe: tuple[str, ...] = _option("subscribe", (),
        "Topics, separated by commas. One of subscribe, subscribePattern and assign, or the whole log.", parse=_names, default_text="all")
    subscribe_pattern: str | None = _option("subscribePattern", None, "A regular expression that the whole topic must match.",
        parse=_pattern)
    assign: dict[str, tuple[int, ...]] | None = _option("assign", None, 'Queues as JSON: `{"orders": [0, 1]}`.', parse=_queues)
    starting_offsets: QueueOffsets | None = _option("startingOffsets", None,
        'Where each queue starts: `earliest`, or JSON `{"orders": {"0": 23, "1": -2}}` (-2, and queues not named: '
        'earliest). [Streams](#streams) take more.', parse=_starting,
        words={word: StartingPoint(word) for word in ("earliest", "latest")}, default_text="earliest")
    ending_offsets: QueueOffsets | None = _option("endingOffsets", None,
        "Where each queue ends, exclusive: `latest`, or JSON as above (-1: latest).", parse=_ending, words={"latest": None})
    starting_timestamp_ms: int | None = _option("startingTimestamp", None,
        "Only messages stored at this time or later, in milliseconds; overrides startingOffsets.", **_WHOLE, low=0)
    ending_timestamp_ms: int | None = _option("endingTimestamp", None,
        "Only messages stored before this time; overrides endingOffsets.", **_WHOLE, low=0)
    starting_timestamps: QueueOffsets | None = _option("startingOffsetsByTimestamp", None,
        'As startingTimestamp, for single queues: `{"orders": {"0": 1700000000000}}`.', parse=_queue_times)
    ending_timestamps: QueueOffsets | None = _option("endingOffsetsByTimestamp", None, "As endingTimestamp, for single queues.",
        parse=_queue_times)
    starting_timestamp_strategy: str = _option("startingOffsetsByTimestampStrategy", "latest",
        "A queue without a message of the starting time or later gives nothing, or begins with the next (`latest`), or is an error "
        "(`error`).", choices=("latest", "error"))
    starting_physical_offset: int | None = _option("startingPhysicalOffset", None,
        "Only records that begin at this byte of the log or later.", **_WHOLE, low=0, words={"earliest": None, "latest": None})
    ending_physical_offset: int | None = _option("endingPhysicalOffset", None, "Only records that begin before this byte.",
        **_WHOLE, low=0, words={"latest": None, "earliest": None})
    tags: tuple[str, ...] = _option("tags", (), "Only messages with one of these tags: `paid || sent`.", parse=_tags, default_text="*")
    sql: str | None = _option("sql", None,
        "Only messages whose properties meet this SQL92 condition: `price > 5 AND region = 'eu'`.", parse=_sql)
    columns: tuple[str, ...] = _option("columns", (),
        "The columns to read, in this order; `*` is all.", parse=_names, default_text="the default columns")
    schema_mode: str = _option("schemaMode", "default",
        "Without `columns`: `kafka` (what Spark's Kafka source has), `rocketmq` (its names), `full` (all), or the default "
        "columns.", choices=("default", "kafka", "rocketmq", "full"))
    include_body: bool = _option("includeBody", True, "false leaves the body out.")
    include_headers: bool = _option("includeHeaders", False, "true adds the column `headers`.")
    decompress: bool = _option("decompress", True, "Decompress `value` (zlib, LZ4, ZSTD); false gives the stored bytes.")
    read_columns: tuple[str, ...] = _option("readColumns", ("*",),
        "Columns that are read; the others are null. `pyengine.spark.sql` finds them.", parse=_names, default_text="*")
    min_partitions: int = _option("minPartitions", 1, "At least this many partitions, if there are enough bytes.", high=PARTS_MAX)
    max_partition_bytes: int = _option("maxPartitionBytes", 256 << 20,
        "Bytes of the log in one partition, at most; more without bodies and in jobs.", units=_SIZES, high=INT64_MAX, default_text="256m")
    fail_on_data_loss: bool = _option("failOnDataLoss", True, "Data that no longer exists fails the query; false reads what exists.")
    allow_missing: bool = _option("allowMissing", False,
        "A topic or queue without entries that topics.json does not name fails the query, in a batch also a pattern without a match; true "
        "reads what exists.")
    read_level: ReadLevel = _option("readLevel", ReadLevel.FLUSHED, "How far to read: written, committed, flushed or replicated.",
        words={level.value: level for level in ReadLevel})
    verify_crc: bool = _option("verifyCRC", False, "Check the checksum of each body.")
    on_corrupt: Literal["fail", "skip"] = _option("onCorrupt", "fail",
        "Damage fails the query, or is skipped up to the next whole record.", choices=("fail", "skip"))
    access: str = _option("access", AUTO,
        "Chosen topics are found by their queues (`queue`), or every record's header (`scan`), deleted namesakes' too; `auto` "
        "takes queues below a third of a large log.", choices=(AUTO, "scan", "queue"))
    file_system: str = _option("fileSystem", AUTO,
        "`auto` maps a path and reads a URI by ranges, `arrow` always reads by ranges; `module:name`: [another "
        "one](#remote-file-systems).", choices=(AUTO, ARROW), parse=_file_system)
    max_offsets_per_trigger: int | None = _option("maxOffsetsPerTrigger", None,
        "Streams: messages in one micro-batch, at most; at least one of each queue.", **_WHOLE)
    min_offsets_per_trigger: int | None = _option("minOffsetsPerTrigger", None,
        "Streams: no micro-batch before so many wait, or maxTriggerDelay is over.", **_WHOLE)
    max_trigger_delay_ms: int = _option("maxTriggerDelay", 15 * 60_000, "Streams: how long minOffsetsPerTrigger may delay messages.",
        units=_SPANS, low=0, high=INT64_MAX, sentence="a span of time like 30s, 15m or 1 hour", default_text="15m")
    max_bytes_per_trigger: int | None = _option("maxBytesPerTrigger", None,
        "Streams: about so many bytes of the log in one micro-batch; at least one message.", **_WHOLE | {"unit": "bytes"}, units=_SIZES)
    batch_rows: int = _option("batchRows", 10_000, "Rows in one Arrow batch, at most.", high=BATCH_ROWS_MAX)
    batch_bytes: int = _option("batchBytes", 4 << 20, "Bytes of records in one Arrow batch, at most.", units=_SIZES, high=BATCH_BYTES_MAX,
        default_text="4m")
    starting_point: StartingPoint | None = None
    sizes: dict[str, Any] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """The path for messages."""
        return shown(self.path)

    @property
    def is_remote(self) -> bool:
        """Whether the store is read by ranges over a file system of pyarrow (spark/remote_store.py), not mapped."""
        return self.file_system != AUTO or scheme_of(self.path) != ""

    @property
    def ends_between_records(self) -> bool:
        """Whether its level ends between two records; slaves of RocketMQ may have confirmed a part of one."""
        return self.read_level is not ReadLevel.REPLICATED

    @property
    def has_topics(self) -> bool:
        """Whether topics are chosen."""
        return bool(self.subscribe or self.subscribe_pattern or self.assign)

    @property
    def is_queue_view(self) -> bool:
        """Whether topics, queues or queue offsets are chosen, so that rows are what consumers see, not all records of the log."""
        return bool(self.has_topics or self.starting_offsets or self.ending_offsets or self.starting_timestamps or self.ending_timestamps)


OPTIONS = settings_of(ReadOptions)
BY_KEY = {option.key.lower(): option for option in OPTIONS.values()}
_SPAN = OPTIONS["max_trigger_delay_ms"]
_NEED_TOPICS = "needs a choice of topics (subscribe, subscribePattern or assign)"
_FIXED = {fold(spelling): name for name in (*FIXED_NAMES, *LOG_PATHS) for spelling in (name, SETTINGS[name].key)}


def read_options(given: Mapping[str, str], use: Use = "batch") -> ReadOptions:
    """Parse the options of one read; UsageError says which one is wrong and what is allowed."""
    values: dict[str, Any] = {}
    sizes: dict[str, Any] = {}
    for name, text in given.items():
        option = BY_KEY.get(name.lower())
        if option is not None:
            try:
                values[option.name] = option.value_of(str(text))
            except ValueError as error:
                raise UsageError(f"option {option.key} = {text!r}: {error}") from None
            except UsageError as error:
                raise UsageError(f"option {option.key}: {error}") from None
        elif fold(name) in _FIXED:
            size = SETTINGS[_FIXED[fold(name)]]
            sizes[size.name] = size.read(text, "option")
        else:
            raise UsageError(_unknown(name))
    if "path" not in values:
        raise UsageError('give the store\'s root directory: .load("/path/of/store") or .option("path", ...); in SQL '
                         "CREATE TEMPORARY VIEW ... USING pyengine OPTIONS (path '...')")
    if values.get("file_system", AUTO) not in (AUTO, ARROW):  # then the path is one inside it
        values["path"] = next(str(text) for name, text in given.items() if name.lower() == "path")
    if isinstance(values.get("starting_offsets"), StartingPoint):
        values["starting_point"] = values.pop("starting_offsets")
    options = ReadOptions(**values, sizes=sizes)
    if not options.is_remote:
        sizes |= {name: value for name, value in from_environment(os.environ).items() if name in LOG_PATHS and name not in sizes}
    elif not sizes.keys().isdisjoint(LOG_PATHS):
        raise UsageError(f"the log of {options.where} cannot be read in other folders than its own: mount them to read it")
    _check_together(options)
    if use != "any" and options.view != MESSAGES:
        raise UsageError(f"option view = {options.view}: only spark.read takes it; streams and jobs read messages")
    if use == "batch":
        _check_batch({name.lower(): str(text) for name, text in given.items()}, options)
    elif use == "stream":
        _check_stream(options)
    # A time for all queues has precedence over times of single queues, and these over offsets.
    starts = options.starting_timestamps if options.starting_timestamp_ms is None else None
    ends = options.ending_timestamps if options.ending_timestamp_ms is None else None
    has_start, has_end = starts or options.starting_timestamp_ms is not None, ends or options.ending_timestamp_ms is not None
    if options.starting_timestamp_strategy == "error" and not starts and not options.has_topics:
        raise UsageError(f"option startingOffsetsByTimestampStrategy = error {_NEED_TOPICS}")
    return replace(options, starting_timestamps=starts, ending_timestamps=ends,
                   starting_offsets=None if has_start else options.starting_offsets,
                   ending_offsets=None if has_end else options.ending_offsets,
                   starting_point=None if has_start or use == "batch" else options.starting_point)


# Options of Spark's Kafka source that have no meaning here: there is no broker, no group to join, and no polling.
_OF_KAFKA = {
    "groupidprefix": "a read joins no consumer group: a stream's progress is in its checkpoint",
    "kafka.group.id": "a read joins no consumer group: a stream's progress is in its checkpoint",
    "kafka.bootstrap.servers": "there is no broker to connect to: give the store's directory as path",
    "kafkaconsumer.polltimeoutms": "files are read, nothing is polled",
    "fetchoffset.numretries": "offsets are looked up in files or shared memory, which needs no retries",
    "fetchoffset.retryintervalms": "offsets are looked up in files or shared memory, which needs no retries",
    "maxrecordsperpartition": "say minPartitions or maxPartitionBytes instead",
    "topic": "that names the topic of a sink: choose what is read by subscribe",
    **dict.fromkeys(("location", "owner"),  # what CREATE TABLE gives
                    "the source makes no tables in a catalog: CREATE TEMPORARY VIEW ... USING pyengine OPTIONS (path '...')"),
}


def _unknown(name: str) -> str:
    why = _OF_KAFKA.get(name.lower()) or (
        "there is no Kafka client to configure" if name.lower().startswith("kafka.") else "")
    if why:
        return f"option {name} has no meaning here: {why}; leave it out"
    names = [option.key for option in OPTIONS.values()]
    near = did_you_mean(name, [*names, *(SETTINGS[size].key for size in _FIXED.values())])
    return f"unknown option {name!r}{near or ': known are ' + ', '.join(names)}"


def _check_together(options: ReadOptions) -> None:
    """Refuse options that contradict each other; the planning of the read checks what depends on the store."""
    if sum(map(bool, (options.subscribe, options.subscribe_pattern, options.assign))) > 1:
        raise UsageError("give one of subscribe, subscribePattern and assign")
    for name in ("starting_offsets", "ending_offsets", "starting_timestamps", "ending_timestamps"):
        for topic, queue_id in flat(getattr(options, name)):
            if options.subscribe and topic not in options.subscribe:
                raise UsageError(f"option {OPTIONS[name].key} names topic {topic!r}, which subscribe does not")
            if options.assign and queue_id not in options.assign.get(topic, ()):
                raise UsageError(f"option {OPTIONS[name].key} names queue {topic}/{queue_id}, which assign does not")
    if options.group is not None and options.view not in ("queue", "groups"):
        raise UsageError(f"option group = {options.group!r}: give it with view=queue or view=groups")
    if options.columns and options.schema_mode != "default":
        raise UsageError("give one of columns and schemaMode")
    for name in ("timestamp_ms", "physical_offset"):
        start, end = getattr(options, f"starting_{name}"), getattr(options, f"ending_{name}")
        if start is not None and end is not None and start > end:
            raise UsageError(f"option {OPTIONS[f'starting_{name}'].key} is after {OPTIONS[f'ending_{name}'].key}")


def _check_batch(given: Mapping[str, str], options: ReadOptions) -> None:
    """Refuse what only a stream takes; `given`: the options' texts by their names in lower case."""
    for name in ("maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay"):
        if name.lower() in given:
            raise UsageError(f"option {name} is one of readStream, not of read")
    said = f"option startingOffsets = {given.get('startingoffsets')!r}: {STARTING_EXAMPLE}"
    if options.starting_point is not None and options.starting_point.word != "earliest":
        raise UsageError(f"{said}; other words are for readStream")
    for (topic, queue_id), offset in flat(options.starting_offsets).items():
        if offset == LATEST:
            raise UsageError(f"{said}; {topic}: {queue_id}: {offset} is not allowed")


def _check_stream(options: ReadOptions) -> None:
    for name in ("ending_offsets", "ending_timestamps", "ending_timestamp_ms", "ending_physical_offset"):
        if getattr(options, name) is not None:
            raise UsageError(f"option {OPTIONS[name].key}: a stream has no end; read what there is with the trigger availableNow")
    least, most = options.min_offsets_per_trigger, options.max_offsets_per_trigger
    if least is not None and most is not None and least > most:
        raise UsageError("option minOffsetsPerTrigger is more than maxOffsetsPerTrigger")
    if options.has_topics:
        if options.starting_physical_offset is not None:
            raise UsageError("option startingPhysicalOffset: a stream of topics starts at offsets of their queues, see startingOffsets")
    elif options.starting_timestamps:
        raise UsageError(f"option startingOffsetsByTimestamp {_NEED_TOPICS}")
    elif options.starting_offsets or options.starting_point is not None and options.starting_point.word == "last":
        raise UsageError(f"option startingOffsets {_NEED_TOPICS}")
