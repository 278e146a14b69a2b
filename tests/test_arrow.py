"""`pyengine.arrow.dataset`: a log as a pyarrow dataset, read by pyarrow, DuckDB and Polars, whole or in splits."""

from __future__ import annotations

import concurrent.futures
import itertools
import multiprocessing
import pickle
import random
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import pytest

import pyengine
from fix_cli import environment
from fix_golden import CLEAN, usual
from fix_store_builder import START_MS, StoreBuilder
from pyengine.errors import UsageError
from waiting import scaled_timeout_s

pa = pytest.importorskip("pyarrow")
from pyarrow import compute as pc  # noqa: E402
from pyarrow import dataset as ds  # noqa: E402

from pyengine.native import scan  # noqa: E402
from pyengine.storage.arrow import schema  # noqa: E402
from pyengine.storage.store_reader import Narrowing, StoreReader  # noqa: E402

COLUMNS = [*scan.COLUMNS, "property.region"]


@pytest.fixture
def builder(tmp_path, rng) -> StoreBuilder:
    made = StoreBuilder(tmp_path / "store")
    for number in range(240):
        made.put(rng.choice(["orders", "events", "logs"]), b"%d" % number, queue_id=rng.randrange(3),
                 tags=rng.choice([None, "paid", "sent"]), properties={"region": rng.choice(["eu", "us"])} if number % 3 else {})
    return made


def whole(builder: StoreBuilder, topics: list[str] | None = None) -> Any:
    with pyengine.open_store(builder.root) as store:
        return store.to_arrow(topics, COLUMNS).read_all()


def conditions(rng: random.Random) -> Any:
    """A filter of any kind."""
    at = datetime.fromtimestamp(START_MS / 1000 + rng.randrange(250), UTC)
    number, tag = rng.randrange(100), rng.choice(["paid", "sent", "none"])
    field = ds.field
    simple = [
        lambda: field("topic") == rng.choice(["orders", "events", "no"]), lambda: field("topic").isin(["orders", "logs"]),
        lambda: field("queueId") == rng.randrange(4), lambda: field("queueId") != 1, lambda: field("queueOffset") >= number,
        lambda: field("queueOffset") < number, lambda: field("queueOffset") == number, lambda: field("storeTimestamp") >= pa.scalar(at),
        lambda: field("storeTimestamp") < pa.scalar(at), lambda: field("storeTimestamp") == pa.scalar(at), lambda: field("tags") == tag,
        lambda: field("tags").isin([tag, "paid"]), lambda: field("tags") != tag, lambda: field("tags").is_null(),
        lambda: field("tags").isin([tag, None]), lambda: pc.starts_with(field("tags"), "p"), lambda: field("bodySize") > 2,
        lambda: field("property.region") == "eu", lambda: field("storeTimestamp") > field("bornTimestamp"),
        lambda: pc.if_else(field("tags").is_valid(), field("tags") == tag, pa.scalar(None, pa.bool_())),
        lambda: field("queueOffset").cast(pa.float64()) > number, lambda: pc.add(field("queueOffset"), 3) < number,
    ]
    made = rng.choice(simple)()
    for _ in range(rng.randrange(3)):
        other = rng.choice(simple)()
        made = rng.choice([lambda a, b: a & b, lambda a, b: a | b, lambda a, b: a & ~b])(made, other)
    return made


@pytest.mark.ci
@pytest.mark.parametrize("topics", usual([None, ["orders", "logs"]], [["orders", "logs"]], pytest.mark.ci), ids=["all", "topics"])
def test_a_filter_gives_the_rows_that_it_gives_of_a_table(builder, rng, topics):
    table, log = whole(builder, topics), pyengine.arrow.dataset(builder.root, topics, COLUMNS)
    for _ in range(150):
        wanted, columns = conditions(rng), rng.sample(COLUMNS, rng.randrange(1, 4))
        assert log.to_table(columns, filter=wanted) == table.filter(wanted).select(columns), str(wanted)
        assert log.count_rows(filter=wanted) == table.filter(wanted).num_rows


def test_properties_of_any_name_are_columns_and_filters(tmp_path):
    builder = StoreBuilder(tmp_path / "store")
    for number in "01":
        builder.put("orders", b"x", properties=dict.fromkeys(["order-id", "a b:/$", "a"], number))
    columns = [f"property.{name}" for name in ("order-id", "a b:/$", "a")]
    log = pyengine.arrow.dataset(builder.root, columns=[*columns, "queueId", "queueOffset"])
    for column in columns:
        assert log.to_table([column]).to_pydict() == {column: ["0", "1"]}
        assert log.to_table(["queueOffset"], filter=ds.field(column) == "1").to_pydict() == {"queueOffset": [1]}
        assert log.to_table({"as": ds.field(column)}).to_pydict() == {"as": ["0", "1"]}


