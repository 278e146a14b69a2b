"""A backup of a store that works, and the store made from it again: whole, with what consumers and delay levels noted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

import pyengine
from fix_cli import run
from fix_engine import EACH_MODE, SMALL, wait_noted
from fix_golden import CLEAN, compare_inspect, usual
from pyengine.client import backup as backup_module
from pyengine.client.backup import backup_store, check_backup, restore_store
from pyengine.errors import CorruptionError, EngineError, StoreBusyError, StoreRefusedError, UsageError
from pyengine.ipc.live_reader import open_store
from pyengine.storage import log_holds
from pyengine.storage.backup_files import Folder, Remote, read_manifest
from pyengine.storage.checkpoint import read_watermark
from pyengine.storage.config import load_config
from pyengine.storage.consumer_offset import CANCELS_NAME, delay_marks
from pyengine.storage.engine_id import read_engine_id
from pyengine.storage.log_holds import read_log_holds
from pyengine.storage.ofd_lock import try_lock
from pyengine.storage.replication_state import ReplicationState, ReplicationStateFile
from waiting import eventually, scaled_timeout_s

SEGMENT = 65536
SIZES = {"mapped_file_size_commit_log_bytes": SEGMENT, "mapped_file_size_consume_queue_bytes": 400}
BODY = b"x" * 900


class Acked:
    """Puts one after the other from a thread of its own, and knows which were acknowledged."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.put)
        self.results: list[tuple[int, bytes]] = []  # physical offset, body

    def put(self) -> None:
        with pyengine.connect(self.engine.root, refusals="return") as producer:
            number = 0
            while not self.stopped.is_set():
                body = b"%08d" % number * 20
                result = producer.put("live", body, queue_id=number % 3, keys=f"live-{number}")
                if result.ok:
                    self.results.append((result.physical_offset, body))
                number += 1
                self.stopped.wait(0.001)  # of what it puts the rest of the test has more work than it has itself

    def __enter__(self) -> Acked:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.thread.join()


def put_segments(root, count, topic="T"):
    with pyengine.connect(root) as producer:
        for _ in range(count):
            assert producer.put_many(topic, [BODY] * 66, queue_id=1, keys="k").ok


def bodies(root, topic, queue_id):
    found = []
    with open_store(root) as store:
        first, end = store.queue_range(topic, queue_id, "committed")
        while first < end:
            got = store.get_message(topic, queue_id, first, level="committed")
            found += [(message.queue_offset, bytes(message.body)) for message in got.messages]
            first = got.next_begin_offset
    return found


def is_whole(root):
    checked = run("check", root, "--json")
    return (checked.code, checked.document["findings"]) == (0, [])


def test_a_backup_beside_producers_has_all_that_was_acknowledged_before_it(make_engine, tmp_path):
    engine, dest = make_engine(**SIZES), Folder(tmp_path / "dest")
    engine.start()
    with Acked(engine) as live:
        eventually(lambda: len(live.results) > 300, "producers put")
        first = backup_store(engine.root, dest)
        eventually(lambda: len(live.results) > 900, "producers go on")
        acked = list(live.results)
        with pyengine.consume(engine.root, "live", group="g", from_="first") as consumer:
            assert consumer.pull(max_messages=50, timeout_s=20)
            consumer.commit()
        second = backup_store(engine.root, dest, read_back=True)
    assert second.number == 2 and second.end_offset > first.end_offset and second.checked_bytes == second.bytes
    assert second.new_bytes == second.end_offset - first.end_offset
    offsets = (engine.root / "config/consumerOffset.json").read_bytes()
    # the original is cleaned, recovered after a crash, and deleted
    wait_noted(engine.root)
    assert run("clean", engine.root, "--older-than", 0).code == 0
    engine.kill_all()
    assert run("recover", engine.root).code == 0
    original = read_engine_id(engine.root)
    shutil.rmtree(engine.root)

    restored = restore_store(dest, tmp_path / "new")
    assert (restored.exit_code, restored.end_offset) == (0, second.end_offset) and is_whole(tmp_path / "new")
    assert restored.uuid == str(read_engine_id(tmp_path / "new").uuid) != str(original.uuid)
    found = [{body for _, body in bodies(tmp_path / "new", "live", queue_id)} for queue_id in range(3)]
    assert not {body for _, body in acked} - set.union(*found)
    with open_store(tmp_path / "new") as store:
        for offset, body in acked[::97]:
            assert store.message_at(offset).body == body
        assert store.query_message("live", "live-7")[0].body == b"%08d" % 7 * 20
    assert (tmp_path / "new/config/consumerOffset.json").read_bytes() == offsets
    with pyengine.Engine(tmp_path / "new") as engine, engine.connect() as producer:
        assert producer.put("live", b"next", queue_id=0).physical_offset == second.end_offset


