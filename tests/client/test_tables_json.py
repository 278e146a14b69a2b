"""Tables with columns from JSON bodies: types, `_extra`, bad rows in a table of their own, columns that are added, kills."""

from __future__ import annotations

import json
import zlib
from datetime import UTC, date, datetime

import pytest

import pyengine
from fix_cli import run
from fix_store_builder import StoreBuilder
from pyengine.errors import UsageError

deltalake = pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")
pytest.importorskip("sqlalchemy")

from pyiceberg.catalog.sql import SqlCatalog  # noqa: E402

from pyengine.client import table_formats  # noqa: E402

TYPES = {"name": "string", "count": "int", "total": "long", "price": "double", "paid": "boolean", "at": "timestamp", "day": "date",
         "lines": "json"}
GOOD = {"name": "é", "count": 3, "total": 1 << 40, "price": 1, "paid": True, "at": "2024-01-02T03:04:05.5+01:00", "day": "2024-01-02",
        "lines": [{"n": 1}]}
BAD = {
    b"no json": "the body is no JSON", b"[1]": "no object", b"\xff": "no text in UTF-8", b"": "no JSON", b'{"price": NaN}': "NaN",
    b'{"more": [1e999]}': "Out of range",
    b'{"count": "3"}': 'count is "3", not a int', b'{"count": 2147483648}': "not a int", b'{"count": true}': "count is true",
    b'{"total": 9223372036854775808}': "total", b'{"price": 1e999}': "price", b'{"paid": 1}': "paid",
    b'{"at": "2024-01-02T03:04:05"}': "with a time zone", b'{"at": 5}': "at",
    b'{"day": "2024-13-01"}': "day",
    b'{"name": "\\ud800"}': "name",
    b"[" * 100_000: "no JSON",
}
both = pytest.mark.parametrize("to", ["delta", "iceberg"])


@pytest.fixture
def builder(tmp_path) -> StoreBuilder:
    from pyengine.engine_config import Geometry

    return StoreBuilder(tmp_path / "store", Geometry(1 << 20, 400, 16, 40, 512))


def rows(dest, to: str, name: str) -> list[dict]:
    if to == "delta":
        table = deltalake.DeltaTable(dest / name).to_pyarrow_table()
    else:
        catalog = SqlCatalog("pyengine", uri=f"sqlite:///{dest / 'catalog.db'}", warehouse=f"file://{dest}")
        table = catalog.load_table(("topics", name)).scan().to_arrow()
    return table.sort_by("physicalOffset").to_pylist()


def fill(builder: StoreBuilder, dest, to: str, **types: str) -> pyengine.TablesReport:
    return pyengine.write_tables(builder.root, dest, to, json=types)


@both
def test_fields_become_columns_and_all_others_are_in_extra(builder, tmp_path, to):
    builder.put("orders", json.dumps({**GOOD, "more": {"a": "ü"}, "other": None}).encode(), tags="t")
    builder.put("orders", zlib.compress(json.dumps({"name": "packed"}).encode()), sys_flag=1)
    builder.put("orders", b"{}")
    assert fill(builder, tmp_path / to, to, **TYPES).messages == {"orders": 3}
    found = rows(tmp_path / to, to, "orders")
    at = datetime(2024, 1, 2, 2, 4, 5, 500_000, tzinfo=UTC)
    values = {**GOOD, "price": 1.0, "at": at, "day": date(2024, 1, 2), "lines": '[{"n": 1}]'}
    assert {name: found[0][name] for name in TYPES} == values and found[0]["tags"] == "t" and "body" not in found[0]
    assert json.loads(found[0]["_extra"]) == {"more": {"a": "ü"}, "other": None}
    assert [row["name"] for row in found] == ["é", "packed", None] and found[1]["_extra"] is found[2]["_extra"] is None
    assert [row["queueOffset"] for row in found] == [0, 1, 2]


@both
def test_bad_rows_are_in_a_table_of_their_own_with_the_reason(builder, tmp_path, to):
    builder.put("orders_bad", b"{}")  # another topic, whose table would have the name
    for body in BAD:
        builder.put("orders", body)
    builder.put("orders", b"no stream", sys_flag=1)
    builder.put("orders", b"{}")
    report = fill(builder, tmp_path / to, to, **TYPES)
    assert report.messages == {"orders": 1, "orders/bad": len(BAD) + 1, "orders_bad": 1} and not report.failed
    found = rows(tmp_path / to, to, "orders_bad")
    assert [row["body"] for row in found] == [*BAD, b"no stream"]
    for row, says in zip(found, [*BAD.values(), "zlib"]):
        assert says in row["reason"], row
    assert len(rows(tmp_path / to, to, table_formats.distinct_name("orders_bad"))) == 1


