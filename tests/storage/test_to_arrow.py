"""The log as one Arrow stream, as other engines take it; and the page docs/arrow.md, run without a change."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import pyengine
import pyengine.arrow
from fix_cli import environment
from fix_golden import CLEAN, usual
from fix_store_builder import START_MS, StoreBuilder
from pyengine.client.tables import write_tables
from pyengine.errors import CorruptionError, UsageError
from pyengine.formats.constants import SCHEDULE_TOPIC, SYS_FLAG_TRANSACTION_MASK
from pyengine.formats.consume_queue import NOT_QUEUED
from pyengine.formats.paths import parse_segment_name
from pyengine.formats.record import Message
from pyengine.storage.checkpoint import WATERMARK, DurableWatermark
from pyengine.storage.config_table import TopicConfig, TopicConfigs
from record_bytes import iter_records

pa = pytest.importorskip("pyarrow")
from pyengine.native.scan import COLUMNS  # noqa: E402
from pyengine.storage import queue_entries  # noqa: E402
from pyengine.storage.arrow import LogScanner, schema  # noqa: E402

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
        once = store.to_arrow((topic for topic in ["orders"]), (name for name in ["queueOffset", "body"]))  # each is read once only
        assert once.read_all() == some
        assert list(store.scan(["orders"], tags="none")) == []  # no empty batches
        assert store.to_arrow(columns=[]).read_all().num_rows == pyengine.arrow.dataset(builder.root, columns=[]).count_rows() == 40
        assert store.to_arrow(["orders"], [], sql="TAGS = 'paid'").read_all().num_rows == 20


def test_topics_that_are_not_read_are_listed_only_when_the_store_is_opened(builder, monkeypatch):
    listed, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path=".": listed.append(str(path).rpartition("/")[2]) or scandir(path))
    with pyengine.open_store(builder.root) as store:
        assert store.to_arrow(["orders"], queues=[0]).read_all().num_rows
    assert listed.count("events") == 1 < listed.count("orders")
    with pyengine.consume(builder.root, re.compile("order.*")) as consumer:
        assert consumer.topics == ["orders"]
    assert listed.count("events") == 2


def test_a_topic_that_is_a_queue_of_others_messages_is_refused_as_a_light_queue(builder):
    message = builder.put("orders", b"x", properties={"INNER_MULTI_DISPATCH": "archive", "INNER_MULTI_QUEUE_OFFSET": "0"})
    builder.write_entry("archive", 0, 0, message.physical_offset, message.size_bytes, 0)
    with pyengine.open_store(builder.root) as store:
        for read in (store.scan, store.to_arrow, lambda topics: pyengine.arrow.dataset(builder.root, topics).to_table()):
            with pytest.raises(UsageError, match="archive is a light queue: its messages are rows of their own topics"):
                read(["archive", "orders"])
        assert store.to_arrow(["archive"], allow_missing=True).read_all().num_rows == 0
    with pytest.raises(UsageError, match="archive is a light queue"):
        write_tables(builder.root, builder.root.parent / "lake", "delta", topics="arch.*")


@pytest.mark.parametrize("its", [(0, 0), (0, 2), (1, 0)])
def test_a_topic_with_messages_of_its_own_is_read_wherever_those_of_others_are(builder, its):
    own_queue, own_offset = its
    for number in range(3):
        if (0, number) == its:
            builder.put("mixed", b"its own")
            continue
        builder.queue_offsets["mixed", 0] = number + 1
        message = builder.put("orders", b"x", properties={"INNER_MULTI_DISPATCH": "mixed", "INNER_MULTI_QUEUE_OFFSET": str(number)})
        builder.write_entry("mixed", 0, number, message.physical_offset, message.size_bytes, 0)
    if own_queue:
        builder.put("mixed", b"its own", queue_id=own_queue)
    with pyengine.open_store(builder.root) as store:
        assert store.to_arrow(["mixed"]).read_all()["queueOffset"].to_pylist() == [own_offset]
    assert pyengine.arrow.dataset(builder.root, ["mixed"]).to_table().num_rows == 1


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


def all_messages(root: Path) -> Iterator[Message]:
    """Each message of the log, read by the formats alone."""
    for path in sorted((root / "commitlog").iterdir()):
        data, start = path.read_bytes(), parse_segment_name(path.name)
        yield from (record for record in iter_records(data, start, start, start + len(data)) if isinstance(record, Message))


def is_chosen(message: Message, topics: list[str] | None, choice: dict[str, Any]) -> bool:
    """The conditions, one by one; `sql` is `a IS NOT NULL`, of the property a."""
    first = choice.get("from_offsets", {}).get(message.topic, {}).get(message.queue_id, 0)
    return ((topics is None or message.topic in topics and message.sys_flag & SYS_FLAG_TRANSACTION_MASK not in NOT_QUEUED)
            and message.queue_id in choice.get("queues", [message.queue_id]) and message.queue_offset >= first
            and ("tags" not in choice or message.tags in choice["tags"].split(" || "))
            and ("sql" not in choice or choice["sql"].split()[0] in message.properties)
            and choice.get("since", 0) <= message.store_timestamp_ms < choice.get("until", 1 << 62))


def random_choice(rng: random.Random, messages: list[Message], topics: list[str] | None) -> dict[str, Any]:
    """Conditions of any kinds, made from messages of the store, so that they divide its messages."""
    some, other = rng.choice(messages), rng.choice(messages)
    since_ms, until_ms = sorted((some.store_timestamp_ms, other.store_timestamp_ms))
    names = sorted({name for message in messages for name in message.properties if name.isidentifier()}) or ["a"]
    tags = {message.tags for message in (some, other) if message.tags and "||" not in message.tags}
    choice = {"tags": " || ".join(tags or {"none"}), "sql": f"{rng.choice(names)} IS NOT NULL",
              "since": since_ms, "until": until_ms}
    if topics:
        ours = [message for message in messages if message.topic in topics]
        starts = rng.sample(ours, min(len(ours), 3))
        choice["queues"] = sorted({message.queue_id for message in rng.sample(ours, min(len(ours), 2))})
        choice["from_offsets"] = {}
        for message in starts:
            choice["from_offsets"].setdefault(message.topic, {})[message.queue_id] = message.queue_offset
    return {name: value for name, value in choice.items() if rng.random() < 0.4}


def require_the_chosen_rows(root: Path, messages: list[Message], rng: random.Random, **settings: Any) -> None:
    """Compare reads with random conditions with a plain filter of all messages, and with get_message of each queue."""
    queued = sorted({message.topic for message in messages if message.sys_flag & SYS_FLAG_TRANSACTION_MASK not in NOT_QUEUED})
    with pyengine.open_store(root, **settings) as store:
        for _ in range(40):
            topics = rng.choice([None, rng.sample(queued, rng.randint(1, len(queued)))])
            choice = random_choice(rng, messages, topics)
            wanted = [message.physical_offset for message in messages if is_chosen(message, topics, choice)]
            found = store.to_arrow(topics, ["physicalOffset"], "committed", **choice)
            assert [row["physicalOffset"] for row in found.read_all().to_pylist()] == wanted, (topics, choice)
        for topic in queued:
            for queue_id in store.queue_ids(topic):
                some = random_choice(rng, messages, None)
                has_tags = topic != SCHEDULE_TOPIC  # its entries have times in place of tags
                filters = {name: some[name] for name in ("tags", "sql")[not has_tags:] if name in some}
                found = store.to_arrow([topic], ["queueOffset"], "committed", queues=[queue_id], allow_missing=True, **filters).read_all()
                got, offset = [], 0
                while (result := store.get_message(topic, queue_id, offset, level="committed", **filters)).next_begin_offset > offset:
                    got += [message.queue_offset for message in result.messages if message.topic == topic]
                    offset = result.next_begin_offset
                assert found["queueOffset"].to_pylist() == got, (topic, queue_id, filters)


@pytest.fixture(params=["scan", "queues"])
def by_queues(request, monkeypatch) -> list[bool]:
    """Reads go through queues wherever these prove what a scan would give, or never. The result has an item for each such read."""
    used: list[bool] = []
    if request.param == "queues":
        for name, value in (("LOG_BYTES_MIN", 0), ("SHARE_MAX", 1.0), ("_QUEUE_BYTES", 0), ("SCAN_BYTES", 500), ("LOST_QUEUE_BYTES", 500)):
            monkeypatch.setattr(queue_entries, name, value)
        gather = LogScanner.gather
        monkeypatch.setattr(LogScanner, "gather", lambda *arguments: (used.append(True), gather(*arguments))[1])
    return used


@pytest.mark.parametrize("name", usual([name for name in CLEAN if name != "empty"]))
def test_the_choice_gives_the_rows_of_a_plain_filter_in_golden_stores(name, golden, rng, by_queues):
    store = golden(name)
    require_the_chosen_rows(store.root, list(all_messages(store.root)), rng, **store.sizes)


@pytest.mark.parametrize("has_watermark", [True, False], ids=["pyengine", "rocketmq"])
def test_the_choice_gives_the_rows_of_a_plain_filter_in_random_stores(tmp_path, rng, has_watermark, by_queues, request):
    made = StoreBuilder(tmp_path / "random")
    messages = []
    for _ in range(300):
        made.now_ms += rng.choice([-1000, -1000, 0, 5000])  # the clock's steps of 1 s: several messages of a time
        made.now_ms = max(made.now_ms, messages[-1].store_timestamp_ms if messages else 0)
        properties = {name: "1" for name in ("a", "b") if rng.random() < 0.5}
        messages.append(made.put(rng.choice(["orders", "events", "logs"]), rng.randbytes(rng.randrange(60)), queue_id=rng.randrange(3),
                                 tags=rng.choice([None, "paid", "sent", "late"]), properties=properties))
    assert len(list((made.root / "commitlog").iterdir())) > 5
    if has_watermark:
        WATERMARK.write(made.root, DurableWatermark("u", 1, made.end))
    require_the_chosen_rows(made.root, messages, rng)
    assert bool(by_queues) == ("queues" in request.node.callspec.id)


@pytest.mark.parametrize("by_queues", ["queues"], indirect=True)
@pytest.mark.parametrize("harm", ["bit", "zeros", "file"])
def test_damaged_queues_hide_no_message(tmp_path, rng, by_queues, harm, monkeypatch):
    """What their entries do not prove is read from the log itself."""
    monkeypatch.setattr(queue_entries, "LOST_QUEUE_BYTES", 1 << 30)
    made = StoreBuilder(tmp_path / "harmed")
    for topic in ("orders", "events"):  # so that it is known which queues the store should have
        TopicConfigs(made.root).create(TopicConfig(topic, read_queue_nums=2, write_queue_nums=2))
    messages = [made.put(rng.choice(["orders", "events"]), rng.randbytes(rng.randrange(60)), queue_id=rng.randrange(2),
                         tags=rng.choice([None, "paid"])) for _ in range(200)]
    for _ in range(60):
        files = sorted((made.root / "consumequeue" / "orders").glob("*/*"))
        path = rng.choice(files)
        saved = path.read_bytes()
        last = (len(saved.rstrip(b"\0")) - 1) // 20
        at = 20 * rng.randrange(last + 1)
        if harm == "bit":
            flipped = bytearray(saved)
            flipped[at + rng.randrange(20)] ^= 1 << rng.randrange(8)
            path.write_bytes(flipped)
        elif harm == "zeros":  # an entry with others after it
            path.write_bytes(saved[:at] + bytes(20) + saved[at + 20 :] if at < 20 * last else saved)
        else:
            path.unlink()
        with pyengine.open_store(made.root) as store:
            found = store.to_arrow(["orders"], ["physicalOffset"]).read_all()["physicalOffset"].to_pylist()
        assert found == [message.physical_offset for message in messages if message.topic == "orders"], (path, at, saved[at : at + 20])
        path.write_bytes(saved)
    assert by_queues


def test_a_few_messages_of_a_large_log_are_read_through_their_queues(tmp_path, by_queues, monkeypatch):
    """Records of other topics are not looked at, and the rows come in the order of the log."""
    made = StoreBuilder(tmp_path / "large")
    for number in range(300):
        made.put("few" if number % 50 == 7 else "many", b"y" * 100, queue_id=number % 2)
    other = next(message for message in all_messages(made.root) if message.topic == "many" and message.physical_offset > 10_000)
    made.write_log(b"\xff" * 8, at=other.physical_offset)
    monkeypatch.setattr(queue_entries, "SHARE_MAX", 0.3)
    with pyengine.open_store(made.root) as store:
        read = store.to_arrow(["few"], ["physicalOffset"], "written").read_all
        if queue_entries.LOG_BYTES_MIN == 0:
            offsets = read()["physicalOffset"].to_pylist()
            assert len(offsets) == 6 and offsets == sorted(offsets) and by_queues
        else:
            with pytest.raises(CorruptionError):
                read()
        used = len(by_queues)
        with pytest.raises(CorruptionError):  # most of the log: a scan
            store.to_arrow(["many"], ["physicalOffset"], "written").read_all()
        assert len(by_queues) == used


def test_no_topics_give_no_rows_however_large_the_log_is(builder, by_queues):
    with pyengine.open_store(builder.root) as store:
        assert store.to_arrow([], ["physicalOffset"]).read_all().num_rows == 0


def test_segments_of_other_times_are_not_read_in_a_log_of_pyengine(builder):
    """Damage in them is not met. RocketMQ's clock may have been set back, so all of its log is read."""
    for _ in range(100):
        builder.put("orders", b"y" * 200)
    starts = sorted(int(path.name) for path in (builder.root / "commitlog").iterdir())
    assert len(starts) > 4
    times = {}
    for message in all_messages(builder.root):
        times.setdefault(message.physical_offset - message.physical_offset % 4096, []).append(message.store_timestamp_ms)
    for start in (starts[1], starts[-2]):
        second = next(message for message in all_messages(builder.root) if message.physical_offset > start)
        builder.write_log(b"\xff" * 8, at=second.physical_offset)
    begin, end = times[starts[2]][0] + 1, times[starts[-2]][0]  # with the first millisecond the segment before may have it too

    def read(**choice: int) -> int:
        with pyengine.open_store(builder.root) as store:
            return store.to_arrow(columns=["size"], level="written", **choice).read_all().num_rows

    WATERMARK.write(builder.root, DurableWatermark("u", 1, builder.end))
    assert read(since=begin, until=end) == sum(begin <= time < end for of_segment in times.values() for time in of_segment)
    for wider in ({"since": begin - 1, "until": end}, {"since": begin, "until": end + 1}, {"since": begin}, {}):
        with pytest.raises(CorruptionError):
            read(**wider)
    for unknown in (DurableWatermark("u", 1, builder.end, verified_from=starts[-1]), DurableWatermark("u", 1, starts[2]),
                    DurableWatermark("u", 1, builder.end, ordered_from=starts[-1])):
        WATERMARK.write(builder.root, unknown)
        with pytest.raises(CorruptionError):
            read(since=begin, until=end)


