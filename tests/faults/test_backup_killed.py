"""A backup and a restore are killed at each of their steps: the backup before stays whole, and the next run finishes the work."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess

import pytest

import pyengine
from crash.steps import FAILPOINTS
from fix_cli import command_line, environment, run
from pyengine.client.backup import backup_store, check_backup, restore_store
from pyengine.errors import StoreRefusedError
from pyengine.ipc.store_lock import require_startable
from pyengine.storage.backup_files import Folder, read_manifest
from pyengine.storage.log_holds import read_log_holds
from waiting import scaled_timeout_s

SIZES = {"mapped_file_size_commit_log_bytes": 65536, "mapped_file_size_consume_queue_bytes": 400}
BACKUP = ("backup_piece_written", "backup_piece_synced", "backup_note_synced", "backup_piece_noted", "backup_manifest_due",
          "backup_manifest_written")
RESTORE = ("restore_segment_made", "restore_rebuilt", "restore_moving", "restore_moved")


def killed_at(name, nth, *arguments):
    done = subprocess.run(command_line(*arguments), capture_output=True, text=True, timeout=scaled_timeout_s(120),
                          env=environment(PYENGINE_FAILPOINT=f"{name}:{nth}:kill"))
    assert done.returncode == -signal.SIGKILL, (name, done.stderr)


def test_every_step_is_tried_here():
    there = {name for name, point in FAILPOINTS.items() if point.where in ("pyengine/client/backup.py", "pyengine/storage/backup_files.py")}
    assert there == {*BACKUP, *RESTORE}


@pytest.fixture
def engine(make_engine):
    made = make_engine(**SIZES)
    made.start()
    return made


def put(engine, topic):
    """More than a segment."""
    with pyengine.connect(engine.root) as producer:
        assert producer.put_many(topic, [topic.encode() * 50] * 90).ok


def test_a_killed_backup_leaves_a_whole_backup_and_the_next_run_finishes(engine, tmp_path):
    dest = Folder(tmp_path / "dest")
    put(engine, "first")
    backup_store(engine.root, dest)
    for name in BACKUP:
        put(engine, name)
        before = read_manifest(dest)
        killed_at(name, 2 if name.startswith("backup_piece") else 1, "backup", engine.root, tmp_path / "dest")
        (hold,) = read_log_holds(engine.root)  # for ten minutes at most
        assert run("status", engine.root, "--json").document["log_holds"][0]["name"] == hold.name
        found = read_manifest(dest)
        assert check_backup(dest) == found.size_bytes  # of whichever is complete
        assert (found == before) == (name != "backup_manifest_written")
        report = backup_store(engine.root, dest, read_back=True)
        assert read_log_holds(engine.root) == [] and report.end_offset > before.end
        assert sorted(dest.sizes()) == sorted([one.name for one in read_manifest(dest).files] + ["manifest.json"])
    assert restore_store(dest, tmp_path / "new").exit_code == 0
    found = run("topics", tmp_path / "new").stdout
    assert all(name in found for name in ("first", *BACKUP))


def test_a_killed_first_backup_is_none(engine, tmp_path):
    put(engine, "first")
    killed_at("backup_manifest_due", 1, "backup", engine.root, tmp_path / "dest")
    refused = run("restore", tmp_path / "dest", tmp_path / "new")
    assert refused.code == 2 and "has not finished: run it again" in refused.stderr and not (tmp_path / "new").exists()
    assert backup_store(engine.root, Folder(tmp_path / "dest")).new_bytes == 0
    assert restore_store(Folder(tmp_path / "dest"), tmp_path / "new").exit_code == 0


def test_a_killed_restore_is_no_store_and_the_next_one_finishes_it(engine, tmp_path):
    for topic in ("one", "two", "three"):
        put(engine, topic)
    dest, new = Folder(tmp_path / "dest"), tmp_path / "new"
    backup_store(engine.root, dest)
    for name in RESTORE:
        killed_at(name, 2 if name in ("restore_segment_made", "restore_moved") else 1, "restore", tmp_path / "dest", new)
        with pytest.raises(StoreRefusedError, match="has not finished"):
            require_startable(new)
        assert restore_store(dest, new).exit_code == 0
        assert not (new / ".restoring").exists() and sorted(os.listdir(new / "commitlog"))[0] == "0" * 20
        checked = run("check", new, "--json").document
        assert (checked["findings"], checked["messages"]) == ([], 270)
        shutil.rmtree(new)


def test_a_restore_that_was_killed_at_its_very_end_only_clears_up(engine, tmp_path):
    put(engine, "one")
    backup_store(engine.root, Folder(tmp_path / "dest"))
    restore_store(Folder(tmp_path / "dest"), tmp_path / "new")
    (tmp_path / "new/.restoring").mkdir()
    restored = restore_store(Folder(tmp_path / "dest"), tmp_path / "new")
    assert (restored.rebuilt, restored.exit_code, restored.check.messages) == (None, 0, 90)
    require_startable(tmp_path / "new")
