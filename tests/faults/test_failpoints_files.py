"""A process is killed at each step of making, replacing and deleting a file: the file is there whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from crash.steps import FAILPOINTS
from pyengine.errors import ExitCode
from pyengine.storage.checkpoint import create_abort_file, read_sync_failure, read_watermark
from pyengine.storage.durable_file import ConfigFile
from pyengine.storage.durable_writes import create_file, sweep_unfinished, write_config
from waiting import scaled_timeout_s

ROOT = Path(__file__).parents[2]
SIZE = 8192
UNNAMED = ("new_file_unnamed", "new_file_sized", "new_file_allocated", "new_file_synced", "new_file_linked",
           "new_file_durable", "folder_made")
TOGETHER = ("new_files_unnamed", "new_files_synced", "new_files_linked")
SIBLING = ("sibling_file_made", "sibling_file_renamed")
CONFIG = ("config_opened", "config_written", "config_synced", "config_backup_linked", "config_backup_renamed", "config_renamed",
          "config_durable")
REMOVAL = ("removal_unlinked", "removal_durable", "removal_step_done")
NAMED = {"new_file_linked", "new_file_durable", "sibling_file_renamed"}
REPLACED = {"config_renamed", "config_durable"}

CREATE = "from pyengine.storage.durable_writes import create_file; create_file({folder!r}, 'file', {size})"
CREATE_IN_SIBLING = """
from pyengine.storage import durable_writes
def refuse(*arguments): raise durable_writes._TmpfileRefusedError
durable_writes._create_unnamed = refuse
""" + CREATE.partition("; ")[2].replace("create_file", "durable_writes.create_file")
CREATE_TOGETHER = """
from pyengine.storage.durable_writes import create_files
create_files([f'{folder}/{{name}}/file' for name in 'abc'], {size}, allocate={size})
"""
REPLACE = "from pyengine.storage.durable_writes import write_config; write_config({folder!r} + '/table.json', b'new')"
REMOVE = """
from pathlib import Path
from pyengine.storage.durable_writes import free_blocks, unlink_durably
for _ in free_blocks(unlink_durably(Path({folder!r}) / 'file'), step_bytes=4096): pass
"""


def killed_at(name: str, program: str, folder: Path) -> None:
    command = [sys.executable, "-P", "-c", program.format(folder=str(folder), size=SIZE)]
    done = subprocess.run(command, capture_output=True, text=True,
                          env=os.environ | {"PYENGINE_FAILPOINT": f"{name}:1:kill", "PYTHONPATH": str(ROOT)}, timeout=scaled_timeout_s(60))
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_every_step_of_a_file_is_tried_here():
    wheres = ("pyengine/storage/durable_writes.py", "pyengine/storage/durable_writes.py")
    names = {point.name for point in FAILPOINTS.values() if point.where in wheres and not point.name.startswith("bytes_")}
    assert names == {*UNNAMED, *TOGETHER, *SIBLING, *CONFIG, *REMOVAL}


@pytest.mark.parametrize("name", UNNAMED + SIBLING)
def test_a_new_file_is_there_whole_or_not_at_all(tmp_path, name):
    folder = tmp_path / "commitlog"
    killed_at(name, CREATE_IN_SIBLING if name in SIBLING else CREATE, folder)
    assert folder.is_dir() or name == "folder_made"
    there = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    assert there == (["file"] if name in NAMED else [])
    assert all((folder / one).stat().st_size == SIZE and (folder / one).stat().st_blocks * 512 >= SIZE for one in there)
    sweep_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["commitlog"]
    if not there:
        os.close(create_file(folder, "file", SIZE))


@pytest.mark.parametrize("name", TOGETHER)
def test_of_many_new_files_each_is_there_whole_or_not_at_all(tmp_path, name):
    killed_at(name, CREATE_TOGETHER, tmp_path)
    there = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert there == ([tmp_path / "a" / "file"] if name == "new_files_linked" else [])
    assert all(path.stat().st_size == SIZE and path.stat().st_blocks * 512 >= SIZE for path in there)
    for folder in "abc":
        if not (tmp_path / folder / "file").exists():
            os.close(create_file(tmp_path / folder, "file", SIZE))


@pytest.mark.parametrize("name", CONFIG)
def test_a_replaced_file_is_the_old_one_or_the_new_one(tmp_path, name):
    path = tmp_path / "config" / "table.json"
    for content in (b"first", b"old"):
        write_config(path, content)
    killed_at(name, REPLACE, path.parent)
    assert path.read_bytes() == (b"new" if name in REPLACED else b"old")
    path.unlink()  # the backup, which a reader would use in its place
    assert ConfigFile(path, str).read().value in ("first", "old")
    sweep_unfinished(tmp_path)
    write_config(path, b"newest")
    assert sorted(one.name for one in path.parent.iterdir()) in (["table.json", "table.json.bak"],)
    assert path.read_bytes() == b"newest"


@pytest.mark.parametrize("name", REMOVAL)
def test_a_deleted_file_has_no_name_whenever_its_killer_comes(tmp_path, name):
    os.close(create_file(tmp_path, "file", SIZE))
    killed_at(name, REMOVE, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_recovery_that_gives_up_bytes_finishes_giving_them_up(build_store):
    """Killed when the watermark is taken back and the log is not cut yet."""
    store = build_store(40)
    store.mark(store.end)
    create_abort_file(store.root)
    record = store.records[10]
    store.flip(record.start + 90)
    command = [sys.executable, "-P", "-m", "pyengine", "recover", str(store.root), "--accept-loss"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    killed = environ | {"PYENGINE_FAILPOINT": "recovery_loss_accepted:1:kill"}
    assert subprocess.run(command, env=killed, capture_output=True, timeout=scaled_timeout_s(60)).returncode == -signal.SIGKILL
    done = subprocess.run(command[:-1], env=environ, capture_output=True, text=True, timeout=scaled_timeout_s(60))
    assert done.returncode in (ExitCode.OK, ExitCode.REPAIRED), done.stderr
    assert read_watermark(store.root).watermark.flushed == record.start
    assert list((store.root / "quarantine").iterdir())
    again = subprocess.run(command[:-1], env=environ, capture_output=True, text=True, timeout=scaled_timeout_s(60))
    assert again.returncode == ExitCode.OK and f"up to offset {record.start}" in again.stdout


def test_a_failed_sync_stays_noted_whatever_is_killed_until_its_bytes_are_written_again(build_store):
    """Killed when it is noted, then when the log is written over itself and not synced."""
    store = build_store(40)
    store.mark(store.records[10].start)
    create_abort_file(store.root)
    note = "from pyengine.storage.checkpoint import note_sync_failure; note_sync_failure({folder!r}, 0, 'a segment', 'gone')"
    killed_at("sync_failure_noted", note, store.root)
    recover = "from pyengine.cli.main import main; main(['recover', {folder!r}])"
    killed_at("bytes_rewritten", recover, store.root)
    assert read_sync_failure(store.root).is_of_this_boot
    done = subprocess.run([sys.executable, "-P", "-m", "pyengine", "recover", str(store.root)], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=scaled_timeout_s(60))
    assert done.returncode == ExitCode.OK and "a sync had failed" in done.stdout
    assert read_sync_failure(store.root) is None and read_watermark(store.root).watermark.flushed == store.end
