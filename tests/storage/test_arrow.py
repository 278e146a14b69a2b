"""Arrow batches hold what formats reads from the same bytes: all columns, any cut, any filter, no byte above the limit."""

from __future__ import annotations

import random
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fix_golden import RECIPES
from logs import Log, LogBuilder
from pyengine.errors import CorruptionError, UsageError
from pyengine.formats.consume_queue import ENTRY, FILLER_BYTES
from pyengine.formats.record import Message, decode_record
from pyengine.native.scan import TALLY_COLUMNS, ColumnScanner, TallyScanner, sync
from record_bytes import encode_record, iter_records

pa = pytest.importorskip("pyarrow")
from pyengine.native.scan import COLUMNS, RowFilter, choose_topics  # noqa: E402
from pyengine.storage.arrow import LogScanner, allocate, schema, to_array  # noqa: E402
from pyengine.storage.commit_log import (  # noqa: E402
    LogDamage,
    LogRun,
    SegmentBytes,
    next_record,
    refuse_damage,
    runs_of,
)

SEGMENT = 16384
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def row_of(message: Message, columns=COLUMNS) -> dict[str, object]:
    """Return what the columns hold for a message, by formats alone."""
    values = {
        "topic": message.topic,
        "queueId": message.queue_id,
        "queueOffset": message.queue_offset,
        "physicalOffset": message.physical_offset,
        "storeTimestamp": EPOCH + timedelta(milliseconds=message.store_timestamp_ms),
        "bornTimestamp": EPOCH + timedelta(milliseconds=message.born_timestamp_ms),
        "tags": message.tags,
        "keys": message.keys,
        "uniqKey": message.uniq_key,
        "properties": message.raw_properties,
        "body": message.body,
        "bodySize": len(message.body),
        "size": message.size_bytes,
        "bodyCRC": message.body_crc,
        "flag": message.flag,
        "sysFlag": message.sys_flag,
        "reconsumeTimes": message.reconsume_times,
        "preparedTransactionOffset": message.prepared_transaction_offset,
        "bornHost": message.born_host,
        "storeHost": message.store_host,
        "msgId": message.msg_id,
    }
    return {
        name: values[name] if name in values else message.properties.get(name.removeprefix("property."))
        for name in columns
    }


def rows(batches) -> list[dict[str, object]]:
    found = []
    for batch in batches:
        batch.validate(full=True)
        found += batch.to_pylist()
    return found


def scan_segments(paths, limit: int, start: int = 0, row_filter: RowFilter | None = None):
    """The batches of whole segments in their order, from the record at `start` on and below `limit`."""
    scanner = LogScanner(row_filter=row_filter)
    for path in paths:
        base, view = int(path.name), path.read_bytes()
        first, end = max(start, base), min(limit, base + len(view))
        if first < end:
            yield from scanner.scan(view, base, first, end)


def in_arrow(scanner: ColumnScanner, batches):
    return (pa.RecordBatch.from_arrays([to_array(column, raw.rows) for column in raw.columns], schema=schema(scanner.columns))
            for raw in batches)


def gathered(scanner: ColumnScanner, data: bytes, entries: bytes, limit: int | None = None):
    """The rows that entries name, up to the first that names no record; `scanner.reason` says why it is none."""
    return rows(in_arrow(scanner, scanner.gather(data, 0, entries, limit)))


def scanned(data: bytes, end: int, columns=COLUMNS, *, passed: list[LogDamage] | None = None, **settings):
    """The rows of a whole segment; damage is put into `passed`, or refused without it."""
    scanner, found = ColumnScanner(columns, allocate=allocate, **settings), []
    for piece in runs_of(SegmentBytes(data, 0), 0, end, end, refuse_damage if passed is None else next_record):
        if isinstance(piece, LogRun):
            found += rows(in_arrow(scanner, piece.scan(scanner)))
        else:
            passed.append(piece)
    return found