@both
def test_a_later_run_adds_columns_and_no_run_changes_one(builder, tmp_path, to):
    dest = tmp_path / to
    builder.put("orders", b'{"name": "a", "count": 1}')
    fill(builder, dest, to, name="string")
    builder.put("orders", b'{"name": "b", "count": 2}')
    for types, says in (({"name": "long"}, "json columns name .string, now long"),
                        ({"count": "int"}, "json columns name .string, now missing"), (None, "was begun with json")):
        with pytest.raises(UsageError, match=says):
            pyengine.write_tables(builder.root, dest, to, json=types)
    assert fill(builder, dest, to, name="string", count="int").messages == {"orders": 1}
    builder.put("events", b'{"count": 3}')
    builder.put("orders", b'{"name": "c", "count": 4}')
    fill(builder, dest, to, name="string", count="int")
    assert [(row["name"], row["count"], row["_extra"]) for row in rows(dest, to, "orders")] == [
        ("a", None, '{"count": 1}'), ("b", 2, None), ("c", 4, None)]
    assert [row["count"] for row in rows(dest, to, "events")] == [3]
    plain = tmp_path / "plain"
    pyengine.write_tables(builder.root, plain, to)
    with pytest.raises(UsageError, match="was begun without json"):
        fill(builder, plain, to, name="string")


@both
def test_a_run_that_ends_between_the_two_tables_is_continued_without_doubles(builder, tmp_path, to, monkeypatch):
    for number in range(6):
        builder.put("orders", b'{"name": "%d"}' % number if number % 2 else b"%d" % number)
    kind = table_formats.DeltaTables if to == "delta" else table_formats.IcebergTables
    append = kind.append

    def ended(self, topic, its, start, end):
        if topic == "orders/bad":
            raise KeyboardInterrupt
        append(self, topic, its, start, end)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "append", ended)
        with pytest.raises(KeyboardInterrupt):
            fill(builder, tmp_path / to, to, name="string")
    for _ in range(2):
        fill(builder, tmp_path / to, to, name="string", more="long")
    assert [row["name"] for row in rows(tmp_path / to, to, "orders")] == ["1", "3", "5"]
    assert [row["body"] for row in rows(tmp_path / to, to, "orders_bad")] == [b"0", b"2", b"4"]


def test_a_piece_whose_bodies_are_large_when_decompressed_is_divided(builder, tmp_path, monkeypatch):
    monkeypatch.setattr(table_formats, "CONTENT_BYTES_MAX", 3000)
    for number in range(21):  # the last is larger alone
        body = json.dumps({"name": f"{number}", "more": "x" * (5000 if number == 20 else 1000)}).encode()
        builder.put(("orders", "events")[number % 2], zlib.compress(body), sys_flag=1)
    report = fill(builder, tmp_path / "lake", "delta", name="string")
    assert report.messages == {"orders": 11, "events": 10} and report.commits >= 10
    for topic, first in (("orders", 0), ("events", 1)):
        assert [row["name"] for row in rows(tmp_path / "lake", "delta", topic)] == [*map(str, range(first, 21, 2))]


def test_bodies_that_are_large_when_decompressed_divide_a_piece_no_more_than_they_must(builder, tmp_path, monkeypatch):
    monkeypatch.setattr(table_formats, "CONTENT_BYTES_MAX", 100_000)
    for number in range(500):
        if number < 200 and not number % 25:
            builder.put("large", zlib.compress(json.dumps({"name": "a", "more": "x" * 30_000}).encode()), sys_flag=1)
        builder.put(f"orders{number % 3}", b'{"name": "%d"}' % number)
    report = fill(builder, tmp_path / "lake", "delta", name="string")
    assert report.messages == {"large": 8, "orders0": 167, "orders1": 167, "orders2": 166}
    assert report.commits == 12, "three pieces, of four topics each"
    for topic in range(3):
        assert [row["name"] for row in rows(tmp_path / "lake", "delta", f"orders{topic}")] == [*map(str, range(topic, 500, 3))]


@pytest.mark.parametrize(("types", "says"), [
    ({"tags": "string"}, "the column 'tags' of json"), ({"Body": "string"}, "the column 'Body' of json"), ({"_extra": "json"}, "_extra"),
    ({"a": "string", "A": "int"}, "the column 'A' of json"), ({"a b": "int"}, "the column 'a b'"), ({"a": "doubl"}, "did you mean double"),
])
def test_wrong_columns_are_refused_before_anything_is_made(builder, tmp_path, types, says):
    with pytest.raises(UsageError, match=says):
        fill(builder, tmp_path / "dest", "delta", **types)
    assert not (tmp_path / "dest").exists()


def test_the_command_reads_the_columns_from_a_file(builder, tmp_path):
    builder.put("orders", b'{"name": "a"}')
    schema = tmp_path / "orders.json"
    for content, says in (("{", "cannot be read"), ("[]", "no JSON object")):
        schema.write_text(content)
        done = run("tables", builder.root, tmp_path / "lake", "--to", "delta", "--json-schema", schema)
        assert done.code == 2 and says in done.stderr
    schema.write_text('{"name": "string"}')
    done = run("tables", builder.root, tmp_path / "lake", "--to", "delta", "--json-schema", schema, "--json")
    assert done.code == 0, done.stderr
    assert [row["name"] for row in rows(tmp_path / "lake", "delta", "orders")] == ["a"]
