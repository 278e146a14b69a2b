"""Salvage: the new store has every whole record of the damaged one, in order; the damaged one is not changed."""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import closing
from dataclasses import asdict, replace

import pytest

import pyengine
from damage import flip
from fix_golden import CLEAN
from pyengine.engine_config import EngineConfig
from pyengine.errors import DiskError, DiskFullError, ExitCode, NotAStoreError, UsageError
from pyengine.formats.delayed_message import DelayMark
from pyengine.formats.paths import StorePaths
from pyengine.formats.record import decode_record
from pyengine.formats.small_file import decode_config
from pyengine.storage import salvage as salvage_module
from pyengine.storage.check.check import check
from pyengine.storage.checkpoint import RECOVERED, WATERMARK, DurableWatermark
from pyengine.storage.consumer_offset import CANCELS_NAME, DelayCancels
from pyengine.storage.inspect import inspect
from pyengine.storage.mapped_file import MappedFile
from pyengine.storage.message_store import MessageStore, discover
from pyengine.storage.recovery.quarantine import copy_of_bytes, list_pieces
from pyengine.storage.recovery.recover import recover
from pyengine.storage.replication_state import ReplicationState, ReplicationStateFile
from pyengine.storage.salvage import MISSING_LISTED_MAX, salvage


@pytest.fixture
def stopped(build_store):
    store = build_store(60)
    recover(MessageStore(store.root, store.geometry))
    return store


def bodies(root, geometry):
    """(topic, queue id, body digest) of every message of a store, in log order."""
    return [(record["topic"], record["queueId"], record["bodySha"]) for record in inspect(root)["records"]
            if "blank" not in record]


def put_bodies(records):
    messages = [decode_record(record.data) for record in records]
    return [(message.topic, message.queue_id, hashlib.sha256(message.body).hexdigest()) for message in messages]


def assert_whole(root, geometry, records):
    """A store with exactly these messages, in order, queues without gaps, nothing wrong."""
    assert bodies(root, geometry) == put_bodies(records)
    report = check(MessageStore(root, geometry))
    assert list(report.findings) == []
    assert (report.messages, report.queue_entries, report.index_keys) == (len(records),) * 3


def test_an_undamaged_store_is_copied_as_it_is(stopped, tmp_path):
    before = stopped.tree()
    report = salvage(stopped.root, tmp_path / "new", stopped.geometry)
    assert (report.exit_code, report.records, report.skipped, report.moved_queues) == (ExitCode.OK, 60, (), {})
    assert_whole(tmp_path / "new", stopped.geometry, stopped.records)
    for path in sorted((stopped.root / "commitlog").iterdir())[:-1]:
        assert (tmp_path / "new" / "commitlog" / path.name).read_bytes() == path.read_bytes()
    assert stopped.tree() == before


@pytest.mark.parametrize("lost", [[0], [20], [59], [3, 4, 5], [10, 12, 14], [0, 59, 30], list(range(60))])
def test_each_lost_record_costs_itself_only(stopped, tmp_path, lost, rng):
    for number in lost:
        record = stopped.records[number]
        stopped.flip(record.start + 88 + rng.randrange(3))
    before = stopped.tree()
    report = salvage(stopped.root, tmp_path / "new", stopped.geometry)
    kept = [record for number, record in enumerate(stopped.records) if number not in lost]
    assert_whole(tmp_path / "new", stopped.geometry, kept)
    assert (report.exit_code, report.records) == (ExitCode.REPAIRED, len(kept))
    covered = [number for number, record in enumerate(stopped.records)
               if any(piece.start <= record.start and record.end <= piece.end for piece in report.skipped)]
    assert covered == sorted(lost)
    assert stopped.tree() == before


def test_records_between_two_that_lost_their_heads_are_found(stopped, tmp_path):
    for number in (20, 22):
        stopped.poke(stopped.records[number].start, b"\xff" * 60)
    report = salvage(stopped.root, tmp_path / "new", stopped.geometry)
    assert [(piece.start, piece.end, piece.reason) for piece in report.skipped] == [
        (stopped.records[number].start, stopped.records[number].end, "foreign") for number in (20, 22)]
    assert report.records == 58


