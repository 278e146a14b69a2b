"""Queues and index from the log alone: as they were, whatever was lost, wherever the rebuild was killed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from damage import flip
from dying import run_and_die_at
from fix_failpoints import Interrupted, at_failpoints
from fix_golden import CLEAN, compare_inspect
from pyengine.engine_config import EngineConfig
from pyengine.errors import ExitCode, NotAStoreError, StoreRefusedError, UsageError
from pyengine.storage.check.check import check
from pyengine.storage.checkpoint import REBUILD, create_abort_file
from pyengine.storage.inspect import inspect
from pyengine.storage.message_store import MessageStore, discover
from pyengine.storage.recovery.rebuild import Selection, rebuild
from pyengine.storage.recovery.recover import recover
from pyengine.storage.recovery.report import RecoveryState
from pyengine.storage.store_reader import StoreReader

# The log lacks the records of these queues' first entries, or the store's own answer was a defect.
MORE_OR_LESS = {"cleaned", "prefill", "widetopic"}


def queue_bytes(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted((root / "consumequeue").rglob("*"))
            if path.is_file()}


def index_bytes(root: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((root / "index").iterdir())]


def queue_times(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): path.stat().st_mtime_ns
            for path in sorted((root / "consumequeue").rglob("*")) if path.is_file()}


@pytest.mark.parametrize("name", [name for name in CLEAN if name not in MORE_OR_LESS | {"empty", "cqext"}])
def test_queues_and_index_come_back_byte_for_byte_with_their_times(golden, name):
    store = golden(name)
    geometry = discover(store.root, store.sizes)
    queues, index, times = queue_bytes(store.root), index_bytes(store.root), queue_times(store.root)
    levels = store.manifest["config"].get("messageDelayLevel")
    report = rebuild(MessageStore(store.root, geometry), options=EngineConfig(message_delay_level=levels) if levels else None)
    assert (report.state, report.exit_code) == (RecoveryState.RECOVERED, ExitCode.OK)
    assert queue_bytes(store.root) == queues
    assert index_bytes(store.root) == index
    if name != "delay":  # its clock is not virtual: a mapping is dirtied, and gets its time, before its last entry
        assert queue_times(store.root) == times
    assert compare_inspect(inspect(store.root, store.manifest["config"]), store.verify) == []
    assert check(MessageStore(store.root, geometry)).findings == []
    assert REBUILD.read(store.root).record is None
    kept = store.root / "quarantine" / "rebuild-1"
    assert queue_bytes(kept) == queues and Path(report.quarantine) == kept


@pytest.mark.parametrize("name", ["cleaned", "prefill"])
def test_a_queue_that_does_not_begin_with_the_log_reads_as_before(golden, name):
    store = golden(name)
    geometry = discover(store.root, store.sizes)
    rebuild(MessageStore(store.root, geometry))
    more = ("queues", "queries") if name == "cleaned" else ()  # entries and keys of deleted records are not made
    assert compare_inspect(inspect(store.root, store.manifest["config"]), store.verify, ignore=(*more, "byTime")) == []
    assert check(MessageStore(store.root, geometry)).findings == []


def test_one_queue_alone_and_its_times(golden):
    store = golden("roll")
    geometry = discover(store.root, store.sizes)
    before, times = queue_bytes(store.root), queue_times(store.root)
    victim = next(iter(before)).rsplit("/", 1)[0]
    _, topic, queue_id = victim.split("/")
    shutil.rmtree(store.root / victim)
    index = index_bytes(store.root)
    report = rebuild(MessageStore(store.root, geometry), Selection(topic=topic, queue_id=int(queue_id), index=False))
    assert report.queues == ((topic, int(queue_id)),) and not report.index and not report.quarantine
    assert queue_bytes(store.root) == before and index_bytes(store.root) == index
    made = {name: time for name, time in queue_times(store.root).items() if name.startswith(victim + "/")}
    assert {name: time for name, time in queue_times(store.root).items() if name not in made} == {
        name: time for name, time in times.items() if name not in made}
    with StoreReader(store.root, **store.sizes) as reader:
        stored = {message.queue_offset: message.store_timestamp_ms for message in messages(reader, topic, int(queue_id))}
    per_file = geometry.mapped_file_size_consume_queue_bytes // 20
    for name, time_ns in made.items():
        first = int(name.rsplit("/", 1)[1]) // 20
        assert time_ns == stored[min(first + per_file - 1, max(stored))] * 1_000_000


def messages(reader, topic, queue_id):
    at, end = reader.queue_range(topic, queue_id)
    while at < end:
        found = reader.get_message(topic, queue_id, at)
        yield from found.messages
        at = found.next_begin_offset


def test_times_make_look_ups_by_time_find_the_message(build_store):
    store = build_store(200)
    recover(MessageStore(store.root, store.geometry))
    shutil.rmtree(store.root / "consumequeue")
    rebuild(MessageStore(store.root, store.geometry))
    with StoreReader(store.root, **sizes(store)) as reader:
        for topic, queue_ids in reader.topics().items():
            for queue_id in queue_ids:
                for message in messages(reader, topic, queue_id):
                    assert reader.offset_by_time(topic, queue_id, message.store_timestamp_ms) == message.queue_offset


def sizes(store):
    return {name: getattr(store.geometry, name) for name in (
        "mapped_file_size_commit_log_bytes", "mapped_file_size_consume_queue_bytes", "max_hash_slot_num", "max_index_num")}


@pytest.fixture
def stopped(build_store):
    """A store of ours, stopped in order, nothing wrong."""
    store = build_store(120)
    recover(MessageStore(store.root, store.geometry))
    return store


@pytest.mark.parametrize("spoil", ["wrong length", "foreign file", "wrong entry", "gone", "folder in it", "a file"])
def test_a_damaged_queue_is_replaced(stopped, spoil):
    before = queue_bytes(stopped.root)
    folder = stopped.root / "consumequeue" / "topic-0" / "0"
    file = folder / f"{0:020d}"
    if spoil == "wrong length":
        os.truncate(file, 100)
    elif spoil == "foreign file":
        (folder / "notes.txt").write_text("mine")
    elif spoil == "wrong entry":
        flip(file, 3)
    elif spoil in ("gone", "a file"):
        shutil.rmtree(folder)
        if spoil == "a file":
            folder.write_text("mine")
            kinds = {finding.kind for finding in check(MessageStore(stopped.root, stopped.geometry)).findings}
            assert kinds == {"missing queue"}, "its advice is this rebuild"
    else:
        (folder / "subfolder").mkdir()
    report = rebuild(MessageStore(stopped.root, stopped.geometry), Selection(topic="topic-0", queue_id=0, index=False))
    assert report.exit_code is ExitCode.OK
    assert queue_bytes(stopped.root) == before
    assert check(MessageStore(stopped.root, stopped.geometry)).findings == []


def test_the_index_alone_is_made_again_and_queues_stay(stopped):
    before, queues = index_bytes(stopped.root), queue_times(stopped.root)
    for path in (stopped.root / "index").iterdir():
        path.write_bytes(b"nonsense")
    report = rebuild(MessageStore(stopped.root, stopped.geometry), Selection(queues=False))
    assert report.index and report.queues == () and report.replaced == ("index",)
    assert index_bytes(stopped.root) == before and queue_times(stopped.root) == queues


def test_a_queue_that_the_log_no_longer_knows_keeps_its_place(stopped):
    lost = stopped.root / "consumequeue" / "old" / "3"
    shutil.copytree(stopped.root / "consumequeue" / "topic-0" / "0", lost)
    before = queue_bytes(stopped.root)
    report = rebuild(MessageStore(stopped.root, stopped.geometry))
    assert report.kept == (("old", 3),)
    assert queue_bytes(stopped.root) == before


def test_an_unknown_topic_is_a_usage_error_and_changes_nothing(stopped):
    before = picture(stopped.root)
    with pytest.raises(UsageError, match="nobody, queue 7"):
        rebuild(MessageStore(stopped.root, stopped.geometry), Selection(topic="nobody", queue_id=7))
    assert picture(stopped.root) == before
    with pytest.raises(NotAStoreError):
        rebuild(MessageStore(stopped.root / "elsewhere", stopped.geometry))


def test_a_broken_queue_that_is_not_asked_for_is_refused_before_anything_changes(stopped):
    os.truncate(stopped.root / "consumequeue" / "topic-1" / "0" / f"{0:020d}", 100)
    before = picture(stopped.root)
    with pytest.raises(StoreRefusedError, match="topic-1"):
        rebuild(MessageStore(stopped.root, stopped.geometry), Selection(topic="topic-0"))
    assert picture(stopped.root) == before


@pytest.mark.parametrize("place", ["consumequeue", "consumequeue_ext", "index"])
def test_a_file_in_the_place_of_a_folder_is_refused_before_anything_changes(stopped, place):
    shutil.rmtree(stopped.root / place, ignore_errors=True)
    (stopped.root / place).write_text("mine")
    before = picture(stopped.root)
    with pytest.raises(StoreRefusedError, match=f"{place} is a file where a folder belongs; move it away"):
        rebuild(MessageStore(stopped.root, stopped.geometry))
    assert picture(stopped.root) == before


def test_damage_below_the_watermark_is_refused_and_nothing_changed(stopped):
    damaged = stopped.records[3]
    flip(stopped.root / "commitlog" / f"{0:020d}", damaged.start + 4)
    before = picture(stopped.root)
    report = rebuild(MessageStore(stopped.root, stopped.geometry))
    assert (report.state, report.exit_code, report.damage_offset) == (
        RecoveryState.DEGRADED, ExitCode.CORRUPTION, damaged.start)
    assert picture(stopped.root) == before


def picture(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_store_that_was_not_stopped_in_order_is_recovered_by_the_way(stopped):
    before = queue_bytes(stopped.root)
    shutil.rmtree(stopped.root / "consumequeue")
    create_abort_file(stopped.root)
    report = rebuild(MessageStore(stopped.root, stopped.geometry))
    assert report.recovery is not None and report.recovery.path.value == "abnormal"
    assert queue_bytes(stopped.root) == before
    assert not (stopped.root / "abort").exists()


SYSTEM_CALLS = ("rename", "unlink", "rmdir", "fsync", "ftruncate", "utime", "mkdir")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("then", [rebuild, pytest.param(recover, marks=pytest.mark.ci)])
def test_killed_anywhere_it_is_finished_by_the_next_run_or_the_next_start(build_store, tmp_path, then, rng, request):
    stopped = build_store(50)
    recover(MessageStore(stopped.root, stopped.geometry))
    before, index = queue_bytes(stopped.root), index_bytes(stopped.root)
    flip(stopped.root / "consumequeue" / "topic-0" / "0" / f"{0:020d}", 3)
    wrong, times = queue_bytes(stopped.root), queue_times(stopped.root)
    stride = 1 if request.config.run_long else 6
    done, step, unchanged = False, rng.randrange(stride), 0
    while not done:
        root = tmp_path / f"copy-{step}"
        shutil.copytree(stopped.root, root)
        done = run_and_die_at(step, lambda: rebuild(MessageStore(root, stopped.geometry)), SYSTEM_CALLS)
        then(MessageStore(root, stopped.geometry))
        if then is recover and queue_bytes(root) == wrong:
            unchanged += 1  # killed before anything was to be made again
        else:
            assert queue_bytes(root) == before and index_bytes(root) == index, step
            assert check(MessageStore(root, stopped.geometry)).findings == [], step
            assert all(queue_times(root)[name] <= time for name, time in times.items()), step
        assert REBUILD.read(root).record is None and not (root / "config" / "recovery").exists()
        shutil.rmtree(root)
        step += stride
    assert step > 20 and unchanged < 10


def test_a_rebuild_of_the_whole_store_continues_a_killed_rebuild_of_one_queue(stopped):
    before = queue_bytes(stopped.root)
    first = Selection(topic="topic-0", queue_id=0, index=False)
    assert not run_and_die_at(30, lambda: rebuild(MessageStore(stopped.root, stopped.geometry), first), SYSTEM_CALLS)
    report = rebuild(MessageStore(stopped.root, stopped.geometry))
    assert queue_bytes(stopped.root) == before
    assert Path(report.quarantine).name == "rebuild-1"
    assert queue_bytes(Path(report.quarantine)) == before


def test_a_start_that_ends_a_killed_rebuild_makes_light_queues_again_too(builder):
    for number in range(3):
        properties = {"INNER_MULTI_DISPATCH": "%LMQ%a", "INNER_MULTI_QUEUE_OFFSET": str(number)}
        builder.put("T", b"%d" % number, dispatch=False, properties=properties)
    store = MessageStore(builder.root, builder.geometry)
    recover(store, options=EngineConfig(enable_multi_dispatch=True))
    before = queue_bytes(builder.root)
    assert len(before) == 2

    def cut(step: str) -> None:
        if step == "recovery_log_done":
            raise Interrupted

    with pytest.raises(Interrupted), at_failpoints(cut):
        rebuild(store)
    assert not queue_bytes(builder.root)
    recover(store)
    assert queue_bytes(builder.root) == before