def one_segment(rng: random.Random, count: int = 60) -> tuple[LogBuilder, bytes]:
    builder = LogBuilder(1 << 20)
    builder.append_varied(rng, count)
    return builder, bytes(builder.segments[0])


def test_all_columns_of_all_messages(tmp_path, rng):
    builder = LogBuilder(SEGMENT)
    builder.append_varied(rng, 300)
    root = builder.write(tmp_path / "store")
    paths = sorted((root / "commitlog").iterdir())
    assert len(paths) > 2
    batches = list(scan_segments(paths, limit=builder.end))
    assert rows(batches) == [row_of(message) for message in builder.messages]
    assert all(batch.schema == schema() for batch in batches)


def test_hosts_that_repeat_and_change_within_a_batch(rng):
    hosts = ["1.2.3.4:10911", "1.2.3.4:10912", "255.0.0.1:2147483647", "[2001:db8::1]:1", "[::]:0", "0.0.0.0:0"]
    data, messages = bytearray(), []
    for _ in range(200):
        born, store = ((messages[-1].born_host, messages[-1].store_host) if messages and rng.random() < 0.5
                       else (rng.choice(hosts), rng.choice(hosts)))
        record = encode_record(topic="T", body=b"b", physical_offset=len(data), born_host=born, store_host=store)
        messages.append(decode_record(record))
        data += record
    found = scanned(bytes(data), len(data), ["bornHost", "storeHost", "msgId"], batch_rows=64)
    assert [tuple(row.values()) for row in found] == [(one.born_host, one.store_host, one.msg_id) for one in messages]


def test_the_schema_is_what_spark_expects():
    """Spark compares it with its own, made from the same types: nothing large, viewed or not nullable."""
    assert schema() == pa.schema(
        [
            ("topic", pa.string()), ("queueId", pa.int32()), ("queueOffset", pa.int64()),
            ("physicalOffset", pa.int64()), ("storeTimestamp", pa.timestamp("us", tz="UTC")),
            ("bornTimestamp", pa.timestamp("us", tz="UTC")), ("tags", pa.string()), ("keys", pa.string()),
            ("uniqKey", pa.string()), ("properties", pa.string()), ("body", pa.binary()), ("bodySize", pa.int32()),
            ("size", pa.int32()), ("bodyCRC", pa.int32()), ("flag", pa.int32()), ("sysFlag", pa.int32()),
            ("reconsumeTimes", pa.int32()), ("preparedTransactionOffset", pa.int64()), ("bornHost", pa.string()),
            ("storeHost", pa.string()), ("msgId", pa.string()),
        ]
    )
    assert all(field.nullable for field in schema())
    assert schema(["property.shop", "body"]) == pa.schema([("property.shop", pa.string()), ("body", pa.binary())])
    assert COLUMNS == tuple(schema().names)


@pytest.mark.parametrize("name", RECIPES)
def test_golden_logs_read_as_formats_reads_them(name, golden):
    """Up to the first thing that is not a record."""
    store = golden(name)
    size = next(iter(store.sizes.values()))
    if name == "abnormal-shortfile":
        size = store.sizes["mapped_file_size_commit_log_bytes"]
        for path in (store.root / "commitlog").iterdir():
            if path.stat().st_size != size:
                path.unlink()
    log = Log(store.root, size)
    for base, view in log.views.items():
        expected = [item for item in iter_records(view, base, base, base + size) if isinstance(item, Message)]
        end = expected[-1].physical_offset + expected[-1].size_bytes if expected else base
        assert rows(LogScanner().scan(view, base, base, end)) == [row_of(message) for message in expected]


