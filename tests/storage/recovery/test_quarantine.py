"""Bytes and files are copied to quarantine before they are removed from the log, once, with a note."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from pyengine.errors import DiskError, DiskFullError, FlushError
from pyengine.formats.paths import StorePaths
from pyengine.storage.mapped_file import MappedFile
from pyengine.storage.recovery import quarantine as module
from pyengine.storage.recovery.quarantine import copy_of_bytes, move_of

SEGMENT = "00000000000000016384"


def make_segment(root: Path) -> Path:
    path = root / "commitlog" / SEGMENT
    path.parent.mkdir(parents=True)
    path.write_bytes(b"kept" * 25 + b"removed-\0-bytes" + bytes(4096))
    return path


def copied(root: Path, segment: Path, start: int, end: int) -> list[Path]:
    """Copy the bytes from `start` to `end` of the segment, and return the paths of the copies."""
    pieces = copy_of_bytes(StorePaths(root), MappedFile(segment, 16384), start, end, "a test")
    for piece in pieces:
        piece.keep()
    return [piece.noted.path for piece in pieces]


def moved(root: Path, path: Path, physical_offset: int = 16384, **kind: str) -> Path:
    piece = move_of(StorePaths(root), path, physical_offset, "a test", **kind)
    piece.keep()
    return piece.noted.path


def test_bytes_are_copied_without_the_zeros_after_them(tmp_path):
    segment = make_segment(tmp_path)
    before = segment.read_bytes()
    (piece,) = copy_of_bytes(StorePaths(tmp_path), MappedFile(segment, 16384), 16484, 16384 + len(before), "a test")
    path, others = piece.noted.path, [piece.noted.physical_offset, piece.noted.size_bytes, piece.noted.reason]
    assert not path.parent.exists(), "a name writes nothing"
    piece.keep()
    assert path.read_bytes() == b"removed-\0-bytes"
    assert others == [16484, 15, "a test"]
    note = json.loads(path.with_name(path.name + ".json").read_text())
    assert (note["from"], note["physical_offset"], note["size_bytes"], note["reason"]) == (SEGMENT, 16484, 15, "a test")
    assert segment.read_bytes() == before


def test_zeros_alone_are_not_copied(tmp_path):
    segment = make_segment(tmp_path)
    assert copied(tmp_path, segment, 16384 + 115, 16384 + 4211) == []
    assert not (tmp_path / "quarantine").exists()


def test_the_same_bytes_are_kept_once_and_other_bytes_beside_them(tmp_path):
    segment = make_segment(tmp_path)
    for _ in range(2):
        copied(tmp_path, segment, 16484, 16499)
    assert len(os.listdir(tmp_path / "quarantine")) == 2
    segment.write_bytes(b"kept" * 25 + b"another-\0-piece" + bytes(4096))
    (path,) = copied(tmp_path, segment, 16484, 16499)
    assert len(os.listdir(tmp_path / "quarantine")) == 4
    assert path.read_bytes() == b"another-\0-piece"


def test_a_copy_that_a_crash_left_without_its_note_is_made_again(tmp_path):
    segment = make_segment(tmp_path)
    (tmp_path / "quarantine").mkdir()
    (tmp_path / "quarantine" / f"commitlog-{16484:020d}-15").write_bytes(b"half")
    (path,) = copied(tmp_path, segment, 16484, 16499)
    assert path.read_bytes() == b"removed-\0-bytes"
    assert len(os.listdir(tmp_path / "quarantine")) == 2


def test_a_file_is_moved_and_a_second_one_of_its_name_is_kept_too(tmp_path):
    for turn in range(2):
        segment = make_segment(tmp_path / str(turn))
        content = segment.read_bytes()
        path = moved(tmp_path, segment)
        assert not segment.exists()
        assert path.read_bytes() == content
    assert sorted(os.listdir(tmp_path / "quarantine")) == [
        f"commitlog-{SEGMENT}", f"commitlog-{SEGMENT}.1", f"commitlog-{SEGMENT}.1.json", f"commitlog-{SEGMENT}.json"]


def test_a_segment_is_synced_before_it_is_moved_and_stays_if_that_fails(tmp_path, monkeypatch):
    segment, synced, fsync = make_segment(tmp_path), [], os.fsync

    def refuse(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(FlushError, match=SEGMENT):
        moved(tmp_path, segment)
    assert segment.exists() and not list(tmp_path.rglob("*.json"))
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(os.readlink(f"/proc/self/fd/{descriptor}")), fsync(descriptor)))
    moved(tmp_path, segment)
    assert str(segment) in synced and not segment.exists()


def test_a_folder_can_be_moved_too(tmp_path):
    folder = tmp_path / "consumequeue"
    (folder / "T" / "0").mkdir(parents=True)
    (folder / "T" / "0" / SEGMENT).write_bytes(b"x" * 20)
    path = moved(tmp_path, folder, 0, kind="derived")
    assert not folder.exists()
    assert (path / "T" / "0" / SEGMENT).read_bytes() == b"x" * 20


def across(monkeypatch, path):
    """Let a rename of this path fail as one to another file system."""
    real = os.rename

    def rename(source, target):
        if Path(source) == path:
            raise OSError(errno.EXDEV, "another device")
        real(source, target)

    monkeypatch.setattr(module.os, "rename", rename)


def test_across_file_systems_a_file_is_copied_before_it_is_removed(tmp_path, monkeypatch):
    segment = make_segment(tmp_path)
    content = segment.read_bytes()
    across(monkeypatch, segment)
    synced, sync = [], module.sync_folder
    monkeypatch.setattr(module, "sync_folder", lambda folder: (synced.append((folder, segment.exists())), sync(folder)))
    path = moved(tmp_path, segment)
    assert not segment.exists()
    assert path.read_bytes() == content
    assert (tmp_path / "quarantine", True) in synced, "a power cut leaves one of the two"


def test_a_failed_move_across_file_systems_leaves_no_note_and_an_unchanged_log(tmp_path, monkeypatch):
    segment = make_segment(tmp_path)
    before = segment.read_bytes()
    across(monkeypatch, segment)

    fsync = os.fsync

    def fail(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".part"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(module.os, "fsync", fail)
    with pytest.raises(DiskFullError):
        moved(tmp_path, segment)
    assert not list((tmp_path / "quarantine").glob("*"))
    assert segment.read_bytes() == before


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failed_copy_leaves_no_file_and_an_unchanged_log(tmp_path, monkeypatch, code):
    segment = make_segment(tmp_path)
    before = segment.read_bytes()

    def fail(_descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(module.os, "fsync", fail)
    with pytest.raises(DiskFullError if code == errno.ENOSPC else DiskError):
        copied(tmp_path, segment, 16484, 16499)
    assert not list((tmp_path / "quarantine").glob("*"))
    assert segment.read_bytes() == before
