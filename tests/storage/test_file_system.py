"""A store's folder that is held open: paths below it, and what is noticed when it is moved, removed or replaced."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from faults.mounts import own_mounts, with_own_mounts
from fix_cli import run
from fix_failpoints import Interrupted
from fix_store_builder import StoreBuilder
from pyengine.errors import DiskError, EngineError, command, disk_error, shown
from pyengine.formats.paths import log_folders
from pyengine.storage import file_system
from pyengine.storage.backup_files import Folder
from pyengine.storage.config_table import TopicConfig, TopicConfigs
from pyengine.storage.consumer_offset import ConsumerOffsets
from pyengine.storage.durable_writes import create_file, make_folders, write_config
from pyengine.storage.file_system import HeldStore, open_folder
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.recover import recover


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "a store"
    for name in ("commitlog", "config"):
        (root / name).mkdir(parents=True)
    (root / "lock").write_bytes(b"lock")
    return root


@pytest.fixture
def held(root):
    store = HeldStore(root)
    store.watch()
    yield store
    store.close()


def write_all(store: HeldStore) -> None:
    """Make files in each of the ways that a store's files are made."""
    os.close(create_file(store.root / "commitlog", f"{0:020d}", 4096))
    os.close(create_file(store.root / "consumequeue" / "T" / "0", f"{0:020d}", 4096))
    write_config(store.root / "config" / "x.json", b"{}")
    write_config(store.root / "config" / "x.json", b"{ }")
    TopicConfigs(store.root).ensure(TopicConfig("T"))
    ConsumerOffsets(store.root).commit("T", "G", {0: 1})


def test_all_files_are_made_in_the_folder_that_was_opened(held, root):
    moved = root.rename(root.with_name("moved"))
    (root / "commitlog").mkdir(parents=True)
    write_all(held)
    assert list((root / "commitlog").iterdir()) == [] and os.listdir(root) == ["commitlog"]
    assert {"x.json", "x.json.bak", "topics.json", "consumerOffset.json"} <= set(os.listdir(moved / "config"))
    assert [path.name for path in moved.rglob(f"{0:020d}")] == [f"{0:020d}"] * 2


@pytest.mark.parametrize("change", ["the same", "moved", "moved, and another store there", "a link that leads back", "moved and back"])
def test_a_folder_is_lost_when_its_path_leads_elsewhere(held, root, change):
    moved = root.with_name("moved")
    if change != "the same":
        root.rename(moved)
    if "another" in change:
        shutil.copytree(moved, root)
    elif "link" in change:
        root.symlink_to(moved)
    elif "back" in change:
        moved.rename(root)
    loss = held.loss()
    if change in ("the same", "a link that leads back", "moved and back"):
        assert loss is None
    else:
        assert loss.is_whole and not loss.is_taken
        assert loss.sentence.startswith(f"{root} does not lead to") and f"which are in {moved}:" in loss.sentence
    write_all(held)


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("name", ["lock", "commitlog"])
def test_nothing_is_made_in_a_folder_whose_files_were_removed_or_replaced(held, root, name, is_replaced, monkeypatch):
    path = root / name
    path.rename(root / "old")
    if is_replaced:
        shutil.copytree(root / "old", path) if name == "commitlog" else shutil.copy(root / "old", path)
    if name == "lock":
        assert held.loss() is None  # for LOCK_AWAY_S
        monkeypatch.setattr(file_system, "LOCK_AWAY_S", 0.0)
    loss = held.loss()
    assert not loss.is_whole and not loss.is_taken
    assert loss.sentence == f"{path} was {'replaced' if is_replaced else 'removed'} while the engine ran"
    before = sorted(root.rglob("*"))
    for make in (lambda: create_file(held.root / "commitlog", f"{0:020d}", 4096), lambda: make_folders(held.root / "index"),
                 lambda: write_config(held.root / "config" / "x.json", b"{}")):
        if name == "lock":  # without it alone the work goes on until the engine ends
            make()
        else:
            with pytest.raises(DiskError, match=f"{path} was"):
                make()
    assert name == "lock" or sorted(root.rglob("*")) == before
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    (root / "old").rename(path)
    assert held.loss() is None and held.broken() == ""


def test_another_stores_identity_and_lock_take_the_folder(held, root):
    (root / "config" / "engine-id").write_bytes(b"one")
    held.watch("config/engine-id")
    for name in ("config/engine-id", "lock"):
        (root / name).rename(root / "old")
        assert not (loss := held.loss()) or not loss.is_taken
        shutil.copy(root / "old", root / name)
    assert held.loss().is_taken


