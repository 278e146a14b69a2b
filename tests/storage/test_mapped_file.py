"""Folders of segments, their mappings and zeros; pages dropped from the page cache."""

from __future__ import annotations

import errno
import os
import resource

import pytest

from fix_failpoints import at_failpoints
from in_child import InChild
from pyengine.errors import DiskError, StoreRefusedError
from pyengine.formats.paths import segment_name
from pyengine.storage import mapped_file
from pyengine.storage.mapped_file import (
    MappedFile,
    MappedFileQueue,
    MappingCache,
    clear_file_from,
    folder_names,
    list_segments,
    map_read_only,
    mapped,
    queue_folders,
    renew_zeros,
    used_end,
)
from waiting import eventually

SIZE = 4096


def make(folder, start: int, fill: bytes = b"\0") -> None:
    folder.mkdir(exist_ok=True)
    (folder / segment_name(start)).write_bytes(fill * SIZE)


def test_queues_are_found_and_foreign_folders_passed_over(tmp_path):
    assert list(queue_folders(tmp_path / "consumequeue")) == []
    for name in ("T/0", "T/11", "T/.new", "%LMQ%x/0", "T/x"):
        (tmp_path / "consumequeue" / name).mkdir(parents=True)
    (tmp_path / "consumequeue" / "file").touch()
    assert list(queue_folders(tmp_path / "consumequeue")) == [
        (topic, queue_id, tmp_path / "consumequeue" / topic / str(queue_id)) for topic, queue_id in (("%LMQ%x", 0), ("T", 0), ("T", 11))]


def test_a_segment_that_is_deleted_while_the_folder_is_read_is_not_foreign(tmp_path, monkeypatch):
    """Where the file system does not tell kinds with names (XFS without ftype, NFS), a kind is asked for after the name."""
    for start in (0, SIZE):
        make(tmp_path, start)

    def delete_first(entry):
        if entry.name == segment_name(0):
            os.unlink(entry.path)
        return os.path.isfile(entry.path)

    monkeypatch.setattr(mapped_file, "is_plain_file", delete_first)
    assert [segment.start_offset for segment in list_segments(tmp_path, SIZE)] == [SIZE]


def test_segments_come_in_order(tmp_path):
    for start in (8192, 0, 4096):
        make(tmp_path, start)
    assert list_segments(tmp_path, SIZE) == [
        MappedFile(tmp_path / segment_name(start), start) for start in (0, 4096, 8192)
    ]


def test_a_missing_folder_counts_as_empty(tmp_path):
    assert list_segments(tmp_path / "nowhere", SIZE) == []
    assert MappedFileQueue(tmp_path / "nowhere", SIZE, MappingCache()).min_offset == -1


def test_a_link_without_a_target_is_no_empty_folder(tmp_path):
    folder = tmp_path / "link"
    folder.symlink_to(tmp_path / "not mounted")
    for opened in (lambda: list_segments(folder, SIZE), MappedFileQueue(folder, SIZE, MappingCache()).starts):
        with pytest.raises(StoreRefusedError, match="link is a link to .*not mounted, which does not exist; mount its disk"):
            opened()
    with pytest.raises(DiskError, match="cannot list .*link"):
        folder_names(folder)


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


def test_a_process_that_may_map_too_little_is_told_what_to_raise(tmp_path):
    """As a task of Spark with spark.executor.pyspark.memory, which sets RLIMIT_AS, reads a segment of 1 GiB."""
    (tmp_path / "segment").touch()
    os.truncate(tmp_path / "segment", 1 << 30)

    def read() -> str:
        resource.setrlimit(resource.RLIMIT_AS, (512 << 20, resource.getrlimit(resource.RLIMIT_AS)[1]))
        with pytest.raises(DiskError) as refused:
            map_read_only(tmp_path / "segment")
        return str(refused.value)

    said = InChild(read)()
    assert "Cannot allocate memory" in said and "spark.executor.pyspark.memory" in said and "fileSystem=arrow" in said, said


def test_a_file_that_cannot_be_mapped_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        map_read_only(tmp_path / "nowhere")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(DiskError):
        map_read_only(tmp_path / "empty")


def test_a_file_that_is_being_created_is_not_listed(tmp_path):
    """A broker creates the file first and sets its length afterwards."""
    make(tmp_path, 0)
    new = tmp_path / segment_name(SIZE)
    new.touch()
    folder = MappedFileQueue(tmp_path, SIZE, MappingCache())
    assert folder.starts() == [0]
    with pytest.raises(StoreRefusedError):
        list_segments(tmp_path, SIZE)
    new.write_bytes(bytes(SIZE))
    assert folder.starts() == [0, SIZE]


