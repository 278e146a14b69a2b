"""New files appear complete or not at all: on a healthy disk, a full one, and with a crash at every system call."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dying import run_and_die_at
from pyengine.errors import DiskError, DiskFullError, FlushError, InvariantError
from pyengine.storage import durable_writes
from pyengine.storage.durable_writes import create_file, create_files, make_folders, open_given, sweep_unfinished, write_config

NAME = "00000000000000065536"


def refuse_tmpfile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process see a file system that does not know O_TMPFILE."""
    real_open = os.open

    def open_without_tmpfile(path, flags, *rest, **named):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE here", str(path))
        return real_open(path, flags, *rest, **named)

    monkeypatch.setattr(durable_writes.os, "open", open_without_tmpfile)


@pytest.fixture(params=["tmpfile", "sibling"])
def way(request, monkeypatch):
    if request.param == "sibling":
        refuse_tmpfile(monkeypatch)
    return request.param


@pytest.mark.parametrize(("allocate", "least_bytes", "most_bytes"),
                         [("full", 1 << 20, 2 << 20), ("none", 0, 0), (65536, 65536, 131072)])
def test_a_new_file_has_its_length_its_blocks_and_zeros(way, tmp_path, allocate, least_bytes, most_bytes):
    descriptor = create_file(tmp_path / "commitlog", NAME, 1 << 20, allocate=allocate)
    try:
        status = os.fstat(descriptor)
        assert status.st_size == 1 << 20
        assert least_bytes <= status.st_blocks * 512 <= most_bytes
        assert os.pread(descriptor, 1 << 20, 0) == bytes(1 << 20)
        assert os.pwrite(descriptor, b"x", 5) == 1
        assert os.stat(tmp_path / "commitlog" / NAME).st_ino == status.st_ino
    finally:
        os.close(descriptor)
    assert os.listdir(tmp_path / "commitlog") == [NAME]
    assert os.listdir(tmp_path) == ["commitlog"]


def test_missing_folders_are_made_and_each_one_is_synced_in_its_parent(tmp_path, monkeypatch):
    synced = []
    real = durable_writes.sync_folder
    monkeypatch.setattr(durable_writes, "sync_folder", lambda folder: (synced.append(Path(folder)), real(folder)))
    os.close(create_file(tmp_path / "consumequeue" / "T" / "0", NAME, 4096))
    assert synced == [tmp_path, tmp_path / "consumequeue", tmp_path / "consumequeue" / "T",
                      tmp_path / "consumequeue" / "T" / "0"]


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "consumequeue").write_text("not a folder")
    with pytest.raises(DiskError, match="consumequeue"):
        make_folders(tmp_path / "consumequeue" / "T")


def test_a_taken_name_is_refused_and_left_alone(way, tmp_path):
    (tmp_path / NAME).write_bytes(b"old")
    with pytest.raises(DiskError) as caught:
        create_file(tmp_path, NAME, 4096)
    assert caught.value.errno == errno.EEXIST
    assert (tmp_path / NAME).read_bytes() == b"old"
    assert os.listdir(tmp_path) == [NAME]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b"])
def test_a_name_that_is_no_name_is_our_own_error(tmp_path, name):
    with pytest.raises(InvariantError):
        create_file(tmp_path, name, 1)