def test_a_read_that_continues_begins_at_the_messages_of_its_offsets(builder, rng):
    """With queues and an offset for each: damage before their messages is not met, and each message is read once."""
    messages = list(all_messages(builder.root))
    for _ in range(200):
        has_entry = builder.end > 8000 or rng.random() < 0.9  # some entries are missing, as after a crash
        messages.append(builder.put(rng.choice(["orders", "events"]), b"y" * 50, queue_id=rng.randrange(2), dispatch=has_entry))
    topics, queues = ["orders", "events"], [0, 1]
    columns, nothing = ["physicalOffset"], {topic: dict.fromkeys(queues, 0) for topic in topics}
    with pyengine.open_store(builder.root) as store:
        for cut in sorted(rng.sample(range(len(messages)), 20)):
            offsets = {topic: dict.fromkeys(queues, 0) for topic in topics}
            for message in messages[:cut]:
                offsets[message.topic][message.queue_id] = message.queue_offset + 1
            found = store.to_arrow(topics, columns, "written", queues=queues, from_offsets=offsets).read_all()
            assert found["physicalOffset"].to_pylist() == [message.physical_offset for message in messages[cut:]], offsets
    builder.write_log(b"\xff" * 8, at=messages[1].physical_offset)
    newest = {(message.topic, message.queue_id): message.queue_offset for message in messages}
    with pyengine.open_store(builder.root) as store:
        for more, rows in ((0, 4), (1, 0)):
            offsets = {topic: {queue_id: newest[topic, queue_id] + more for queue_id in queues} for topic in topics}
            assert store.to_arrow(topics, columns, "written", queues=queues, from_offsets=offsets).read_all().num_rows == rows
            for wider in ({"from_offsets": offsets}, {"queues": queues}, {"queues": queues, "from_offsets": {"orders": offsets["orders"]}},
                          {"queues": queues, "from_offsets": offsets | {"orders": nothing["orders"]}}):
                with pytest.raises(CorruptionError):
                    store.to_arrow(topics, columns, "written", **wider).read_all()