def test_an_empty_file_that_stays_empty_is_refused(tmp_path, monkeypatch):
    (tmp_path / segment_name(0)).touch()
    monkeypatch.setattr(mapped_file, "CREATION_GRACE_NS", 0)
    with pytest.raises(StoreRefusedError):
        MappedFileQueue(tmp_path, SIZE, MappingCache()).starts()


def test_new_segments_are_seen(tmp_path):
    folder = MappedFileQueue(tmp_path / "log", SIZE, MappingCache())
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
    folder = MappedFileQueue(tmp_path, SIZE, MappingCache())
    assert folder.starts() == [0]
    monkeypatch.setattr(mapped_file, "list_inodes", lambda *_, **__: pytest.fail("listed again"))
    assert folder.starts() == [0]


def test_a_listing_is_kept_also_where_the_folders_time_is_ahead_of_the_clock(tmp_path, monkeypatch):
    make(tmp_path, 0)
    ahead = 4 * 10**18
    os.utime(tmp_path, ns=(ahead, ahead))
    folder = MappedFileQueue(tmp_path, SIZE, MappingCache())
    assert folder.starts() == [0]
    make(tmp_path, SIZE)
    os.utime(tmp_path, ns=(ahead, ahead))  # a second change within one tick of the first
    assert folder.starts() == [0, SIZE]
    listed: list[str] = []
    whole = mapped_file.list_inodes
    monkeypatch.setattr(mapped_file, "list_inodes", lambda path, *more: listed.append(path) or whole(path, *more))

    def is_kept():
        listed.clear()
        return folder.starts() == [0, SIZE] and not listed

    eventually(is_kept, "the listing is kept")
    make(tmp_path, 2 * SIZE)
    assert folder.starts() == [0, SIZE, 2 * SIZE]


def test_a_change_within_one_tick_of_the_folders_time_is_seen(tmp_path):
    folder = MappedFileQueue(tmp_path, SIZE, MappingCache())
    make(tmp_path, 0)
    changed = os.stat(tmp_path).st_mtime_ns
    assert folder.starts() == [0]
    make(tmp_path, SIZE)
    os.utime(tmp_path, ns=(changed, changed))  # the second change carries the same time
    assert folder.starts() == [0, SIZE]


def test_a_deleted_segments_mapping_lives_as_long_as_its_reader(tmp_path):
    make(tmp_path, 0, b"a")
    make(tmp_path, SIZE, b"b")
    folder = MappedFileQueue(tmp_path, SIZE, MappingCache())
    folder.starts()
    view = folder.view(0)
    (tmp_path / segment_name(0)).unlink()
    assert folder.starts() == [SIZE]
    assert folder.min_offset == SIZE
    assert view[:2] == b"aa"
    assert folder.view(0) is None
    assert folder.start_of(0) is None


def test_a_replaced_segment_is_mapped_again(tmp_path):
    make(tmp_path, 0, b"a")
    folder = MappedFileQueue(tmp_path, SIZE, MappingCache())
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
    folder = MappedFileQueue(tmp_path, SIZE, cache)
    kept = [folder.view(number * SIZE) for number in range(5)]
    assert [view[0] for view in kept] == [65, 66, 67, 68, 69]
    assert folder.view(4 * SIZE) is kept[4]
    assert folder.view(0) is not kept[0]


def test_times_are_whole_milliseconds_like_javas(tmp_path):
    make(tmp_path, 0)
    os.utime(tmp_path / segment_name(0), ns=(0, 1_700_000_000_123_999_999))
    folder = MappedFileQueue(tmp_path, SIZE, MappingCache())
    assert folder.modified_ms(0) == 1_700_000_000_123
    assert folder.modified_ms(SIZE) is None


def test_an_error_in_a_mapped_block_is_raised_although_a_view_still_exists(tmp_path):
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


ALLOCATED_BYTES = 64 << 20


def allocated_file(path, content: bytes):
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, ALLOCATED_BYTES)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return path


def test_blocks_that_were_never_written_are_not_read(tmp_path, monkeypatch):
    """Readahead makes holes count as data, so the holes are looked up before the first read."""
    path = allocated_file(tmp_path / "segment", b"used" * 1000)
    read = []
    real = os.preadv
    monkeypatch.setattr(mapped_file.os, "preadv", lambda *args: read.append(real(*args)) or read[-1])
    assert used_end(path) == 4000
    assert sum(read) <= 4 << 20


