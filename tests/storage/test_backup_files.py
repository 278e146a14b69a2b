"""A backup's files: the manifest detects each flipped byte, and all kinds of destination behave alike."""

from __future__ import annotations

import errno

import pytest

from fix_small_disk import fill
from pyengine.errors import CorruptionError, DiskError, DiskFullError, FormatError, StoreBusyError, UsageError
from pyengine.storage import backup_files
from pyengine.storage.backup_files import (
    MANIFEST,
    PROGRESS,
    Folder,
    Manifest,
    Piece,
    Remote,
    Table,
    open_destination,
    read_manifest,
    read_progress,
)

MANIFEST_OF_TWO = Manifest(
    3, "uuid", "/store", 1_800_000_000_000, 4096, 9000, 0, {"mapped_file_size_commit_log_bytes": 4096, "enable_lmq": False},
    (Piece(4096, 8192, 7, 4096, 5, 1), Piece(8192, 9000, 8, 8192, 6, 3)),
    (Table("config/topics.json", "tables/3/config/topics.json", 9, 1, 9),))


@pytest.fixture(params=["folder", "remote"])
def dest(request, tmp_path):
    """An empty destination: a folder, and one of pyarrow.fs."""
    if request.param == "folder":
        return Folder(tmp_path / "dest")
    fs = pytest.importorskip("pyarrow.fs")
    (tmp_path / "remote").mkdir()
    return Remote(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "remote/dest", "mock://remote/dest")


def test_a_manifest_is_read_as_it_was_written(dest):
    assert read_manifest(dest) is None and read_progress(dest) is None
    dest.replace(MANIFEST, MANIFEST_OF_TWO.content())
    assert read_manifest(dest) == MANIFEST_OF_TWO
    assert MANIFEST_OF_TWO.size_bytes == 4096 + 808 + 9
    assert MANIFEST_OF_TWO.pieces[1].name == "commitlog/00000000000000008192.0-808.3"


def test_every_flipped_bit_of_a_manifest_is_found():
    content = MANIFEST_OF_TWO.content()
    for at in range(len(content) - 1):
        with pytest.raises(FormatError):
            Manifest.read(content[:at] + bytes([content[at] ^ 1]) + content[at + 1:])


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff\xfe", MANIFEST_OF_TWO.content().replace(b'"format": 1', b'"format": 2')])
def test_a_manifest_that_is_none_is_refused_and_such_a_progress_counts_for_nothing(dest, content):
    dest.replace(MANIFEST, content)
    dest.replace(PROGRESS, content)
    with pytest.raises(CorruptionError, match="manifest.json cannot be used"):
        read_manifest(dest)
    assert read_progress(dest) is None


def test_files_are_written_read_listed_and_removed(dest):
    assert dest.sizes() == {}
    dest.write("commitlog/a", [b"one", memoryview(b"two")])
    dest.write("tables/1/config/t", [])
    dest.replace("m", b"old")
    dest.replace("m", b"new")
    assert dest.sizes() == {"commitlog/a": 6, "tables/1/config/t": 0, "m": 3}
    assert b"".join(dest.chunks("commitlog/a")) == b"onetwo" and b"".join(dest.chunks("m")) == b"new"
    dest.remove(["commitlog/a", "tables/1/config/t", "never"])
    assert dest.sizes() == {"m": 3}
    with pytest.raises(FileNotFoundError):
        list(dest.chunks("commitlog/a"))


def test_a_file_that_could_not_be_written_whole_leaves_nothing_in_a_folder(tmp_path):
    dest = Folder(tmp_path)

    def broken():
        yield b"half"
        raise OSError(errno.ENOSPC, "no space")

    with pytest.raises(DiskFullError, match="commitlog/a"):
        dest.write("commitlog/a", broken())
    assert dest.sizes() == {}


def test_one_backup_at_a_time_has_a_folder_and_several_may_read_it(tmp_path):
    dest = Folder(tmp_path / "dest")
    with dest.locked(), pytest.raises(StoreBusyError), dest.locked(shared=True):
        pass
    with dest.locked(shared=True), dest.locked(shared=True), pytest.raises(StoreBusyError), dest.locked():
        pass
    assert dest.sizes() == {}


def test_a_folder_that_does_not_exist_is_not_made_to_be_read(tmp_path):
    with pytest.raises(DiskError, match="cannot open"), Folder(tmp_path / "none").locked(shared=True):
        pass
    assert not (tmp_path / "none").exists()


def test_a_destination_is_a_folder_or_a_uri(tmp_path):
    pytest.importorskip("pyarrow")
    assert isinstance(open_destination(str(tmp_path)), Folder)
    assert isinstance(open_destination(f"file://{tmp_path}"), Folder)  # with the folder's durability
    assert isinstance(open_destination("mock:///bucket/x"), Remote)
    with pytest.raises(UsageError, match="cannot use nothing://bucket"):
        open_destination("nothing://bucket")


def test_a_clone_that_cannot_share_blocks_leaves_no_file(tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.write_bytes(b"x" * 8192)

    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(backup_files.fcntl, "ioctl", refuse)
    assert not Folder(tmp_path / "dest").clone("commitlog/a", source)
    assert Folder(tmp_path / "dest").sizes() == {}


@pytest.mark.root
def test_blocks_are_shared_where_the_file_system_can(make_disk):
    disk = make_disk("btrfs")
    source = disk / "source"
    source.write_bytes(bytes(range(256)) * (120 << 12))  # 120 MiB: two of them have no room
    dest = Folder(disk / "dest")
    for number in range(8):
        assert dest.clone(f"commitlog/{number}", source)
    fill(disk / "filler")
    source.unlink()
    assert b"".join(dest.chunks("commitlog/7")) == bytes(range(256)) * (120 << 12)