def test_only_what_a_query_wants_is_read(builder, monkeypatch):
    asked = []
    narrowed = StoreReader._scan_narrowed
    monkeypatch.setattr(StoreReader, "_scan_narrowed", lambda self, topics, columns, level, choice, narrowing: (
        asked.append((list(columns), narrowing)), narrowed(self, topics, columns, level, choice, narrowing))[1])
    log = pyengine.arrow.dataset(builder.root, columns=COLUMNS)
    at = datetime.fromtimestamp(START_MS / 1000 + 100, UTC)
    log.to_table(["body"], filter=(ds.field("tags") == "paid") & (ds.field("storeTimestamp") >= pa.scalar(at)) & (ds.field("queueId") == 1)
                 & (ds.field("queueOffset") > 5))
    columns, narrowing = asked.pop()
    assert columns == ["queueId", "queueOffset", "storeTimestamp", "tags", "body"]
    assert narrowing.tags == {"paid"} and START_MS + 99_000 < narrowing.since_ms <= START_MS + 100_000 and narrowing.until_ms is None
    assert narrowing.choose("orders", 1)[0] in (5, 6) and narrowing.choose("orders", 0) is None
    log.to_table(["size"], filter=(ds.field("topic") == "logs") | (ds.field("storeTimestamp") < pa.scalar(at)))
    columns, narrowing = asked.pop()
    assert columns == ["topic", "storeTimestamp", "size"] and narrowing.until_ms is narrowing.tags is None and narrowing.choose("events", 0)
    for read in (log.count_rows, lambda: log.to_table([]).num_rows):
        assert read() == 240 and asked.pop()[0] == ["queueId"]
    assert log.head(3).num_rows == 3 and log.take([1, 5]).num_rows == 2


def test_tags_that_the_text_of_a_filter_shows_otherwise_are_found(tmp_path, monkeypatch):
    builder, read = StoreBuilder(tmp_path / "store"), []
    long, quoted = "L" * 150, 'a", "b'
    for tag in (long, quoted, "a", "b", "L" * 100, "paid", "", "null", None, "c\\d", 'e"f', 'null, "paid'):
        builder.put("orders", b"x", tags=tag)
    table, log = whole(builder), pyengine.arrow.dataset(builder.root, columns=COLUMNS)
    monkeypatch.setattr(pyengine.arrow, "Narrowing", lambda *given: read.append(narrowing := Narrowing(*given)) or narrowing)
    values = {*table["tags"].to_pylist()}
    for several in itertools.chain(itertools.combinations(values - {None}, 1), itertools.combinations(values, 2), [values]):
        wanted = ds.field("tags").isin([*several])
        assert log.to_table(filter=wanted) == table.filter(wanted), several
    for one in values - {None}:
        wanted = (ds.field("tags") == one) | (ds.field("tags") == "paid")
        assert log.to_table(filter=wanted) == table.filter(wanted), one
    assert {None, frozenset({"paid"}), frozenset({"a", "b"})} < {narrowing.tags for narrowing in read}


def test_a_column_that_a_filter_names_by_its_number_is_that_of_the_dataset(builder):
    table, log = whole(builder), pyengine.arrow.dataset(builder.root, columns=COLUMNS)
    number = ds.field(COLUMNS.index("queueId"))
    assert 0 < log.count_rows(filter=number == 1) == table.filter(pc.field("queueId") == 1).num_rows
    for columns in (["tags"], ["body"], ["physicalOffset", "topic"], {"as": number}):
        wanted = (number == 1) & (ds.field("tags") == "paid")
        assert log.to_table(columns, filter=wanted) == ds.dataset(table).to_table(columns, filter=wanted)