def test_the_end_is_the_last_byte_that_is_not_zero(tmp_path):
    path = allocated_file(tmp_path / "segment", b"")
    assert used_end(path) == 0
    assert used_end(path, 5) == 5
    with open(path, "r+b") as file:
        for at in (10, 3 << 20, (5 << 20) - 1):
            file.seek(at)
            file.write(b"x")
            file.flush()
            assert used_end(path) == at + 1
            assert used_end(path, at + 1) == at + 1


def test_clearing_writes_zeros_where_there_were_none_and_keeps_the_file_time(tmp_path):
    path = allocated_file(tmp_path / "segment", b"keep" + b"x" * (3 << 20))
    os.utime(path, ns=(1, 2))
    assert clear_file_from(path, 4) == 3 << 20
    assert path.read_bytes() == b"keep" + bytes(ALLOCATED_BYTES - 4)
    assert os.stat(path).st_mtime_ns == 2
    assert clear_file_from(path, 4) == 0


def test_a_cleared_part_is_synced(tmp_path, monkeypatch):
    path = allocated_file(tmp_path / "segment", b"keep" + b"x" * 100)
    synced = []
    monkeypatch.setattr(mapped_file, "sync_descriptor", lambda descriptor, path: synced.append(path.read_bytes()[:104]))
    clear_file_from(path, 4)
    assert synced == [b"keep" + bytes(100)]


@pytest.mark.parametrize(("start", "used_bytes", "last"), [
    (5000, 20_000, range(5000, 8192)), (8000, 400, range(8000, 8192)), (8180, 9000, range(8180, 12_288)), (8192, 300, range(8192, 12_288)),
], ids=["pages", "two pages", "a record's head in two pages", "one page"])
def test_the_first_page_is_cleared_alone_after_all_others_are_synced(tmp_path, monkeypatch, start, used_bytes, last):
    """A power cut may keep one of two pages: a tail that begins with zeros is no torn record any more, nor is one with half a head."""
    path, calls = tmp_path / "file", []
    path.write_bytes(b"x" * (start + used_bytes) + bytes(9000))
    pwrite, fsync = os.pwrite, os.fsync
    monkeypatch.setattr(os, "pwrite", lambda descriptor, content, at: (
        calls.append(range(at, at + len(content))), pwrite(descriptor, content, at))[1])
    monkeypatch.setattr(os, "fsync", lambda descriptor: (calls.append("sync"), fsync(descriptor)))
    mapped_file.clear_file_from(path, start)
    assert calls[-2:] == [last, "sync"] and calls[-3:-2] in ([], ["sync"])
    assert path.read_bytes() == b"x" * start + bytes(used_bytes + 9000)


def test_clearing_that_is_killed_after_any_page_leaves_the_file_time(tmp_path):
    path, times = allocated_file(tmp_path / "segment", b"keep" + b"x" * 20_000), []
    os.utime(path, ns=(1, 2))
    with at_failpoints(lambda name: times.append(path.stat().st_mtime_ns)):
        clear_file_from(path, 4)
    assert len(times) == 6 and set(times) == {2}


def test_zeros_with_new_pages_keep_content_blocks_and_file_time(tmp_path):
    path = allocated_file(tmp_path / "segment", b"keep" * 2000)
    os.utime(path, ns=(1, 2))
    before = os.stat(path)
    renew_zeros(path, 8000)
    assert path.read_bytes() == b"keep" * 2000 + bytes(ALLOCATED_BYTES - 8000)
    after = os.stat(path)
    assert (after.st_mtime_ns, after.st_size, after.st_blocks) == (2, before.st_size, before.st_blocks)


@pytest.mark.parametrize("which", [os.SEEK_DATA, os.SEEK_HOLE])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_on_a_file_system_without_holes_is_read_completely(tmp_path, monkeypatch, which, number):
    path = tmp_path / "f"
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 3 << 20)
        os.pwrite(file.fileno(), b"x", 5000)
        os.pwrite(file.fileno(), b"y", 2 << 20)
    real = os.lseek

    def lseek(descriptor: int, position: int, whence: int) -> int:
        if whence == which:
            raise OSError(number, os.strerror(number))
        return real(descriptor, position, whence)

    monkeypatch.setattr(os, "lseek", lseek)
    assert (used_end(path), used_end(path, 5001), used_end(path, (2 << 20) + 1)) == ((2 << 20) + 1,) * 3
    assert clear_file_from(path, 5001) == (2 << 20) + 1 - 5001
    assert path.read_bytes() == bytes(5000) + b"x" + bytes((3 << 20) - 5001)