@pytest.mark.parametrize("batch_rows", [1, 2, 7, 60, 61, 10_000])
@pytest.mark.parametrize("batch_bytes", [1, 500, 5000, 4 << 20])
def test_any_batch_size_gives_the_same_rows(batch_rows, batch_bytes, rng):
    builder, data = one_segment(rng)
    scanner = ColumnScanner(COLUMNS, batch_rows=batch_rows, batch_bytes=batch_bytes, allocate=allocate)
    batches = list(in_arrow(scanner, scanner.scan(data, 0, 0, builder.end)))
    assert rows(batches) == [row_of(message) for message in builder.messages]
    for batch in batches:
        assert batch.num_rows <= batch_rows
        assert batch.num_rows == 1 or sum(batch["size"].to_pylist()) <= batch_bytes


def test_any_choice_of_columns(rng):
    builder, data = one_segment(rng)
    names = [*COLUMNS, "property.TAGS", "property.shop"]
    for _ in range(30):
        columns = rng.sample(names, rng.randrange(1, 6))
        found = rows(LogScanner(columns).scan(data, 0, 0, builder.end))
        assert found == [row_of(message, columns) for message in builder.messages]


def test_every_split_gives_every_row_once(rng):
    builder, data = one_segment(rng, 12)
    whole = [message.physical_offset for message in builder.messages]
    for split in range(builder.end + 1):
        found = []
        for start, end in ((0, split), (split, builder.end)):
            scanner = LogScanner(["physicalOffset"])
            first = sync(data, 0, start, end, limit=builder.end) if start else 0
            if first is not None:
                found += rows(scanner.scan(data, 0, first, end, builder.end))
        assert [row["physicalOffset"] for row in found] == whole, split


def test_no_byte_at_or_above_the_limit_is_looked_at(rng):
    """The bytes there are damaged; the rows before them are read all the same."""
    builder, data = one_segment(rng, 12)
    for message in builder.messages:
        limit = message.physical_offset
        spoiled = data[:limit] + rng.randbytes(len(data) - limit)
        found = rows(LogScanner().scan(spoiled, 0, 0, limit))
        assert found == [row_of(other) for other in builder.messages if other.physical_offset < limit]


PROPERTIES = st.text(alphabet=st.sampled_from("\x00\x01\x02 aTAGSé主😀"), max_size=40)


@given(
    st.lists(
        st.tuples(
            st.text(max_size=20),
            st.one_of(PROPERTIES, st.sampled_from(["TAGS\x01a\x02TAGS\x01b", "KEYS\x01\x02TAGS\x01x", "\x02\x02a\x01b\x02"])),
            st.binary(max_size=50),
        ),
        max_size=10,
    )
)
def test_any_text_reads_as_formats_reads_it(messages):
    data, expected = b"", []
    for topic, properties, body in messages:
        record = encode_record(topic=topic, properties=properties, body=body, physical_offset=len(data))
        expected.append(next(iter_records(record, len(data), len(data), len(data) + len(record))))
        data += record
    columns = [*COLUMNS, "property.a", "property.aTAGS"]
    assert rows(LogScanner(columns).scan(data, 0, 0, len(data))) == [row_of(message, columns) for message in expected]


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_bytes_that_are_no_utf8_come_with_replacement_characters(topic, value):
    """Never invalid UTF-8 in a string column; the replacement is Python's."""
    properties = b"TAGS\x01" + value.replace(b"\x02", b"")
    record = bytearray(encode_record(topic="t" * len(topic), properties="p" * len(properties), body=b"x"))
    at = 88 + 1 + 1
    record[at : at + len(topic)] = topic
    record[len(record) - len(properties) :] = properties
    (row,) = rows(LogScanner(["topic", "properties", "tags", "body"]).scan(record, 0, 0, len(record)))
    assert row["topic"] == topic.decode("utf-8", "replace")
    assert row["properties"] == properties.decode("utf-8", "replace")
    assert row["tags"] == (properties[5:].decode("utf-8", "replace") or None)
    assert row["body"] == b"x"


