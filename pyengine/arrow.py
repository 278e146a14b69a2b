"""A store's log as a pyarrow dataset, for DuckDB, Polars, Dask, Daft and Ray.

    log = pyengine.arrow.dataset("my-store", ["orders"])
    duckdb.sql("SELECT tags, count(*) FROM log GROUP BY tags")               # each query reads the log again
    polars.scan_pyarrow_dataset(log).filter(polars.col("tags") == "paid").select("body").collect()
    log.splits(256 << 20)                                                    # parts that other processes read

A query's columns and filters go down to the C scanner. No reader is open between two reads, and a dataset can be pickled.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Self, Unpack

from pyengine import arguments
from pyengine.arguments import INT64_MAX
from pyengine.errors import UsageError, did_you_mean, require_extra
from pyengine.ipc.live_reader import LiveStoreReader, open_store
from pyengine.native.scan import QueueBounds
from pyengine.results import Level
from pyengine.storage.consume_queue import place_of
from pyengine.storage.store_reader import Narrowing, ScanChoice

__all__ = ["LogDataset", "dataset"]

try:
    import pyarrow as pa
    from pyarrow import dataset as ds
    from pyarrow import fs

    from pyengine.storage.arrow import schema, stream
except ImportError:
    require_extra("pyarrow", name="arrow")
    raise

SPLIT_BYTES = 256 << 20
_TIME_MS_END = 1 << 48  # beyond the year 10000
_OFFSET_END = 1 << 62
_QUEUES_MAX = 100       # that are asked for the start of a record
_TAGS = re.compile(r'\(tags == "([^"]*)"\)|is_in\(tags, \{value_set=(?:large_)?string:\[\s*((?:"[^"]*"|null|,|\s)*)\]')
_ELSEWHERE = "the dataset of a log: call its own methods, such as scanner() and to_table()"


def dataset(
    path: str | os.PathLike[str],
    topics: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    level: Level | None = None,
    **choice: Unpack[ScanChoice],
) -> LogDataset:
    """Return the log of the store at `path` as a pyarrow dataset; each read has what the log has then. Errors as of StoreReader.scan."""
    columns = None if columns is None else tuple(arguments.several(columns, "columns", "a sequence of str"))
    topics = None if topics is None else tuple(arguments.several(topics, "topics", "a sequence of str"))
    made = LogDataset(_Read(os.path.abspath(path), topics, schema(columns), level, choice))
    with open_store(path) as reader:  # for its errors
        reader.scan(topics, columns, level, **choice)
    return made


class _Read(NamedTuple):
    """What a dataset reads: the arguments of a scan, a part [begin, end) of the log between two records, and a filter."""

    path: str
    topics: tuple[str, ...] | None
    schema: pa.Schema
    level: Level | None
    choice: ScanChoice
    begin: int = 0
    end: int = INT64_MAX
    filter: ds.Expression | None = None


class LogDataset(ds.UnionDataset):  # type: ignore[misc]  # pyarrow has no types
    """A log as a pyarrow dataset, or a part of it. Can be pickled."""

    def __init__(self, read: _Read) -> None:
        self._read = read
        super().__init__(read.schema, [_absent(read.schema)])  # code that reads it otherwise than by these methods gets an error

    @property
    def log_bytes(self) -> int:
        """The bytes of the log of a split, unwanted records included."""
        with open_store(self._read.path) as reader:
            limit = reader.max_physical_offset(self._read.level)
            return max(0, min(limit, self._read.end) - max(self._read.begin, reader.min_physical_offset))

    def scanner(
        self,
        columns: Sequence[str] | dict[str, ds.Expression] | None = None,
        filter: ds.Expression | None = None,
        **options: Any,
    ) -> ds.Scanner:
        """Return a scanner with the `options` of pyarrow."""
        wanted = _both(self._read.filter, filter)
        names = self._needed(columns, wanted)
        return ds.Scanner.from_batches(stream(names, self._batches(names, wanted)), columns=columns, filter=wanted, **options)

    def splits(self, split_bytes: int = SPLIT_BYTES) -> list[LogDataset]:
        """Return datasets of parts of the log, each of at most about `split_bytes`, or a segment.

        Together they have each row once. Each may be read in another process of this host.
        """
        if arguments.integer(split_bytes, "split_bytes") < 1:
            raise UsageError(f"split_bytes is {split_bytes}; give 1 or more")
        read = self._read
        with open_store(read.path) as reader:
            end = min(read.end, reader.max_physical_offset(read.level))
            begins = [max(read.begin, reader.min_physical_offset)]
            places = [place for place in _places(reader, read, split_bytes, end) if begins[0] < place < end]
        for place, following in zip(places, [*places[1:], end]):
            if following - begins[-1] > split_bytes:
                begins.append(place)
        return [LogDataset(read._replace(begin=begin, end=stop)) for begin, stop in zip(begins, [*begins[1:], end]) if begin < stop]

    def filter(self, expression: ds.Expression) -> LogDataset:
        """Return a dataset of the rows that meet the expression too."""
        return LogDataset(self._read._replace(filter=_both(self._read.filter, expression)))

    def count_rows(self, filter: ds.Expression | None = None, **options: Any) -> int:
        """Return the number of rows; reads only the filter's columns."""
        count: int = self.scanner([], filter, **options).count_rows()
        return count

    def sort_by(self, sorting: Any, **options: Any) -> ds.InMemoryDataset:
        """Return the rows in this order, in memory."""
        return ds.InMemoryDataset(self.to_table()).sort_by(sorting, **options)

    def join(self, right_dataset: ds.Dataset, *arguments: Any, **options: Any) -> ds.InMemoryDataset:
        """Join the rows, in memory, with another dataset."""
        right = ds.InMemoryDataset(right_dataset.to_table()) if isinstance(right_dataset, LogDataset) else right_dataset
        return ds.InMemoryDataset(self.to_table()).join(right, *arguments, **options)

    def __reduce__(self) -> tuple[type[Self], tuple[_Read]]:
        return type(self), (self._read,)

    def __repr__(self) -> str:
        read = self._read
        part = "" if (read.begin, read.end) == (0, INT64_MAX) else f", bytes {read.begin} to {read.end}"
        return f"<LogDataset of {read.path}, {'all records' if read.topics is None else ', '.join(read.topics)}{part}>"

    def _needed(self, columns: Sequence[str] | dict[str, ds.Expression] | None, wanted: ds.Expression | None) -> list[str]:
        """Return the columns to read, in the order of the schema: a query that wants none needs one, for its rows."""
        names = self._read.schema.names
        if columns is None:
            return [*names]
        listed, made = ((), columns.values()) if isinstance(columns, dict) else (columns, ())
        for name in listed:
            if name not in names:
                raise UsageError(f"the dataset has no column {name!r}{did_you_mean(name, names)}")
        text = " ".join(map(str, [*made, wanted]))
        if "FieldPath(" in text:  # a column's number in the schema
            return [*names]
        named = {*listed, *_named(text, names)}
        return [name for name in names if name in named] or sorted(names, key=lambda name: (name == "body", name != "queueId"))[:1]

    def _batches(self, names: Sequence[str], wanted: ds.Expression | None) -> Iterator[pa.RecordBatch]:
        read = self._read
        with open_store(read.path) as reader:
            narrowing = Narrowing(read.begin, read.end) if wanted is None else _narrowed(read, wanted)
            yield from reader._scan_narrowed(read.topics, names, read.level, read.choice, narrowing)


