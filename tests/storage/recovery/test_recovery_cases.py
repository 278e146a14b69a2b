"""What is beyond the log's end, and what recovery keeps of it."""

from __future__ import annotations

import inspect
import re
import struct
from pathlib import Path

import pytest

from pyengine.formats.index_file import IndexHeader, IndexLayout
from pyengine.formats.record import encode_blank
from pyengine.storage.mapped_file import MappedFile
from pyengine.storage.recovery.derived import plan_index
from pyengine.storage.recovery.log import Extra, Tail, judge_tail
from record_bytes import encode_record

SEGMENT, END = 8192, 1000
RECORD = encode_record(topic="topic", body=b"hello", physical_offset=END, properties="a\x01b")
PLAIN = encode_record(topic="topic", body=b"hello", physical_offset=END)
ROWS = [
    # bytes from the end on, reason of the walk, in pyengine's store, in RocketMQ's
    (b"", "zeroes", Tail.NOTHING, Tail.NOTHING),
    (encode_blank(SEGMENT - END), "blank", Tail.ROLL, Tail.ROLL),
    (encode_blank(SEGMENT - END) + b"stale", "blank", Tail.ROLL, Tail.ROLL),
    (RECORD[:90], "torn", Tail.TORN, Tail.TORN),
    (RECORD[:8], "torn", Tail.TORN, Tail.TORN),  # the offset was not written yet
    (RECORD[:-3], "bad_text", Tail.TORN, Tail.TORN),
    (RECORD[:-2], "bad_text", Tail.TORN, Tail.SPOILED),
    (PLAIN.replace(b"hello", b"hallo"), "bad_crc", Tail.TORN, Tail.SPOILED),
    (RECORD.replace(b"hello", b"hallo"), "bad_crc", Tail.TORN, Tail.SPOILED),
    (RECORD.replace(b"hello", b"hallo") + b"more", "bad_crc", Tail.UNKNOWN, Tail.UNKNOWN),
    (encode_record(topic="t", body=b"stale", physical_offset=7)[:40], "torn", Tail.UNKNOWN, Tail.UNKNOWN),
    (struct.pack(">iI", 90, 0xDAA320A7), "torn", Tail.UNKNOWN, Tail.UNKNOWN),  # no record is so short
    (RECORD, "offset_mismatch", Tail.UNKNOWN, Tail.UNKNOWN),
    (b"random bytes", "foreign", Tail.UNKNOWN, Tail.UNKNOWN),
    (RECORD[:50], "overrun", Tail.UNKNOWN, Tail.UNKNOWN),
]


@pytest.fixture
def segment(tmp_path):
    def write(tail: bytes) -> MappedFile:
        path = tmp_path / f"{0:020d}"
        path.write_bytes((b"x" * END + tail).ljust(SEGMENT, b"\0"))
        return MappedFile(path, 0)

    return write


@pytest.mark.parametrize(("content", "reason", "ours", "theirs"), ROWS)
def test_a_tail_is_judged_by_its_bytes_and_its_owner(segment, content, reason, ours, theirs):
    used_bytes = len(content.rstrip(b"\0"))
    assert judge_tail(segment(content), END, reason, is_ours=True) == (ours, used_bytes)
    assert judge_tail(segment(content), END, reason, is_ours=False) == (theirs, used_bytes)


@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize(("content", "reason", "ours", "theirs"), ROWS[1:])
def test_a_tail_beyond_the_commit_slot_is_unpublished(segment, is_ours, content, reason, ours, theirs):
    assert judge_tail(segment(content), END, reason, is_ours=is_ours, by_slot=True)[0] is Tail.UNPUBLISHED


def test_only_what_may_be_a_message_is_kept():
    assert {tail for tail in Tail if tail.may_be_message} == {Tail.SPOILED, Tail.UNKNOWN}


@pytest.mark.parametrize(("end_times_ms", "kept"), [
    ([10, 20, 30], 2),
    ([10, 20, 20, 20], 2),  # the third one may have ended just after the second was synced
    ([10, 20, 15], 2),      # the clock was put back
    ([20, 20], 1),
    ([30], 0),
])
def test_an_index_file_after_the_last_one_that_the_checkpoint_knows_counts_as_unsynced(tmp_path, end_times_ms, kept):
    layout = IndexLayout(4, 8)
    files = [(tmp_path / str(number), IndexHeader(1, end_ms, number, number + 1, 1, 4)) for number, end_ms in enumerate(end_times_ms)]
    for path, _ in files:
        path.write_bytes(bytes(layout.size_bytes))
    deleted, enter_from = plan_index(files, layout, 20, 0, 1000)
    assert [path for path, _ in reversed(deleted)] == [path for path, _ in files[kept:]]
    assert {label for _, label in deleted} <= {"unsynced", "orphaned"} and enter_from == kept
    assert plan_index(files, layout, None, 0, 1000) == ((), None)


def test_the_page_about_recovery_names_every_row():
    page = (Path(__file__).parents[3] / "docs" / "recovery.md").read_text()
    of_index = re.findall(r'label = "([a-z]+)"', inspect.getsource(plan_index))
    assert len(of_index) == 5
    for label in {*map(str, Tail), *map(str, Extra)}:
        assert f"| {label} |" in page
    for label in of_index:
        assert f"(*{label}*)" in page
