"""A deleted file's blocks come back step by step, and whoever has it mapped lives on."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest

from dying import run_and_die_at
from pyengine.errors import DiskError
from pyengine.storage import file_removal
from pyengine.storage.file_removal import give_back, unlink_durably

STEP = 1 << 20


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "00000000000000000000"
    path.write_bytes(b"x" * (3 * STEP + 5))
    return path


def test_a_mapped_reader_sees_zeros_and_the_blocks_come_back_piece_by_piece(file):
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as view:
        descriptor = unlink_durably(file)
        assert not file.exists() and view[:1] == view[-1:] == b"x"
        seen = []
        for pause_s in give_back(descriptor, step_bytes=STEP):
            assert pause_s >= file_removal.PAUSE_S_MIN
            seen.append(os.fstat(opened.fileno()).st_blocks)
        assert len(seen) == 3 and seen == sorted(seen, reverse=True) and len(set(seen)) == 3
        assert os.fstat(opened.fileno()).st_size == len(view) == 3 * STEP + 5
        assert os.fstat(opened.fileno()).st_blocks == 0
        assert view[:] == bytes(len(view))


def test_a_pause_grows_with_how_long_the_step_took(file):
    times = iter([0.0, 2.0, 2.0, 2.5, 3.0, 3.0, 3.0, 3.0])
    assert list(give_back(unlink_durably(file), step_bytes=STEP, clock=lambda: next(times))) == [
        8.0, 2.0, file_removal.PAUSE_S_MIN]


def test_where_holes_cannot_be_punched_everything_goes_at_once(file, monkeypatch):
    monkeypatch.setattr(file_removal, "punch", lambda *_: errno.EOPNOTSUPP)
    descriptor = unlink_durably(file)
    assert list(give_back(descriptor, step_bytes=STEP)) == []
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_an_error_while_giving_back_closes_the_descriptor_and_says_why(file, monkeypatch):
    monkeypatch.setattr(file_removal, "punch", lambda *_: errno.EIO)
    descriptor = unlink_durably(file)
    with pytest.raises(DiskError, match="Input/output error"):
        list(give_back(descriptor))
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_a_file_that_is_gone_is_as_good_as_deleted(file):
    file.unlink()
    assert list(give_back(unlink_durably(file))) == []


def test_a_folder_that_cannot_be_written_keeps_its_file(file, monkeypatch):
    def refuse(path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(DiskError, match="cannot delete .*Read-only file system"):
        unlink_durably(file)
    assert file.exists() and len(os.listdir("/proc/self/fd")) == before


def test_the_folder_is_synced_behind_the_name(file, monkeypatch):
    calls = []
    monkeypatch.setattr(os, "unlink", lambda path: calls.append(("unlink", path)))
    monkeypatch.setattr(file_removal, "sync_folder", lambda folder: calls.append(("sync", folder)))
    os.close(unlink_durably(file))
    assert calls == [("unlink", file), ("sync", file.parent)]


def test_killed_at_any_step_the_file_is_there_whole_or_not_at_all(file):
    content, step, over = file.read_bytes(), 0, False
    while not over:
        file.write_bytes(content)
        over = run_and_die_at(step, lambda: list(give_back(unlink_durably(file), step_bytes=STEP)), ("unlink", "fsync"),
                              [(file_removal, "punch")])
        assert not file.exists() or file.read_bytes() == content
        step += 1
    assert step == 7  # the name, its folder, four pieces, and to the end
