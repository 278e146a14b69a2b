"""The checkpointer never writes a value that is ahead of what was synced before it."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pyengine._native import lib
from pyengine.errors import DiskError, DiskFullError, FlushError
from pyengine.formats.paths import StorePaths
from pyengine.formats.small_file import Checkpoint, path_stamp
from pyengine.ipc.control_block import now_ms
from pyengine.native import control as native
from pyengine.services import flush_consume_queue
from pyengine.services.flush_consume_queue import WATERMARK_INTERVAL_NS, FlushConsumeQueueService
from pyengine.services.reput_message import ReputMessageService
from pyengine.storage.checkpoint import read_checkpoint, read_watermark, write_checkpoint
from pyengine.storage.config import EngineConfig
from pyengine.storage.config_table import TopicConfig, TopicConfigs
from pyengine.storage.durable_writes import MANY_FILES
from ready_store import SEGMENT, store_with_writer
from reported import Reported
from waiting import eventually, scaled_timeout_s


class Rig:
    """A store whose other workers are played by hand, and a record of what was synced."""

    def __init__(self, make_owner, monkeypatch, **changes) -> None:
        self.owner, self.writer = store_with_writer(make_owner, mode=native.MODE_MAPPED, segments=6)
        config = self.owner.config
        self.config = EngineConfig(**{name: getattr(config, name) for name in (
            "mapped_file_size_commit_log_bytes", "mapped_file_size_consume_queue_bytes", "max_hash_slot_num",
            "max_index_num")}, flush_interval_consume_queue_ms=1, **changes)
        self.reputter = ReputMessageService(self.owner.context(self.config))
        self.reported = Reported()
        self.synced: list[str] = []
        real = flush_consume_queue.fdatasync

        def fdatasync(descriptor, path=None):
            self.synced.append(os.path.relpath(path, self.owner.root))
            real(descriptor, path)

        monkeypatch.setattr(flush_consume_queue, "fdatasync", fdatasync)
        monkeypatch.setattr(flush_consume_queue, "WATERMARK_INTERVAL_NS", 0)
        self.service = self.make()

    def make(self) -> FlushConsumeQueueService:
        return FlushConsumeQueueService(self.owner.context(self.config, report=self.reported))

    def dispatch(self) -> None:
        while self.reputter.work():
            pass

    def flush(self) -> None:
        """What the flusher does."""
        lib.ms_control_publish_flushed(self.owner.control, self.writer.end, True)

    def round(self) -> None:
        self.service.take_settings(self.config)  # after which one is due
        self.service.work()


@pytest.fixture
def rig(make_owner, monkeypatch):
    made = Rig(make_owner, monkeypatch)
    yield made
    made.reputter.close()


@pytest.mark.parametrize("works", [True, False])
def test_many_touched_queues_are_synced_with_their_file_system_or_one_by_one(rig, monkeypatch, works):
    names = [f"consumequeue/T/{queue_id}/{0:020d}" for queue_id in range(MANY_FILES)]
    asked = []
    monkeypatch.setattr(flush_consume_queue, "sync_file_system", lambda folder: works)
    monkeypatch.setattr(flush_consume_queue, "check_written", lambda descriptor, path: asked.append(os.path.relpath(path, rig.owner.root)))
    for queue_id in range(len(names)):
        rig.writer.put(b"x", queue_id=queue_id)
    rig.dispatch()
    rig.flush()
    rig.round()
    assert sorted(asked) == (sorted(names) if works else []) and sorted(rig.synced) == ([] if works else sorted(names))
    assert read_checkpoint(rig.owner.root).logics_msg_timestamp_ms == rig.writer.clock_ms


def test_one_file_of_many_that_could_not_be_written_freezes_the_store(rig, monkeypatch):
    def fails(descriptor, path):
        raise FlushError("gone", errno=errno.EIO, path=path)

    monkeypatch.setattr(flush_consume_queue, "check_written", fails)
    for queue_id in range(MANY_FILES):
        rig.writer.put(b"x", queue_id=queue_id)
    rig.dispatch()
    rig.flush()
    rig.round()
    assert native.load(rig.owner.control.state, "frozen") and read_watermark(rig.owner.root).watermark is None


def test_only_touched_queue_files_are_synced_and_times_follow(rig):
    for queue_id in range(4):
        rig.writer.put(b"x", queue_id=queue_id)
    rig.dispatch()
    rig.flush()
    rig.round()
    assert sorted(rig.synced) == [f"consumequeue/T/{queue_id}/{0:020d}" for queue_id in range(4)]
    checkpoint = read_checkpoint(rig.owner.root)
    assert checkpoint.physic_msg_timestamp_ms == checkpoint.logics_msg_timestamp_ms == rig.writer.clock_ms
    assert read_watermark(rig.owner.root).watermark.flushed == rig.writer.end
    rig.synced.clear()
    rig.round()
    assert rig.synced == []
    rig.writer.put(b"y", queue_id=2)
    rig.dispatch()
    rig.round()
    assert rig.synced == [f"consumequeue/T/2/{0:020d}"]
    assert native.load(rig.owner.control.workers[native.CHECKPOINTER], "position") == rig.writer.end


def test_checkpoint_and_watermark_cover_only_dispatched_and_flushed_messages(rig):
    rig.writer.put(b"one")
    rig.dispatch()
    rig.flush()
    first_ms, first_end = rig.writer.clock_ms, rig.writer.end
    rig.writer.put(b"two")
    rig.round()
    checkpoint = read_checkpoint(rig.owner.root)
    assert (checkpoint.physic_msg_timestamp_ms, checkpoint.logics_msg_timestamp_ms) == (first_ms, first_ms)
    assert read_watermark(rig.owner.root).watermark.flushed == first_end
    rig.dispatch()
    rig.round()
    checkpoint = read_checkpoint(rig.owner.root)
    assert (checkpoint.physic_msg_timestamp_ms, checkpoint.logics_msg_timestamp_ms) == (first_ms, rig.writer.clock_ms)
    assert read_watermark(rig.owner.root).watermark.flushed == first_end


def test_a_time_that_waits_for_a_slow_sync_counts_once_that_is_over(rig):
    """Also in the next checkpointer, whose predecessor had synced the queues of it and was killed."""
    rig.writer.put(b"one")
    first_ms, first_end = rig.writer.clock_ms, rig.writer.end
    rig.dispatch()
    for service in (rig.service, rig.make()):
        service.take_settings(rig.config)
        service.work()
        assert read_checkpoint(rig.owner.root).physic_msg_timestamp_ms == 0
    rig.writer.put(b"two")
    lib.ms_control_publish_flushed(rig.owner.control, first_end, True)
    service.take_settings(rig.config)
    service.work()
    assert read_checkpoint(rig.owner.root).physic_msg_timestamp_ms == first_ms


def test_targets_are_read_before_the_syncs(rig, monkeypatch):
    """Whatever is published while the files are being synced belongs to the next round."""
    rig.writer.put(b"one")
    rig.dispatch()
    rig.flush()
    first_ms, first_end = rig.writer.clock_ms, rig.writer.end
    real = flush_consume_queue.fdatasync

    def fdatasync(*arguments):
        real(*arguments)
        if rig.writer.end == first_end:
            rig.writer.put(b"two")
            rig.dispatch()
            rig.flush()

    monkeypatch.setattr(flush_consume_queue, "fdatasync", fdatasync)
    rig.round()
    checkpoint = read_checkpoint(rig.owner.root)
    assert (checkpoint.physic_msg_timestamp_ms, checkpoint.logics_msg_timestamp_ms) == (first_ms, first_ms)
    assert read_watermark(rig.owner.root).watermark.flushed == first_end
    assert native.load(rig.owner.control.workers[native.CHECKPOINTER], "position") == first_end


def test_queue_files_over_several_segments_and_files_are_all_synced(rig):
    for _ in range(700):  # 300 entries a queue file
        rig.writer.put(b"x" * 200)
    assert rig.writer.end > 2 * SEGMENT
    rig.dispatch()
    rig.round()
    assert sorted(rig.synced) == [f"consumequeue/T/0/{start:020d}" for start in (0, 6000, 12000)]


def test_full_index_files_are_synced_once_and_the_last_one_at_stop(rig):
    while len(list(StorePaths(rig.owner.root).index.glob("*"))) < 3:
        rig.writer.put(b"x", properties=f"KEYS\x01k{rig.writer.end}")
        rig.dispatch()
    names = sorted(path.name for path in StorePaths(rig.owner.root).index.iterdir())
    rig.round()
    assert [name for name in rig.synced if name.startswith("index")] == [f"index/{name}" for name in names[:2]]
    index_ms = read_checkpoint(rig.owner.root).index_msg_timestamp_ms
    assert 0 < index_ms <= rig.writer.clock_ms
    rig.synced.clear()
    rig.round()
    assert not any(name.startswith("index") for name in rig.synced)
    assert not rig.service.drain()
    assert [name for name in rig.synced if name.startswith("index")] == [f"index/{names[2]}"]
    assert read_checkpoint(rig.owner.root).index_msg_timestamp_ms == index_ms


def test_a_successor_syncs_from_where_the_dead_one_had_come(rig):
    rig.writer.put(b"x", queue_id=0)
    rig.dispatch()
    rig.round()
    rig.writer.put(b"x", queue_id=1)
    rig.dispatch()
    rig.synced.clear()
    rig.service = rig.make()
    rig.round()
    assert rig.synced == [f"consumequeue/T/1/{0:020d}"]
    assert read_checkpoint(rig.owner.root).logics_msg_timestamp_ms == rig.writer.clock_ms


def test_a_failed_sync_freezes_the_store_and_leaves_the_checkpoint(rig, monkeypatch):
    rig.writer.put(b"one")
    rig.dispatch()
    rig.flush()
    rig.round()
    before = read_checkpoint(rig.owner.root), read_watermark(rig.owner.root).watermark
    rig.writer.put(b"two")
    rig.dispatch()
    rig.flush()

    def fail(descriptor, path=None):
        raise FlushError(f"fdatasync {path}", errno=errno.EIO, path=path)

    monkeypatch.setattr(flush_consume_queue, "fdatasync", fail)
    rig.round()
    assert native.load(rig.owner.control.state, "frozen") == 2
    assert rig.owner.control.state.frozen_kind == native.CHECKPOINTER
    monkeypatch.undo()
    rig.round()
    rig.service.drain()
    assert (read_checkpoint(rig.owner.root), read_watermark(rig.owner.root).watermark) == before


def test_it_sleeps_in_a_frozen_store_though_the_log_from_before_is_not_read(rig):
    for _ in range(40):
        rig.writer.put(b"x" * 2000)
    rig.flush()
    rig.service = rig.make()
    rig.service.work()
    native.freeze(rig.owner.control, native.FLUSHER, errno.EIO, "gone")
    rig.service.take_settings(replace(rig.config, flush_interval_consume_queue_ms=86_400_000))
    rig.service.work()
    assert 86_000 < rig.service.pause_s() <= 86_400


def test_a_full_disk_is_reported_once_and_got_over(rig, monkeypatch):
    rig.writer.put(b"one")
    rig.dispatch()
    rig.flush()
    real = flush_consume_queue.WATERMARK

    def full(root, watermark):
        raise DiskFullError("no room for the watermark", errno=errno.ENOSPC)

    monkeypatch.setattr(flush_consume_queue, "WATERMARK", SimpleNamespace(write=full))
    rig.round()
    rig.round()
    assert len(rig.reported) == 1 and "no room" in rig.reported[0]
    assert native.load(rig.owner.control.workers[native.CHECKPOINTER], "error_count") == 2
    monkeypatch.setattr(flush_consume_queue, "WATERMARK", real)
    rig.round()
    assert read_watermark(rig.owner.root).watermark.flushed == rig.writer.end
    assert rig.reported[1:] == ["checkpoint and watermark can be written again"]


def test_the_watermark_is_written_at_most_once_a_second_but_always_at_stop(rig, monkeypatch):
    assert WATERMARK_INTERVAL_NS == 10**9
    monkeypatch.setattr(flush_consume_queue, "WATERMARK_INTERVAL_NS", 3600 * 10**9)
    rig.writer.put(b"one")
    rig.dispatch()
    rig.flush()
    rig.round()
    first = rig.writer.end
    rig.writer.put(b"two")
    rig.dispatch()
    rig.flush()
    rig.round()
    assert read_watermark(rig.owner.root).watermark.flushed == first
    assert not rig.service.drain()
    written = read_watermark(rig.owner.root).watermark
    assert written.flushed == rig.writer.end
    assert (written.uuid, written.epoch) == (str(rig.owner.engine_id.uuid), rig.owner.memory.identity.epoch)


def test_the_worker_writes_while_it_runs_and_when_it_is_asked_to_stop(rig):
    rig.owner.use_settings(flush_interval_consume_queue_ms=10)
    child = rig.owner.spawn("pyengine.workers.checkpointer")
    rig.owner.wait_ready(native.CHECKPOINTER)
    rig.writer.put(b"one")
    rig.dispatch()
    rig.flush()
    eventually(lambda: read_checkpoint(rig.owner.root).logics_msg_timestamp_ms == rig.writer.clock_ms, "a checkpoint")
    rig.writer.put(b"two")
    rig.dispatch()
    rig.flush()
    child.terminate()
    assert child.wait(timeout=scaled_timeout_s(30)) == 0
    assert read_checkpoint(rig.owner.root).physic_msg_timestamp_ms == rig.writer.clock_ms
    assert read_watermark(rig.owner.root).watermark.flushed == rig.writer.end


def test_a_failed_write_of_the_checkpoint_names_its_file_and_leaves_the_old_one(tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_checkpoint(tmp_path, Checkpoint(1, 2, 3))
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskError, match=f"cannot write {tmp_path}/checkpoint: No space left") as failed:
        write_checkpoint(tmp_path, Checkpoint(4, 5, 6))
    assert failed.value.errno == errno.ENOSPC and read_checkpoint(tmp_path) == Checkpoint(1, 2, 3)


def test_a_topic_of_a_new_message_is_entered_in_the_same_round_and_again_after_it_was_deleted(rig):
    topics = TopicConfigs(rig.owner.root)
    rig.writer.clock_ms = now_ms() - 1000
    rig.writer.put(b"1", topic="orders", queue_id=9)
    rig.dispatch()
    rig.round()
    assert topics.read().rows == {"orders": TopicConfig("orders", 10, 1)}
    stamp = path_stamp(topics.path)
    rig.writer.put(b"2", topic="orders", queue_id=3)
    rig.dispatch()
    rig.round()
    assert path_stamp(topics.path) == stamp, "nothing had to be changed"
    topics.delete("orders")
    rig.round()
    assert topics.read().rows == {}, "no message came"
    rig.writer.clock_ms = now_ms()
    rig.writer.put(b"3", topic="orders")
    rig.dispatch()
    rig.round()
    assert topics.read().rows == {"orders": TopicConfig("orders", 1, 1)}


def test_a_topic_that_is_deleted_after_its_last_put_is_not_entered_again(rig):
    topics = TopicConfigs(rig.owner.root)
    topics.create(TopicConfig("orders"))
    rig.writer.clock_ms = now_ms() - 1000
    rig.writer.put(b"1", topic="orders")
    rig.writer.put(b"1", topic="bills")
    rig.dispatch()
    topics.delete("orders")
    rig.round()
    assert set(topics.read().rows) == {"bills"}, "the message is older than the deletion"
    rig.writer.put(b"2", topic="orders")
    rig.writer.clock_ms = now_ms()
    rig.writer.put(b"3", topic="orders", queue_id=9)
    rig.dispatch()
    rig.round()
    assert topics.read().rows["orders"] == TopicConfig("orders", 10, 1) and not topics.read().deleted


def test_a_deletion_during_a_round_is_noticed_by_the_next_one(rig, monkeypatch):
    enter, topics = TopicConfigs._enter, TopicConfigs(rig.owner.root)

    def enter_and_lose(*arguments):
        result = enter(*arguments)
        monkeypatch.undo()
        topics.delete("orders")
        return result

    monkeypatch.setattr(TopicConfigs, "_enter", enter_and_lose)
    rig.writer.clock_ms = now_ms() - 1000
    rig.writer.put(b"1", topic="orders")
    rig.dispatch()
    rig.round()
    assert not topics.read().rows
    rig.writer.clock_ms = now_ms()
    rig.writer.put(b"2", topic="orders")
    rig.dispatch()
    rig.round()
    assert topics.read().rows


def test_a_bad_topics_file_does_not_keep_the_checkpoint_from_being_written(rig):
    topics = TopicConfigs(rig.owner.root)
    topics.path.write_text("{")
    for body in (b"1", b"2"):
        rig.writer.put(body)
        rig.dispatch()
        rig.flush()
        rig.round()
    assert topics.path.read_text() == "{"
    assert len(rig.reported) == 1 and "new topics are not entered" in rig.reported[0]
    assert read_checkpoint(rig.owner.root).logics_msg_timestamp_ms == rig.writer.clock_ms
    topics.path.unlink()
    rig.writer.put(b"3")
    rig.dispatch()
    rig.round()
    assert "T" in topics.read().rows and "entered into topics.json again" in rig.reported[1]


def test_a_changed_interval_counts_at_once(rig):
    rig.service.take_settings(replace(rig.config, flush_interval_consume_queue_ms=86_400_000))
    rig.service.work()
    assert 86_000 < rig.service.pause_s() <= 86_400
    rig.service.take_settings(rig.config)
    assert rig.service.pause_s() == 0


def test_an_unlistable_folder_blocks_the_watermark_until_it_can_be_listed(rig, monkeypatch):
    def full(path):
        raise OSError(errno.ENFILE, "Too many open files in system", str(path))

    rig.writer.put(b"1", properties="KEYS\x01k")
    rig.dispatch()
    rig.flush()
    monkeypatch.setattr(os, "scandir", full)
    rig.round()
    assert "Too many open files in system" in rig.service.blocked_reason and read_watermark(rig.owner.root).watermark is None
    monkeypatch.undo()
    rig.round()
    assert not rig.service.blocked_reason and read_watermark(rig.owner.root).watermark.flushed == rig.writer.end