def test_a_second_backup_after_the_cleaner_holds_only_kept_segments_and_keeps_queue_offsets(make_engine, tmp_path):
    engine, dest = make_engine(**SIZES), Folder(tmp_path / "dest")
    engine.start()
    with pyengine.connect(engine.root) as producer:
        for number in range(30):  # more than a queue file holds, all in the first segment
            assert producer.put("early", b"%d" % number, queue_id=2).ok
    put_segments(engine.root, 3)
    first = backup_store(engine.root, dest)
    assert first.min_offset == 0
    wait_noted(engine.root)
    assert run("clean", engine.root, "--older-than", 0, "--json").document["segments"] == 3
    put_segments(engine.root, 1)
    second = backup_store(engine.root, dest)
    assert second.min_offset == 3 * SEGMENT and second.new_bytes == second.end_offset - first.end_offset
    assert not [name for name in dest.sizes() if name.startswith("commitlog/") and int(name[10:30]) < 3 * SEGMENT]
    here = {name: bodies(engine.root, name, queue_id) for name, queue_id in (("T", 1), ("early", 2))}
    assert here["early"] == [] and here["T"][0][0] > 0
    times = {path.name: path.stat().st_mtime_ns for path in (engine.root / "commitlog").iterdir()}
    engine.stop()

    restored = restore_store(dest, tmp_path / "new")
    assert restored.exit_code == 0 and is_whole(tmp_path / "new") and [str(one) for one in restored.rebuilt.kept] == ["('early', 2)"]
    assert {name: bodies(tmp_path / "new", name, queue_id) for name, queue_id in (("T", 1), ("early", 2))} == here
    assert "queues without messages  1\n" in run("restore", tmp_path / "dest", tmp_path / "again").stdout
    found = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "new/commitlog").iterdir()}
    full = sorted(found)[:-1]
    assert full and {name: found[name] for name in full} == {name: times[name] for name in full}  # retention counts from them
    with pyengine.Engine(tmp_path / "new") as engine, engine.connect() as producer:
        assert producer.put("early", b"next", queue_id=2).queue_offset == 30
        assert producer.put("T", b"next", queue_id=1).queue_offset == here["T"][-1][0] + 1


@pytest.fixture(scope="module")
def stopped_store(tmp_path_factory):
    root = tmp_path_factory.mktemp("stopped") / "store"
    with pyengine.Engine(root, **SMALL | SIZES):
        put_segments(root, 3)
    return root


@pytest.fixture
def stopped(stopped_store, make_engine):
    """A store with four segments, stopped in order: a copy, for which no watermark counts."""
    engine = make_engine(**SIZES)
    shutil.copytree(stopped_store, engine.root)
    return engine.root


@pytest.fixture
def watermarked(make_engine):
    """The same where it was made: what ends too early is damage."""
    engine = make_engine(**SIZES)
    engine.start()
    put_segments(engine.root, 3)
    engine.stop()
    return engine.root


# What the log does not hold: a broker's filter bitmaps; keys of records that RocketMQ's dispatcher had jumped over.
NOT_IN_THE_LOG = {"cqext": ("queues",), "widetopic": ("queries",)}
USUAL = ("roll", "tx", "delay", "lmq", "cleaned", "cqext")


@pytest.mark.parametrize("recipe", usual(CLEAN, USUAL))
def test_a_store_of_rocketmq_comes_back_as_its_own_store_reads_it(recipe, golden, tmp_path):
    store = golden(recipe)
    levels = {"messageDelayLevel": levels} if (levels := store.manifest["config"].get("messageDelayLevel")) else {}
    backup_store(store.root, Folder(tmp_path / "dest"), **store.sizes, **levels)
    restored = restore_store(Folder(tmp_path / "dest"), tmp_path / "new")
    assert restored.exit_code == 0, restored.sentence
    ours = run("inspect", tmp_path / "new", "--json").document
    assert compare_inspect(ours, store.verify, ignore=NOT_IN_THE_LOG.get(recipe, ())) == []