def test_times_are_datetimes_too(builder):
    begin = datetime.fromtimestamp(START_MS / 1000, UTC)
    with pyengine.open_store(builder.root) as store:
        for since, until, rows in ((0, 10, 10), (5, 40, 35), (7, 7, 0)):
            found = store.scan(columns=["size"], since=begin + timedelta(seconds=since), until=begin + timedelta(seconds=until))
            assert sum(batch.num_rows for batch in found) == rows


def test_bodies_are_as_their_producers_had_them_if_asked(builder):
    text = b"as the producer had it " * 20
    for number in range(30):
        builder.put("packed", zlib.compress(text + b"%d" % number) if number % 3 else b"%d" % number, sys_flag=bool(number % 3))
    with pyengine.open_store(builder.root) as store:
        messages = [message for message in all_messages(builder.root) if message.topic == "packed"]
        for columns in (["body", "queueOffset"], ["sysFlag", "body"], None):
            table = store.to_arrow(["packed"], columns, decompress=True).read_all()
            assert table["body"].to_pylist() == [message.content for message in messages]
            assert table.schema == store.to_arrow(["packed"], columns).schema
            assert store.to_arrow(["packed"], columns).read_all()["body"].to_pylist() == [message.body for message in messages]
        some = store.to_arrow(["packed"], ["body"], decompress=True, from_offsets={"packed": {0: 28}}).read_all()
        assert some["body"].to_pylist() == [text + b"28", text + b"29"]
    builder.put("packed", b"no stream", sys_flag=1)
    with pyengine.open_store(builder.root) as store:
        with pytest.raises(CorruptionError, match="cannot be decompressed: .*zlib.* with decompress=False"):
            store.to_arrow(["packed"], ["body"], decompress=True).read_all()
        assert store.to_arrow(["packed"], ["size"], decompress=True).read_all().num_rows == 31


