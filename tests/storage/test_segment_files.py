"""Folders of segments: what is refused, what is followed, and mappings of deleted files."""

from __future__ import annotations

import os

import pytest

from pyengine.errors import DiskError, StoreRefusedError
from pyengine.formats.paths import segment_name
from pyengine.storage import segment_files
from pyengine.storage.segment_files import MappingCache, SegmentFile, SegmentFolder, list_segments, map_read_only, mapped

SIZE = 4096


def make(folder, start: int, fill: bytes = b"\0") -> None:
    folder.mkdir(exist_ok=True)
    (folder / segment_name(start)).write_bytes(fill * SIZE)


def test_segments_come_in_order(tmp_path):
    for start in (8192, 0, 4096):
        make(tmp_path, start)
    assert list_segments(tmp_path, SIZE) == [
        SegmentFile(tmp_path / segment_name(start), start) for start in (0, 4096, 8192)
    ]


def test_no_folder_is_an_empty_one(tmp_path):
    assert list_segments(tmp_path / "nowhere", SIZE) == []
    assert SegmentFolder(tmp_path / "nowhere", SIZE, MappingCache()).min_offset == -1


@pytest.mark.parametrize("name", ["x.tmp", "0", "0" * 21, ".hidden"])
def test_a_foreign_file_is_refused(tmp_path, name):
    make(tmp_path, 0)
    (tmp_path / name).write_bytes(bytes(SIZE))
    with pytest.raises(StoreRefusedError, match="does not belong"):
        list_segments(tmp_path, SIZE)


def test_a_folder_with_a_segments_name_is_refused(tmp_path):
    (tmp_path / segment_name(0)).mkdir()
    with pytest.raises(StoreRefusedError):
        list_segments(tmp_path, SIZE)


@pytest.mark.parametrize("length", [0, SIZE - 1, SIZE + 1])
def test_a_wrong_length_is_refused(tmp_path, length):
    make(tmp_path, 0)
    (tmp_path / segment_name(SIZE)).write_bytes(bytes(length))
    with pytest.raises(StoreRefusedError, match=f"{length} bytes"):
        list_segments(tmp_path, SIZE)


def test_a_name_between_two_segments_is_refused(tmp_path):
    make(tmp_path, 20)
    with pytest.raises(StoreRefusedError, match="multiple"):
        list_segments(tmp_path, SIZE)


def test_what_cannot_be_mapped(tmp_path):
    with pytest.raises(FileNotFoundError):
        map_read_only(tmp_path / "nowhere")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(DiskError):
        map_read_only(tmp_path / "empty")


def test_a_file_that_is_being_made_is_not_there_yet(tmp_path):
    """A broker makes the file first and gives it its length then."""
    make(tmp_path, 0)
    new = tmp_path / segment_name(SIZE)
    new.touch()
    folder = SegmentFolder(tmp_path, SIZE, MappingCache())
    assert folder.starts() == [0]
    with pytest.raises(StoreRefusedError):
        list_segments(tmp_path, SIZE)
    new.write_bytes(bytes(SIZE))
    assert folder.starts() == [0, SIZE]


def test_an_empty_file_that_nobody_is_making_is_refused(tmp_path, monkeypatch):
    (tmp_path / segment_name(0)).touch()
    monkeypatch.setattr(segment_files, "_BEING_MADE_NS", 0)
    with pytest.raises(StoreRefusedError):
        SegmentFolder(tmp_path, SIZE, MappingCache()).starts()


def test_new_segments_are_seen(tmp_path):
    folder = SegmentFolder(tmp_path / "log", SIZE, MappingCache())
    assert folder.starts() == []
    make(tmp_path / "log", 0)
    assert folder.starts() == [0]
    make(tmp_path / "log", SIZE)
    assert folder.starts() == [0, SIZE]
    assert folder.start_of(SIZE + 5) == SIZE
    assert folder.start_of(2 * SIZE) is None
    make(tmp_path / "log", 2 * SIZE)
    assert folder.start_of(2 * SIZE) == 2 * SIZE


def test_a_listing_is_kept_while_the_folder_is_unchanged(tmp_path, monkeypatch):
    make(tmp_path, 0)
    os.utime(tmp_path, ns=(10**18, 10**18))
    folder = SegmentFolder(tmp_path, SIZE, MappingCache())
    assert folder.starts() == [0]
    monkeypatch.setattr(segment_files, "_inodes", lambda *_, **__: pytest.fail("listed again"))
    assert folder.starts() == [0]


def test_a_change_within_one_tick_of_the_folders_time_is_seen(tmp_path):
    folder = SegmentFolder(tmp_path, SIZE, MappingCache())
    make(tmp_path, 0)
    changed = os.stat(tmp_path).st_mtime_ns
    assert folder.starts() == [0]
    make(tmp_path, SIZE)
    os.utime(tmp_path, ns=(changed, changed))  # the second change carries the same time
    assert folder.starts() == [0, SIZE]


def test_a_deleted_segments_mapping_lives_as_long_as_its_reader(tmp_path):
    make(tmp_path, 0, b"a")
    make(tmp_path, SIZE, b"b")
    folder = SegmentFolder(tmp_path, SIZE, MappingCache())
    folder.starts()
    view = folder.view(0)
    (tmp_path / segment_name(0)).unlink()
    assert folder.starts() == [SIZE]
    assert folder.min_offset == SIZE
    assert view[:2] == b"aa"
    assert folder.view(0) is None
    assert folder.start_of(0) is None


def test_a_replaced_segment_is_mapped_anew(tmp_path):
    make(tmp_path, 0, b"a")
    folder = SegmentFolder(tmp_path, SIZE, MappingCache())
    folder.starts()
    assert folder.view(0)[:1] == b"a"
    (tmp_path / "kept").write_bytes(b"b" * SIZE)
    (tmp_path / "kept").rename(tmp_path / segment_name(0))
    folder.starts()
    assert folder.view(0)[:1] == b"b"


def test_the_cache_is_bounded(tmp_path):
    for number in range(5):
        make(tmp_path, number * SIZE, bytes([65 + number]))
    cache = MappingCache(mappings_max=2)
    folder = SegmentFolder(tmp_path, SIZE, cache)
    kept = [folder.view(number * SIZE) for number in range(5)]
    assert [view[0] for view in kept] == [65, 66, 67, 68, 69]
    assert folder.view(4 * SIZE) is kept[4]
    assert folder.view(0) is not kept[0]


def test_times_are_whole_milliseconds_like_javas(tmp_path):
    make(tmp_path, 0)
    os.utime(tmp_path / segment_name(0), ns=(0, 1_700_000_000_123_999_999))
    folder = SegmentFolder(tmp_path, SIZE, MappingCache())
    assert folder.modified_ms(0) == 1_700_000_000_123
    assert folder.modified_ms(SIZE) is None


def test_an_error_in_a_mapped_block_is_not_hidden_by_what_still_points_there(tmp_path):
    make(tmp_path, 0, b"x")
    path = tmp_path / segment_name(0)

    def fail(view):
        kept = memoryview(view)
        raise DiskError(f"{len(kept)} bytes are still pointed to")

    with pytest.raises(DiskError, match="4096 bytes"):
        with mapped(path) as view:
            fail(view)
    with mapped(path) as view:
        assert view[:1] == b"x"
    assert view.closed