def test_a_second_backup_of_nothing_new_copies_nothing(stopped, tmp_path):
    dest = Folder(tmp_path / "dest")
    first = backup_store(stopped, dest)
    again = backup_store(stopped, dest)
    assert (again.number, again.new_bytes, again.end_offset) == (2, 0, first.end_offset) and first.new_bytes == first.end_offset


def test_an_interrupted_backup_cannot_be_restored_and_the_next_one_continues_it(stopped, tmp_path):
    dest, done = Folder(tmp_path / "dest"), []

    def stop_in_the_third_segment(count, total):
        done.append(count)
        if count > 2 * SEGMENT:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backup_store(stopped, dest, progress=stop_in_the_third_segment)
    assert read_log_holds(stopped) == []
    with pytest.raises(UsageError, match="has not finished: run it again"):
        restore_store(dest, tmp_path / "new")
    with pytest.raises(UsageError, match="has not finished"):
        check_backup(dest)
    report = backup_store(stopped, dest)
    assert report.new_bytes == report.end_offset - 2 * SEGMENT
    assert restore_store(dest, tmp_path / "new").exit_code == 0
    assert sorted(dest.sizes()) == sorted([one.name for one in read_manifest(dest).files] + ["manifest.json"])


def test_pieces_that_are_gone_or_short_are_copied_again(stopped, tmp_path):
    dest = Folder(tmp_path / "dest")
    backup_store(stopped, dest)
    first, second, *_ = [one.name for one in read_manifest(dest).pieces]
    (tmp_path / "dest" / first).unlink()
    os.truncate(tmp_path / "dest" / second, 100)
    with pytest.raises(CorruptionError, match="is missing.*is damaged"):
        check_backup(dest)
    assert backup_store(stopped, dest, read_back=True).new_bytes == 2 * SEGMENT


def test_every_kind_of_flipped_byte_in_a_backup_is_found(stopped, tmp_path, rng):
    dest = Folder(tmp_path / "dest")
    backup_store(stopped, dest)
    for name, length in dest.sizes().items():
        path, at = tmp_path / "dest" / name, rng.randrange(length)
        content = path.read_bytes()
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1:])
        with pytest.raises(CorruptionError, match=name.replace(".", "[.]")):
            check_backup(dest)
        with pytest.raises(CorruptionError, match=name.replace(".", "[.]")):
            restore_store(dest, tmp_path / "new")
        assert not (tmp_path / "new").exists() or os.listdir(tmp_path / "new") == []
        path.write_bytes(content)
    assert restore_store(dest, tmp_path / "new").exit_code == 0


def test_a_log_that_was_cut_and_went_on_otherwise_is_copied_again_from_there(make_engine, tmp_path):
    engine, dest = make_engine(**SIZES), Folder(tmp_path / "dest")
    engine.start()
    put_segments(engine.root, 2)
    engine.stop()
    first = backup_store(engine.root, dest)
    with open(engine.root / f"commitlog/{2 * SEGMENT:020d}", "r+b") as file:  # the last segment is lost, and given up
        file.write(bytes(SEGMENT))
    assert run("recover", engine.root, "--accept-loss").code == 0
    engine.start()
    with pyengine.connect(engine.root) as producer:
        assert producer.put_many("other", [BODY] * 30).ok
    engine.stop()
    second = backup_store(engine.root, dest, read_back=True)
    assert second.rewritten_bytes == first.end_offset - 2 * SEGMENT and second.new_bytes == second.end_offset - 2 * SEGMENT
    restored = restore_store(dest, tmp_path / "new")
    assert restored.exit_code == 0 and bodies(tmp_path / "new", "other", 0) == bodies(engine.root, "other", 0) != []


