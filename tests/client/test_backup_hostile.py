"""Backups and restores in folders of another user: links, pipes and forged manifests reach nothing outside."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

import pyengine
from fix_cli import run
from fix_engine import SMALL
from pyengine.client.backup import backup_store, check_backup, restore_store
from pyengine.errors import CorruptionError, DiskError, EngineError, StoreBusyError, UsageError
from pyengine.storage.backup_files import MANIFEST, Folder, Table, read_manifest

OTHER = 65534  # another user
SIZES = {"mapped_file_size_commit_log_bytes": 65536, "mapped_file_size_consume_queue_bytes": 400}
SECRET = b'{"secret": "of root"}'


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    root = tmp_path_factory.mktemp("original") / "store"
    with pyengine.Engine(root, **SMALL | SIZES) as engine, engine.connect() as producer:
        assert producer.put_many("T", [b"x" * 900] * 100, queue_id=1).ok
    return root


@pytest.fixture
def store(original, tmp_path):
    shutil.copytree(original, tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def victim(tmp_path):
    """A folder with a file of root, which each test leaves as it is."""
    folder = tmp_path / "victim"
    folder.mkdir(mode=0o700)
    (folder / "file").write_bytes(SECRET)
    os.chmod(folder / "file", 0o600)
    yield folder
    assert os.listdir(folder) == ["file"] and (folder / "file").read_bytes() == SECRET


@pytest.fixture
def dest(store, tmp_path):
    """A backup."""
    backup_store(store, Folder(tmp_path / "dest"))
    return tmp_path / "dest"


def link(path, target):
    """A link of another user, where root can make one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    if os.geteuid() == 0:
        os.lchown(path, OTHER, OTHER)


def files_of(folder):
    return [path for path in Path(folder).rglob("*") if path.is_file()]


# ---- the destination ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe"])
def test_what_has_the_name_of_an_unfinished_file_is_replaced_and_not_followed(store, victim, tmp_path, kind):
    backup_store(store, Folder(tmp_path / "first"))
    names = [name for name in Folder(tmp_path / "first").sizes() if name.startswith("commitlog/")]
    dest = tmp_path / "dest"
    (dest / "commitlog").mkdir(parents=True)
    placed = [dest / f"{name}.part" for name in names] + [dest / "manifest.json.tmp", dest / "progress.json.tmp"]
    shutil.copy(tmp_path / "first/manifest.json", dest / "progress.json")  # an unfinished backup, of which no piece is there
    for path in placed:
        match kind:
            case "link":
                path.symlink_to(victim / "file")
            case "hard link":
                os.link(victim / "file", path)
            case "pipe":
                os.mkfifo(path)
    assert backup_store(store, Folder(dest), read_back=True).checked_bytes
    assert not any(os.path.lexists(path) for path in placed)


@pytest.mark.parametrize("name", ["commitlog", "tables", "tables/2", "manifest.json", ".pyengine.lock"])
def test_a_link_in_a_destination_is_never_followed(store, dest, victim, tmp_path, name):
    if name == "tables/2":
        (dest / "tables/2").symlink_to(victim)
    else:
        link(dest / name, victim / "file" if "." in name else victim)
    with pytest.raises(EngineError):
        backup_store(store, Folder(dest))
    link(tmp_path / "linked", dest)
    if name != ".pyengine.lock":
        with pytest.raises(EngineError):
            backup_store(store, Folder(dest), read_back=True)


def test_a_link_to_a_file_of_the_backup_is_no_file_of_it(dest, victim):
    piece = next(path for path in files_of(dest) if path.parent.name == "commitlog")
    shutil.move(piece, dest.parent / "elsewhere")
    piece.symlink_to(dest.parent / "elsewhere")
    with pytest.raises(EngineError, match=piece.name):
        check_backup(Folder(dest))
    with pytest.raises(EngineError, match=piece.name):
        restore_store(Folder(dest), dest.parent / "new")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)], ids=["pipe", "endless"])
@pytest.mark.parametrize("which", ["manifest.json", "commitlog", "tables"])
def test_a_pipe_or_device_in_a_backup_is_not_waited_for(dest, tmp_path, make, which):
    path = next(path for path in files_of(dest) if str(path.relative_to(dest)).startswith(which))
    path.unlink()
    make(path)
    with pytest.raises(EngineError):
        restore_store(Folder(dest), tmp_path / "new")
    with pytest.raises(EngineError):
        check_backup(Folder(dest))


def test_a_file_that_is_longer_than_the_manifest_says_is_not_read_to_its_end(dest):
    path = next(path for path in files_of(dest) if path.parent.name == "commitlog")
    os.truncate(path, 1 << 40)
    with pytest.raises(CorruptionError, match="or more bytes"):
        check_backup(Folder(dest))
    os.truncate(dest / MANIFEST, 1 << 40)
    with pytest.raises(CorruptionError, match="it is longer than"):
        check_backup(Folder(dest))