def test_pyarrow_alone_is_enough(builder):
    """The extra `arrow` does not bring numpy."""
    builder.put("packed", zlib.compress(b"text"), sys_flag=1)
    program = f"""
import sys
sys.modules["numpy"] = None
import pyengine
log = pyengine.arrow.dataset({str(builder.root)!r}, ["packed"], decompress=True)
print(log.to_table()["body"].to_pylist(), log.count_rows(), sum(part.count_rows() for part in log.splits(1000)))
with pyengine.consume({str(builder.root)!r}, "packed") as consumer:
    print(consumer.pull_arrow(decompress=True)["body"].to_pylist())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment())
    assert done.stdout == "[b'text'] 1 1\n[b'text']\n", done.stderr


def test_a_queue_that_the_store_has_not_is_an_error_unless_it_may_be_missing(builder):
    builder.put("late", b"x", queue_id=6, dispatch=False)
    with pyengine.open_store(builder.root) as store:
        for choice, says in (({"queues": [0, 9]}, "no queue 9 of the chosen topics, only 0, 1: allow_missing=True"),
                             ({"from_offsets": {"orders": {4: 0}}}, "no queue orders/4, only 0, 1: allow_missing=True"),
                             ({"from_offsets": {"order": {0: 1}}}, "names 'order', which is not among topics .did you mean orders")):
            with pytest.raises(UsageError, match=says):
                store.to_arrow(["orders", "events"], **choice)
        assert store.to_arrow(["orders"], queues=[9], from_offsets={"orders": {4: 0}}, allow_missing=True).read_all().num_rows == 0
        assert store.to_arrow(["orders", "late"], queues=[6]).read_all().num_rows == 1


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
    assert re.search(r"events\s+│\s+10 ", shown[0]) and re.search(r"orders\s+│\s+30 ", shown[0]), shown[0]
    paid = sum(number % 2 == 0 for number in range(40) if number % 4 != 3)
    assert re.search(rf"orders\s+┆ {paid}\s", shown[0]), shown[0]
    assert shown[1] == "40\n" and shown[3] == "30\n", shown
    assert re.search(r"events\s+1\s+10\n", shown[2]), shown[2]


def test_the_page_names_every_column():
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in COLUMNS)