def test_zeroed_missing_short_and_empty_segments(stopped, tmp_path):
    hole = stopped.records[5]
    stopped.poke(hole.start, bytes(len(hole.data)))
    stopped.segment(4096).unlink()
    short = stopped.segment(8192)
    kept_to = stopped.boundary_before(8192 + 2000)
    short.write_bytes(short.read_bytes()[:2000])
    (stopped.root / "commitlog" / f"{1 << 20:020d}").write_bytes(b"")
    (stopped.root / "commitlog" / "notes.txt").write_text("x")
    report = salvage(stopped.root, tmp_path / "new", stopped.geometry)
    kept = [record for record in stopped.records if record.start != hole.start and not 4096 <= record.start < 8192
            and not kept_to <= record.start < 12288]
    assert_whole(tmp_path / "new", stopped.geometry, kept)
    assert 4096 in report.missing_segments
    assert report.exit_code is ExitCode.REPAIRED


def test_a_file_whose_name_is_beyond_any_offset_is_no_segment(stopped, tmp_path):
    segment = min((stopped.root / "commitlog").iterdir())
    (segment.parent / "18446744073709551616").write_bytes(segment.read_bytes())
    assert salvage(stopped.root, tmp_path / "new", stopped.geometry).records == 60
    assert_whole(tmp_path / "new", stopped.geometry, stopped.records)


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.symlink_to("not mounted")], ids=["folder", "link"])
@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
def test_a_segment_that_is_no_file_is_missing(stopped, tmp_path, make, which):
    path = sorted((stopped.root / "commitlog").iterdir())[which]
    path.unlink()
    make(path)
    report = salvage(stopped.root, tmp_path / "new", stopped.geometry)
    assert report.missing_segments == (int(path.name),) and report.exit_code is ExitCode.REPAIRED


