"""Options of the data source: what is read out of them, and what is refused with which sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.errors import UsageError
from pyengine.results import ReadLevel
from pyengine.spark.options import OPTIONS, ReadOptions, read_options
from pyengine.spark.partitions import cut, partition_bytes
from pyengine.spark.schema import COLUMNS, chosen_columns, find_column, schema_text
from reference import column_table, option_table, with_tables

DOCS = Path(__file__).parents[2] / "docs" / "spark.md"


def read(**options: str) -> ReadOptions:
    return read_options({"path": "/store", **options})


def test_defaults_are_those_of_the_table():
    assert read() == ReadOptions("/store")
    for name, option in OPTIONS.items():
        shown = option.default_text or option.show(option.default)
        if shown not in ("", "all", "the default columns"):
            assert getattr(read_options({"path": "/store", option.key: shown}, "any"), name) == getattr(read(), name), name


def test_names_do_not_depend_on_case_and_a_relative_path_becomes_absolute():
    assert read(STARTINGtimestamp="5", maxpartitionbytes="1k").max_partition_bytes == 1024
    assert Path(read_options({"path": "some/store"}).path) == Path("some/store").absolute()
    for uri in ("file:/some/store", "file:///some/store", "FILE://localhost/some/store"):
        assert read_options({"path": uri}).path == "/some/store"
    assert read_options({"path": "file:///a%20b"}).path == "/a b" and read_options({"path": "/a%20b"}).path == "/a%20b"


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("subscribe", " a, b,a", "subscribe", ("a", "b")),
        ("assign", '{"a": [1, 0, 1]}', "assign", {"a": (0, 1)}),
        ("tags", "x || y", "tags", ("x", "y")),
        ("tags", "x.y-z_1||caf\u00e9&%", "tags", ("caf\u00e9&%", "x.y-z_1")),
        ("tags", "*", "tags", ()),
        ("sql", "price > 5", "sql", "price > 5"),
        ("readLevel", "Committed", "read_level", ReadLevel.COMMITTED),
        ("startingOffsetsByTimestamp", '{"a": {"0": 5}}', "starting_timestamps", {"a": {0: 5}}),
        ("includeHeaders", "True", "include_headers", True),
        ("includeBody", " no ", "include_body", False),
        ("batchBytes", "2 MiB", "batch_bytes", 2 << 20),
        ("maxPartitionBytes", "64MB", "max_partition_bytes", 64 << 20),
        ("startingPhysicalOffset", "earliest", "starting_physical_offset", None),
        ("endingPhysicalOffset", "17", "ending_physical_offset", 17),
        ("mapedFileSizeCommitLog", "64k", "sizes", {"mapped_file_size_commit_log_bytes": 65536}),
        ("mapped_file_size_commit_log_bytes", "65536", "sizes", {"mapped_file_size_commit_log_bytes": 65536}),
    ],
)
def test_texts_that_are_understood(name, text, field, value):
    assert getattr(read(**{name: text}), field) == value


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"subscirbe": "a"}, "unknown option 'subscirbe' (did you mean subscribe?)"),
        ({"startingTimestmap": "1"}, "did you mean startingTimestamp?"),
        ({"mappedFileSizeComitLog": "1"}, "did you mean mappedFileSizeCommitLog?"),
        ({"kafka.bootstrap.servers": "h:9"}, "there is no broker to connect to: give the store's directory as path; leave it out"),
        ({"groupIdPrefix": "x"}, "a read joins no consumer group"),
        ({"kafka.Security.Protocol": "SSL"}, "there is no Kafka client to configure; leave it out"),
        ({"kafkaConsumer.pollTimeoutMs": "5"}, "nothing is polled"),
        ({"startingOffsetsByTimestamp": "5"}, 'give JSON like {"topic": {"0": 1700000000000}}'),
        ({"startingOffsetsByTimestamp": '{"a": {"0": -1}}'}, "a: 0: -1 is not allowed"),
        ({"subscribe": "a", "endingOffsetsByTimestamp": '{"b": {"0": 1}}'}, "names topic 'b', which subscribe does not"),
        ({"startingTimestamp": "5", "startingOffsetsByTimestampStrategy": "error"}, "needs a choice of topics"),
        ({"startingOffsetsByTimestampStrategy": "fail"}, "give latest or error"),
        ({"zzz": "1"}, "unknown option 'zzz': known are path, view, group, subscribe"),
        ({"subscribe": " , "}, "option subscribe = ' , ': give names separated by commas"),
        ({"subscribe": "a", "assign": '{"b": [0]}'}, "give one of subscribe, subscribePattern and assign"),
        ({"subscribePattern": "("}, "this is not a regular expression"),
        ({"assign": "[1]"}, 'give JSON like {"topic": [0, 1]}'),
        ({"assign": '{"a": [-1]}'}, 'give JSON like {"topic": [0, 1]}'),
        ({"assign": "[" * 5000}, 'give JSON like {"topic": [0, 1]}'),
        ({"startingOffsets": "latest"}, "give earliest or JSON like"),
        ({"startingOffsets": "tomorrow"}, "give earliest or JSON like"),
        ({"endingOffsets": "earliest"}, "give latest or JSON like"),
        ({"startingOffsets": '{"a": {"0": -1}}'}, "a: 0: -1 is not allowed"),
        ({"endingOffsets": '{"a": {"0": -2}}'}, "a: 0: -2 is not allowed"),
        ({"startingOffsets": '{"a": {"x": 1}}'}, "a: x: 1 is not allowed"),
        ({"startingOffsets": '{"a": {"0": 9223372036854775808}}'}, "a: 0: 9223372036854775808 is not allowed"),
        ({"endingOffsetsByTimestamp": '{"a": {"0": 9223372036854775808}}'}, "a: 0: 9223372036854775808 is not allowed"),
        ({"endingOffsets": '{"a": {"2147483648": 1}}'}, "a: 2147483648: 1 is not allowed"),
        ({"subscribe": "a", "startingOffsets": '{"b": {"0": 1}}'}, "names topic 'b', which subscribe does not"),
        ({"assign": '{"a": [0]}', "endingOffsets": '{"a": {"1": 1}}'}, "names queue a/1, which assign does not"),
        ({"startingTimestamp": "now"}, "give 0 to 9,223,372,036,854,775,807"),
        ({"startingTimestamp": "5", "endingTimestamp": "4"}, "startingTimestamp is after endingTimestamp"),
        ({"startingPhysicalOffset": "5", "endingPhysicalOffset": "4"}, "startingPhysicalOffset is after"),
        ({"schemaMode": "full", "columns": "topic"}, "give one of columns and schemaMode"),
        ({"schemaMode": "kafkaa"}, "give default, kafka, rocketmq or full"),
        ({"tags": " || "}, "option tags: no tag in"),
        ({"sql": "price >"}, "option sql: SQL condition 'price >', character 8"),
        ({"tags": "paid || amount>5"}, "option tags: 'paid || amount>5' is not a list of tags: write tags"),
        ({"tags": "TAGS is not null"}, "write tags like 'a || b'"),
        ({"tags": "(paid)"}, "an SQL92 condition, also one on TAGS, goes into sql"),
        ({"allowMissing": "maybe"}, "give true or false"),
        *(({"path": path}, f"option path = {path!r}: tasks cannot open this: write a URI like s3://bucket/store or file:///store, or the")
          for path in ("dbfs:/stores/one", "DBFS:///stores/one", "s3:/bucket/store", "s3:bucket/store", "file://stores/one", "file:one")),
        ({"startingPhysicalOffset": "-1"}, "give earliest, latest, 0 to 9,223,372,036,854,775,807"),
        ({"maxPartitionBytes": "0"}, "give 1 to 9,223,372,036,854,775,807 bytes, as 64m"),
        ({"maxPartitionBytes": "1 mile"}, "give 1 to 9,223,372,036,854,775,807 bytes, as 64m"),
        ({"batchRows": "1048577"}, "give 1 to 1,048,576"),
        ({"readLevel": "synced"}, "give written, committed, flushed or replicated"),
        ({"onCorrupt": "ignore"}, "give fail or skip"),
        ({"mappedFileSizeCommitLog": "1"}, "mapped_file_size_commit_log_bytes = 1 (option) is not allowed"),
    ],
)
def test_a_wrong_read_option_is_refused_with_its_reason(options, sentence):
    with pytest.raises(UsageError) as refused:
        read(**options)
    assert sentence in str(refused.value)


@pytest.mark.parametrize("option", ["startingOffsets", "maxTriggerDelay"])
@pytest.mark.parametrize("span", ["9223372036854776 s", "106751991168 days", "5 weeks", "0 weeks"])
def test_a_span_of_time_has_a_known_unit_and_fits_its_field(option, span):
    text = f"-{span}" if option == "startingOffsets" else span
    with pytest.raises(UsageError, match="give a span of time like 30s, 15m or 1 hour"):
        read_options({"path": "/store", option: text}, "stream")
    largest = text.replace(span, "9223372036854775 s")
    assert read_options({"path": "/store", option: largest}, "stream")


def test_a_path_is_needed():
    with pytest.raises(UsageError, match="give the store's root directory"):
        read_options({})


def test_timestamps_go_before_offsets():
    options = read(subscribe="a", startingTimestamp="5", startingOffsets='{"a": {"0": 3}}', endingOffsets='{"a": {"0": 9}}')
    assert options.starting_offsets is None and options.ending_offsets == {"a": {0: 9}}
    queues = {"startingOffsetsByTimestamp": '{"a": {"0": 7}}', "endingOffsetsByTimestamp": '{"a": {"0": 8}}'}
    options = read(subscribe="a", startingOffsets='{"a": {"0": 3}}', endingOffsets='{"a": {"0": 9}}', **queues)
    assert (options.starting_offsets, options.ending_offsets) == (None, None)
    assert (options.starting_timestamps, options.ending_timestamps) == ({"a": {0: 7}}, {"a": {0: 8}})
    options = read(subscribe="a", startingTimestamp="5", endingTimestamp="6", **queues)
    assert (options.starting_timestamps, options.ending_timestamps) == (None, None)


def test_columns_are_chosen_by_name_and_unknown_ones_refused():
    assert [c.name for c in chosen_columns(read(columns="offset, property.A B,topic"))] == ["offset", "property.A B", "topic"]
    assert [c.name for c in chosen_columns(read(columns="*"))] == [c.name for c in COLUMNS if c.name != "headers"]
    for mode in ({}, {"schemaMode": "kafka"}, {"schemaMode": "full"}):
        plain = [c.name for c in chosen_columns(read(**mode))]
        assert [c.name for c in chosen_columns(read(**mode, includeHeaders="true"))] == [*plain, "headers"]
    assert [c.name for c in chosen_columns(read())][:7] == [
        "key", "value", "topic", "partition", "offset", "timestamp", "timestampType"]
    assert "value" not in [c.name for c in chosen_columns(read(includeBody="false"))]
    assert schema_text([find_column("property.a`b")]) == "`property.a``b` STRING"
    with pytest.raises(UsageError, match="unknown column 'topik' in the option readColumns.*did you mean topic"):
        chosen_columns(read(readColumns="topik"))
    assert not {"value", "body"} & {c.name for c in chosen_columns(read(columns="*", includeBody="false"))}
    for name in ("location", "owner"):  # of CREATE TABLE
        with pytest.raises(UsageError, match=f"{name} has no meaning here: .*CREATE TEMPORARY VIEW"):
            read(**{name: "file:/store"})
    for wrong, sentence in (("ofset", "did you mean offset"), ("property.", "write property.NAME"),
                            ("topic,Topic", "named twice")):
        with pytest.raises(UsageError, match=sentence):
            chosen_columns(read(columns=wrong))


def test_a_schema_mode_chooses_columns():
    names = {mode: [c.name for c in chosen_columns(read(schemaMode=mode))] for mode in ("default", "kafka", "rocketmq", "full")}
    assert names["default"] == [c.name for c in chosen_columns(read())]
    assert names["kafka"] == ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"]
    scanned = {c.scanned for c in COLUMNS if c.scanned}
    assert {find_column(name).scanned for name in names["rocketmq"]} == scanned
    assert {find_column(name).scanned for name in names["full"]} - {""} == scanned
    assert names["rocketmq"][:3] == ["topic", "flag", "body"] and not {"value", "partition", "offset"} & set(names["rocketmq"])
    for mode in names:
        without = [c.name for c in chosen_columns(read(schemaMode=mode, includeBody="false"))]
        assert without == [name for name in names[mode] if name not in ("value", "body")]


def test_the_page_holds_the_tables_of_the_code():
    """After a change: python scripts/reference.py docs"""
    text = DOCS.read_text(encoding="utf-8")
    assert text == with_tables(text) and option_table() in text and column_table() in text


@settings(max_examples=300, deadline=None)
@given(
    start=st.integers(0, 1000), length=st.integers(0, 2000), segment_bytes=st.integers(1, 300),
    most=st.integers(1, 900), least=st.integers(1, 40),
)
def test_ranges_cover_the_log_once_and_keep_to_their_bounds(start, length, segment_bytes, most, least):
    ranges = cut(start, start + length, start + length, segment_bytes, partition_bytes(length, most, least))
    assert [r.start for r in ranges[1:]] == [r.end for r in ranges[:-1]]
    assert (not ranges) == (length == 0)
    assert len(ranges) >= min(least, length)
    if ranges:
        assert (ranges[0].start, ranges[-1].end) == (start, start + length)
    for one in ranges:
        pieces = list(one.pieces())
        assert 0 < one.end - one.start <= most
        assert (pieces[0][1], pieces[-1][2]) == (one.start, one.end)
        assert len(pieces) == 1 or all(segment == first for segment, first, _ in pieces[1:])