def test_after_a_cut_and_two_interrupted_runs_no_byte_of_before_is_taken(make_engine, tmp_path, monkeypatch):
    engine, dest = make_engine(**SIZES), Folder(tmp_path / "dest")

    def put(topic, count):
        engine.start()
        with pyengine.connect(engine.root) as producer:
            assert producer.put_many(topic, [BODY] * count).ok
        engine.stop()

    def interrupted_after(pieces):
        noted = []

        def stop(name):
            noted.append(name)
            if noted.count("backup_piece_noted") == pieces:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(backup_module, "failpoint", stop)
            with pytest.raises(KeyboardInterrupt):
                backup_store(engine.root, dest)

    put("T", 66 + 50)
    old = backup_store(engine.root, dest)
    with open(engine.root / f"commitlog/{SEGMENT:020d}", "r+b") as file:  # the last segment is lost, and given up
        file.write(bytes(SEGMENT))
    assert run("recover", engine.root, "--accept-loss").code == 0
    put("other", 20)
    interrupted_after(1)  # it has a shorter piece of the same beginning
    put("other", 60)
    interrupted_after(2)  # and the next segment's
    put("other", 1)
    report = backup_store(engine.root, dest)
    assert report.end_offset > 2 * SEGMENT > old.end_offset
    assert restore_store(dest, tmp_path / "new").exit_code == 0
    for name in os.listdir(engine.root / "commitlog")[:2]:
        assert (engine.root / "commitlog" / name).read_bytes() == (tmp_path / "new/commitlog" / name).read_bytes(), name


def test_a_damaged_log_is_backed_up_as_it_is_and_said_to_be(watermarked, tmp_path):
    with open(watermarked / f"commitlog/{SEGMENT:020d}", "r+b") as file:
        file.seek(5000)
        file.write(b"damage")
    report = backup_store(watermarked, Folder(tmp_path / "dest"))
    assert report.exit_code == 3 and len(report.damage) == 1 and SEGMENT < report.damage[0] <= SEGMENT + 5000
    restored = restore_store(Folder(tmp_path / "dest"), tmp_path / "new")
    assert restored.exit_code == 3 and "damaged" in restored.sentence
    for name in os.listdir(watermarked / "commitlog")[:1]:
        assert (watermarked / "commitlog" / name).read_bytes() == (tmp_path / "new/commitlog" / name).read_bytes()


def lose_the_last_segment(root):
    sorted((root / "commitlog").iterdir())[-1].unlink()


def zero_the_last_segments_first_record(root):
    with open(sorted((root / "commitlog").iterdir())[-1], "r+b") as file:
        file.write(bytes(100))


@pytest.mark.parametrize(("is_ours", "lose"), usual(
    product([True, False], [lose_the_last_segment, zero_the_last_segments_first_record]),
    [(True, lose_the_last_segment), (False, zero_the_last_segments_first_record)], pytest.mark.ci))
def test_a_log_that_has_lost_its_end_never_replaces_the_backup_that_has_it(watermarked, tmp_path, lose, is_ours):
    root, dest, boundary = watermarked, Folder(tmp_path / "dest"), 3 * SEGMENT
    if not is_ours:
        shutil.rmtree(root / "config")
    first = backup_store(root, dest, **SIZES)
    before = {name: (tmp_path / "dest" / name).read_bytes() for name in dest.sizes()}
    lose(root)
    with pytest.raises(CorruptionError, match="nothing of backup 1 in .* was changed. `pyengine check .*` makes a store of that") as told:
        backup_store(root, dest, **SIZES)
    is_seen_whole = is_ours and lose is zero_the_last_segments_first_record  # its watermark says where to read on
    assert (f"is damaged at {boundary}" if is_seen_whole else "its end is lost or damaged") in str(told.value)
    assert {name: (tmp_path / "dest" / name).read_bytes() for name in dest.sizes()} == before
    assert restore_store(dest, tmp_path / "new").exit_code == 0
    with pyengine.open_store(tmp_path / "new", **SIZES) as store:
        assert store.max_physical_offset("committed") == first.end_offset
    left = backup_store(root, Folder(tmp_path / "left"), **SIZES)
    if is_ours:
        assert (left.exit_code, left.damage) == (3, (boundary,)) and f"damaged at {boundary}" in left.sentence
        assert left.end_offset == (first.end_offset if is_seen_whole else boundary)
        assert run("recover", root, "--accept-loss").code in (0, 4)
        assert backup_store(root, dest, **SIZES).exit_code == 0


@pytest.fixture
def interrupted(monkeypatch):
    """interrupted(step, dest, root): a restore that ends at the step, as a kill ends it."""

    def restore(step, dest, root):
        def stop(name):
            if name == step:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(backup_module, "failpoint", stop)
            with pytest.raises(KeyboardInterrupt):
                restore_store(dest, root)

    return restore