@pytest.mark.root
def test_root_follows_no_link_of_another_user_to_a_destination_and_its_own_ones(store, dest, victim, tmp_path):
    (victim / "inside").mkdir()
    link(tmp_path / "theirs", victim)
    for path in (tmp_path / "theirs/inside", tmp_path / "theirs/new", tmp_path / "theirs"):
        with pytest.raises(DiskError, match="is a link that the user 65534 made"):
            backup_store(store, Folder(path))
        with pytest.raises(DiskError, match="is a link that the user 65534 made"):
            restore_store(Folder(dest), path)
    (victim / "inside").rmdir()
    (tmp_path / "disk").mkdir()
    (tmp_path / "ours").symlink_to(tmp_path / "disk")
    assert backup_store(store, Folder(tmp_path / "ours/dest")).exit_code == 0
    assert restore_store(Folder(tmp_path / "ours/dest"), tmp_path / "ours/new").exit_code == 0


@pytest.mark.root
def test_a_hard_link_to_a_file_of_root_in_the_backup_of_another_user_is_not_restored(dest, victim, tmp_path):
    manifest = read_manifest(Folder(dest))
    table = next(table for table in manifest.tables if table.path == "config/topics.json")
    (dest / table.name).unlink()
    os.link(victim / "file", dest / table.name)
    os.chown(dest, OTHER, OTHER)
    os.chown((dest / table.name).parent, OTHER, OTHER)
    with pytest.raises(DiskError, match="is a hard link to a file of the user 0"):
        restore_store(Folder(dest), tmp_path / "new")


def test_a_backup_and_what_is_restored_from_it_are_private(store, tmp_path):
    before = os.umask(0o022)
    try:
        backup_store(store, Folder(tmp_path / "dest"))
        backup_store(store, Folder(tmp_path / "dest"))
        assert restore_store(Folder(tmp_path / "dest"), tmp_path / "new").exit_code == 0
    finally:
        assert os.umask(before) == 0o022
    for folder in ("dest", "new"):
        for path in (tmp_path / folder, *(tmp_path / folder).rglob("*")):
            assert not stat.S_IMODE(path.lstat().st_mode) & 0o077, path


@pytest.mark.root
def test_another_user_cannot_stop_backups_by_a_lock_on_the_folder(store, dest, tmp_path):
    os.chmod(dest, 0o755)
    (tmp_path / "new").mkdir(mode=0o755)
    held = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY) for folder in (dest, tmp_path / "new")]
    for descriptor in held:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        assert backup_store(store, Folder(dest)).number == 2
        assert restore_store(Folder(dest), tmp_path / "new").exit_code == 0
        with Folder(dest).locked():
            assert stat.S_IMODE((dest / ".pyengine.lock").stat().st_mode) == 0o600
    finally:
        for descriptor in held:
            os.close(descriptor)


def test_a_lock_that_is_left_is_taken_again_and_a_living_one_is_not(store, dest):
    (dest / ".pyengine.lock").touch(mode=0o600)
    assert backup_store(store, Folder(dest)).number == 2
    assert not (dest / ".pyengine.lock").exists()
    with Folder(dest).locked(), pytest.raises(StoreBusyError):
        backup_store(store, Folder(dest))


# ---- forged manifests -----------------------------------------------------------------


def forged(dest, **fields):
    (dest / MANIFEST).write_bytes(replace(read_manifest(Folder(dest)), **fields).content())


@pytest.mark.parametrize("path", ["config/plain_acl.yml", "config/plain_acl.yml.bak", "../outside", "/etc/passwd",
                                  "config/../../outside.json",
                                  "config/engine-id", "config/watermark", "lock", "abort", "checkpoint",
                                  "consumequeue/../../x/00000000000000000000", "consumequeue/T/0/x", "consumequeue/T/-1/" + "0" * 20,
                                  "commitlog/" + "0" * 20, "config/a\0.json", "", 7])
def test_a_manifest_that_names_another_file_of_the_store_is_refused(dest, tmp_path, path):
    table = read_manifest(Folder(dest)).tables[0]
    forged(dest, tables=(replace(table, path=path),))
    with pytest.raises(CorruptionError, match="manifest.json cannot be used"):
        restore_store(Folder(dest), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["../victim/file", "/etc/shadow", "tables/1/../../../victim/file", "commitlog/x",
                                  "tables/x/config/topics.json",
                                  "tables/1/config/other.json", "", None, 7])
