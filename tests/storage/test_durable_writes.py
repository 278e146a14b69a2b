"""Writes into files that exist, and their removal."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

import pytest

from dying import run_and_die_at
from pyengine.errors import DiskError, DiskFullError, FlushError
from pyengine.ipc.group_members import GroupMembers
from pyengine.ipc.shared_objects import note_run
from pyengine.storage import durable_writes
from pyengine.storage.consumer_offset import ConsumerOffsets
from pyengine.storage.durable_writes import (
    DirectFile,
    free_blocks,
    open_shared_file,
    sweep_unfinished,
    unlink_durably,
    write_config,
)
from pyengine.storage.log_holds import LogHold, write_log_hold


def test_short_writes_continue_where_they_ended_and_a_sync_comes_last(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    pwrite, fsync, synced = os.pwrite, os.fsync, []
    monkeypatch.setattr(os, "pwrite", lambda descriptor, content, position: pwrite(descriptor, content[:7], position))
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(path.read_bytes()), fsync(descriptor)))
    durable_writes.write_at(path, b"x" * 50, 20)
    assert synced == [bytes(20) + b"x" * 50 + bytes(30)]


def test_a_rewrite_leaves_the_bytes_the_length_and_the_time_of_a_file(tmp_path, monkeypatch):
    """Whole blocks go past the page cache too, where that can be; the rest of a file that ends within a block does not."""
    monkeypatch.setattr(durable_writes, "REWRITE_BYTES", 8192)
    content = os.urandom(30_001)
    for name, start, end in (("whole", 0, 30_001), ("part", 5_000, 21_000), ("nothing", 7_000, 7_000)):
        path = tmp_path / name
        path.write_bytes(content)
        os.utime(path, ns=(1, 2))
        durable_writes.rewrite(path, start, end)
        assert path.read_bytes() == content and path.stat().st_mtime_ns == 2


def test_each_sync_of_a_rewrite_finds_the_files_time_as_it_was(tmp_path, monkeypatch):
    """A kill may follow it, and the next recovery keeps the time that it finds."""
    monkeypatch.setattr(durable_writes, "REWRITE_BYTES", 8192)
    path, fsync, times = tmp_path / "file", os.fsync, []
    path.write_bytes(b"x" * 30_001)
    os.utime(path, ns=(1, 2))
    monkeypatch.setattr(os, "fsync", lambda descriptor: (times.append(os.fstat(descriptor).st_mtime_ns), fsync(descriptor)))
    durable_writes.rewrite(path, 0, 30_001)
    assert len(times) == 5 and set(times) == {2}


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, DiskFullError), (errno.EROFS, DiskError), (errno.EIO, DiskError)])
def test_a_rewrite_whose_write_fails_raises_an_error_of_the_disk(tmp_path, monkeypatch, number, error):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 8192)

    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(error):
        durable_writes.rewrite(path, 0, 8192)


@pytest.mark.parametrize("done", [None, 4096], ids=["refused", "short"])
def test_a_rewrite_that_the_disk_refuses_leaves_the_bytes_in_the_page_cache(tmp_path, monkeypatch, done):
    """A write past the page cache drops the pages first, and they may be the only copy."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 8192)
    pwrite, refused, writer = os.pwrite, [], os.open(path, os.O_WRONLY)

    def fails_once(descriptor, content, position):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(position)
            if done:
                pwrite(writer, bytes(8192), 0)  # what a dropped page reads as
                return done
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pwrite(descriptor, content, position)

    try:
        os.close(os.open(path, os.O_RDWR | os.O_DIRECT))
    except OSError:
        pytest.skip("no writes past the page cache here")
    monkeypatch.setattr(os, "pwrite", fails_once)
    with pytest.raises(FlushError):
        durable_writes.rewrite(path, 0, 8192)
    os.close(writer)
    assert refused == [0]
    assert path.read_bytes() == b"x" * 8192


