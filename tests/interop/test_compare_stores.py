"""The comparison masks what may differ and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from damage import flip
from fix_golden import unpack
from interop.compare_stores import index_differences, log_differences, queue_differences


@pytest.fixture
def pair(golden, tmp_path):
    """A recipe twice: the store to change, and the one it is compared with."""

    def make(recipe: str):
        ours = golden(recipe)
        (tmp_path / "theirs").mkdir()
        size = ours.sizes["mapped_file_size_commit_log_bytes"]
        return ours.root, unpack(recipe, tmp_path / "theirs"), ours.manifest["records"], size

    return make


def segment_of(root: Path, physical: int, size: int) -> tuple[Path, int]:
    return root / "commitlog" / f"{physical - physical % size:020d}", physical % size


def test_a_store_equals_itself(pair):
    ours, theirs, records, size = pair("pool-roll")
    assert log_differences(ours, theirs, records, size) == []
    assert queue_differences(ours, theirs) == index_differences(ours, theirs) == []


def test_filler_after_a_blank_is_masked_but_its_header_is_not(pair):
    ours, theirs, records, size = pair("pool-roll")
    blank = next(record for record in records if record.get("blank") and record["size"] > 8)
    path, at = segment_of(ours, blank["phy"], size)
    flip(path, at + 8)
    assert log_differences(ours, theirs, records, size) == []
    flip(path, at + 3)
    assert log_differences(ours, theirs, records, size)[0].startswith(f"record {records.index(blank)} at {blank['phy']} (8 "
                                                                      f"bytes) differs at byte 3")


@pytest.mark.parametrize("where", ["first", "last"])
def test_one_byte_of_a_record_is_seen(pair, where):
    ours, theirs, records, size = pair("basic")
    record = records[0 if where == "first" else -1]
    path, at = segment_of(ours, record["phy"], size)
    flip(path, at + (0 if where == "first" else record["size"] - 1))
    assert len(log_differences(ours, theirs, records, size)) == 1


def test_bytes_after_the_end_are_seen(pair):
    ours, theirs, records, size = pair("basic")
    path, at = segment_of(ours, records[-1]["phy"] + records[-1]["size"] + 100, size)
    flip(path, at)
    assert log_differences(ours, theirs, records, size)[0].startswith("the log goes on behind its end")


def test_a_missing_segment_is_seen(pair):
    ours, theirs, records, size = pair("roll")
    sorted((ours / "commitlog").iterdir())[3].unlink()
    assert log_differences(ours, theirs, records, size)


def test_queues_and_index_are_compared_byte_by_byte(pair):
    ours, theirs, *_ = pair("multi-index")
    queue = next(path for path in (ours / "consumequeue").rglob("*") if path.is_file())
    flip(queue, 7)
    assert len(queue_differences(ours, theirs)) == 1
    queue.unlink()
    assert queue_differences(ours, theirs)[0].endswith("missing here")
    flip(sorted((ours / "index").iterdir())[1], 35)
    assert index_differences(ours, theirs)[0].startswith("1: ")
