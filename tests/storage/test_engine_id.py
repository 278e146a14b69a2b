"""A store keeps its identity over restarts and remounts; a copy gets a new one."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from pyengine.errors import DiskError
from pyengine.storage.engine_id import ID_NAME, ensure_engine_id, raise_epoch, read_engine_id, read_epoch


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "store"
    path.mkdir()
    return path


def test_a_store_without_identity_has_none_and_looking_does_not_give_it_one(root):
    assert read_engine_id(root) is None
    assert os.listdir(root) == []


def test_the_identity_stays(root):
    first = ensure_engine_id(root)
    assert ensure_engine_id(root) == first == read_engine_id(root)
    status = os.stat(root / ID_NAME)
    assert (first.device, first.inode) == (status.st_dev, status.st_ino)
    assert len(first.short) == 16 and int(first.short, 16) >= 0
    assert os.listdir(root / "config") == ["engine-id"]


def test_a_copy_gets_a_new_uuid_and_never_had_the_same_names(root, tmp_path):
    original = ensure_engine_id(root)
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    assert read_engine_id(copy).uuid == original.uuid, "looking changes nothing"
    assert read_engine_id(copy).short != original.short
    renewed = ensure_engine_id(copy)
    assert renewed.uuid != original.uuid
    assert renewed.short not in (original.short, read_engine_id(root).short)
    assert ensure_engine_id(root) == original


def test_a_renamed_store_is_the_same_store(root, tmp_path):
    first = ensure_engine_id(root)
    os.rename(root, tmp_path / "elsewhere")
    assert ensure_engine_id(tmp_path / "elsewhere") == first


def test_a_remounted_store_keeps_its_uuid(root):
    first = ensure_engine_id(root)
    path = root / ID_NAME
    document = json.loads(path.read_bytes())
    document["device"] += 1
    descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC)  # the inode stays, as it does over a remount
    os.write(descriptor, json.dumps(document).encode())
    os.close(descriptor)
    again = ensure_engine_id(root)
    assert again.uuid == first.uuid
    assert ensure_engine_id(root) == again


def test_damaged_identities_are_replaced(root):
    first = ensure_engine_id(root)
    for damage in (b"", b"{", b"[]", b"{}", b'{"uuid": "x", "device": 1, "inode": 2}', b'{"uuid": 5}', b"\xff\xfe"):
        (root / ID_NAME).write_bytes(damage)
        assert read_engine_id(root) is None, damage
        assert ensure_engine_id(root).uuid != first.uuid


def test_epochs_grow_and_survive_the_loss_of_the_file(root):
    assert read_epoch(root) == 0
    assert [raise_epoch(root) for _ in range(3)] == [1, 2, 3]
    (root / "config/epoch").write_bytes(b"garbage")
    assert read_epoch(root) == 2, "the backup is one behind"
    assert raise_epoch(root) == 3
    assert read_epoch(root) == 3


def test_an_epoch_that_cannot_be_read_now_is_no_epoch_of_0(root, monkeypatch):
    raise_epoch(root)

    def fails(path):
        raise OSError(24, "Too many open files", str(path))

    monkeypatch.setattr("pyengine.formats.small_file.read_small_file", fails)
    with pytest.raises(DiskError, match="cannot read .*epoch: Too many open files"):
        raise_epoch(root)
