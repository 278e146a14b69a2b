"""Links in a circle, pipes and folders where files belong: told or passed over, and nothing waits for them."""

from __future__ import annotations

import os

import pytest

import pyengine
from pyengine.errors import DiskError, StoreRefusedError
from pyengine.storage.check.check import check
from pyengine.storage.inspect import inspect
from pyengine.storage.mapped_file import index_file_names
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.recover import recover


@pytest.fixture
def store(builder):
    for number in range(12):
        builder.put("T", b"x" * 100, keys=f"k{number}")
    return builder


def read(store):
    with pyengine.open_store(store.root, **settings(store)) as reader:
        assert reader.topics() == {"T": [0]}
        assert len(reader.query_message("T", "k3")) == 1
        return len(reader.get_message("T", 0, 0, max_messages=32).messages)  # to the end of the queue's first file


def settings(store):
    return {name: str(getattr(store.geometry, name)) for name in ("max_hash_slot_num", "max_index_num")}


@pytest.mark.parametrize("folder", [".", "consumequeue", "consumequeue/T", "config", "index"])
def test_links_that_lead_nowhere_are_passed_over(store, folder):
    for name in ("0circle", "20991231235959999", "7"):
        os.symlink(name, store.root / folder / name)
    os.symlink("nowhere", store.root / folder / "dangling")
    assert check(MessageStore(store.root, store.geometry)).exit_code == 0
    assert recover(MessageStore(store.root, store.geometry)).queue_ends == {("T", 0): 12}
    assert read(store) == 10
    assert inspect(store.root, {})["facts"]


@pytest.mark.parametrize("folder", ["commitlog", "consumequeue/T/0"])
def test_a_link_in_a_circle_among_segments_is_refused_with_its_name(store, folder):
    os.symlink("00000000000000009999", store.root / folder / "00000000000000009999")
    with pytest.raises(StoreRefusedError, match="00000000000000009999 does not belong there"):
        recover(MessageStore(store.root, store.geometry))


@pytest.mark.parametrize("stray", ["commitlog/00000000000000000000~", "consumequeue/T/0/x.swp"])
def test_a_stray_file_that_comes_among_segments_ends_no_reader_and_is_named_to_who_opens_the_store(store, stray):
    with pyengine.open_store(store.root, **settings(store)) as early:
        before = early.get_message("T", 0, 0, max_messages=32).messages
        (store.root / stray).touch()
        assert before and early.get_message("T", 0, 0, max_messages=32).messages == before
    with pytest.raises(StoreRefusedError, match=f"{stray} does not belong there"):
        read(store)
    with pytest.raises(StoreRefusedError, match=f"{stray} does not belong there"):
        recover(MessageStore(store.root, store.geometry))


def test_a_pipe_or_a_folder_in_the_index_keeps_no_reader_waiting(store):
    os.mkfifo(store.root / "index" / "20991231235959999")
    os.mkfifo(store.root / "index" / "x")
    (store.root / "index" / "20991231235959998").mkdir()
    (store.root / "index" / "00000000000000000001").touch()
    assert index_file_names(store.root / "index") == ["20260101000000000"]
    assert inspect(store.root, {})["facts"] and recover(MessageStore(store.root, store.geometry)).queue_ends == {("T", 0): 12}
    assert read(store) == 10


def test_a_folder_whose_number_begins_with_zeros_is_no_queue(store):
    folder = store.root / "consumequeue" / "T" / "00000000000001048576"
    folder.mkdir()
    (folder / "00000000000000000000").write_bytes(bytes(200))
    assert read(store) == 10
    assert recover(MessageStore(store.root, store.geometry)).queue_ends == {("T", 0): 12}


@pytest.mark.parametrize("number", [2**31, 2**32, 9_999_999_999])
def test_a_folder_whose_number_no_record_can_have_is_no_queue(store, number):
    folder = store.root / "consumequeue" / "T" / str(number)
    folder.mkdir()
    (folder / "00000000000000000000").write_bytes(bytes(store.geometry.mapped_file_size_consume_queue_bytes))
    assert check(MessageStore(store.root, store.geometry)).exit_code == 0
    assert recover(MessageStore(store.root, store.geometry)).queue_ends == {("T", 0): 12}
    assert read(store) == 10


def test_a_checkpoint_that_is_a_folder_is_an_error(store):
    (store.root / "checkpoint").unlink()
    (store.root / "checkpoint").mkdir()
    with pytest.raises(DiskError, match="cannot read .*checkpoint"):
        inspect(store.root, {})
    with pytest.raises(DiskError, match="checkpoint"):
        recover(MessageStore(store.root, store.geometry))


def test_a_log_that_is_shorter_than_its_queues_is_noted(store):
    """RocketMQ's own store, stopped in order: nothing else knows that there had been more."""
    size = store.geometry.mapped_file_size_commit_log_bytes
    with open(store.root / "commitlog" / "00000000000000000000", "r+b") as log:
        log.seek(1000)
        log.write(bytes(size - 1000))
    report = recover(MessageStore(store.root, store.geometry))
    assert report.queue_entries_removed > 0
    assert any("queue entries named messages after the end of the log" in note for note in report.notes)
