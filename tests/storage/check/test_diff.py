"""Two stores compared: what the log of one has and the other's has not, told from a copy that is only behind."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from damage import flip
from fix_golden import RECIPES
from logs import LogBuilder
from pyengine.errors import EngineError, ExitCode
from pyengine.formats.paths import StorePaths, segment_name
from pyengine.formats.record import Message
from pyengine.ipc.live_reader import diff_now
from pyengine.storage.check import diff as diff_module

SEGMENT_BYTES = 4096
SIZES = {"mapped_file_size_commit_log_bytes": SEGMENT_BYTES, "mapped_file_size_consume_queue_bytes": 2000}


def write_store(root: Path, log: LogBuilder) -> Path:
    folder = StorePaths(root).commit_log
    folder.mkdir(parents=True)
    for number, data in enumerate(log.segments):
        (folder / segment_name(log.first_offset + number * SEGMENT_BYTES)).write_bytes(bytes(data).ljust(SEGMENT_BYTES, b"\0"))
    return root


def log_file(root: Path, offset: int) -> tuple[Path, int]:
    """The segment that holds `offset`, and where in it."""
    start = offset - offset % SEGMENT_BYTES
    return StorePaths(root).commit_log / segment_name(start), offset - start


def body_at(message: Message) -> int:
    """Return the position of the body in its record."""
    return message.size_bytes - len(message.body) - len(message.topic.encode()) - len(message.raw_properties.encode()) - 3


def cut(root: Path, end: int) -> None:
    """The log ends there, with one spare segment after its last."""
    for path in StorePaths(root).commit_log.iterdir():
        if int(path.name) > end + SEGMENT_BYTES:
            path.unlink()
        else:
            kept = min(max(0, end - int(path.name)), SEGMENT_BYTES)
            path.write_bytes(path.read_bytes()[:kept].ljust(SEGMENT_BYTES, b"\0"))


@pytest.fixture
def pair(tmp_path, rng):
    """A store, its copy, and the messages of both."""
    log = LogBuilder(SEGMENT_BYTES)
    log.append_varied(rng, 120)
    return write_store(tmp_path / "store", log), write_store(tmp_path / "other", log), log.messages


def compare(store: Path, other: Path):
    """The report, and the same from the other side."""
    report = diff_now(store, other, settings=SIZES)
    turned = diff_now(other, store, settings=SIZES)
    assert (turned.is_equal, turned.exit_code, turned.start, turned.end, turned.first_difference, turned.lag_bytes) == (
        report.is_equal, report.exit_code, report.start, report.end, report.first_difference, -report.lag_bytes)
    found, mirrored = report.found, turned.found
    assert (mirrored.equal, *map(mirrored.total, ("differing", "only_in_other", "only_in_store"))) == (
        found.equal, *map(found.total, ("differing", "only_in_store", "only_in_other")))
    return report


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_golden_store_equals_its_copy(golden, recipe):
    store = golden(recipe)
    other = shutil.copytree(store.root, store.root.with_name("copy"))
    try:
        report = diff_now(store.root, other, settings=store.sizes)
    except EngineError as error:
        assert recipe == "abnormal-shortfile", error
        return
    assert (report.is_equal, report.exit_code, report.lag_bytes, report.queues) == (True, ExitCode.OK, 0, ())
    whole = sum(1 for record in store.verify["records"] if record.get("topic"))
    assert report.found.equal >= whole and report.found.differences == []


@pytest.mark.parametrize("slice_bytes", [1, 700, 256 << 10])
def test_differing_records_are_reported_with_their_differences(pair, monkeypatch, slice_bytes):
    monkeypatch.setattr(diff_module, "SLICE_BYTES", slice_bytes)
    store, other, messages = pair
    longest = max(messages[10:60], key=lambda one: len(one.body))
    path, at = log_file(other, longest.physical_offset)
    flip(path, at + body_at(longest) + 2)
    changed = messages[80]
    path, at = log_file(other, changed.physical_offset)
    flip(path, at + 27, 1)
    report = compare(store, other)
    counts = map(report.found.total, ("differing", "only_in_store", "only_in_other"))
    assert (report.exit_code, *counts) == (ExitCode.CORRUPTION, 2, 0, 0)
    first, second = report.found.differences
    assert (first.physical_offset, first.topic, first.queue_offset) == (longest.physical_offset, longest.topic, longest.queue_offset)
    assert (first.fields, first.bad_crc) == (("body",), ("other",))
    assert (second.physical_offset, second.fields, second.bad_crc) == (changed.physical_offset, ("queue_offset",), ())
    assert report.first_difference == longest.physical_offset and report.found.equal == len(messages) - 2
    assert sum(counts["differing"] for counts in report.found.topics.values()) == 2


@pytest.mark.parametrize("at", [1, 5, 30])
def test_a_last_record_that_is_none_any_more_is_a_difference(pair, at):
    store, other, messages = pair
    path, start = log_file(other, messages[-1].physical_offset)
    flip(path, start + at)
    report = compare(store, other)
    assert (report.exit_code, report.first_difference) == (ExitCode.CORRUPTION, messages[-1].physical_offset)


@pytest.mark.parametrize("slice_bytes", [1, 256 << 10])
def test_logs_that_went_apart_have_records_that_the_other_has_not(tmp_path, rng, monkeypatch, slice_bytes):
    monkeypatch.setattr(diff_module, "SLICE_BYTES", slice_bytes)
    ours, theirs = LogBuilder(SEGMENT_BYTES), LogBuilder(SEGMENT_BYTES)
    for log in (ours, theirs):
        for number in range(30):
            log.append("T", b"x" * number)
    for number in range(30):
        ours.append("T", rng.randbytes(rng.randrange(900)))
        theirs.append("T", rng.randbytes(rng.randrange(900)))
    report = compare(write_store(tmp_path / "store", ours), write_store(tmp_path / "other", theirs))
    end = min(ours.end, theirs.end)
    mine, its = ({one.physical_offset: one for one in log.messages if one.physical_offset < end} for log in (ours, theirs))
    first = min(offset for offset in mine.keys() | its.keys() if mine.get(offset) != its.get(offset))
    assert (report.start, report.end, report.first_difference) == (0, end, first)
    assert report.found.total("only_in_store") == len(mine.keys() - its.keys())
    assert report.found.total("only_in_other") == len(its.keys() - mine.keys())
    assert report.found.total("differing") == sum(mine[offset] != its[offset] for offset in mine.keys() & its.keys())
    assert report.found.topics["T"]["store"] == len(mine) and report.found.topics["T"]["other"] == len(its)
    unlike = len(mine.keys() ^ its.keys()) + report.found.total("differing")
    assert report.to_dict()["left_out"] == max(0, unlike - diff_module.DIFFERENCES_MAX)


@pytest.mark.parametrize("records", [0, 1, 40, 119])
def test_a_copy_that_is_behind_is_no_difference(pair, records):
    store, other, messages = pair
    end = messages[records].physical_offset
    cut(other, end)
    log_end = messages[-1].physical_offset + messages[-1].size_bytes
    report = compare(store, other)
    assert (report.exit_code, report.found.equal, report.lag_bytes) == (ExitCode.OK, records, log_end - end)
    assert f"The log of OTHER ends {log_end - end} bytes earlier" in report.sentence


def test_a_log_that_begins_later_is_compared_from_there(pair):
    store, other, messages = pair
    os.unlink(log_file(other, 0)[0])
    report = compare(store, other)
    assert (report.is_equal, report.start) == (True, SEGMENT_BYTES) and f"begins at {SEGMENT_BYTES}" in report.notes[0]
    assert report.found.equal == sum(one.physical_offset >= SEGMENT_BYTES for one in messages)


def test_damage_in_a_stopped_copy_is_a_difference_and_not_a_shorter_log(pair):
    store, other, messages = pair
    lost = messages[-5]
    path, at = log_file(other, lost.physical_offset)
    flip(path, at + 5)
    report = compare(store, other)
    assert (report.exit_code, report.found.total("only_in_store"), report.lag_bytes) == (ExitCode.CORRUPTION, 1, 0)
    assert report.first_difference == lost.physical_offset and f"no whole record at {lost.physical_offset}" in report.notes[0]


def test_a_torn_end_after_a_crash_is_behind_and_in_a_stopped_copy_a_difference(pair):
    store, other, messages = pair
    last = next(one for one in reversed(messages) if len(one.body) > 30)
    for root in (store, other):  # it is the last one of both
        cut(root, last.physical_offset + last.size_bytes)
    path, at = log_file(other, last.physical_offset)
    flip(path, at + body_at(last) + 2)
    report = compare(store, other)
    assert (report.exit_code, report.first_difference, report.lag_bytes) == (ExitCode.CORRUPTION, last.physical_offset, 0)
    StorePaths(other).abort.touch()
    report = compare(store, other)
    assert (report.exit_code, report.lag_bytes) == (ExitCode.OK, last.size_bytes)


def test_a_missing_segment_in_the_middle_is_a_difference(pair):
    store, other, messages = pair
    os.unlink(log_file(other, SEGMENT_BYTES)[0])
    report = compare(store, other)
    assert report.first_difference == next(one.physical_offset for one in messages if one.physical_offset >= SEGMENT_BYTES)
    assert report.found.total("only_in_store") == sum(SEGMENT_BYTES <= one.physical_offset < 2 * SEGMENT_BYTES for one in messages)


def test_logs_without_a_common_offset_are_not_called_equal(tmp_path, rng):
    log, later = LogBuilder(SEGMENT_BYTES), LogBuilder(SEGMENT_BYTES, first_offset=10 * SEGMENT_BYTES)
    for one in (log, later):
        one.append_varied(rng, 30)
    report = compare(write_store(tmp_path / "store", log), write_store(tmp_path / "other", later))
    assert (report.is_equal, report.exit_code) == (False, ExitCode.FAILED) and "nothing was compared" in report.sentence


def test_an_empty_copy_is_behind(pair, tmp_path):
    store, _, messages = pair
    StorePaths(tmp_path / "new").commit_log.mkdir(parents=True)
    report = compare(store, tmp_path / "new")
    assert (report.is_equal, report.lag_bytes) == (True, messages[-1].physical_offset + messages[-1].size_bytes)


@pytest.mark.parametrize("is_swapped", [False, True])
def test_a_log_whose_messages_are_all_deleted_has_nothing_that_the_other_lacks(pair, is_swapped):
    """Its only segment is a later one, without a record."""
    store, other, _ = pair
    for path in StorePaths(other).commit_log.iterdir():
        path.unlink()
    (StorePaths(other).commit_log / segment_name(1 << 20)).write_bytes(bytes(SEGMENT_BYTES))
    report = compare(other, store) if is_swapped else compare(store, other)
    assert (report.is_equal, report.lag_bytes, report.sentence) == (True, 0, "One log is empty.")


def test_logs_of_other_segment_sizes_are_compared_by_offset(tmp_path):
    log = LogBuilder(SEGMENT_BYTES)
    for number in range(10):
        log.append("T", b"x" * 50 * number)
    store, other = write_store(tmp_path / "store", log), tmp_path / "other"
    assert len(log.segments) == 1
    StorePaths(other).commit_log.mkdir(parents=True)
    data = bytes(log.segments[0]).ljust(SEGMENT_BYTES, b"\0")
    for start in range(0, SEGMENT_BYTES, 2048):
        (StorePaths(other).commit_log / segment_name(start)).write_bytes(data[start : start + 2048])
    report = diff_now(store, other, settings={"mapped_file_size_consume_queue_bytes": 2000})
    across = [one.physical_offset for one in log.messages if one.physical_offset < 2048 < one.physical_offset + one.size_bytes]
    assert (report.store.segment_bytes, report.other.segment_bytes) == (SEGMENT_BYTES, 2048)
    assert (report.found.equal, [one.physical_offset for one in report.found.differences]) == (len(log.messages) - 1, across)


def test_a_queue_that_ends_elsewhere_is_a_difference(golden):
    store = golden("basic")
    other = shutil.copytree(store.root, store.root.with_name("copy"))
    queue = next(one for one in store.verify["facts"]["queues"] if one["max"] > 1)
    path = StorePaths(other).queue_folder(queue["topic"], queue["queueId"]) / f"{0:020d}"
    data = path.read_bytes()
    path.write_bytes(data[: 20 * (queue["max"] - 1)].ljust(len(data), b"\0"))
    report = diff_now(store.root, other, settings=store.sizes)
    (found,) = report.queues
    assert (found.topic, found.queue_id, found.store, found.other) == (
        queue["topic"], queue["queueId"], queue["max"], queue["max"] - 1)
    assert (report.exit_code, report.first_difference) == (ExitCode.CORRUPTION, None)
    StorePaths(other).abort.touch()
    report = diff_now(store.root, other, settings=store.sizes)
    assert report.is_equal and "recover it first" in report.notes[-1]