@pytest.mark.parametrize("step", ["restore_moving", "restore_moved"])
def test_a_restore_that_continues_reports_the_damage_that_the_first_run_found(watermarked, tmp_path, interrupted, step):
    with open(watermarked / f"commitlog/{SEGMENT:020d}", "r+b") as file:
        file.seek(5000)
        file.write(b"damage")
    dest = Folder(tmp_path / "dest")
    backup_store(watermarked, dest)
    interrupted(step, dest, tmp_path / "new")
    expected = restore_store(dest, tmp_path / "whole")
    restored = restore_store(dest, tmp_path / "new")
    assert restored.rebuilt is None and restored.exit_code == expected.exit_code == 3 and "damaged" in restored.sentence
    assert restored.refused == expected.refused


def test_a_newer_backup_is_restored_unless_the_older_one_is_being_moved(stopped, make_engine, tmp_path, interrupted):
    dest = Folder(tmp_path / "dest")
    first = backup_store(stopped, dest)
    interrupted("restore_moving", dest, tmp_path / "new")
    interrupted("restore_moved", dest, tmp_path / "moving")
    with pyengine.Engine(stopped) as engine, engine.connect() as producer:
        assert producer.put("later", b"one").ok
    second = backup_store(stopped, dest)
    restored = restore_store(dest, tmp_path / "new")
    assert restored.end_offset == second.end_offset and bodies(tmp_path / "new", "later", 0) == [(0, b"one")]
    moved = restore_store(dest, tmp_path / "moving")
    assert (moved.end_offset, moved.exit_code) == (first.end_offset, 0) and bodies(tmp_path / "moving", "T", 1)
    assert moved.taken_ms < restored.taken_ms


def test_a_half_removed_store_is_not_taken_for_a_restored_one(stopped, tmp_path, interrupted, monkeypatch):
    dest = Folder(tmp_path / "dest")
    backup_store(stopped, dest)
    interrupted("restore_moving", dest, tmp_path / "new")
    shutil.copytree(tmp_path / "dest", tmp_path / "older")
    backup_store(stopped, dest)

    def remove_half(path, **_):
        shutil.move(os.path.join(os.path.dirname(path), "commitlog"), tmp_path / "gone")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(backup_module.shutil, "rmtree", remove_half)
        with pytest.raises(KeyboardInterrupt):
            restore_store(dest, tmp_path / "new")
    again = restore_store(Folder(tmp_path / "older"), tmp_path / "new")  # the very backup of which that was made
    assert again.rebuilt is not None and is_whole(tmp_path / "new")


def test_a_log_in_several_folders_is_restored_into_one(make_engine, tmp_path):
    engine, dest = make_engine(**SIZES, store_path_commit_log=f"{tmp_path / 'a'},{tmp_path / 'b'}"), Folder(tmp_path / "dest")
    engine.start()
    put_segments(engine.root, 3)
    backup_store(engine.root, dest)
    here = bodies(engine.root, "T", 1)
    engine.stop()
    assert os.listdir(tmp_path / "a") and os.listdir(tmp_path / "b")
    assert restore_store(dest, tmp_path / "new").exit_code == 0
    assert bodies(tmp_path / "new", "T", 1) == here and load_config(tmp_path / "new").store_path_commit_log == ""


def test_a_store_without_messages_comes_back_with_its_tables_and_without_secrets(make_engine, tmp_path):
    engine = make_engine(**SIZES)
    engine.start()
    assert run("topics", "create", engine.root, "orders", "--queues", 3).code == 0
    (engine.root / "config/namesrvConfig.json").write_text('{"orderMessageEnable": "true"}')
    (engine.root / "config/plain_acl.yml").write_text("accounts: [{accessKey: shop-key, secretKey: a-secret-of-the-shop}]")
    backup_store(engine.root, Folder(tmp_path / "dest"))
    assert not [path for path in (tmp_path / "dest").rglob("*") if path.is_file() and b"a-secret-of-the-shop" in path.read_bytes()]
    engine.stop()
    assert restore_store(Folder(tmp_path / "dest"), tmp_path / "new").exit_code == 0
    for name in ("topics.json", "namesrvConfig.json"):
        assert (tmp_path / "new/config" / name).read_bytes() == (engine.root / "config" / name).read_bytes()
    with pyengine.Engine(tmp_path / "new") as again, again.connect() as producer:
        assert producer.put("orders", b"one").physical_offset == 0


