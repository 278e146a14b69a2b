"""Statistics of messages: by queue, topic, hour and day they are what the pure-Python parser counts, however the log is cut."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from damage import flip
from fix_cli import run
from fix_golden import unpack
from pyengine.errors import UsageError
from pyengine.formats.paths import StorePaths
from pyengine.formats.record import Message
from pyengine.spark.jobs import BY, collect_stats, stats
from spark import oracle
from spark.logs import write_log

pytestmark = [pytest.mark.spark, pytest.mark.java]

HOUR_MS = 3_600_000
FIGURES = {
    "messages": len,
    "body_bytes": lambda mine: sum(len(m.body) for m in mine),
    "bytes": lambda mine: sum(m.size_bytes for m in mine),
    "largest": lambda mine: max(m.size_bytes for m in mine),
    "delayed": lambda mine: sum("DELAY" in m.properties for m in mine),
    "transactional": lambda mine: sum(m.sys_flag & 0xC != 0 for m in mine),
    "compressed": lambda mine: sum(m.sys_flag & 1 for m in mine),
    "retried": lambda mine: sum(m.reconsume_times > 0 for m in mine),
    "first_timestamp_ms": lambda mine: min(m.store_timestamp_ms for m in mine),
    "last_timestamp_ms": lambda mine: max(m.store_timestamp_ms for m in mine),
}


def keys_of(by: str, m: Message) -> tuple[str, int | None, int | None]:
    """(topic, queue id, beginning of the hour or day) as a row of these statistics has them."""
    step_ms = {"hour": HOUR_MS, "day": 24 * HOUR_MS}.get(by)
    return m.topic, m.queue_id if by == "queue" else None, step_ms and m.store_timestamp_ms // step_ms * step_ms


def counted(messages: list[Message], by: str) -> list[tuple]:
    """Return the expected rows in order."""
    groups = defaultdict(list)
    for message in messages:
        groups[keys_of(by, message)].append(message)
    found = []
    for key, mine in sorted(groups.items()):
        offsets = [m.queue_offset for m in mine] if by == "queue" else []
        found.append((*key, *(figure(mine) for figure in FIGURES.values()), min(offsets, default=None),
                      max(offsets, default=None)))
    return found


def collected(spark, root: Path, by: str, **options: object) -> list[tuple]:
    return [(row.topic, row.queue_id, row.time_ms, *(getattr(row, name) for name in FIGURES), row.first_offset, row.last_offset)
            for row in collect_stats(spark, root, by=by, **options)]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A log of three days with every kind of message that is counted apart."""
    place = tmp_path_factory.mktemp("stats")
    kinds = [{}, {"properties": "DELAY\x013\x02"}, {"sys_flag": 4}, {"sys_flag": 8 | 1}, {"sys_flag": 12},
             {"reconsume_times": 2}, {"properties": "TAGS\x01a\x02"}]
    write_log(place, [{
        "topic": f"T{n % 3}", "queue_id": n % 2, "queue_offset": n // 6, "body": b"x" * (n % 50),
        "store_timestamp_ms": 1_700_000_000_123 + n * 11 * 60_000, **kinds[n % len(kinds)],
    } for n in range(300)])
    return place


@pytest.mark.parametrize("by", [pytest.param(by, marks=[pytest.mark.long] * (by != "hour")) for by in BY])
def test_rows_of_message_stats_equal_the_counts_of_the_parser(spark, root, by):
    wanted = counted(oracle.log_messages(root), by)
    assert len(wanted) >= 3
    assert collected(spark, root, by, maxPartitionBytes=5000, batchRows=7, verifyCRC=True) == wanted


@pytest.mark.long
@pytest.mark.parametrize("most", [1, 311, 4096, 1 << 20])
@pytest.mark.parametrize("recipe", ["pool-roll", "delay", "tx", "lmq", "ipv6", "cleaned"])
def test_golden_stores_in_parts_of_any_size(spark, tmp_path, recipe, most):
    store = unpack(recipe, tmp_path)
    size_bytes = sum(path.stat().st_size for path in (store / "commitlog").iterdir())
    for by in BY:
        wanted = counted(oracle.log_messages(store), by)
        assert collected(spark, store, by, maxPartitionBytes=max(most, size_bytes // 20)) == wanted


def test_rows_that_a_condition_chooses_are_counted(spark, root):
    wanted = counted([m for m in oracle.log_messages(root) if m.properties.get("TAGS") == "a"], "queue")
    assert len(wanted) > 1
    assert collected(spark, root, "queue", sql="TAGS = 'a'", maxPartitionBytes=5000) == wanted
    assert collected(spark, root, "queue", tags="a", minPartitions=3) == wanted


def test_a_count_is_one_job_of_one_stage_however_often_its_rows_are_used(spark, root):
    context = spark.sparkContext
    context.setJobGroup("one stage", "")
    try:
        rows = stats(spark, root, by="topic", minPartitions=3, maxPartitionBytes=5000)
        assert sum(row.messages for row in rows.collect()) == sum(row.messages for row in rows.collect()) == 300
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)
    tracker = context.statusTracker()
    [job] = tracker.getJobIdsForGroup("one stage")
    assert len(tracker.getJobInfo(job).stageIds) == 1


def test_wrong_options_and_damage_are_errors(spark, root, tmp_path):
    with pytest.raises(UsageError, match="by 'week': choose one of queue, topic, hour, day"):
        stats(spark, root, by="week")
    assert stats(spark, root, ["nobody"], allowMissing=True).collect() == []
    offsets = write_log(tmp_path, [{"topic": "T", "body": b"x" * 300}] * 60)
    flip(StorePaths(tmp_path).commit_log_segment(4096), offsets[15] - 4096 + 120)  # in a body
    assert sum(row.messages for row in collect_stats(spark, tmp_path)) == 60
    with pytest.raises(Exception, match="the log is damaged at"):
        collect_stats(spark, tmp_path, verifyCRC=True)
    assert sum(row.messages for row in collect_stats(spark, tmp_path, verifyCRC=True, onCorrupt="skip")) == 59


def test_the_stats_command_counts_by_hour(spark, root):
    messages = oracle.log_messages(root)
    done = run("stats", root, "--by", "hour", "--topic", "T1", "--allow-missing", "--json")  # of a log without queues
    assert done.code == 0, done.stderr
    mine = [m for m in messages if m.topic == "T1" and m.sys_flag & 0xC in (0, 8)]  # of a topic, what its consumers see
    assert (done.document["by"], done.document["messages"]) == ("hour", len(mine))
    assert [(row["time_ms"], row["messages"]) for row in done.document["rows"]] == \
        [(row[2], row[3]) for row in counted(mine, "hour")]
    table = run("stats", root).stdout
    assert "T0" in table and "T2" in table and "300 messages" in table
    assert "2023-11-14T22 " in run("stats", root, "--by", "hour").stdout and " 2023-11-14 " in run("stats", root, "--by", "day").stdout
    assert run("stats", root / "nothing").code == 2


def test_the_stats_command_counts_in_the_log_folders_that_it_is_given(spark, tmp_path):
    offsets = write_log(tmp_path / "store", [{"topic": "T", "body": bytes(500)} for _ in range(40)])
    (tmp_path / "archive").mkdir()
    first = StorePaths(tmp_path / "store").commit_log_segment(0)
    first.rename(tmp_path / "archive" / first.name)
    done = run("stats", tmp_path / "store", "--json", "--set", f"read_only_commit_log_store_paths={tmp_path / 'archive'}")
    assert done.code == 0 and done.document["messages"] == len(offsets), done.stderr