def test_duckdb_and_polars_read_it_as_often_as_they_like(builder):
    duckdb, polars = pytest.importorskip("duckdb"), pytest.importorskip("polars")
    log = pyengine.arrow.dataset(builder.root, ["orders", "logs"])
    table = whole(builder, ["orders", "logs"])
    wanted = table.filter((pc.field("tags") == "paid") & (pc.field("queueId") == 1))
    relation = duckdb.sql("SELECT queueOffset, body FROM log WHERE tags = 'paid' AND queueId = 1")
    for _ in range(2):
        assert sorted(relation.fetchall()) == sorted(zip(wanted["queueOffset"].to_pylist(), wanted["body"].to_pylist()))
    assert duckdb.sql("SELECT count(*), count(DISTINCT topic) FROM log").fetchall() == [(table.num_rows, 2)]
    early = table.filter(pc.field("tags").is_valid() & (pc.field("storeTimestamp") < pa.scalar(datetime(2023, 11, 14, 22, 15, tzinfo=UTC))))
    query = "FROM log SELECT count(*) WHERE tags IN ('paid', 'sent') AND storeTimestamp < '2023-11-14 22:15:00Z'::TIMESTAMPTZ"
    assert duckdb.sql(query).fetchall() == [(early.num_rows,)] and 0 < early.num_rows
    lazy = polars.scan_pyarrow_dataset(log)
    for _ in range(2):
        found = lazy.filter((polars.col("tags") == "paid") & (polars.col("queueId") == 1)).select("queueOffset", "body").collect()
        assert found.to_arrow().to_pydict() == wanted.select(["queueOffset", "body"]).to_pydict()
    assert lazy.head(5).collect().height == 5
    assert lazy.select(polars.len()).collect().item() == table.num_rows
    builder.put("orders", b"later")
    assert duckdb.sql("SELECT count(*) FROM log").fetchall() == [(table.num_rows + 1,)]
    assert lazy.collect().height == table.num_rows + 1
    assert len(log.to_table(["size"]).to_pandas()) == table.num_rows + 1


LIMITED = """
import itertools, sys, threading
import pyengine
from pyengine.storage.store_reader import StoreReader
narrowed = StoreReader._scan_narrowed
StoreReader._scan_narrowed = lambda *a: (
    batch for first in narrowed(*a) for batch in itertools.repeat(first, 10**6) if threading.current_thread())  # which lists the thread
log = pyengine.arrow.dataset(sys.argv[1])
"""


@pytest.mark.parametrize("query", usual(["log.head(1)", "next(iter(log.to_batches()))", "kept = iter(log.to_batches()); next(kept)"],
                                        ["log.head(1)"], pytest.mark.ci))
def test_a_program_ends_in_order_while_arrow_reads_on_after_its_last_query(builder, query):
    for _ in range(3):
        program = [sys.executable, "-c", LIMITED + query, str(builder.root)]
        subprocess.run(program, env=environment(), timeout=scaled_timeout_s(90), check=True)


DROPPED_SLOWLY = """
import sys, time
import pyengine
from pyengine.storage.store_reader import StoreReader
narrowed = StoreReader._scan_narrowed
def endless(*arguments):
    try:
        for batch in narrowed(*arguments):
            while True:
                yield batch
    finally:
        time.sleep(0.3)
StoreReader._scan_narrowed = endless
pyengine.arrow.dataset(sys.argv[1]).head(1)
"""


def test_a_program_ends_in_order_while_a_thread_of_arrow_drops_what_it_read(builder):
    program = [sys.executable, "-c", DROPPED_SLOWLY, str(builder.root)]
    subprocess.run(program, env=environment(), timeout=scaled_timeout_s(90), check=True)


FORKED_DURING_A_READ = """
import _thread, os, sys, threading
import pyengine
from pyengine.storage.store_reader import StoreReader
is_read, may_end = threading.Event(), threading.Event()
def held_up(*arguments):
    is_read.set()
    yield from [may_end.wait()][:0]
StoreReader._rows = held_up
batches = pyengine.open_store(sys.argv[1]).to_arrow()
_thread.start_new_thread(batches.read_all, ())  # as one of Arrow's, which `threading` does not know
is_read.wait()
if (child := os.fork()) == 0:
    sys.exit()
may_end.set()
sys.exit(os.waitpid(child, 0)[1])
"""


def test_a_forked_child_ends_although_a_thread_of_arrow_read_at_the_fork(builder):
    program = [sys.executable, "-c", FORKED_DURING_A_READ, str(builder.root)]
    subprocess.run(program, env=environment(), timeout=scaled_timeout_s(30), check=True)


def rows_of(split: Any) -> list[int]:
    """Runs in another process."""
    return split.to_table(["physicalOffset"])["physicalOffset"].to_pylist()


@pytest.mark.ci
@pytest.mark.parametrize("topics", usual([None, ["orders"]], [["orders"]], pytest.mark.ci), ids=["all", "topics"])
def test_splits_have_each_row_once_in_other_processes(builder, topics):
    wanted = whole(builder, topics)["physicalOffset"].to_pylist()
    log = pyengine.arrow.dataset(builder.root, topics)
    few, many = log.splits(1 << 30), log.splits(1000)
    assert len(few) == 1 < builder.end // 4096 < len(many) and sum(split.log_bytes for split in many) == builder.end
    assert max(split.log_bytes for split in many) <= 4096
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as others:
        for splits in (few, many):
            assert list(itertools.chain(*others.map(rows_of, splits))) == wanted
    builder.put("orders", b"later")
    assert list(itertools.chain(*map(rows_of, many))) == wanted  # as far as the log went
    large = max(many, key=lambda split: len(rows_of(split)))
    within = large.splits(10)
    assert len(within) > 1 and list(itertools.chain(*map(rows_of, within))) == rows_of(large)


