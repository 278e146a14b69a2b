"""Shared objects are really allocated, never shared by accident, and swept."""

from __future__ import annotations

import errno
import os
import re
import resource
import stat
import subprocess

import posix_ipc
import pytest

from fix_cli import command_line
from in_child import InChild
from pyengine.errors import DiskError, DiskFullError, EngineError, EngineUnavailableError, ExitCode
from pyengine.ipc import shared_objects
from pyengine.ipc.shared_objects import SharedFolder, create_semaphores, find_folder, note_run, semaphore_name
from pyengine.storage.engine_id import ensure_engine_id
from waiting import scaled_timeout_s


def test_an_object_is_allocated_private_and_seen_by_others(folder):
    folder.make()
    with folder.create("control", 1 << 20) as made:
        status = os.stat(folder.path / "control")
        assert status.st_blocks * 512 >= 1 << 20 and stat.S_IMODE(status.st_mode) == 0o600
        assert stat.S_IMODE(os.stat(folder.path).st_mode) == 0o700
        assert made.memory[:] == bytes(1 << 20)
        made.memory[5] = 7
        with folder.attach("control", writable=False) as seen:
            assert seen.memory[5] == 7
            with pytest.raises(TypeError):
                seen.memory[5] = 8


def test_names_are_exclusive_and_attaching_never_creates(folder):
    folder.make()
    folder.create("cleaning", 4096).close()
    with pytest.raises(FileExistsError):
        folder.create("cleaning", 4096)
    with pytest.raises(EngineUnavailableError, match="no engine"):
        folder.attach("control")
    assert folder.names() == ["cleaning"]


def test_an_object_that_does_not_fit_leaves_nothing(folder):
    folder.make()
    status = os.statvfs(folder.path)
    with pytest.raises(DiskFullError, match="shm_directory"):
        folder.create("pool-0", status.f_blocks * status.f_frsize + (1 << 30))
    assert folder.names() == []


def test_a_half_made_object_is_refused(folder):
    folder.make()
    (folder.path / "control").touch()
    with pytest.raises(EngineUnavailableError, match="empty"):
        folder.attach("control")


@pytest.mark.parametrize("limit, exhausted", [(resource.RLIMIT_NOFILE, 3), (resource.RLIMIT_AS, 1)], ids=["descriptors", "memory"])
def test_a_mapping_that_the_system_refuses_is_an_error_with_its_name_and_no_missing_engine(folder, limit, exhausted):
    folder.make()
    folder.create("control", 64 << 20).close()

    def attach() -> str:
        resource.setrlimit(limit, (exhausted, resource.getrlimit(limit)[1]))
        try:
            folder.attach("control", writable=False)
        except EngineError as error:
            return f"{type(error).__name__}: {error}"
        return "it was mapped"

    said = InChild(attach)()  # in a process of its own, which may do without
    assert said.startswith(f"EngineError: cannot map {folder.path}/control: ") and "limit" in said, said


def test_links_are_not_followed(folder, tmp_path):
    folder.make()
    (tmp_path / "victim").write_bytes(b"x" * 4096)
    os.symlink(tmp_path / "victim", folder.path / "control")
    with pytest.raises(EngineUnavailableError, match="is not a shared object"):
        folder.attach("control")
    with pytest.raises(FileExistsError):
        folder.create("control", 4096)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.mknod(path, stat.S_IFSOCK | 0o600)],
                         ids=["folder", "pipe", "socket"])
@pytest.mark.parametrize("writable", [False, True])
def test_an_object_that_is_no_regular_file_is_refused_at_once_and_swept(folder, make, writable):
    folder.make()
    make(folder.path / "control")
    with pytest.raises(EngineUnavailableError, match="control is not a shared object|is empty"):
        folder.attach("control", writable=writable)
    assert folder.sweep() == ["control"] and not folder.path.exists()


@pytest.mark.parametrize("trap", ["open to others", "a link", "a file"])
def test_a_folder_that_another_user_laid_out_is_not_used(folder, tmp_path, trap):
    if trap == "open to others":
        folder.path.mkdir(mode=0o777)
        folder.path.chmod(0o777)
    elif trap == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        os.symlink(tmp_path / "elsewhere", folder.path)
    else:
        folder.path.touch()
    try:
        with pytest.raises(EngineUnavailableError, match="belongs to another user"):
            folder.make()
    finally:
        if folder.path.is_symlink() or folder.path.is_file():
            folder.path.unlink()