def test_a_missing_log_folder_is_noted(stopped, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    with open(stopped.root / "config" / "engine.toml", "a") as settings:
        settings.write(f'read_only_commit_log_store_paths = "{elsewhere}"\n')
    report = salvage(stopped.root, tmp_path / "new", stopped.geometry)
    assert f"the log's folder {elsewhere} does not exist: if its disk is not mounted, mount it and salvage again" in report.notes


def with_twin(stopped, folder, number=0):
    """Copy a segment of the store, by default the first, to a further log folder; (segment, its copy)."""
    first = sorted((stopped.root / "commitlog").iterdir())[number]
    folder.mkdir()
    with open(stopped.root / "config" / "engine.toml", "a") as settings:
        settings.write(f'read_only_commit_log_store_paths = "{folder}"\n')
    return first, shutil.copy2(first, folder)


def test_a_segment_in_two_folders_comes_over_once(stopped, tmp_path):
    first, twin = with_twin(stopped, tmp_path / "archive")
    report = salvage(stopped.root, tmp_path / "new", stopped.geometry)
    assert f"{twin} is the segment of {first} too: 0 records that are only in it follow those of the log" in report.notes
    assert_whole(tmp_path / "new", stopped.geometry, stopped.records)


def test_a_segment_in_two_folders_comes_over_once_if_the_given_size_is_wrong(stopped, tmp_path):
    later, twin = with_twin(stopped, tmp_path / "archive", 1)
    wrong = replace(stopped.geometry, mapped_file_size_commit_log_bytes=2 * stopped.geometry.mapped_file_size_commit_log_bytes)
    report = salvage(stopped.root, tmp_path / "new", wrong)
    assert f"{twin} is the segment of {later} too: 0 records that are only in it follow those of the log" in report.notes


@pytest.mark.parametrize("kept_bytes, length", [(0, 0), (0, 4096), (1000, 1000)], ids=["empty", "spare", "short"])
def test_of_a_segment_in_two_folders_the_longer_one_is_read_wherever_it_is(stopped, tmp_path, kept_bytes, length):
    first, _ = with_twin(stopped, tmp_path / "archive")
    first.write_bytes(first.read_bytes()[:kept_bytes] + bytes(length - kept_bytes))
    salvage(stopped.root, tmp_path / "new", stopped.geometry)
    assert_whole(tmp_path / "new", stopped.geometry, stopped.records)


def test_records_that_only_the_other_copy_of_a_segment_has_come_over(stopped, tmp_path):
    first, twin = with_twin(stopped, tmp_path / "archive")
    lost, damaged = stopped.records[1], stopped.records[2]
    stopped.flip(lost.start + 88)
    flip(twin, damaged.start + 88)
    report = salvage(stopped.root, tmp_path / "new", stopped.geometry)
    assert f"{twin} is the segment of {first} too: 1 records that are only in it follow those of the log" in report.notes
    assert bodies(tmp_path / "new", stopped.geometry) == put_bodies([record for record in stopped.records if record is not lost] + [lost])


def test_a_quarantine_on_a_disk_that_is_not_mounted_is_not_empty(stopped, tmp_path):
    (stopped.root / "quarantine").symlink_to("not mounted")
    with pytest.raises(DiskError, match="cannot list .*quarantine"):
        salvage(stopped.root, tmp_path / "new", stopped.geometry)
    assert salvage(stopped.root, tmp_path / "new", stopped.geometry, with_quarantine=False).exit_code is ExitCode.OK


def test_stale_records_of_another_place_are_not_taken(stopped, tmp_path):
    """A record that names another offset is some older life of these bytes."""
    stale = stopped.records[1]
    stopped.poke(stopped.end, stale.data)
    report = salvage(stopped.root, tmp_path / "new", stopped.geometry)
    assert report.records == 60
    assert_whole(tmp_path / "new", stopped.geometry, stopped.records)
    assert [(piece.start, piece.reason) for piece in report.skipped] == [(stopped.end, "offset_mismatch")]


def test_queue_offsets_move_up_after_a_loss_and_consumers_with_them(stopped, tmp_path):
    queue = [record for record in stopped.records if (record.topic, record.queue_id) == ("topic-0", 0)]
    for lost in (queue[2], queue[3]):
        stopped.flip(lost.start + 88)
    (stopped.root / "config" / "consumerOffset.json").write_text(
        '{"offsetTable":{"topic-0@g":{0:5,1:1},"topic-0@slow":{0:3},"topic-0@new":{0:0},"topic-0@done":{0:%d},"other@g":{0:7}}}'
        % len(queue))
    report = salvage(stopped.root, tmp_path / "new", stopped.geometry)
    assert report.moved_queues == {("topic-0", 0): 2}
    table = decode_config((tmp_path / "new" / "config" / "consumerOffset.json").read_text())["offsetTable"]
    assert table == {"topic-0@g": {"0": 3, "1": 1}, "topic-0@slow": {"0": 2}, "topic-0@new": {"0": 0},
                     "topic-0@done": {"0": len(queue) - 2}, "other@g": {"0": 0}}, "no queue, so the next offset is 0"
    assert json.loads((tmp_path / "new" / "config" / "consumerOffset.json").read_text())


def test_the_old_engines_identity_is_not_copied_and_unreadable_config_is_named(stopped, tmp_path):
    config = stopped.root / "config"
    (config / "engine-id").write_text("x")
    RECOVERED.write(stopped.root, 4096)  # an offset of the old log
    ReplicationStateFile(stopped.root).write(ReplicationState("SLAVE", 4096))
    (config / "topics.json").write_text('{"topicConfigTable": {}}')
    (config / "topics.json.bak").write_text("{}")
    (config / "consumerOffset.json").write_text("not JSON")
    report = salvage(stopped.root, tmp_path / "new", stopped.geometry)
    assert sorted(path.name for path in (tmp_path / "new" / "config").iterdir()) == ["topics.json"]
    assert "consumerOffset.json" in report.notes[0]


@pytest.mark.parametrize("content", [b"{", b"[]", b"", b"\xff", None])
@pytest.mark.parametrize("name, table", [
    ("consumerOffset.json", {"offsetTable": {"topic-0@g": {"0": 1}}}), ("subscriptionGroup.json", {"subscriptionGroupTable": {}})])
def test_a_damaged_table_is_replaced_by_its_bak_file_or_left_out(stopped, tmp_path, content, name, table):
    file = stopped.root / "config" / name
    if content is not None:
        file.write_bytes(content)
    file.with_name(name + ".bak").write_text(json.dumps(table))
    report = salvage(stopped.root, tmp_path / "new", stopped.geometry)
    assert decode_config((tmp_path / "new" / "config" / name).read_text()) == table
    assert any(f"config/{name}.bak" in note for note in report.notes)
    file.with_name(name + ".bak").write_bytes(b"{")
    report = salvage(stopped.root, tmp_path / "none", stopped.geometry)
    assert not (tmp_path / "none" / "config" / name).exists() and any(f"config/{name} " in note for note in report.notes)


@pytest.mark.parametrize("name", [name for name in CLEAN if name not in ("empty",)])
def test_stores_of_rocketmq_can_be_salvaged(golden, tmp_path, name):
    store = golden(name)
    geometry = discover(store.root, store.sizes)
    report = salvage(store.root, tmp_path / "new", geometry)
    wide = [record for record in store.manifest["records"] if len(record.get("topic", "").encode()) > 127]
    expected = [(record["topic"], record["queueId"], record["bodySha"]) for record in store.manifest["records"]
                if "blank" not in record and record not in wide]
    assert bodies(tmp_path / "new", geometry) == expected
    assert report.records == len(expected)
    assert list(check(MessageStore(tmp_path / "new", geometry)).findings) == []


def test_transactions_still_point_to_their_prepared_message(golden, tmp_path):
    store = golden("tx")
    geometry = discover(store.root, store.sizes)
    records = store.manifest["records"]
    damaged = next(record for record in records if "blank" not in record)
    segment = sorted((store.root / "commitlog").iterdir())[0]
    flip(segment, damaged["phy"] + 90)
    salvage(store.root, tmp_path / "new", geometry)
    new = [record for record in inspect(tmp_path / "new")["records"] if "blank" not in record]
    old = [record for record in records if "blank" not in record and record is not damaged]
    place = {was["phy"]: now["phy"] for was, now in zip(old, new, strict=True)}
    pointed = [(was["prepared"], now["prepared"]) for was, now in zip(old, new) if was["prepared"]]
    assert pointed and all(now == place.get(was, 0) for was, now in pointed)


@pytest.mark.parametrize("wrong", ["full", "a file", "inside"])
def test_a_destination_that_cannot_be_is_refused_and_left_alone(stopped, tmp_path, wrong):
    destination = tmp_path / "new"
    if wrong == "full":
        destination.mkdir()
        (destination / "x").write_text("x")
    elif wrong == "a file":
        destination.write_text("x")
    else:
        destination = stopped.root / "new"
    before = stopped.tree()
    with pytest.raises(UsageError, match="new"):
        salvage(stopped.root, destination, stopped.geometry)
    assert stopped.tree() == before
    assert wrong != "full" or [path.name for path in destination.iterdir()] == ["x"]


def test_a_missing_store_is_refused(tmp_path, stopped):
    with pytest.raises(NotAStoreError):
        salvage(tmp_path / "nowhere", tmp_path / "new", stopped.geometry)
    assert not (tmp_path / "new").exists()


def test_a_full_disk_leaves_nothing_at_the_destination(stopped, tmp_path, monkeypatch):
    def full(*_args, **_named):
        raise DiskFullError("injected", errno=28)

    monkeypatch.setattr(salvage_module, "create_file", full)
    with pytest.raises(DiskFullError):
        salvage(stopped.root, tmp_path / "new", stopped.geometry)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("damage", [{"physical_offset": "x"}, {"physical_offset": [1]}, {"physical_offset": -5},
                                    {"physical_offset": 1 << 70}, {"physical_offset": (1 << 63) - 2}, {"size_bytes": -1}])
def test_a_damaged_note_in_quarantine_costs_its_piece_at_most(stopped, tmp_path, damage):
    (piece,) = copy_of_bytes(StorePaths(stopped.root), MappedFile(stopped.segment(0), 0), 0, stopped.records[1].start, "a test")
    piece.keep()
    (path,) = (stopped.root / "quarantine").glob("*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    (name,) = damage
    assert f"its note cannot be read: {name} is" in list_pieces(stopped.root / "quarantine")[0].problem
    salvage(stopped.root, tmp_path / "new", stopped.geometry)
    assert_whole(tmp_path / "new", stopped.geometry, stopped.records)


@pytest.mark.parametrize("is_link", [False, True])
def test_after_a_failure_an_empty_destination_is_as_it_was(stopped, tmp_path, monkeypatch, is_link):
    def full(*_args, **_named):
        raise DiskFullError("injected", errno=28)

    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    destination = tmp_path / "link" if is_link else folder
    if is_link:
        destination.symlink_to(folder)
    monkeypatch.setattr(salvage_module, "recover", full)
    with pytest.raises(DiskFullError):
        salvage(stopped.root, destination, stopped.geometry)
    assert (list(folder.iterdir()), folder.stat().st_mode & 0o777) == ([], 0o700)


@pytest.mark.parametrize("watermark", ["absent", "damaged", "whole"])
def test_the_loss_after_the_last_record_is_known_only_with_a_whole_watermark(stopped, tmp_path, watermark):
    WATERMARK.path(stopped.root).unlink(missing_ok=True)
    if watermark != "absent":
        WATERMARK.write(stopped.root, DurableWatermark("u", 1, stopped.end))
    if watermark == "damaged":
        flip(WATERMARK.path(stopped.root), 10)
    last = stopped.records[-1]
    stopped.poke(last.start, bytes(len(last.data)))
    report = salvage(stopped.root, tmp_path / "new", stopped.geometry)
    assert report.records == 59 and report.end_offset == last.start
    said = [note for note in report.notes if "is unknown" in note]
    if watermark == "whole":
        assert (report.lost_beyond_end, said, report.exit_code) == (len(last.data), [], ExitCode.REPAIRED)
    else:
        assert report.lost_beyond_end is None and report.to_dict()["lost_beyond_end"] is None
        assert len(said) == 1 and f"after {last.start:,}," in said[0] and "watermark" in said[0]


@pytest.mark.parametrize("kept", [0, 1000])
def test_zeros_between_records_are_reported(stopped, tmp_path, kept):
    """An older copy of a segment, put back: it ends in zeros where records and a blank had followed."""
    start = max(8192, stopped.boundary_before(8192 + kept))
    stopped.poke(start, bytes(12288 - start))
    report = salvage(stopped.root, tmp_path / "new", stopped.geometry)
    assert [(piece.start, piece.end, piece.reason) for piece in report.skipped] == [(start, 12288, "zeroes")]
    assert report.exit_code is ExitCode.REPAIRED
    assert_whole(tmp_path / "new", stopped.geometry, [r for r in stopped.records if not start <= r.start < 12288])


def test_a_log_that_ends_before_its_synced_end_is_reported(stopped, tmp_path):
    last = stopped.records[-1]
    stopped.poke(last.start, bytes(len(last.data)))
    report = salvage(stopped.root, tmp_path / "new", stopped.geometry)
    assert [(piece.start, piece.end, piece.reason) for piece in report.skipped] == [(last.start, last.end, "lost")]
    assert report.exit_code is ExitCode.REPAIRED


def test_a_segment_with_a_name_far_away_leaves_no_endless_list(stopped, tmp_path):
    stopped.segment(8192).rename(stopped.segment(8192).with_name(f"{1 << 50:020d}"))
    report = salvage(stopped.root, tmp_path / "new", stopped.geometry)
    assert 8192 in report.missing_segments and len(report.missing_segments) <= 1 + MISSING_LISTED_MAX
    assert any("segments are missing before" in note for note in report.notes)
    assert_whole(tmp_path / "new", stopped.geometry, [r for r in stopped.records if not 8192 <= r.start < 12288])


@pytest.mark.parametrize("names, offsets, rot", [
    ("%LMQ%a,archive", "{0},{0}", b""),
    ("%LMQ%a,,archive", "{0},0,{0}", b""),       # a pair that names nothing stays one
    ("%LMQ%a,archive", "{0},{0}", b"\xff\xfe"),   # what the body's checksum does not cover
])  # fmt: skip
def test_numbers_in_light_queues_move_up_after_a_loss_too(builder, tmp_path, names, offsets, rot):
    put = []
    for number in range(12):
        properties = {"INNER_MULTI_DISPATCH": names, "INNER_MULTI_QUEUE_OFFSET": offsets.format(number), "x": "yyyy"}
        put.append(builder.put("T", b"%d" % number, queue_id=2, properties=properties))
    builder.write_log(b"\xff" * 8, at=put[3].physical_offset)
    builder.write_log(rot, at=put[6].physical_offset + put[6].size_bytes - 3)
    options = EngineConfig(enable_multi_dispatch=True)
    assert salvage(builder.root, tmp_path / "new", builder.geometry, options=options).records == 11
    assert check(MessageStore(tmp_path / "new", builder.geometry)).findings == []
    kept = [b"%d" % number for number in range(12) if number != 3]
    with pyengine.open_store(tmp_path / "new", **asdict(builder.geometry)) as reader:
        for topic, queue_id in (("T", 2), ("%LMQ%a", 0), ("archive", 2)):
            found = [reader.get_message(topic, queue_id, number).messages[0] for number in range(11)]
            assert [message.body for message in found] == kept
        assert found[-1].properties["INNER_MULTI_QUEUE_OFFSET"] == offsets.format(10) and found[-1].properties["x"] == "yyyy"


def test_op_messages_name_their_half_messages_after_a_loss_too(builder, tmp_path):
    half, op = "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"
    put = [builder.put(half, b"half %d" % number) for number in range(12)]
    for number in range(11):
        builder.put(op, b"%d" % number, tags="d")
    builder.put(op, b"no number", tags="d")
    builder.write_log(b"\xff" * 8, at=put[3].physical_offset)
    assert salvage(builder.root, tmp_path / "new", builder.geometry).records == 23
    assert check(MessageStore(tmp_path / "new", builder.geometry)).findings == []
    with pyengine.open_store(tmp_path / "new", **asdict(builder.geometry)) as reader:
        ends = [reader.get_message(op, 0, number).messages[0].body for number in range(12)]
        for number in (number for number in range(11) if number != 3):
            assert reader.get_message(half, 0, int(ends[number])).messages[0].body == b"half %d" % number
        assert (ends[3], ends[10], ends[11]) == (b"-", b"09", b"no number"), "the last half message is not ended"


def test_a_new_log_that_is_not_whole_is_noted(builder, tmp_path, monkeypatch):
    """Whatever salvage itself might do wrong."""
    for number in range(3):
        builder.put("T", b"%d" % number)
    monkeypatch.setattr(salvage_module.SalvagedLog, "end_offset", 1 << 20)
    report = salvage(builder.root, tmp_path / "new", builder.geometry)
    assert report.exit_code is ExitCode.REPAIRED and "the new log was written to 1,048,576" in report.notes[0]


def test_marks_of_cancelled_messages_are_not_copied_because_messages_have_other_ids(stopped, tmp_path):
    with closing(DelayCancels(stopped.root)) as cancels:
        cancels.take(1, 1, 0)
        assert not salvage(stopped.root, tmp_path / "one", stopped.geometry).notes
        assert cancels.cancel(DelayMark(4096, 1_700_000_000_000, 1, 7, 0))
    [note] = salvage(stopped.root, tmp_path / "two", stopped.geometry).notes
    assert "those that were cancelled are delivered" in note
    assert not (tmp_path / "one" / "config" / CANCELS_NAME).exists() and not (tmp_path / "two" / "config" / CANCELS_NAME).exists()