def test_a_rewrite_writes_past_the_page_cache_what_it_has_read_before_its_sync(tmp_path, monkeypatch):
    """After a failed write the disk may read as zeros, also once a sync succeeds, and the kernel may drop a clean page at any time."""
    path, content = tmp_path / "file", b"x" * 30_001
    path.write_bytes(content)
    try:
        os.close(os.open(path, os.O_RDWR | os.O_DIRECT))
    except OSError:
        pytest.skip("no writes past the page cache here")
    monkeypatch.setattr(durable_writes, "REWRITE_BYTES", 8192)
    pwrite, fsync, cached = os.pwrite, os.fsync, set[int]()

    def noting(descriptor, content, position):
        blocks = range(position, position + len(content) // 4096 * 4096, 4096)
        is_direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        (cached.difference_update if is_direct else cached.update)(blocks)
        return pwrite(descriptor, content, position)

    def dropping_pages(descriptor):
        fsync(descriptor)
        for block in cached:
            pwrite(descriptor, bytes(4096), block)  # what a dropped page reads as

    monkeypatch.setattr(os, "pwrite", noting)
    monkeypatch.setattr(os, "fsync", dropping_pages)
    durable_writes.rewrite(path, 0, 30_001)
    assert path.read_bytes() == content and not cached


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
        for pause_s in free_blocks(descriptor, step_bytes=STEP):
            assert pause_s >= durable_writes.FREE_PAUSE_S_MIN
            seen.append(os.fstat(opened.fileno()).st_blocks)
        assert len(seen) == 3 and seen == sorted(seen, reverse=True) and len(set(seen)) == 3
        assert os.fstat(opened.fileno()).st_size == len(view) == 3 * STEP + 5
        assert os.fstat(opened.fileno()).st_blocks == 0
        assert view[:] == bytes(len(view))


def test_a_pause_grows_with_how_long_the_step_took(file):
    times = iter([0.0, 2.0, 2.0, 2.5, 3.0, 3.0, 3.0, 3.0])
    assert list(free_blocks(unlink_durably(file), step_bytes=STEP, clock=lambda: next(times))) == [
        8.0, 2.0, durable_writes.FREE_PAUSE_S_MIN]


def test_a_file_is_freed_at_once_if_holes_cannot_be_punched(file, monkeypatch):
    monkeypatch.setattr(durable_writes, "punch", lambda *_: errno.EOPNOTSUPP)
    descriptor = unlink_durably(file)
    assert list(free_blocks(descriptor, step_bytes=STEP)) == []
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_an_error_while_giving_back_closes_the_descriptor_and_says_why(file, monkeypatch):
    monkeypatch.setattr(durable_writes, "punch", lambda *_: errno.EIO)
    descriptor = unlink_durably(file)
    with pytest.raises(DiskError, match="Input/output error"):
        list(free_blocks(descriptor))
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_a_file_that_is_gone_is_as_good_as_deleted(file):
    file.unlink()
    assert list(free_blocks(unlink_durably(file))) == []


def test_a_folder_that_cannot_be_written_keeps_its_file(file, monkeypatch):
    def refuse(path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(DiskError, match="cannot delete .*Read-only file system"):
        unlink_durably(file)
    assert file.exists() and len(os.listdir("/proc/self/fd")) == before


def test_the_folder_is_synced_after_the_name(file, monkeypatch):
    calls = []
    monkeypatch.setattr(os, "unlink", lambda path: calls.append(("unlink", path)))
    monkeypatch.setattr(durable_writes, "sync_folder", lambda folder: calls.append(("sync", folder)))
    os.close(unlink_durably(file))
    assert calls == [("unlink", file), ("sync", file.parent)]


def test_killed_at_any_step_the_file_is_there_whole_or_not_at_all(file):
    content, step, over = file.read_bytes(), 0, False
    while not over:
        file.write_bytes(content)
        over = run_and_die_at(step, lambda: list(free_blocks(unlink_durably(file), step_bytes=STEP)), ("unlink", "fsync"),
                              [(durable_writes, "punch")])
        assert not file.exists() or file.read_bytes() == content
        step += 1
    assert step == 7  # the name, its folder, four pieces, and to the end


# -- without the page cache -----------------------------------------------------------

BUFFER = 8192


@pytest.mark.parametrize("is_refused", [False, True], ids=["direct", "refused at the first write"])
def test_a_direct_file_holds_what_was_written_to_it_whatever_its_pieces(tmp_path, rng, monkeypatch, is_refused):
    monkeypatch.setattr(durable_writes, "DIRECT_BYTES", BUFFER)
    pwrite = os.pwrite

    def refuse(descriptor, content, position):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return pwrite(descriptor, content, position)

    if is_refused:
        monkeypatch.setattr(os, "pwrite", refuse)
    for size_bytes in (0, 1, BUFFER - 1, BUFFER, BUFFER + 1, 9 * BUFFER, 7 * BUFFER + 4095):
        content, at = rng.randbytes(size_bytes), 0
        with DirectFile(tmp_path / "file") as file:
            while at < size_bytes:
                count = rng.choice([1, 100, BUFFER, 3 * BUFFER])
                assert file.write(content[at : at + count]) == len(content[at : at + count])
                at += count
        assert file.closed and (tmp_path / "file").read_bytes() == content


def test_close_raises_the_error_of_a_direct_write_if_no_other_call_has(tmp_path, monkeypatch):
    def refuse(descriptor, content, position):
        if position == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(content)

    monkeypatch.setattr(durable_writes, "DIRECT_BYTES", BUFFER)
    file = DirectFile(tmp_path / "file")
    monkeypatch.setattr(os, "pwrite", refuse)
    file.write(bytes(BUFFER + 1))
    with pytest.raises(DiskFullError):
        file.close()
    assert file.closed


@pytest.mark.parametrize("when", range(2), ids=["the backup is named", "the file is named"])
def test_a_config_file_is_written_although_an_engine_that_starts_sweeps(tmp_path, monkeypatch, when):
    path, rename, renames = tmp_path / "config" / "topics.json", os.rename, []
    write_config(path, b"old")

    def swept_once(source, target):
        if len(renames) == when:
            assert sweep_unfinished(tmp_path) != []
        renames.append(target)
        rename(source, target)

    monkeypatch.setattr(os, "rename", swept_once)
    write_config(path, b"new")
    assert path.read_bytes() == b"new" and path.with_name("topics.json.bak").read_bytes() == b"old"
    assert sorted(file.name for file in path.parent.iterdir()) == ["topics.json", "topics.json.bak"]


@pytest.mark.parametrize("name, write", [
    ("topics.json.tmp", lambda root: write_config(root / "config" / "topics.json", b"new")),
    ("topics.json.tmp", lambda root: write_config(root / "config" / "topics.json", b"new", mode=0o600)),
    ("consumerOffset.json.tmp", lambda root: ConsumerOffsets(root).commit("orders", "billing", {0: 7})),
    ("engine-run.json.tmp", lambda root: note_run(root, "/dev/shm")),
], ids=["config", "private", "offsets", "run"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to(path.with_name("other")),
                                  lambda path: path.hardlink_to(path.with_name("other"))], ids=["pipe", "link", "hard link"])
def test_a_foreign_file_with_a_temporary_files_name_is_replaced_and_not_written_to(tmp_path, make, name, write):
    config = tmp_path / "config"
    config.mkdir()
    (config / "other").write_bytes(b"of another user")
    make(config / name)
    write(tmp_path)
    assert (config / "other").read_bytes() == b"of another user" and not (config / name).exists()
    written = list(config.glob("*.json"))
    assert len(written) == 1 and not written[0].is_symlink() and written[0].stat().st_nlink == 1


def test_a_folder_with_a_temporary_files_name_is_an_error(tmp_path):
    """It may have a user's files."""
    path = tmp_path / "config" / "topics.json"
    write_config(path, b"old")
    path.with_name("topics.json.tmp").mkdir()
    with pytest.raises(DiskError, match=r"cannot write .*topics.json"):
        write_config(path, b"new")
    assert path.read_bytes() == b"old" and sweep_unfinished(tmp_path) == []


@pytest.mark.root
@pytest.mark.parametrize("use", [
    lambda root: ConsumerOffsets(root).commit("orders", "billing", {0: 7}),
    lambda root: GroupMembers(root, "orders", "billing").close(),
    lambda root: write_log_hold(root, LogHold("backup", "backup", 0, 1)),
], ids=["offsets", "members", "hold"])
def test_folders_and_locks_that_root_makes_first_are_of_the_stores_user(tmp_path, use):
    config = tmp_path / "config"
    config.mkdir()
    os.chown(config, 65534, 65534)
    use(tmp_path)
    shared = [path for path in config.rglob("*") if path.is_dir() or path.parent.name == "consumers" or path.suffix == ".lock"]
    assert shared and {(path.stat().st_uid, path.stat().st_gid) for path in shared} == {(65534, 65534)}


def test_a_lock_that_root_is_just_creating_is_waited_for(tmp_path, monkeypatch):
    path, opened, calls = tmp_path / "config" / "topics.json.lock", os.open, []

    def refused_once(name, *rest, **named):
        calls.append(os.path.basename(name))
        if calls.count(path.name) == 1 and calls[-1] == path.name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(name, *rest, **named)

    monkeypatch.setattr(os, "open", refused_once)
    os.close(open_shared_file(path))
    assert calls.count(path.name) == 2


@pytest.mark.root
def test_a_file_of_root_that_was_moved_into_a_locks_place_stays_roots(tmp_path):
    path = tmp_path / "config" / "topics.json.lock"
    path.parent.mkdir()
    os.chown(path.parent, 65534, 65534)
    path.write_text("a secret of root")
    os.close(open_shared_file(path))
    assert path.stat().st_uid == 0
