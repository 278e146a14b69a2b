"""The statistics of a whole engine: what producers did shows in `status`, also after workers and supervisor died."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pyengine
from fix_cli import run
from fix_engine import EACH_MODE
from pyengine.cli.engine_status import engine_status
from pyengine.ipc import statistics
from waiting import eventually

DOCS = Path(__file__).parents[2] / "docs"


def figures(engine) -> dict:
    return engine_status(engine.root, {})["statistics"]


def put(engine, messages: int, topic: str = "orders") -> None:
    with pyengine.connect(engine.root) as producer:
        for number in range(messages):
            assert producer.put(topic, b"%d" % number, keys="k").ok


@pytest.mark.parametrize("mode", EACH_MODE)
def test_status_shows_counts_of_puts_flushes_and_dispatches(make_engine, mode):
    engine = make_engine(mode)
    engine.start()
    assert figures(engine)["put_latency_99_ms"] is None
    put(engine, 20)
    put(engine, 3, topic="bills")
    eventually(lambda: figures(engine)["topics"].keys() == {"orders", "bills"}
               and figures(engine)["dispatch_messages_total"] == 23, "everything is dispatched and counted")
    eventually(lambda: figures(engine)["sync_times_total"], "it is flushed")
    shown = eventually(lambda: (now := figures(engine))["put_tps"]["10s"] and now, "the supervisor has sampled it")
    assert (shown["put_message_times_total"], shown["put_entries_total"], shown["put_message_failed_times"]) == (23, 23, 0)
    assert shown["topics"]["orders"]["topic_put_nums"] == 20 and shown["topics"]["bills"]["topic_put_nums"] == 3
    assert sum(each["topic_put_size_bytes"] for each in shown["topics"].values()) == shown["put_message_size_total_bytes"]
    assert shown["dispatch_index_keys_total"] >= 23 and shown["out_of_order"] == 0
    assert 0 < shown["put_latency_50_ms"] <= shown["put_latency_999_ms"] <= shown["put_message_entire_time_max_ms"]
    assert sum(shown["put_message_distribute_time"].values()) == 23
    assert 0 < shown["commit_log_disk_ratio"] < 1
    text = run("status", engine.root).stdout
    assert "puts/s" in text and "put time" in text and "out of order" not in text
    assert engine.stop()
    assert engine_status(engine.root, {})["statistics"] is None


def test_counters_and_samples_survive_every_death(make_engine):
    engine = make_engine()
    engine.start()
    put(engine, 5)
    for kind in ("writer", "reputter", "flusher"):
        incarnation = engine.incarnation(kind)
        engine.kill(kind)
        engine.wait_back(kind, incarnation)
    put(engine, 5)
    eventually(lambda: figures(engine)["topics"]["orders"]["topic_put_nums"] == 10, "all are counted")
    assert figures(engine)["put_message_times_total"] == 10
    with engine.memory() as memory:
        before = memory.open_store_stats().history.samples
    engine.kill("supervisor")
    eventually(lambda: "supervisor" not in engine.pids(), "the supervisor is gone")
    engine.start()
    with engine.memory() as memory:
        history = memory.open_store_stats().history
        eventually(lambda: history.samples > before, "the successor samples on")
    assert figures(engine)["put_message_times_total"] == 10


def test_a_new_start_counts_from_nothing(make_engine):
    engine = make_engine()
    engine.start()
    put(engine, 5)
    engine.kill_all()
    engine.start()
    assert figures(engine)["put_message_times_total"] == 0
    assert figures(engine)["topics"] == {} and figures(engine)["put_entries_total"] == 0


def test_every_figure_of_the_statistics_is_on_their_page(make_owner):
    owner = make_owner()
    owner.publish()
    shown = statistics.document(statistics.read_statistics(owner.memory))
    page = (DOCS / "statistics.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", page)) | {"topics"}
    assert shown.keys() <= named, shown.keys() - named


def test_a_reader_counts_its_gets(make_engine):
    engine = make_engine()
    engine.start()
    put(engine, 3)
    with pyengine.open_store(engine.root) as store:
        assert store.wait_for_message("orders", 0, 2, 30)
        messages = store.get_message("orders", 0, 0).messages
        store.get_message("orders", 0, 3)
        store.get_message("nobody", 0, 0)
        assert (store.gets.found, store.gets.missed, store.gets.transferred_messages) == (1, 2, 3)
        assert store.gets.transferred_bytes == sum(message.size_bytes for message in messages)
        assert store.gets.entire_time_max_ms > 0


def test_delayed_messages_that_wait_are_shown_by_level(make_engine):
    engine = make_engine()
    engine.start()
    assert engine_status(engine.root, {})["schedule_message_offset"] == {}
    with pyengine.connect(engine.root) as producer:
        for level in (18, 18, 17):
            assert producer.put("orders", b"later", delay_level=level).ok
    assert engine_status(engine.root, {})["schedule_message_offset"] == {
        "17": {"offset": 0, "max": 1, "pending": 1}, "18": {"offset": 0, "max": 2, "pending": 2}}
    text = run("metrics", engine.root, "--once").stdout
    assert 'pyengine_schedule_pending_messages{level="18"} 2.0' in text
