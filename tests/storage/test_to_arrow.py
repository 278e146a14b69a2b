"""The log as one Arrow stream, as other engines take it; and the page docs/arrow.md, run without a change."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import pyengine
from fix_store_builder import StoreBuilder
from pyengine.errors import UsageError

pa = pytest.importorskip("pyarrow")
from pyengine.native.scan import COLUMNS  # noqa: E402
from pyengine.storage.arrow import schema  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "arrow.md"


@pytest.fixture
def builder(tmp_path, monkeypatch) -> StoreBuilder:
    monkeypatch.chdir(tmp_path)
    made = StoreBuilder(tmp_path / "my-store")
    for number in range(40):
        made.put(("orders", "events")[number % 4 == 3], b"x" * number, queue_id=number % 2, tags=("paid", "sent")[number % 2])
    return made


def test_the_stream_is_the_scan(builder):
    with pyengine.open_store(builder.root) as store:
        stream = store.to_arrow()
        assert stream.schema == schema(COLUMNS)
        assert stream.read_all() == pa.Table.from_batches(store.scan())
        some = store.to_arrow(["orders"], ["queueOffset", "body"]).read_all()
        assert some == pa.Table.from_batches(store.scan(["orders"], ["queueOffset", "body"])) and some.num_rows == 30
        with pytest.raises(UsageError):
            store.to_arrow(columns=["topik"])


def test_a_topic_that_the_store_has_not_is_an_error_unless_it_may_be_missing(builder):
    builder.put("late", b"x", dispatch=False)  # in no queue yet
    with pyengine.open_store(builder.root) as store:
        for read in (store.scan, store.to_arrow):
            with pytest.raises(UsageError, match=r"has no topic 'order' \(did you mean orders\?\): allow_missing=True reads what there is"):
                read(["order", "orders"])
            with pytest.raises(UsageError, match="%LMQ%a is a light queue"):
                read(["%LMQ%a"], allow_missing=True)
        assert store.to_arrow(["nothing"], allow_missing=True).read_all().num_rows == 0
        assert store.to_arrow(["late"]).read_all().num_rows == 1
        assert store.to_arrow([]).read_all().num_rows == 0


def test_chosen_topics_give_what_their_consumers_see_and_the_whole_log_every_record(builder):
    for number, sys_flag in enumerate((0x4, 0x8, 0xC, 0x1, 0x5)):
        is_queued = number in (1, 3)
        builder.put("orders", b"transaction %d" % number, queue_id=7, sys_flag=sys_flag, dispatch=is_queued)
        builder.queue_offsets["orders", 7] -= not is_queued
    with pyengine.open_store(builder.root) as store:
        consumed = [message.body for message in store.get_message("orders", 7, 0).messages]
        assert consumed == [b"transaction 1", b"transaction 3"]
        for topics in (["orders"], ("orders", "events")):
            table = store.to_arrow(topics, ["queueId", "body"]).read_all()
            assert [row["body"] for row in table.to_pylist() if row["queueId"] == 7] == consumed
        assert store.to_arrow(columns=["body"]).read_all().num_rows == 45


def test_it_reads_as_it_is_read_from(builder, monkeypatch):
    with pyengine.open_store(builder.root) as store:
        seen = []
        view = store.commit_log.view
        monkeypatch.setattr(store.commit_log, "view", lambda start: (seen.append(start), view(start))[1])
        stream = store.to_arrow(columns=["body"])
        assert hasattr(stream, "__arrow_c_stream__")
        seen.clear()
        assert stream.read_next_batch().num_rows > 0 and seen == [0]
        assert stream.read_all().num_rows > 0 and seen == store.commit_log.starts() != [0]


def test_the_page_of_docs_runs(builder, capsys):
    pytest.importorskip("polars")
    pytest.importorskip("duckdb")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 4
    namespace: dict[str, object] = {}
    shown = []
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
        shown.append(capsys.readouterr().out)
    namespace["store"].close()
    tags = Counter(("paid", "sent")[number % 2] for number in range(40) if number % 4 != 3)
    for tag, count in tags.items():
        assert re.search(rf"{tag}\s+┆ {count}\s", shown[1]), shown[1]
    assert re.search(r"events\s+│\s+10 ", shown[2]) and re.search(r"orders\s+│\s+30 ", shown[2]), shown[2]
    assert re.search(r"events\s+1\s+10\n", shown[3]), shown[3]


def test_the_page_names_every_column():
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in COLUMNS)