def test_a_manifest_that_takes_a_table_from_elsewhere_is_refused(dest, victim, tmp_path, name):
    forged(dest, tables=(Table("config/topics.json", name, len(SECRET), 0, len(SECRET)),))
    with pytest.raises(CorruptionError, match="manifest.json cannot be used"):
        restore_store(Folder(dest), tmp_path / "new")


@pytest.mark.parametrize("changes", [
    {"segment": -65536}, {"segment": 7}, {"start": -1}, {"start": 1 << 70}, {"end": 1 << 40}, {"end": 0}, {"number": "../../x"},
    {"number": 1.5}, {"segment": "0"}, {"crc": None}, {"modified_ns": True}], ids=str)
def test_a_manifest_with_an_impossible_piece_is_refused(dest, tmp_path, changes):
    piece = read_manifest(Folder(dest)).pieces[0]
    forged(dest, pieces=(replace(piece, **changes),))
    with pytest.raises(CorruptionError, match="manifest.json cannot be used"):
        restore_store(Folder(dest), tmp_path / "new")


@pytest.mark.parametrize("fields", [
    {"settings": {}}, {"settings": {"mapped_file_size_commit_log_bytes": "65536"}}, {"number": -1}, {"verified_from": "x"}, {"uuid": None},
    {"end": 1e300}], ids=str)
def test_a_manifest_with_other_values_is_refused(dest, tmp_path, fields):
    forged(dest, **fields)
    with pytest.raises(CorruptionError, match="manifest.json cannot be used"):
        restore_store(Folder(dest), tmp_path / "new")


@pytest.mark.parametrize("name", ["store_path_commit_log", "shm_directory", "ha_secret_file", "unknown"])
def test_a_manifest_cannot_set_where_a_store_is(dest, victim, tmp_path, name):
    forged(dest, settings=read_manifest(Folder(dest)).settings | {name: str(victim)})
    with pytest.raises(CorruptionError, match=f"the setting {name}, which no backup has"):
        restore_store(Folder(dest), tmp_path / "new")


@pytest.mark.parametrize("key", ["store_path_commit_log", "storePathCommitLog", "STORE-PATH-COMMIT-LOG", '"store_path_commit_log"',
                                 "'storePathCommitLog' "])
def test_settings_in_a_backup_cannot_say_where_the_log_is(store, victim, tmp_path, key):
    with open(store / "config/engine.toml", "a") as file:
        file.write(f'{key} = "{store / "commitlog"}"\n')
    backup_store(store, Folder(tmp_path / "dest"))
    manifest = read_manifest(Folder(tmp_path / "dest"))
    assert any(table.path == "config/engine.toml" for table in manifest.tables)
    assert restore_store(Folder(tmp_path / "dest"), tmp_path / "new").exit_code == 0
    assert os.listdir(tmp_path / "new/commitlog") and run("config", "explain", tmp_path / "new").code == 0


def test_settings_in_a_backup_that_hide_where_the_log_is_are_refused(store, dest, victim, tmp_path):
    table = next(table for table in read_manifest(Folder(dest)).tables if table.path == "config/engine.toml")
    content = f'"store_path_commit\\u005flog" = "{victim}"\n'.encode()
    (dest / table.name).write_bytes(content)
    size = len(content)
    forged(dest, tables=(replace(table, size_bytes=size, full_bytes=size, crc=zlib.crc32(content)),))
    with pytest.raises(CorruptionError, match="in an unusual form where the log is"):
        restore_store(Folder(dest), tmp_path / "new")


def test_a_manifest_of_deep_json_is_a_sentence(dest, tmp_path):
    (dest / MANIFEST).write_bytes(b"[" * 200_000)
    with pytest.raises(CorruptionError, match="manifest.json cannot be used"):
        restore_store(Folder(dest), tmp_path / "new")


# ---- the folder that is restored into -------------------------------------------------


@pytest.mark.parametrize("name", [".restoring", ".pyengine.lock"])
def test_a_link_in_the_folder_that_is_restored_into_is_not_followed(dest, victim, tmp_path, name):
    (tmp_path / "new").mkdir()
    link(tmp_path / "new" / name, victim if name == ".restoring" else victim / "file")
    with pytest.raises(EngineError):
        restore_store(Folder(dest), tmp_path / "new")


def test_a_link_that_is_put_in_place_while_a_store_is_made_is_not_followed(dest, victim, tmp_path):
    new = tmp_path / "new"

    def progress(done, total):
        if (new / ".restoring").is_dir() and not (new / ".restoring").is_symlink():
            os.rename(new / ".restoring", tmp_path / "moved")
            (new / ".restoring").symlink_to(victim)

    with pytest.raises(EngineError):  # at the end, when the store cannot get its place
        restore_store(Folder(dest), new, progress=progress)
    assert (tmp_path / "moved").is_dir()