def test_a_cut_at_the_end_of_a_segment_is_followed_by_an_empty_one(watermarked, tmp_path):
    dest = Folder(tmp_path / "dest")
    backup_store(watermarked, dest)
    manifest = read_manifest(dest)
    dest.replace("manifest.json", replace(manifest, end=2 * SEGMENT, pieces=manifest.pieces[:2]).content())
    assert restore_store(dest, tmp_path / "new").exit_code == 0 and is_whole(tmp_path / "new")
    assert sorted(map(int, os.listdir(tmp_path / "new/commitlog"))) == [0, SEGMENT, 2 * SEGMENT]
    with pyengine.Engine(tmp_path / "new") as engine, engine.connect() as producer:
        assert producer.put("T", b"next").physical_offset == 2 * SEGMENT


def test_any_file_system_of_pyarrow_holds_a_backup(stopped, tmp_path):
    fs = pytest.importorskip("pyarrow.fs")
    (tmp_path / "remote").mkdir()
    dest = Remote(fs.SubTreeFileSystem(str(tmp_path / "remote"), fs.LocalFileSystem()), "bucket/orders", "mock://bucket/orders")
    backup_store(stopped, dest)
    report = backup_store(stopped, dest, read_back=True)
    assert report.new_bytes == 0 and report.checked_bytes == report.bytes
    assert restore_store(dest, tmp_path / "new").exit_code == 0
    assert bodies(tmp_path / "new", "T", 1) == bodies(stopped, "T", 1)


@pytest.mark.ci
@pytest.mark.s3
def test_a_bucket_holds_a_backup_that_grows_and_is_restored_by_its_uri(make_engine, bucket, tmp_path):
    engine = make_engine(**SIZES)
    engine.start()
    put_segments(engine.root, 2)
    dest = f"s3://{bucket.name}/backups/orders"
    assert run("backup", engine.root, dest, "--json").document["number"] == 1
    first = bucket.objects("backups/orders")
    with Acked(engine) as live:
        eventually(lambda: len(live.results) > 300, "producers put")
        acked = {body for _, body in live.results}
        second = run("backup", engine.root, dest, "--check", "--json").document
    assert second["exit_code"] == 0 and second["checked_bytes"] == second["bytes"] > second["new_bytes"] > 0
    grown = bucket.objects("backups/orders")
    assert {name: grown.get(name) for name in first if name.startswith("commitlog/")}.items() <= first.items() and len(grown) > len(first)
    engine.stop()
    here = bodies(engine.root, "T", 1)
    shutil.rmtree(engine.root)
    assert run("restore", dest, tmp_path / "new", "--json").document["exit_code"] == 0 and is_whole(tmp_path / "new")
    assert bodies(tmp_path / "new", "T", 1) == here
    assert not acked - {body for queue_id in range(3) for _, body in bodies(tmp_path / "new", "live", queue_id)}


# ---- other ways to copy a store --------------------------------------------------


def cp(*words):
    subprocess.run(["cp", *map(str, words)], check=True, timeout=scaled_timeout_s(120))


@pytest.mark.parametrize("mode", EACH_MODE)
def test_a_cp_of_a_running_store_that_takes_the_log_last_has_all_that_was_flushed_before(make_engine, tmp_path, mode):
    engine, copy = make_engine(mode, **SIZES), make_engine(mode, "copy", **SIZES)
    engine.start()
    copy.root.mkdir()
    with Acked(engine) as live:
        eventually(lambda: engine.positions()["flushed"] > 2 * SEGMENT, "some segments are flushed")
        eventually(lambda: (found := read_watermark(engine.root).watermark) and found.flushed > SEGMENT, "a watermark names some")
        flushed = engine.positions()["flushed"]
        before = {offset: body for offset, body in list(live.results) if offset < flushed}
        for path in sorted(engine.root.iterdir(), key=lambda path: path.name == "commitlog"):
            count = len(live.results)
            eventually(lambda count=count: len(live.results) > count + 50, "producers go on")
            cp("-a", path, copy.root)
    assert before
    assert run("check", copy.root).code == 0
    ready = copy.start()
    end, named = map(int, re.search(r"its log ends at (\d+), and the watermark that came with it names (\d+)", ready["recovery"]).groups())
    assert ready["state"] == "running" and end >= flushed >= named > 0, ready
    assert read_engine_id(copy.root).uuid != read_engine_id(engine.root).uuid
    with open_store(copy.root) as store:
        assert {offset: store.message_at(offset).body for offset in before} == before
    found = [{body for _, body in bodies(copy.root, "live", queue_id)} for queue_id in range(3)]
    assert not set(before.values()) - set.union(*found)
    assert copy.stop() and is_whole(copy.root)


