"""A slave writes its master's tables once the log that they refer to is durable on the slave."""

from __future__ import annotations

import os
import threading

import pytest

from pyengine.formats.consume_queue import ENTRY
from pyengine.formats.delayed_message import DelayMark
from pyengine.services.replication import ha_stream
from pyengine.services.replication.ha_stream import TABLES, WAITING_MAX, TableSink, TableSource
from pyengine.storage.config import EngineConfig
from pyengine.storage.config_table import SubscriptionGroup, SubscriptionGroups, TopicConfig, TopicConfigs
from pyengine.storage.consumer_offset import ConsumerOffsets, DelayCancels, DelayOffsets
from pyengine.storage.message_store import MessageStore
from pyengine.storage.queue_ends import decode_queue_ends
from reported import Reported

TOPICS, GROUPS, OFFSETS, DELAYS, CANCELS, ENDS = range(6)


class Sides:
    """A master's files, a slave's, and what goes between them."""

    def __init__(self, folder) -> None:
        self.master, self.slave = folder / "master", folder / "slave"
        for root in (self.master, self.slave):
            (root / "config").mkdir(parents=True)
        self.end = self.flushed = 0
        self.reported = Reported()
        self.dispatched = 0
        self.source = TableSource(MessageStore(self.master, EngineConfig(mapped_file_size_consume_queue_bytes=4000).geometry),
                                  lambda: self.end, lambda: self.dispatched, self.reported)
        self.sink = TableSink(self.slave, lambda: self.flushed, self.reported)

    def carry(self) -> list[int]:
        """Everything that is new goes over; the kinds."""
        before = dict(self.source.tables)
        self.source.reload()
        new = [table for kind, table in self.source.tables.items() if before.get(kind) is not table]
        for table in new:
            self.sink.take(*table)
        return [table.kind for table in new]


@pytest.fixture
def sides(tmp_path) -> Sides:
    return Sides(tmp_path)


def test_a_slave_has_its_masters_topics_groups_and_offsets(sides):
    TopicConfigs(sides.master).create(TopicConfig("orders", 3, 3))
    SubscriptionGroups(sides.master).enter(SubscriptionGroup("billing"))
    ConsumerOffsets(sides.master).commit("orders", "billing", {0: 7, 2: 9})
    DelayOffsets(sides.master).write({1: 4, 18: 2})
    assert sides.carry() == [TOPICS, GROUPS, OFFSETS, DELAYS]
    sides.sink.apply()
    assert TopicConfigs(sides.slave).read().rows["orders"].read_queue_nums == 3
    assert "billing" in SubscriptionGroups(sides.slave).read().rows
    assert ConsumerOffsets(sides.slave).read("orders", "billing") == {0: 7, 2: 9}
    assert DelayOffsets(sides.slave).read() == ({1: 4, 18: 2}, "")
    assert sides.reported == []


def test_only_changed_tables_are_sent_again(sides):
    offsets = ConsumerOffsets(sides.master)
    offsets.commit("T", "g", {0: 1})
    assert sides.carry() == [OFFSETS] and sides.carry() == []
    offsets.commit("T", "g", {0: 2})
    assert sides.carry() == [OFFSETS]


def test_a_table_waits_until_its_bytes_of_the_log_are_durable(sides):
    for number in range(1, WAITING_MAX + 3):
        DelayOffsets(sides.master).write({1: number})
        sides.end = number * 100
        assert sides.carry() == [DELAYS]
    delays = DelayOffsets(sides.slave)
    sides.sink.apply()
    assert delays.read() == ({}, "")
    sides.flushed = (WAITING_MAX + 1) * 100 + 50
    sides.sink.apply()
    assert delays.read() == ({1: WAITING_MAX + 1}, ""), "the newest whose bytes are there"
    sides.flushed += 100
    sides.sink.apply()
    assert delays.read() == ({1: WAITING_MAX + 2}, "")


def test_groups_that_the_master_does_not_have_stay_on_the_slave(sides):
    ConsumerOffsets(sides.slave).commit("T", "own", {0: 3})
    ConsumerOffsets(sides.slave).commit("T", "both", {0: 3, 1: 3})
    ConsumerOffsets(sides.master).commit("T", "both", {0: 2})
    sides.carry()
    sides.sink.apply()
    assert ConsumerOffsets(sides.slave).groups() == {("T", "own"): {0: 3}, ("T", "both"): {0: 2}}


def test_a_topic_that_was_deleted_on_the_master_is_deleted_on_the_slave(sides):
    topics = TopicConfigs(sides.master)
    topics.create(TopicConfig("old"))
    topics.create(TopicConfig("new"))
    sides.carry()
    sides.sink.apply()
    topics.delete("old")
    sides.carry()
    sides.sink.apply()
    assert set(TopicConfigs(sides.slave).read().rows) == {"new"}


def test_an_empty_file_of_the_master_is_left_out(sides):
    """As a power cut leaves what a broker wrote: a link ends at a table without bytes."""
    (sides.master / "config" / "topics.json").touch()
    ConsumerOffsets(sides.master).commit("T", "g", {0: 1})
    assert sides.carry() == [OFFSETS] and sides.reported == []
    TopicConfigs(sides.master).create(TopicConfig("orders", 3, 3))
    assert sides.carry() == [TOPICS]


