"""A log in several folders: found by every tool, spread as RocketMQ spreads it, nearly full and read-only ones left alone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from fix_cli import changes, picture, run
from fix_golden import compare_inspect
from interrupting import interrupted_at_each_place
from pyengine.errors import CorruptionError, ExitCode, StoreRefusedError
from pyengine.formats.paths import (
    LogFolders,
    StorePaths,
    log_folders,
    segment_name,
    set_log_folders,
    use_log_folders,
    without_log_folders,
)
from pyengine.storage import commit_log
from pyengine.storage.check.check import check
from pyengine.storage.commit_log import CommitLog, list_log, new_segment_folder
from pyengine.storage.config import config_path, load_config, record_sizes
from pyengine.storage.engine_id import ensure_engine_id
from pyengine.storage.inspect import inspect
from pyengine.storage.message_store import MessageStore, discover
from pyengine.storage.recovery.rebuild import rebuild
from pyengine.storage.recovery.recover import recover
from pyengine.storage.salvage import salvage
from pyengine.storage.store_reader import StoreReader

A, B, C = Path("/a"), Path("/b"), Path("/c")


@pytest.mark.parametrize(("folders", "full", "expected"), [
    (LogFolders((B, A)), (), [A, B, A, B]),               # by name, whatever the order they were given in
    (LogFolders((A, B, C)), (), [A, B, C, A]),
    (LogFolders((A, B, C)), (B,), [A, C, A, C]),
    (LogFolders((A, B)), (A, B), [A, B, A, B]),           # all are full: as if none were
    (LogFolders((A, B, C), (B,)), (), [A, C, A, C]),      # read-only wins over writable
    (LogFolders((A, B, C), (B,)), (A,), [C, C, C, C]),
])
def test_new_segments_go_round_as_in_rocketmq(folders, full, expected):
    assert [folders.folder_for(number * 100, 100, full) for number in range(4)] == expected


def test_a_folder_on_a_nearly_full_disk_is_passed_over(tmp_path, monkeypatch):
    set_log_folders(tmp_path, "one,two", "")
    monkeypatch.setattr(commit_log, "is_nearly_full", lambda folder: folder.name == "one")
    assert [new_segment_folder(tmp_path, n * 64, 64).name for n in range(3)] == ["two"] * 3
    monkeypatch.undo()
    assert commit_log.is_nearly_full(tmp_path) in (True, False)


def test_settings_say_where_in_each_of_their_spellings(tmp_path):
    assert log_folders(tmp_path).all == (tmp_path / "commitlog",)
    (tmp_path / "config").mkdir()
    for text in ('storePathCommitLog = "x, /y"\nreadOnlyCommitLogStorePaths = "z"\n',
                 'read_only_commit_log_store_paths = "z"\nstore_path_commit_log = "x,/y"\nspin = 0\n'):
        (tmp_path / "config" / "engine.toml").write_text(text)
        folders = log_folders(tmp_path)
        assert folders == LogFolders((tmp_path / "x", Path("/y")), (tmp_path / "z",))
        assert without_log_folders(text.encode()) == (b"spin = 0\n" if "spin" in text else b"")


def spread(store, tmp_path, *, kept: bool):
    """The golden store's segments in two folders of which one lies outside, and the oldest in a read-only one."""
    folders = [store.root / "log-a", tmp_path / "elsewhere" / "log-b"]
    archive = tmp_path / "archive"
    for folder in (*folders, archive):
        folder.mkdir(parents=True)
    segments = sorted((store.root / "commitlog").iterdir())
    assert len(segments) > 4
    for number, path in enumerate(segments):
        shutil.move(path, (archive if number < 2 else folders[number % 2]) / path.name)
    (store.root / "commitlog").rmdir()
    settings = {"storePathCommitLog": f"log-a,{folders[1]}", "readOnlyCommitLogStorePaths": str(archive)}
    if kept:
        config = load_config(store.root, settings | store.sizes, {})
        record_sizes(store.root, config)
        set_log_folders(store.root, *settings.values())
    return settings


def test_a_log_that_is_followed_into_other_folders_is_whole_at_each_place_of_a_read(tmp_path):
    for number in range(4):
        path = tmp_path / "ab"[number % 2] / segment_name(number * 4096)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes([number]) * 4096)
    (tmp_path / "all").mkdir()
    for path in [*tmp_path.glob("[ab]/*")]:
        os.link(path, tmp_path / "all" / path.name)
    spread, one = LogFolders((tmp_path / "b", tmp_path / "a")), LogFolders((tmp_path / "all",))
    for before, after in ((one, spread), (spread, one)):
        use_log_folders(tmp_path, before)
        log = CommitLog(tmp_path, 4096)
        reads = []

        def read(log=log, reads=reads) -> None:
            starts = [*log.starts()]
            reads.append((starts, [log.start_of(start + 1) for start in starts], [log.view(start)[0] for start in starts]))

        for _ in interrupted_at_each_place(read, lambda log=log, after=after: log.follow_folders(after, may_lose=True)):
            log.follow_folders(before, may_lose=True)
        starts = [0, 4096, 8192, 12288]
        assert len(reads) > 20 and all(each == (starts, starts, [0, 1, 2, 3]) for each in reads)