def test_a_hard_link_to_a_segment_is_no_backup_since_the_cleaner_empties_it(stopped, tmp_path):
    backup_store(stopped, Folder(tmp_path / "dest"))
    cp("-al", stopped, tmp_path / "linked")
    cp("-a", stopped, tmp_path / "copied")
    first = tmp_path / "linked/commitlog" / ("0" * 20)
    before = bodies(tmp_path / "copied", "T", 1)
    assert first.stat().st_blocks > 0 and any(first.read_bytes())
    assert run("clean", stopped, "--older-than", 0, "--json").document["segments"] == 3
    assert (first.stat().st_size, any(first.read_bytes())) == (SEGMENT, False)
    assert restore_store(Folder(tmp_path / "dest"), tmp_path / "new").exit_code == 0
    assert bodies(tmp_path / "new", "T", 1) == bodies(tmp_path / "copied", "T", 1) == before


# ---- refusals --------------------------------------------------------------------


def test_a_destination_of_another_store_or_with_other_files_is_refused(stopped, make_engine, tmp_path):
    dest = Folder(tmp_path / "dest")
    backup_store(stopped, dest)
    other = make_engine(name="other", **SIZES)
    other.start()
    with pytest.raises(UsageError, match="a backup of another store"):
        backup_store(other.root, dest)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("x")
    with pytest.raises(UsageError, match="holds thesis.txt, which no backup wrote"):
        backup_store(other.root, Folder(tmp_path / "mine"))
    assert os.listdir(tmp_path / "mine") == ["thesis.txt"]


def test_a_store_is_restored_into_an_empty_directory_only(stopped, tmp_path):
    dest = Folder(tmp_path / "dest")
    backup_store(stopped, dest)
    with pytest.raises(UsageError, match="an empty or absent directory"):
        restore_store(dest, stopped)
    with pytest.raises(UsageError, match="holds no backup: it has no manifest"):
        restore_store(Folder(stopped), tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "disk/lost+found").mkdir(parents=True)  # a new file system
    assert restore_store(dest, tmp_path / "disk").exit_code == 0


@pytest.mark.parametrize("name", ["store_path_commit_log", "readOnlyCommitLogStorePaths"])
def test_a_restore_that_is_told_where_the_log_shall_be_is_refused_before_it_begins(stopped, tmp_path, name):
    dest = Folder(tmp_path / "dest")
    backup_store(stopped, dest)
    with pytest.raises(UsageError, match="the log is restored into"):
        restore_store(dest, tmp_path / "new", **{name: "log-a"})
    assert not (tmp_path / "new").exists()


def test_an_engine_refuses_to_start_in_a_directory_with_an_unfinished_restore(tmp_path):
    (tmp_path / "new/.restoring/commitlog").mkdir(parents=True)
    with pytest.raises(StoreRefusedError, match="a restore into .* has not finished"):
        pyengine.Engine(tmp_path / "new").start()
    assert os.listdir(tmp_path / "new") == [".restoring"]


def test_a_store_in_recovery_or_of_a_running_broker_is_not_backed_up(stopped, tmp_path):
    with open(stopped / "lock", "r+b") as lock:
        assert try_lock(lock.fileno(), 0, "lock")
        with pytest.raises(UsageError, match="cannot be backed up now"):
            backup_store(stopped, Folder(tmp_path / "dest"))
    assert backup_store(stopped, Folder(tmp_path / "dest")).exit_code == 0


def test_two_backups_into_one_destination_at_once_are_refused(stopped, tmp_path):
    dest = Folder(tmp_path / "dest")
    with dest.locked(), pytest.raises(StoreBusyError, match="another process"):
        backup_store(stopped, dest)


# ---- the hold --------------------------------------------------------------------