def test_a_removed_folder_is_not_made_anew(held, root):
    shutil.rmtree(root)
    with pytest.raises(EngineError):
        write_all(held)
    with pytest.raises(DiskError):
        ConsumerOffsets(held.root).commit("T", "G", {0: 1})
    assert not root.exists() and not held.loss().is_whole


def test_folders_of_the_log_elsewhere_are_held_and_keep_their_order(root, tmp_path):
    disks = [tmp_path / name for name in ("z-disk", "a-disk")]
    for disk in disks:
        (disk / "log").mkdir(parents=True)
    (root / "config" / "engine.toml").write_text(f'store_path_commit_log = "{disks[0]}/log,commitlog,{disks[1]}/log"\n')
    by_name = [log_folders(root).folder_for(number * 10, 10) for number in range(3)]
    store = HeldStore(root)
    store.watch()
    folders = [log_folders(store.root).folder_for(number * 10, 10) for number in range(3)]
    assert [shown(str(folder)) for folder in folders] == list(map(str, by_name))
    disks[0].rename(tmp_path / "moved")
    for number, folder in enumerate(folders):
        os.close(create_file(folder, f"{number * 10:020d}", 10))
    assert sorted(path.parent for path in tmp_path.rglob("0000*0")) == sorted(
        [tmp_path / "moved" / "log", root / "commitlog", disks[1] / "log"])
    assert f"{disks[0]}/log does not lead to this store's files any more, which are in {tmp_path}/moved/log:" in store.loss().sentence
    (tmp_path / "moved" / "log").rename(tmp_path / "moved" / "old")
    with pytest.raises(DiskError, match=f"{disks[0]}/log was removed"):
        make_folders(next(folder for folder in folders if shown(str(folder)) == f"{disks[0]}/log"))
    store.close()
    assert log_folders(root).folder_for(0, 10) == by_name[0]


def test_texts_have_the_path_that_a_person_knows(held, root):
    assert str(root) not in str(held.root)
    assert shown(f"{held.root}/commitlog and {held.root}") == f"{root}/commitlog and {root}"
    assert shown(f"{held.root}9/x") == f"{held.root}9/x"
    assert command("start", held.root) == f"`pyengine start '{root}'`"
    assert str(disk_error(OSError(5, "broken"), "open", held.root / "lock")) == f"cannot open {root}/lock: broken"
    again = HeldStore(held.root)
    assert again.name == root and shown(str(again.root)) == str(root)
    again.close()


def test_a_held_folder_that_is_dropped_is_closed(root):
    store = HeldStore(root)
    path = store.root
    assert os.path.samefile(path, root)
    del store
    gc.collect()
    assert not os.path.exists(path) or not os.path.samefile(path, root)
    assert shown(str(path)) == str(path)


@pytest.mark.root
@pytest.mark.parametrize("word", ["start", "topics"])
def test_without_proc_what_holds_the_store_open_says_to_mount_it(tmp_path, word):
    builder = StoreBuilder(tmp_path / "store")
    builder.put("T", b"body")
    recover(MessageStore(builder.root, builder.geometry))
    with_own_mounts(_without_proc, word, builder.root)


def _without_proc(word: str, root: Path) -> None:
    own_mounts()
    subprocess.run(["mount", "-t", "tmpfs", "none", "/proc"], check=True)
    done = run(word, root)
    assert done.code and f"{root} cannot be used: /proc is not mounted here" in done.stderr, done


@pytest.mark.parametrize("use", [
    lambda folder: os.close(open_folder(folder / "a" / "b", make_mode=0o700)), lambda folder: Folder(folder).write("a/b/c", [b"x"]),
], ids=["a folder", "a file of a backup"])
def test_a_descriptor_is_closed_once_though_a_signal_handler_raises_after_that(tmp_path, monkeypatch, use):
    """Otherwise the second close is that of another thread's file."""
    close, calls, twice = os.close, [], []

    def interrupted(descriptor: int) -> None:
        calls.append(descriptor)
        try:
            close(descriptor)
        except OSError as error:
            twice.append(error)
        if len(calls) == at:
            raise Interrupted

    monkeypatch.setattr(os, "close", interrupted)
    at, was_raised = 0, True
    while was_raised:
        at, was_raised = at + 1, False
        calls.clear()
        try:
            use(tmp_path)
        except Interrupted:
            was_raised = True
    assert at > 3 and not twice