def _absent(of: pa.Schema, known: ds.Expression | None = None) -> ds.FileSystemDataset:
    """Return a dataset of one file that does not exist, of whose rows `known` holds."""
    kind = ds.ParquetFileFormat()
    return ds.FileSystemDataset([kind.make_fragment(_ELSEWHERE, filesystem=fs.LocalFileSystem(), partition_expression=known)], of, kind)


def _named(text: str, names: Iterable[str]) -> set[str]:
    """Return those columns that the text of an expression names."""
    return {name for name in names if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", text)}


def _both(one: ds.Expression | None, other: ds.Expression | None) -> ds.Expression | None:
    return other if one is None else one if other is None else one & other


def _places(reader: LiveStoreReader, read: _Read, step_bytes: int, end: int) -> Iterator[int]:
    """Yield starts of records, ascending: those of the segments, and proved ones about each `step_bytes` inside of them."""
    topics = reader.topics()
    queues = [queue for topic in (topics if read.topics is None else read.topics) for queue_id in topics.get(topic, ())
              if (queue := reader._queue(topic, queue_id)) is not None]
    queues = sorted(queues, key=lambda queue: -queue.max_offset(end))[:_QUEUES_MAX]
    for start in reader.commit_log.starts():
        yield start
        stop = min(end, start + reader.commit_log.size_bytes)
        at = start + step_bytes
        while at < stop:
            # The message of a queue's entry max_offset(at) may begin before `at`; the next one does not.
            found = (place_of(reader, (queue.topic, queue.queue_id), queue.max_offset(at) + 1, end) for queue in queues)
            following = min((place[0] for place in found if place is not None and place[0] >= at), default=stop)
            if following < stop:
                yield following
            at = following + step_bytes


# -- what a filter tells the scanner -------------------------------------------------
#
# pyarrow simplifies a filter by what is known of a part of a dataset, and leaves out the part if no row of it can meet the filter.
# So it is asked about parts that do not exist: all rows below a time, all rows of a queue. What it cannot tell counts as wanted, and
# the whole filter is applied to each row that is read.


def _narrowed(read: _Read, wanted: ds.Expression) -> Narrowing:
    """Return which rows can meet the filter, as far as the scanner can choose them."""
    text = str(wanted)
    named = _named(text, read.schema.names)
    can_be = partial(_can_be, wanted, read.schema)
    since_ms, until_ms = _bounds(can_be, "storeTimestamp", _TIME_MS_END, 1000) if "storeTimestamp" in named else (None, None)
    offsets = _bounds(can_be, "queueOffset", _OFFSET_END, 1) if "queueOffset" in named else (None, None)
    chooses = bool(named & {"topic", "queueId", "queueOffset"})

    def choose(topic: str, queue_id: int) -> QueueBounds | None:
        known = [ds.field(name) == pa.scalar(value, read.schema.field(name).type)
                 for name, value in (("topic", topic), ("queueId", queue_id)) if name in named]
        is_wanted = all(map(can_be, known)) and (len(known) < 2 or can_be(known[0] & known[1]))
        return (offsets[0] or 0, INT64_MAX if offsets[1] is None else offsets[1]) if is_wanted else None

    tags = _tags(can_be, text) if "tags" in named else None
    return Narrowing(read.begin, read.end, choose if chooses else None, tags, since_ms, until_ms)


def _can_be(wanted: ds.Expression, of: pa.Schema, known: ds.Expression) -> bool:
    """Return whether a row for which `known` holds may meet the filter; True also if pyarrow cannot compare the two."""
    try:
        return any(True for _ in _absent(of, known).get_fragments(wanted))
    except pa.ArrowException:
        return True


def _bounds(can_be: Callable[[ds.Expression], bool], name: str, end: int, unit: int) -> tuple[int | None, int | None]:
    """Return [first, end) of the values in a column, divided by `unit`, of rows that may meet the filter; None for no bound."""
    kind = pa.timestamp("us", "UTC") if unit > 1 else pa.int64()

    def below(number: int) -> bool:
        return can_be(ds.field(name) < pa.scalar(number * unit, kind))

    def from_(number: int) -> bool:
        return not can_be(ds.field(name) >= pa.scalar(number * unit, kind))

    first = bisect_left(range(end), True, key=below) - 1
    stop = bisect_left(range(end), True, key=from_)
    return (None if first <= 0 else first), (None if stop == end else stop)


def _tags(can_be: Callable[[ds.Expression], bool], text: str) -> frozenset[str] | None:
    """Return tags of which rows must have one to meet the filter; None if it does not name them one by one.

    The text only suggests them, since pyarrow shortens long values in it and leaves quotes as they are."""
    named = sorted({tag for one, several in _TAGS.findall(text) for tag in [one, *re.findall(r'"([^"]*)"', several)] if tag})
    tags = ds.field("tags")
    if not named or any(map(can_be, [tags.is_null(), tags < named[0], *((tags > low) & (tags < high) for low, high in pairwise(named)),
                                     tags > named[-1]])):
        return None
    return frozenset(named)