def test_the_log_is_held_while_it_is_copied_and_shown_by_status(make_engine, tmp_path):
    engine, seen = make_engine(**SIZES), []
    engine.start()
    put_segments(engine.root, 3)
    wait_noted(engine.root)

    def look(done, total):
        if done and not seen:
            seen.append(run("status", engine.root, "--json").document["log_holds"])
            assert run("clean", engine.root, "--older-than", 0, "--json").document["segments"] == 0
            seen.append(run("status", engine.root).stdout)

    report = backup_store(engine.root, Folder(tmp_path / "dest"), progress=look)
    (hold,) = seen[0]
    assert hold["active"] and hold["offset"] == 0 and hold["owner"].startswith(f"backup to {tmp_path / 'dest'} (pid {os.getpid()}")
    assert hold["name"] in seen[1] and "log hold" in seen[1]
    assert report.min_offset == 0 and run("status", engine.root, "--json").document["log_holds"] == []
    assert run("clean", engine.root, "--older-than", 0, "--json").document["segments"] == 3


def test_a_segment_that_is_deleted_although_it_is_held_ends_the_backup(make_engine, tmp_path):
    engine = make_engine(**SIZES)
    engine.start()
    put_segments(engine.root, 3)
    wait_noted(engine.root)

    def delete(done, total):
        if done:
            for hold in read_log_holds(engine.root):
                log_holds.remove_log_hold(engine.root, hold.name)
            run("clean", engine.root, "--older-than", 0)

    with pytest.raises(EngineError, match="was deleted while it was copied"):
        backup_store(engine.root, Folder(tmp_path / "dest"), progress=delete)
    assert backup_store(engine.root, Folder(tmp_path / "dest")).min_offset == 3 * SEGMENT
    assert restore_store(Folder(tmp_path / "dest"), tmp_path / "new").exit_code == 0


def test_names_that_are_not_utf_8_are_backed_up_and_restored(make_engine, tmp_path):
    store, dest, new = (Path(os.fsdecode(os.fsencode(tmp_path) + name)) for name in (b"/store\xff", b"/dest\xfe", b"/new\xfd"))
    with pyengine.Engine(store, **SMALL | SIZES) as engine, engine.connect() as producer:
        assert producer.put("T", b"x").ok
    for command in (("backup", store, dest, "--check", "--json"), ("restore", dest, new, "--json"), ("check", new, "--json")):
        done = run(*command)
        assert done.code == 0 and done.stdout.encode()


def test_a_restored_store_knows_which_delayed_messages_are_cancelled(make_engine, tmp_path):
    engine = make_engine()
    engine.start()
    with pyengine.connect(engine.root) as producer:
        msg_id = producer.put("T", b"never", delay_level=18).msg_id
        assert producer.cancel_delayed(msg_id)
    assert engine.stop()
    backup_store(engine.root, Folder(tmp_path / "dest"))
    restore_store(Folder(tmp_path / "dest"), tmp_path / "new")
    marks = [delay_marks((root / "config" / CANCELS_NAME).read_bytes()) for root in (engine.root, tmp_path / "new")]
    assert marks[0] == marks[1] != b"\n"


@pytest.mark.parametrize(("role", "restored"), [("SYNC_MASTER", "SYNC_MASTER"), ("SLAVE", "ASYNC_MASTER")])
def test_a_restored_store_has_the_term_and_the_confirmed_end_of_its_original_and_is_no_slave(make_engine, tmp_path, role, restored):
    """Without its term its own slave would fence it; a slave would need a promotion, and the higher term would fence a living master."""
    engine = make_engine("sync")
    engine.start()
    put_segments(engine.root, 1)
    engine.stop()
    end = run("status", engine.root, "--json").document["positions"]["flushed"]
    noted = ReplicationState(role, end, "replicated", master_end=0 if role == "SYNC_MASTER" else end + 1, term=3, fenced_by=2)
    ReplicationStateFile(engine.root).write(noted)
    new = tmp_path / "new"
    backup_store(engine.root, tmp_path / "backup")
    assert restore_store(tmp_path / "backup", new).exit_code == 0
    state, problem = ReplicationStateFile(new).read()
    assert state == replace(noted, role=restored, master_end=0) and (state.dispatch_at, problem) == ("replicated", "")
    assert read_engine_id(new).uuid != read_engine_id(engine.root).uuid