@pytest.mark.parametrize("step", ["posix_fallocate", "fsync", "ftruncate"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_failing_step_leaves_nothing(way, tmp_path, monkeypatch, step, code):
    def fail(*_args):
        raise OSError(code, os.strerror(code))

    make_folders(tmp_path / "commitlog")
    monkeypatch.setattr(durable_writes.os, step, fail)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DiskError) as caught:
        create_file(tmp_path / "commitlog", NAME, 4096)
    assert caught.value.errno == code
    assert isinstance(caught.value, DiskFullError) == (code != errno.EIO)
    assert isinstance(caught.value, FlushError) == (code == errno.EIO and step == "fsync")
    assert os.listdir(tmp_path / "commitlog") == []
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.undo()
    sweep_unfinished(tmp_path)
    assert os.listdir(tmp_path) == ["commitlog"]


def test_when_the_name_cannot_be_made_durable_the_file_is_taken_back(way, tmp_path, monkeypatch):
    real = durable_writes.sync_folder

    def fail(folder):
        if Path(folder) == tmp_path / "commitlog":
            raise FlushError("injected", errno=errno.EIO)
        real(folder)

    make_folders(tmp_path / "commitlog")
    monkeypatch.setattr(durable_writes, "sync_folder", fail)
    with pytest.raises(FlushError):
        create_file(tmp_path / "commitlog", NAME, 4096)
    assert os.listdir(tmp_path / "commitlog") == []


@pytest.mark.root
def test_new_files_and_folders_of_root_belong_to_the_owner_of_the_folder_that_they_are_in(way, tmp_path):
    os.chown(tmp_path, 65534, 65534)
    os.close(create_file(tmp_path / "commitlog", NAME, 4096))
    names = [str(tmp_path / "consumequeue" / topic / "0" / NAME) for topic in "TU"]
    for descriptor in create_files(names, 4096, allocate=4096) or ():
        os.close(descriptor)
    write_config(tmp_path / "config" / "topics.json", b"{}")
    write_config(tmp_path / "config" / "topics.json", b"{ }")
    assert {(path.stat().st_uid, path.stat().st_gid) for path in tmp_path.rglob("*")} == {(65534, 65534)}
    assert way == "sibling" or all(map(os.path.exists, names))


@pytest.mark.root
@pytest.mark.parametrize("owner", [0, 65533])
def test_a_config_that_root_replaces_keeps_its_owner(tmp_path, owner):
    path = tmp_path / "engine.toml"
    path.touch()
    os.chown(path, owner, owner)
    os.chown(tmp_path, 65534, 65534)
    write_config(path, b"x = 1")
    assert {(file.stat().st_uid, file.stat().st_gid) for file in tmp_path.iterdir()} == {(owner, owner)}


@pytest.mark.root
def test_a_file_of_root_to_which_another_user_made_a_link_stays_roots(tmp_path):
    theirs, files = tmp_path / "theirs", [tmp_path / "old", tmp_path / "new"]
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    files[0].touch()
    for file in files:
        (theirs / file.name).symlink_to(file)
        os.lchown(theirs / file.name, 65534, 65534)
        os.close(open_given(theirs / file.name, os.O_WRONLY | os.O_CREAT))
    (theirs / "folder").symlink_to(tmp_path)
    os.close(open_given(theirs / "folder" / "third", os.O_WRONLY | os.O_CREAT))
    assert {path.stat().st_uid for path in (*files, tmp_path / "third")} == {0}


# -- crashes ----------------------------------------------------------------------

SYSTEM_CALLS = ("open", "ftruncate", "posix_fallocate", "fsync", "rename", "link", "unlink", "mkdir", "rmdir", "pwrite", "write")


def test_killed_anywhere_a_segment_is_whole_or_absent(way, tmp_path):
    for step in range(100):
        root = tmp_path / str(step)
        root.mkdir()
        ended = run_and_die_at(step, lambda: create_file(root / "commitlog", NAME, 65536), SYSTEM_CALLS)
        segment = root / "commitlog" / NAME
        present = os.listdir(root / "commitlog") if (root / "commitlog").is_dir() else []
        assert present in ([], [NAME]), f"killed at system call {step}"
        if present:
            status = segment.stat()
            assert (status.st_size, status.st_blocks * 512 >= 65536) == (65536, True)
        sweep_unfinished(root)
        assert set(os.listdir(root)) <= {"commitlog"}
        if not present:
            os.close(create_file(root / "commitlog", NAME, 65536))
        if ended:
            assert step >= 5
            return
    pytest.fail("create_file never came to its end")


def test_killed_anywhere_a_config_is_old_or_new_and_its_backup_is_whole(tmp_path):
    contents = [b"first" * 100, b"second" * 200, b"third" * 300]
    for step in range(100):
        path = tmp_path / str(step) / "config" / "topics.json"
        write_config(path, contents[0])
        write_config(path, contents[1])
        ended = run_and_die_at(step, lambda: write_config(path, contents[2]), SYSTEM_CALLS)
        now, backup = path.read_bytes(), path.with_name("topics.json.bak").read_bytes()
        assert (now, backup) in [(contents[1], contents[0]), (contents[1], contents[1]),
                                 (contents[2], contents[1])], f"killed at system call {step}"
        sweep_unfinished(path.parent.parent)
        write_config(path, contents[0])
        assert sorted(os.listdir(path.parent)) == ["topics.json", "topics.json.bak"]
        assert (path.read_bytes(), path.with_name("topics.json.bak").read_bytes()) == (contents[0], now)
        if ended:
            assert step >= 5
            return
    pytest.fail("write_config never came to its end")


def test_a_config_with_a_secret_is_never_in_a_file_that_others_may_read(tmp_path, monkeypatch):
    path, modes = tmp_path / "plain_acl.yml", []
    path.with_name("plain_acl.yml.tmp").touch(mode=0o644)  # of a crash
    pwrite, umask = os.pwrite, os.umask(0)
    try:
        monkeypatch.setattr(durable_writes.os, "pwrite", lambda descriptor, data, at: (
            modes.append(os.fstat(descriptor).st_mode & 0o777), pwrite(descriptor, data, at))[1])
        write_config(path, b"secretKey: x", keep_backup=False, mode=0o600)
    finally:
        os.umask(umask)
    assert modes == [0o600] and path.stat().st_mode & 0o777 == 0o600 and os.listdir(tmp_path) == ["plain_acl.yml"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("step", ["pwrite", "fsync", "rename"])
def test_a_config_that_cannot_be_written_stays_as_it_was(tmp_path, monkeypatch, step, code):
    path = tmp_path / "config" / "watermark"
    write_config(path, b"old")

    def fail(*_args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(durable_writes.os, step, fail)
    with pytest.raises(DiskFullError if code == errno.ENOSPC else DiskError):
        write_config(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert not path.with_name("watermark.tmp").exists()


def test_a_config_without_backup(tmp_path):
    write_config(tmp_path / "watermark", b"1", keep_backup=False)
    write_config(tmp_path / "watermark", b"2", keep_backup=False)
    assert os.listdir(tmp_path) == ["watermark"]
    assert (tmp_path / "watermark").read_bytes() == b"2"


def test_the_sweep_takes_unfinished_files_and_nothing_else(tmp_path):
    kept = [tmp_path / "commitlog" / NAME, tmp_path / "consumequeue" / "T" / "0" / NAME,
            tmp_path / "config" / "topics.json", tmp_path / "config" / "topics.json.bak", tmp_path / ".copy.new" / "of a user"]
    swept = [tmp_path / ".commitlog.new" / NAME, tmp_path / ".index.new" / "20200101000000000",
             tmp_path / "consumequeue" / "T" / ".0.new" / NAME, tmp_path / "config" / "topics.json.tmp"]
    for file in [*kept, *swept]:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x")
    assert sorted(sweep_unfinished(tmp_path)) == sorted(swept)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(kept)
    assert [path.name for path in tmp_path.rglob(".*")] == [".copy.new"]


# -- a real full disk -------------------------------------------------------------

@pytest.fixture
def small_disk(make_small_disk):
    return make_small_disk("1m")


@pytest.mark.root
def test_a_full_disk_gives_a_status_leaves_nothing_and_recovers_with_room(way, small_disk):
    os.close(create_file(small_disk / "commitlog", NAME, 512 << 10))
    with pytest.raises(DiskFullError):
        create_file(small_disk / "commitlog", "00000000000000524288", 768 << 10)
    assert os.listdir(small_disk / "commitlog") == [NAME]
    (small_disk / "commitlog" / NAME).unlink()
    os.close(create_file(small_disk / "commitlog", "00000000000000524288", 768 << 10))
    assert os.listdir(small_disk) == ["commitlog"]


@pytest.mark.root
def test_a_config_on_a_full_disk_keeps_its_old_content(small_disk):
    path = small_disk / "config" / "topics.json"
    write_config(path, b"old")
    filler = small_disk / "filler"
    with open(filler, "wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))
    with pytest.raises(DiskFullError):
        write_config(path, bytes(100_000))
    assert path.read_bytes() == b"old"
    filler.unlink()
    write_config(path, b"new")
    assert path.read_bytes() == b"new"