def test_a_split_begins_at_a_record_also_if_a_body_imitates_one(tmp_path):
    made = StoreBuilder(tmp_path / "imitated")
    inner = StoreBuilder(tmp_path / "inner")
    for _ in range(12):
        inner.put("orders", b"x" * 100)
    record = (tmp_path / "inner" / "commitlog" / "00000000000000000000").read_bytes()[:1500]
    for number in range(20):
        made.put("orders", record[: 1000 + number])
    log = pyengine.arrow.dataset(made.root)
    for split_bytes in (500, 700, 1500):
        assert len(log.splits(split_bytes)) > 5
        assert list(itertools.chain(*map(rows_of, log.splits(split_bytes)))) == log.to_table()["physicalOffset"].to_pylist()


@pytest.mark.parametrize("name", usual([name for name in CLEAN if name != "empty"]))
def test_splits_of_stores_of_rocketmq_have_each_row_once(name, golden):
    store = golden(name)
    log = pyengine.arrow.dataset(store.root, level="committed")
    wanted = rows_of(log)
    for split_bytes in (2000, 1 << 20):
        assert list(itertools.chain(*map(rows_of, log.splits(split_bytes)))) == wanted


def test_it_can_be_pickled_and_filtered_before(builder):
    log = pyengine.arrow.dataset(builder.root, ["orders"], ["queueId", "tags", "body"], tags="paid", queues=[0, 1])
    table = log.to_table()
    assert set(table["tags"].to_pylist()) == {"paid"} and set(table["queueId"].to_pylist()) == {0, 1}
    one = pickle.loads(pickle.dumps(log.filter(ds.field("queueId") == 1)))
    assert one.to_table() == table.filter(pc.field("queueId") == 1) and one.schema == table.schema
    assert [split.to_table() for split in one.splits(1 << 30)] == [one.to_table()]
    assert one.filter(ds.field("tags") == "sent").count_rows() == 0
    assert log.sort_by("queueId").to_table() == table.sort_by("queueId")
    assert log.to_table({"next": ds.field("queueId") + 1})["next"].to_pylist() == [one + 1 for one in table["queueId"].to_pylist()]
    assert repr(log).endswith("store, orders>") and isinstance(log, ds.Dataset)


def test_two_logs_are_joined_and_one_with_another_dataset(builder):
    columns = ["queueId", "queueOffset", "bodySize"]
    log = pyengine.arrow.dataset(builder.root, ["orders"], columns=columns)
    whole_log = ds.InMemoryDataset(log.to_table())
    for left, right in ((log, log), (log, whole_log), (whole_log, whole_log)):
        assert left.join(right, ["queueId", "queueOffset"], right_suffix="_b").count_rows() == log.count_rows() > 0


def test_wrong_arguments_are_refused_at_once(builder):
    with pytest.raises(UsageError, match="did you mean orders"):
        pyengine.arrow.dataset(builder.root, ["order"])
    with pytest.raises(UsageError, match="unknown column 'tagz'"):
        pyengine.arrow.dataset(builder.root, columns=["tagz"])
    with pytest.raises((UsageError, TypeError), match="sinse"):
        pyengine.arrow.dataset(builder.root, sinse=3)
    log = pyengine.arrow.dataset(builder.root, columns=["tags"])
    with pytest.raises(UsageError, match=r"no column 'tag' \(did you mean tags"):
        log.to_table(["tag"])
    for wrong in (0, -1):
        with pytest.raises(UsageError, match="split_bytes"):
            log.splits(wrong)
    assert log.schema == schema(["tags"])


def test_code_that_reads_it_otherwise_gets_an_error(builder):
    log = pyengine.arrow.dataset(builder.root)
    with pytest.raises(FileNotFoundError, match="call its own methods"):
        ds.Scanner.from_dataset(log).to_table()


@pytest.mark.parametrize(("choice", "says"), [({"topics": "orders"}, "topics must be a sequence of str, not str: give .'orders'.$"),
                                              ({"columns": "body"}, "columns must be a sequence of str, not str: give .'body'.$")])
def test_one_name_where_a_dataset_takes_several_is_refused(builder, choice, says):
    with pytest.raises(TypeError, match=says):
        pyengine.arrow.dataset(builder.root, **choice)