@pytest.mark.root
def test_a_restore_that_another_user_began_is_not_continued_by_root(dest, tmp_path):
    (tmp_path / "new/.restoring").mkdir(parents=True)
    os.chown(tmp_path / "new/.restoring", OTHER, OTHER)
    with pytest.raises(DiskError, match="belongs to the user 65534"):
        restore_store(Folder(dest), tmp_path / "new")


# ---- the store ------------------------------------------------------------------------


PLACES = ["config", "config/topics.json", "config/engine.toml", "config/log-holds", "commitlog", "commitlog/" + "0" * 20, "consumequeue",
          "consumequeue/T", "consumequeue/T/1", "index", "quarantine", "checkpoint", "lock"]
COMMANDS = [("backup", "STORE", "DEST"), ("check", "STORE"), ("recover", "STORE"), ("status", "STORE"), ("salvage", "STORE", "DEST"),
            ("rebuild", "STORE"), ("config", "set", "STORE", "message_delay_level=1s"), ("start", "STORE"), ("quarantine", "list", "STORE"),
            ("topics", "create", "STORE", "new"), ("groups", "STORE"),
            ("dlq", "STORE"), ("get", "STORE", "--topic", "T", "--queue-id", "1", "--offset", "0"), ("inspect", "STORE", "--json")]


@pytest.mark.root
@pytest.mark.parametrize("place", PLACES)
def test_root_follows_no_link_that_the_stores_user_made(store, victim, tmp_path, place):
    """The tree that it leads to is as it was, and nothing of it is in the backup."""
    elsewhere = victim.parent / "elsewhere"
    shutil.copytree(store, elsewhere)
    (elsewhere / "quarantine").mkdir(exist_ok=True)
    (elsewhere / "config/log-holds").mkdir(exist_ok=True)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in elsewhere.rglob("*")}
    for path in (store, *store.rglob("*")):
        os.chown(path, OTHER, OTHER)
    link(store / place, elsewhere / place)
    for command in COMMANDS:
        if place == "consumequeue/T/1" and command[0] not in ("backup", "check", "recover", "rebuild", "start", "get", "inspect"):
            continue  # it reads no queue
        done = run(*[{"STORE": store, "DEST": tmp_path / "out"}.get(word, word) for word in command])
        assert done.code and "is a link that the user 65534 made" in done.stderr, command
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in elsewhere.rglob("*")} == before
    assert not [path for path in files_of(tmp_path / "out") if path.stat().st_size] if (tmp_path / "out").exists() else True


@pytest.mark.root
def test_root_follows_its_own_links_in_a_store(store, tmp_path):
    (tmp_path / "disk").mkdir()
    for name in ("commitlog", "config"):
        shutil.move(store / name, tmp_path / "disk" / name)
        (store / name).symlink_to(tmp_path / "disk" / name)
    assert run("check", store).code == 0
    assert backup_store(store, Folder(tmp_path / "dest")).exit_code == 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["commitlog/" + "0" * 20, "config/topics.json", "consumequeue/T/1/" + "0" * 20, "checkpoint"])
def test_a_pipe_in_the_store_is_not_waited_for(store, tmp_path, name):
    (store / name).unlink(missing_ok=True)
    os.mkfifo(store / name)
    for command in (("backup", store, tmp_path / "dest"), ("check", store), ("topics", store)):
        assert "Traceback" not in run(*command).stderr


@pytest.mark.root
def test_root_does_not_take_the_log_of_one_user_for_that_of_another(store, original, tmp_path):
    """Without a link: the settings of a store can name any folder as the log's."""
    shutil.move(store / "commitlog", tmp_path / "log-of-root")
    with open(store / "config/engine.toml", "a") as file:
        file.write(f'store_path_commit_log = "{tmp_path / "log-of-root"}"\n')
    assert run("check", store).code == 0  # a store of root
    for path in (store, *store.rglob("*")):
        os.chown(path, OTHER, OTHER)
    done = run("backup", store, tmp_path / "dest")
    assert done.code and "belongs to the user 0" in done.stderr
    with pytest.raises(EngineError, match="belongs to the user 0"):
        backup_store(store, Folder(tmp_path / "dest"))
    for path in (tmp_path / "log-of-root", *(tmp_path / "log-of-root").rglob("*")):
        os.chown(path, OTHER, OTHER)
    assert run("backup", store, tmp_path / "dest").code == 0


def test_a_store_is_not_restored_over_another_one(dest, store):
    with pytest.raises(UsageError, match="a backup is restored into an empty or absent directory"):
        restore_store(Folder(dest), store)
    assert not (store / ".restoring").exists() and not (store / ".pyengine.lock").exists()