def test_unchanged_tables_are_not_written_again(sides):
    TopicConfigs(sides.master).create(TopicConfig("T"))
    ConsumerOffsets(sides.master).commit("T", "g", {0: 1})
    sides.carry()
    sides.sink.apply()
    paths = [sides.slave / "config" / TABLES[kind][0] for kind in (TOPICS, OFFSETS)]
    before = [os.stat(path).st_ino for path in paths]
    for table in sides.source.tables.values():  # a new connection
        sides.sink.take(*table)
    sides.sink.apply()
    assert [os.stat(path).st_ino for path in paths] == before


@pytest.mark.parametrize("kind", [TOPICS, GROUPS, OFFSETS, DELAYS, ENDS])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]"])
def test_a_table_of_the_master_that_cannot_be_parsed_is_reported_and_left_out(sides, kind, content):
    path = sides.slave / "config" / TABLES[kind][0]
    sides.sink.take(kind, content, 0)
    sides.sink.apply()
    assert not path.exists()
    assert f"the master's {TABLES[kind][0]} cannot be used" in sides.sink.blocked.text


def test_a_table_that_cannot_be_written_is_tried_again(sides):
    DelayOffsets(sides.master).write({1: 4})
    sides.carry()
    (sides.slave / "config").rmdir()
    (sides.slave / "config").touch()
    sides.sink.apply()
    assert "delayOffset.json cannot be written here" in sides.sink.blocked.text
    (sides.slave / "config").unlink()
    sides.sink.apply()
    assert sides.sink.blocked.text == "" and DelayOffsets(sides.slave).read() == ({1: 4}, "")


def test_a_kind_of_a_later_version_is_left_out(sides):
    sides.sink.take(len(TABLES), b"{}", 0)
    sides.sink.apply()
    assert os.listdir(sides.slave / "config") == []


def test_of_two_threads_that_reload_none_keeps_an_older_content(sides, monkeypatch):
    """A master's stop reloads beside the thread that does so each second."""
    TopicConfigs(sides.master).create(TopicConfig("old"))
    real, other = ha_stream.read_small_file, threading.Thread(target=sides.source.reload)

    def read(*arguments):
        content = real(*arguments)
        if other.ident is None:
            TopicConfigs(sides.master).create(TopicConfig("new"))
            other.start()
            other.join(0.2)
        return content

    monkeypatch.setattr(ha_stream, "read_small_file", read)
    sides.source.reload()
    other.join()
    assert b'"new"' in sides.source.tables[TOPICS].content


def test_a_slave_has_the_marks_of_cancelled_messages(sides):
    cancels = DelayCancels(sides.master)
    mark = DelayMark(4096, 1_700_000_000_000, 1, 7, 0)
    assert sides.carry() == [] and cancels.cancel(mark) and sides.carry() == [CANCELS]
    sides.sink.apply()
    slave = DelayCancels(sides.slave)
    path = sides.slave / "config" / TABLES[CANCELS][0]
    before = path.read_bytes()
    cancels.take(1, 9, 0)
    assert sides.carry() == [], "what is taken changes with each delivery, and is each side's own"
    cancels.cancel(mark._replace(physical_offset=8192, queue_offset=9))
    assert sides.carry() == [CANCELS]
    sides.sink.apply()
    assert path.read_bytes() != before and path.stat().st_mode & 0o777 == 0o600
    slave.take(1, 9, 0)
    assert slave.is_cancelled(mark.id)
    cancels.close(), slave.close()


def test_the_ends_of_queues_are_read_for_a_new_slave_once_they_have_all_that_it_lacks(sides):
    folder = sides.master / "consumequeue" / "T" / "3"
    folder.mkdir(parents=True)
    (folder / f"{0:020d}").write_bytes((ENTRY.pack(100, 50, 0) * 7).ljust(4000, b"\0"))
    sides.source.read_queue_ends()
    sides.end, sides.dispatched = 900, 399
    sides.source.want_queue_ends(400)
    sides.source.read_queue_ends()
    assert ENDS not in sides.source.tables
    sides.dispatched = 400
    sides.source.read_queue_ends()
    table = sides.source.tables[ENDS]
    assert table.end == 900 and decode_queue_ends(table.content.decode()) == (900, {("T", 3): 7})
    sides.source.read_queue_ends()
    assert sides.source.tables[ENDS] is table, "until the next slave"
    (folder / f"{0:020d}").write_bytes(b"short")
    sides.source.want_queue_ends(400)
    sides.source.read_queue_ends()
    sides.source.reload()
    assert "the ends of queues are not sent to slaves" in sides.reported[-1]
    (folder / f"{0:020d}").write_bytes((ENTRY.pack(100, 50, 0) * 8).ljust(4000, b"\0"))
    sides.source.read_queue_ends()
    assert decode_queue_ends(sides.source.tables[ENDS].content.decode()) == (900, {("T", 3): 8})