def test_times_that_no_calendar_holds_are_the_nearest():
    """Python's and pandas' times, in every time zone: one message of a client with a wrong clock would end each read of its topic."""
    data = b"".join(
        encode_record(topic="T", body=b"", physical_offset=91 * number + number, store_timestamp_ms=time, born_timestamp_ms=-5)
        for number, time in enumerate((2**63 - 1, -(2**63), 1))
    )
    (batch,) = LogScanner(["storeTimestamp", "bornTimestamp"]).scan(data, 0, 0, len(data))
    assert batch["storeTimestamp"].cast(pa.int64()).to_pylist() == [9_223_200_000_000_000, -9_223_200_000_000_000, 1000]
    assert batch["storeTimestamp"].cast(pa.timestamp("ns", "UTC")).to_pandas().dt.tz_convert("Pacific/Kiritimati").dt.year[0] == 2262
    assert batch["bornTimestamp"].cast(pa.int64()).to_pylist() == [-5000] * 3


def test_filters_choose_rows(rng):
    builder, data = one_segment(rng, 200)
    times = [message.store_timestamp_ms for message in builder.messages]
    middle = times[len(times) // 3], times[2 * len(times) // 3]

    def chosen(wanted) -> list[dict[str, object]]:
        return [row_of(message) for message in builder.messages if wanted(message)]

    def choose(topic: str, queue_id: int) -> tuple[int, int] | None:
        return {("A", 0): (2, 9), ("A", 1): (5, 1 << 40)}.get((topic, queue_id))

    cases = [
        (RowFilter(choose_topics(["A"])), lambda message: message.topic == "A"),
        (RowFilter(choose_topics(["A", "主题"], [1, 2])),
         lambda message: message.topic in ("A", "主题") and message.queue_id in (1, 2)),
        (RowFilter(choose_topics([])), lambda message: False),
        (RowFilter(choose), lambda message: (message.topic, message.queue_id) == ("A", 0) and 2 <= message.queue_offset < 9
         or (message.topic, message.queue_id) == ("A", 1) and message.queue_offset >= 5),
        (RowFilter(tags=("tagA",)), lambda message: message.tags == "tagA"),
        (RowFilter(tags=("标签", "tagB")), lambda message: message.tags in ("标签", "tagB")),
        (RowFilter(tags=()), lambda message: False),
        (RowFilter(start_ms=middle[0], end_ms=middle[1]), lambda message: middle[0] <= message.store_timestamp_ms < middle[1]),
        (RowFilter(queued_only=True), lambda message: message.transaction_type in (0, 8)),
        (RowFilter(choose_topics(["A"]), tags=("tagA",), start_ms=middle[0], queued_only=True),
         lambda message: message.topic == "A" and message.tags == "tagA" and message.store_timestamp_ms >= middle[0]
         and message.transaction_type in (0, 8)),
    ]
    for row_filter, wanted in cases:
        assert scanned(data, builder.end, row_filter=row_filter, batch_rows=5) == chosen(wanted), row_filter
        assert rows(LogScanner(row_filter=row_filter).scan(data, 0, 0, builder.end)) == chosen(wanted), row_filter


def test_the_filter_is_asked_once_for_each_queue():
    builder = LogBuilder(1 << 20)
    for number in range(900):
        builder.append(f"topic-{number % 150}-{'x' * 60}", b"", queue_id=number % 3)
    asked = []

    def choose(topic: str, queue_id: int) -> tuple[int, int] | None:
        asked.append((topic, queue_id))
        return (0, 3) if queue_id == 1 else None

    scanner = LogScanner(["topic", "queueId"], row_filter=RowFilter(choose))
    found = rows(scanner.scan(builder.segments[0], 0, 0, builder.end))
    assert len(asked) == len(set(asked)) == len(builder.queue_offsets)
    expected = [message for message in builder.messages if message.queue_id == 1 and message.queue_offset < 3]
    assert found == [{"topic": message.topic, "queueId": 1} for message in expected]
    assert rows(scanner.scan(builder.segments[0], 0, 0, builder.end)) == found
    assert len(asked) == len(builder.queue_offsets)


DAMAGE = [
    ("bad_crc", lambda data, at, size: data.__setitem__(at + 88, data[at + 88] ^ 1)),
    ("foreign", lambda data, at, size: data.__setitem__(at + 4, 0)),
    ("torn", lambda data, at, size: data.__setitem__(at + 84, 0x70)),
    ("overrun", lambda data, at, size: data.__setitem__(at, 0x70)),
    ("offset_mismatch", lambda data, at, size: data.__setitem__(at + 35, data[at + 35] ^ 1)),
    ("zeroes", lambda data, at, size: data.__setitem__(slice(at, at + size), bytes(size))),
]


@pytest.mark.parametrize(("reason", "spoil"), DAMAGE)
@pytest.mark.parametrize("last", [False, True])
def test_damage_fails_or_is_passed_and_reported(reason, spoil, last):
    builder = LogBuilder(1 << 20)
    for number in range(6):
        builder.append(body=b"body %d" % number)
    data = builder.segments[0]
    broken = builder.messages[5 if last else 2]
    spoil(data, broken.physical_offset, broken.size_bytes)
    with pytest.raises(CorruptionError, match=f"damaged at {broken.physical_offset}: {reason.replace('_', ' ')}"):
        scanned(data, builder.end, verify_crc=True)
    if reason != "bad_crc":
        with pytest.raises(CorruptionError, match=f"damaged at {broken.physical_offset}: {reason.replace('_', ' ')}"):
            rows(LogScanner().scan(data, 0, 0, builder.end))
    passed = []
    expected = [row_of(message) for message in builder.messages if message is not broken]
    assert scanned(data, builder.end, passed=passed, verify_crc=True) == expected
    assert passed == [LogDamage(broken.physical_offset, broken.physical_offset + broken.size_bytes, reason)]


def test_without_verify_crc_a_changed_body_is_read():
    builder = LogBuilder(1 << 20)
    builder.append(body=b"body")
    builder.segments[0][88] ^= 1
    assert rows(LogScanner(["body"]).scan(builder.segments[0], 0, 0, builder.end)) == [{"body": b"cody"}]


def entries_of(messages) -> bytes:
    return b"".join(ENTRY.pack(message.physical_offset, message.size_bytes, 0) for message in messages)


def test_gather_reads_what_entries_name(rng):
    builder, data = one_segment(rng, 100)
    wanted = rng.sample(builder.messages, 40)
    scanner = ColumnScanner(COLUMNS, batch_rows=7, allocate=allocate)
    entries = FILLER_BYTES * 3 + entries_of(wanted[:20]) + FILLER_BYTES + entries_of(wanted[20:])
    assert gathered(scanner, data, entries) == [row_of(message) for message in wanted]
    assert gathered(scanner, data, b"") == []
    tagged = ColumnScanner(COLUMNS, row_filter=RowFilter(choose_topics(["A"]), tags=("tagA",)), batch_rows=3, allocate=allocate)
    assert gathered(tagged, data, entries) == [
        row_of(message) for message in wanted if message.topic == "A" and message.tags == "tagA"
    ]


def test_gather_stops_at_an_entry_that_names_no_record(rng):
    builder, data = one_segment(rng, 20)
    first, second, third, last = (builder.messages[number] for number in (3, 7, 11, 19))
    limit = last.physical_offset
    wrong = [
        (ENTRY.pack(second.physical_offset, second.size_bytes + 1, 0), "torn"),
        (ENTRY.pack(second.physical_offset + 1, second.size_bytes, 0), "foreign"),
        (ENTRY.pack(last.physical_offset, last.size_bytes, 0), "overrun"),  # at the limit
        (ENTRY.pack(third.physical_offset, 0x7FFFFFFE, 0), "overrun"),
        (ENTRY.pack(1 << 60, 100, 0), "overrun"),
        (ENTRY.pack(-5, 100, 0), "overrun"),
        (ENTRY.pack(0, 0, 0), "torn"),
    ]
    for entry, reason in wrong:
        entries = entries_of([first]) + entry + entries_of([third])
        scanner = ColumnScanner(COLUMNS, allocate=allocate)
        assert gathered(scanner, data, entries, limit) == [row_of(first)]
        assert (scanner.reason, scanner.gathered) == (reason, 1)
        assert gathered(scanner, data, entries_of([third]), limit) == [row_of(third)]
    for entries, top in ((bytes(19), limit), (entries_of([first]), len(data) + 1)):
        with pytest.raises(UsageError):
            gathered(ColumnScanner(COLUMNS, allocate=allocate), data, entries, top)


def test_wrong_arguments_are_refused():
    for columns in (["topik"], ["property."], ["property.a\x01b"], ["topic", "topic"]):
        with pytest.raises(UsageError):
            LogScanner(columns)
    for settings in ({"batch_rows": 0}, {"batch_bytes": 0}, {"batch_rows": 1 << 21}, {"batch_bytes": 1 << 30}):
        with pytest.raises(UsageError):
            ColumnScanner(COLUMNS, allocate=allocate, **settings)
    for start, end, limit in ((-1, 5, 5), (6, 5, 5), (0, 5, 4), (0, 5, 101)):
        with pytest.raises(UsageError):
            rows(LogScanner().scan(bytes(100), 0, start, end, limit))


def test_a_scan_from_a_record_on(tmp_path, rng):
    builder = LogBuilder(SEGMENT)
    builder.append_varied(rng, 200)
    paths = sorted((builder.write(tmp_path) / "commitlog").iterdir())
    start, limit = builder.messages[120].physical_offset, builder.messages[190].physical_offset
    found = rows(scan_segments(paths, start=start, limit=limit, row_filter=RowFilter(choose_topics(["A"]))))
    assert found == [row_of(message) for message in builder.messages[120:190] if message.topic == "A"]


def test_batches_outlive_their_segment(tmp_path, rng):
    """Nothing of a batch points into the mapping."""
    builder = LogBuilder(SEGMENT)
    builder.append_varied(rng, 100)
    root: Path = builder.write(tmp_path)
    batches = list(scan_segments(sorted((root / "commitlog").iterdir()), limit=builder.end))
    for path in (root / "commitlog").iterdir():
        path.write_bytes(bytes(SEGMENT))
    assert rows(batches) == [row_of(message) for message in builder.messages]


def groups_of(scanner: TallyScanner, raw_batches) -> list[dict[str, object]]:
    """Return what a tally gave, in the order of its keys; a group that came in parts comes more than once."""
    tables = [pa.table([to_array(column, raw.rows) for column in raw.columns], names=[column.name for column in raw.columns])
              for raw in raw_batches]
    return sorted((row for table in tables for row in table.to_pylist()), key=lambda row: (row["topic"], row["queueId"], row["step"]))


def counted(messages, key) -> list[dict[str, object]]:
    """The groups by formats alone; `key` gives (queueId, microseconds) of a message's group."""
    found = defaultdict(list)
    for message in messages:
        found[message.topic, *key(message)].append(message)
    return [{
        "topic": topic, "messages": len(mine), "bodyBytes": sum(len(one.body) for one in mine),
        "bytes": sum(one.size_bytes for one in mine), "largest": max(one.size_bytes for one in mine),
        "delayed": sum("DELAY" in one.properties for one in mine), "transactional": sum(one.sys_flag & 0xC != 0 for one in mine),
        "compressed": sum(one.sys_flag & 1 for one in mine), "retried": sum(one.reconsume_times > 0 for one in mine),
        "firstOffset": min(one.queue_offset for one in mine), "lastOffset": max(one.queue_offset for one in mine),
        "firstTimestamp": EPOCH + timedelta(milliseconds=min(one.store_timestamp_ms for one in mine)),
        "lastTimestamp": EPOCH + timedelta(milliseconds=max(one.store_timestamp_ms for one in mine)),
        "queueId": queue_id, "step": EPOCH + timedelta(microseconds=step),
    } for (topic, queue_id, step), mine in sorted(found.items())]


STEP_US = 7_000
KEYS = {
    "queue": lambda message: (message.queue_id, message.queue_id),
    "topic": lambda message: (0, 0),
    STEP_US: lambda message: ((message.store_timestamp_ms * 1000 // STEP_US * STEP_US + 2**31) % 2**32 - 2**31,
                              message.store_timestamp_ms * 1000 // STEP_US * STEP_US),
}


def tally(by, **given) -> TallyScanner:
    return TallyScanner(["topic", *TALLY_COLUMNS], by, allocate=allocate, **given)


def varied_records(rng: random.Random, count: int) -> tuple[bytes, list[Message]]:
    """Records with all that is counted apart, before and after 1970."""
    data, messages = bytearray(), []
    for number in range(count):
        record = encode_record(
            topic=rng.choice(["A", "B", "\N{SNOWMAN}", "x" * 127]), body=rng.randbytes(rng.choice([0, 1, 300])),
            queue_id=rng.choice([-1, 0, 1, 2**31 - 1]), queue_offset=rng.choice([number, -number, 2**62]), physical_offset=len(data),
            properties=rng.choice(["", "DELAY\x013\x02", "TAGS\x01a\x02DELAY\x01x", "DELAY\x01", "DELAYS\x011\x02", "\x02DELAY\x011"]),
            sys_flag=rng.randrange(16), reconsume_times=rng.choice([-1, 0, 0, 3]),
            store_timestamp_ms=rng.choice([0, 1_700_000_000_000, -1_000]) + rng.randrange(30))
        messages.append(decode_record(record))
        data += record
    return bytes(data), messages


@pytest.mark.parametrize("by", KEYS)
def test_a_tally_counts_what_the_rows_are(rng, by):
    data, messages = varied_records(rng, 3000)
    scanner = tally(by, batch_rows=rng.choice([1, 100, 10_000]))
    assert groups_of(scanner, scanner.scan(data, 0, 0, len(data))) == counted(messages, KEYS[by])
    some = rng.sample(messages, 500)
    assert groups_of(scanner, scanner.gather(data, 0, entries_of(some))) == counted(some, KEYS[by])
    chosen = tally(by, row_filter=RowFilter(choose_topics(["A"])), matches=lambda text: "DELAY" in text)
    assert groups_of(chosen, chosen.scan(data, 0, 0, len(data))) == \
        counted([one for one in messages if one.topic == "A" and "DELAY" in one.raw_properties], KEYS[by])


def test_a_tally_of_more_groups_than_it_holds_gives_them_in_parts(rng):
    data, messages = bytearray(), []
    for number in range(20_000):
        record = encode_record(topic="T", body=b"", queue_id=number % 9_500, queue_offset=number, physical_offset=len(data))
        messages.append(decode_record(record))
        data += record
    scanner = tally("queue")
    batches = list(scanner.scan(bytes(data), 0, 0, len(data)))
    assert len(batches) > 1
    found = defaultdict(int)
    for row in groups_of(scanner, batches):
        found[row["queueId"]] += row["messages"]
    assert found == {row["queueId"]: row["messages"] for row in counted(messages, KEYS["queue"])}


def test_a_tally_ends_where_its_scan_does(rng):
    builder, data = one_segment(rng, 50)
    broken, at = bytearray(data), builder.messages[30].physical_offset
    broken[at + 4] ^= 1
    scanner = tally("topic")
    assert groups_of(scanner, scanner.scan(bytes(broken), 0, 0, builder.end)) == counted(builder.messages[:30], KEYS["topic"])
    assert (scanner.reason, scanner.position) == ("foreign", at)
