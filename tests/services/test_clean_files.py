"""The files of queues, extensions and index that expire when the log begins later."""

from __future__ import annotations

import pytest

from pyengine.formats.consume_queue import ENTRY, FILLER
from pyengine.formats.index_file import HEADER, IndexHeader
from pyengine.formats.paths import segment_name
from pyengine.services.clean_files import expired_ext_files, expired_index_files, expired_queue_files
from record_bytes import encode_ext_address

SIZE = 60  # three entries


def queue_file(folder, start: int, *entries: tuple[int, int, int]):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / segment_name(start)
    path.write_bytes(b"".join(ENTRY.pack(*entry) for entry in entries).ljust(SIZE, b"\0"))
    return path


def entries(*offsets: int) -> list[tuple[int, int, int]]:
    return [(offset, 10, 0) for offset in offsets]


def test_files_without_a_message_in_the_log_expire_except_the_last(tmp_path):
    first = queue_file(tmp_path, 0, *entries(0, 10, 20))
    second = queue_file(tmp_path, SIZE, *entries(30, 40, 100))
    queue_file(tmp_path, 2 * SIZE, *entries(110))
    assert expired_queue_files(tmp_path, SIZE, 20) == []
    assert expired_queue_files(tmp_path, SIZE, 21) == [first]
    assert expired_queue_files(tmp_path, SIZE, 101) == [first, second]
    assert expired_queue_files(tmp_path, SIZE, 10**6) == [first, second]


def test_a_file_of_filler_expires_and_a_file_with_a_hole_is_kept(tmp_path):
    filled = queue_file(tmp_path / "filled", 0, FILLER, FILLER, FILLER)
    queue_file(tmp_path / "filled", SIZE, *entries(50))
    assert expired_queue_files(tmp_path / "filled", SIZE, 1) == [filled]
    queue_file(tmp_path / "hole", 0, *entries(0))
    queue_file(tmp_path / "hole", SIZE, *entries(50))
    assert expired_queue_files(tmp_path / "hole", SIZE, 1000) == []


def test_a_missing_or_empty_queue_has_no_expired_files(tmp_path):
    assert expired_queue_files(tmp_path / "none", SIZE, 1000) == []


def test_extension_files_expire_up_to_the_first_unit_that_an_entry_names(tmp_path):
    queue, ext = tmp_path / "queue", tmp_path / "ext"
    ext.mkdir()
    files = [ext / segment_name(512 * number) for number in range(4)]
    for path in files:
        path.write_bytes(bytes(512))
    queue_file(queue, 0, (0, 10, encode_ext_address(0)), (10, 10, encode_ext_address(600)), (20, 10, encode_ext_address(1030)))
    assert expired_ext_files(queue, ext, 512, 0) == []
    assert expired_ext_files(queue, ext, 512, 10) == files[:1]
    assert expired_ext_files(queue, ext, 512, 20) == files[:2]
    assert expired_ext_files(queue, ext, 512, 30) == []  # no message left that could tell
    queue_file(queue, 0, (0, 10, 5), (10, 10, 7))
    assert expired_ext_files(queue, ext, 512, 10) == []  # plain tags codes


@pytest.mark.parametrize("log_min, count", [(0, 0), (100, 0), (101, 1), (201, 2), (10**6, 2)])
def test_index_files_expire_by_their_last_key_except_the_last(tmp_path, log_min, count):
    names = ["20260101000000000", "20260101000000001", "20260101000000002"]
    for name, end in zip(names, (100, 200, 300), strict=True):
        header = IndexHeader(1, 2, end - 50, end, 1, 3)
        (tmp_path / name).write_bytes(HEADER.pack(*header) + bytes(100))
    (tmp_path / "foreign").touch()
    assert expired_index_files(tmp_path, log_min) == [tmp_path / name for name in names[:count]]
    assert expired_index_files(tmp_path / "none", log_min) == []


def test_index_files_from_a_damaged_header_on_are_kept(tmp_path):
    for name in ("20260101000000000", "20260101000000001"):
        (tmp_path / name).write_bytes(b"")
    assert expired_index_files(tmp_path, 10**6) == []