@pytest.mark.parametrize("kept", [True, False])
def test_every_tool_reads_a_spread_log_as_one(golden, tmp_path, kept):
    store = golden("roll")
    settings = spread(store, tmp_path, kept=kept)
    overrides = store.manifest["config"] | ({} if kept else settings)
    assert compare_inspect(inspect(store.root, overrides), store.verify) == []
    geometry = discover(store.root, store.sizes)
    assert geometry.mapped_file_size_commit_log_bytes == store.sizes["mapped_file_size_commit_log_bytes"]
    report = check(MessageStore(store.root, geometry))
    assert report.findings == [] and report.messages == sum("blank" not in record for record in store.verify["records"])
    assert len(list_log(store.root, geometry.mapped_file_size_commit_log_bytes)) > 4
    with StoreReader(store.root, **store.sizes) as reader:
        assert sum(reader.queue_range(topic, queue_id)[1] for topic, ids in reader.topics().items() for queue_id in ids) > 0
        assert reader.max_physical_offset() == store.verify["facts"]["maxPhy"]


def test_recovery_rebuild_and_salvage_work_on_a_spread_log(golden, tmp_path):
    store = golden("abnormal-multi")
    spread(golden("roll"), tmp_path / "other", kept=True)  # another store's folders are not this one's
    folders = (store.root / "log-a", tmp_path / "log-b")
    for folder in folders:
        folder.mkdir()
    for number, path in enumerate(sorted((store.root / "commitlog").iterdir())):
        shutil.move(path, folders[number % 2] / path.name)
    set_log_folders(store.root, f"log-a,{folders[1]}", "")
    geometry = discover(store.root, store.sizes)
    spares = sum(len(list(folder.iterdir())) for folder in folders)
    report = recover(MessageStore(store.root, geometry))
    assert report.end_offset == store.verify["facts"]["maxPhy"] and len(report.removed_files) == 1
    assert sum(len(list(folder.iterdir())) for folder in folders) == spares - 1
    shutil.rmtree(store.root / "consumequeue")
    rebuild(MessageStore(store.root, geometry))
    assert compare_inspect(inspect(store.root, store.manifest["config"]), store.verify,
                           more_allowed=("queries",), ignore=("byTime",)) == []
    assert check(MessageStore(store.root, geometry)).findings == []
    record_sizes(store.root, load_config(store.root, {"store_path_commit_log": f"log-a,{folders[1]}"} | store.sizes, {}))
    carved = salvage(store.root, tmp_path / "saved", geometry)
    assert carved.records == check(MessageStore(store.root, geometry)).messages and not carved.skipped
    made = list_log(tmp_path / "saved", geometry.mapped_file_size_commit_log_bytes)
    assert {segment.path.parent for segment in made} == {tmp_path / "saved" / "commitlog"}


def test_a_segment_that_lies_in_two_folders_is_refused(golden, tmp_path):
    store = golden("roll")
    spread(store, tmp_path, kept=True)
    shutil.copy2(sorted((store.root / "log-a").iterdir())[0], tmp_path / "archive")
    with pytest.raises(StoreRefusedError, match="the same segment"):
        recover(MessageStore(store.root, discover(store.root, store.sizes)))


def test_a_new_log_s_sizes_and_paths_are_kept_for_the_next_command(tmp_path):
    root = tmp_path / "store"
    (root / "config").mkdir(parents=True)
    record_sizes(root, load_config(root, {"storePathCommitLog": "x,y"}, {}))
    again = load_config(root, {}, {})
    assert again.store_path_commit_log == "x,y" and again.origins["store_path_commit_log"] == "engine.toml"
    assert StorePaths(root).commit_log == root / "x"
    assert StorePaths(root).commit_log_segment(0) == root / "x" / ("0" * 20)
    (root / "y").mkdir()
    (root / "y" / ("0" * 20)).touch()
    assert StorePaths(root).commit_log_segment(0) == root / "y" / ("0" * 20)


def test_a_folder_on_a_disk_that_is_not_mounted_stops_recovery(golden, tmp_path):
    store = golden("roll")
    spread(store, tmp_path, kept=True)
    geometry = discover(store.root, store.sizes)
    for name, sentence in (("archive", "the log's folder .*archive is missing"),
                           ("elsewhere", "segment 00000000000000049152 is in none of its folders .*log-b")):
        (tmp_path / name).rename(tmp_path / "not-mounted")
        with pytest.raises(CorruptionError, match=sentence):
            recover(MessageStore(store.root, geometry))
        (tmp_path / "not-mounted").rename(tmp_path / name)
        assert check(MessageStore(store.root, geometry)).findings == []
    (tmp_path / "elsewhere" / "log-b" / "00000000000000049152").unlink()
    with pytest.raises(CorruptionError, match="is a disk not mounted"):
        recover(MessageStore(store.root, geometry))
    recover(MessageStore(store.root, geometry), accept_loss=True)