def test_a_sweep_takes_objects_semaphores_and_folder(folder):
    folder.make()
    for name in ("control", "pool-0", "pool-1", "session-3-1"):
        folder.create(name, 4096).close()
    create_semaphores(folder.short_id)
    assert folder.sweep() == ["control", "pool-0", "pool-1", "session-3-1"]
    with pytest.raises(posix_ipc.ExistentialError):
        posix_ipc.Semaphore(semaphore_name(folder.short_id, shared_objects.SEMAPHORE_KINDS[1]))
    assert not folder.path.exists()
    assert folder.sweep() == []


def test_semaphores_are_private(folder):
    folder.make()
    create_semaphores(folder.short_id)
    for kind in shared_objects.SEMAPHORE_KINDS:
        status = os.stat(f"/dev/shm/sem.{semaphore_name(folder.short_id, kind)[1:]}")
        assert stat.S_IMODE(status.st_mode) == 0o600


@pytest.mark.parametrize("error", [
    posix_ipc.PermissionsError("No permission to create this semaphore"), posix_ipc.ExistentialError("No semaphore exists with the name"),
    OSError(errno.EROFS, "Read-only file system")], ids=["not ours", "not there", "read-only"])
def test_a_semaphore_that_may_not_be_made_is_an_error_with_the_name_of_its_folder(folder, monkeypatch, error):
    def refuse(*arguments, **named):
        raise error

    monkeypatch.setattr(posix_ipc, "Semaphore", refuse)
    with pytest.raises(EngineUnavailableError, match=rf"cannot be made in /dev/shm: {error.args[-1]}: it must be a tmpfs you may write"):
        create_semaphores(folder.short_id)


def test_a_process_without_a_free_descriptor_is_told_that_and_not_that_the_folder_is_wrong(folder):
    def refused() -> str:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        with pytest.raises(EngineUnavailableError) as said:
            create_semaphores(folder.short_id)
        return str(said.value)

    said = InChild(refused)()
    assert re.search(r"cannot be made in /dev/shm: .*files open$", said), said


def test_the_default_folder_is_not_said_to_be_needless(folder, tmp_path):
    for parent, sentence in ((folder.path.parent, "/dev/shm must be a tmpfs"), (tmp_path, "set shm_directory to a tmpfs")):
        with pytest.raises(DiskError, match=f"File name too long: {sentence} you may write"):
            SharedFolder(parent / f"pyengine-{'0' * 300}").make()


@pytest.mark.root
@pytest.mark.parametrize(("options", "setting", "sentence"), [
    ("ro", True, "the named semaphore .* cannot be removed in /dev/shm: Read-only file system: it must be a tmpfs you may write"),
    pytest.param("nr_inodes=4", False, "no room in /dev/shm for .* free, but no inode", marks=pytest.mark.ci),
    ("nr_inodes=4", True, "the named semaphore .* cannot be made in /dev/shm: No space left")])
def test_a_folder_of_semaphores_that_cannot_be_used_is_named_at_a_start(tmp_path, options, setting, sentence):
    memory = tmp_path / "memory"
    memory.mkdir()
    start = command_line("start", tmp_path / "store", *["--set", f"shm_directory={memory}"] * setting)
    done = subprocess.run(["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$@"', "sh", *start],
                          capture_output=True, text=True, timeout=scaled_timeout_s(60))
    assert done.returncode == ExitCode.FAILED and re.search(sentence, done.stderr), done


def test_another_process_finds_the_folder_of_a_run(root, tmp_path):
    with pytest.raises(EngineUnavailableError, match="ever run"):
        find_folder(root)
    identity = ensure_engine_id(root)
    assert find_folder(root).path == SharedFolder.of(identity).path
    elsewhere = tmp_path / "shm"
    note_run(root, elsewhere)
    note_run(root, elsewhere)
    assert find_folder(root).path == elsewhere / f"pyengine-{identity.short}"
    shared_objects.ENGINE_RUN.path(root).write_bytes(b"[")
    assert find_folder(root).path == SharedFolder.of(identity).path