def test_the_oldest_segments_on_a_disk_that_is_not_mounted_stop_whatever_changes_the_store(golden, tmp_path):
    store, disk = golden("roll"), tmp_path / "disk"
    (disk / "log").mkdir(parents=True)
    for path in sorted((store.root / "commitlog").iterdir())[:2]:
        shutil.move(path, disk / "log")
    record_sizes(store.root, load_config(store.root, {"store_path_commit_log": f"commitlog,{disk / 'log'}"} | store.sizes, {}))
    disk.rename(tmp_path / "not-mounted")
    before = picture(tmp_path)
    for command in ("clean", "recover", "rebuild", "start"):
        ran = run(command, store.root)
        assert ran.code == 3 and f"the log's folder {disk / 'log'} is missing: mount its disk" in ran.stderr, ran
    checked = run("check", store.root, "--json")
    assert checked.code == 3 and [one["kind"] for one in checked.document["findings"]] == ["gap"]
    assert changes(before, picture(tmp_path)) == []
    (tmp_path / "not-mounted").rename(disk)
    assert run("recover", store.root).code == 0


def test_folders_that_are_new_to_a_store_need_not_be_there(golden):
    store = golden("roll")
    set_log_folders(store.root, "commitlog,not-made-yet", "")
    sorted((store.root / "commitlog").iterdir())[0].unlink()  # by the cleaner
    assert not recover(MessageStore(store.root, discover(store.root, store.sizes))).changed


def test_a_disk_is_added_to_a_log_whose_oldest_segments_are_deleted(golden, tmp_path):
    store, disk = golden("roll"), tmp_path / "disk"
    sorted((store.root / "commitlog").iterdir())[0].unlink()  # by the cleaner
    assert run("config", "set", store.root, f"store_path_commit_log=commitlog,{disk}").code == 0
    assert disk.is_dir() and run("recover", store.root).code == 0
    disk.rmdir()
    geometry = discover(store.root, store.sizes)
    log = list_log(store.root, geometry.mapped_file_size_commit_log_bytes)
    assert "gap" in [one.kind for one in check(MessageStore(store.root, geometry)).findings]
    beside = check(MessageStore(store.root, geometry), limit=log[0].start_offset)
    assert "gap" not in [one.kind for one in beside.findings], "the engine that runs may not use it yet"
    set_log_folders(store.root, "commitlog", str(disk))
    beside = check(MessageStore(store.root, geometry), limit=log[0].start_offset)
    assert "gap" in [one.kind for one in beside.findings], "one that is only read has segments"
    use_log_folders(store.root, None)
    assert run("config", "set", store.root, "put_timeout_ms=5s").code == 0 and not disk.exists(), "it may be lost"


def test_a_list_that_leaves_out_a_folder_with_segments_is_refused(golden, tmp_path):
    store, disk = golden("roll"), tmp_path / "disk"
    ensure_engine_id(store.root)  # without one its folders are not known: RocketMQ's settings have them
    before = picture(store.root / "consumequeue")
    for words in (("config", "set", store.root, f"store_path_commit_log={disk}"),
                  ("start", store.root, "--set", f"store_path_commit_log={disk}"),
                  ("recover", store.root, "--accept-loss", "--set", f"store_path_commit_log={disk}")):
        ran = run(*words)
        assert ran.code == ExitCode.USAGE and "append the new folder to the old ones" in ran.stderr, ran
        assert f"{store.root / 'commitlog'} has segments of this log (00000000000000000000)" in ran.stderr
    assert not (config_path(store.root).exists() or disk.exists() or changes(before, picture(store.root / "consumequeue")))
    shutil.copytree(store.root / "commitlog", disk)
    assert run("config", "set", store.root, f"store_path_commit_log={disk}").code == 0, "each segment is in the new folder"
    disk.rename(tmp_path / "lost")
    assert run("config", "set", store.root, "store_path_commit_log=commitlog").code == 0, "the other folder is not there"


def test_a_disk_that_cannot_be_added_is_not_noted_as_one_of_the_log(golden, tmp_path):
    store, disk = golden("roll"), tmp_path / "disk"
    sorted((store.root / "commitlog").iterdir())[0].unlink()
    disk.symlink_to("not mounted")
    setting = f"store_path_commit_log=commitlog,{disk / 'log'}"
    assert run("config", "set", store.root, setting).code == ExitCode.FAILED
    assert run("rebuild", store.root, "--set", setting).code == ExitCode.FAILED
    assert not config_path(store.root).exists()
    disk.unlink()
    assert run("recover", store.root).code == 0
    assert run("rebuild", store.root, "--set", setting).code == 0
    assert (disk / "log").is_dir() and run("recover", store.root).code == 0
