"""An engine whose log lies in several folders: in every mode, across a kill, and for the real store."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess

import pytest

import pyengine
from broker_lock import held_by_a_broker
from fix_cli import changes, command_line, environment, picture, run
from fix_engine import MODES
from fix_golden import usual
from pyengine.engine_config import Geometry
from pyengine.errors import CorruptionError, ExitCode
from pyengine.formats.paths import StorePaths
from pyengine.storage.commit_log import list_log
from pyengine.storage.config import config_path
from pyengine.storage.consumer_offset import ConsumerOffsets
from waiting import eventually, scaled_timeout_s

SEGMENT = 65536
SMALL = {"mapped_file_size_commit_log_bytes": SEGMENT, "mapped_file_size_consume_queue_bytes": 6000,
         "max_hash_slot_num": 1000, "max_index_num": 4000}
MESSAGES = 200
BODY = bytes(1500)


def put_all(root, start: int = 0) -> None:
    with pyengine.connect(root) as producer:
        for number in range(start, start + MESSAGES):
            assert producer.put("T", b"%06d" % number + BODY, keys=f"k{number}").ok


def read_all(root) -> list[int]:
    with pyengine.open_store(root) as store:
        low, high = store.queue_range("T", 0)
        found, at = [], low
        while at < high:
            got = store.get_message("T", 0, at)
            found += [int(message.body[:6]) for message in got.messages]
            at = got.next_begin_offset
        return found


@pytest.fixture(params=usual(MODES, ["pool"], pytest.mark.ci))
def spread(request, make_engine, tmp_path):
    """An engine over two writable folders, one of them outside the store, and an archive."""
    archive = tmp_path / "archive"
    archive.mkdir()
    paths = f"log-a,{tmp_path / 'outside' / 'log-b'}"
    return make_engine(**SMALL, **MODES[request.param], store_path_commit_log=paths,
                       read_only_commit_log_store_paths=str(archive))


def folders_of(root) -> list[str]:
    return [segment.path.parent.name for segment in list_log(root, SEGMENT)]


@pytest.mark.timeout(240)
def test_segments_go_round_and_nothing_is_lost_over_a_kill(spread, tmp_path):
    root = spread.root
    spread.start()
    put_all(root)
    for pid in sorted(spread.pids().items(), key=lambda each: each[0] != "supervisor"):
        os.kill(pid[1], signal.SIGKILL)
    eventually(lambda: not spread.pids(), "all gone")
    recovered = run("recover", root, "--json")
    assert recovered.code == 0, recovered
    assert read_all(root) == list(range(MESSAGES))
    spread.settings = {}  # its config/engine.toml knows
    spread.start()
    put_all(root, MESSAGES)
    assert spread.stop()
    assert read_all(root) == list(range(2 * MESSAGES))
    folders = folders_of(root)
    assert set(folders[0:6:2]) | set(folders[1:6:2]) == {"log-a", "log-b"} and len(set(folders[0:6:2])) == 1
    assert not (root / "commitlog").exists()
    first = list_log(root, SEGMENT)[0]
    shutil.move(first.path, tmp_path / "archive")
    assert read_all(root) == list(range(2 * MESSAGES)) and folders_of(root)[0] == "archive"
    for command in ("check", "status", "rebuild", "inspect", "recover"):
        ran = run(command, root, "--json")
        assert ran.code == 0, ran
    assert run("check", root, "--json").document["findings"] == []


def stored(root, **folders) -> list[str]:
    """Fill a store over several segments and stop it; return their names."""
    with pyengine.Engine(root, **SMALL, **folders):
        put_all(root)
    return [segment.path.name for segment in list_log(root, SEGMENT)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("is_archive", [True, pytest.param(False, marks=pytest.mark.ci)])
def test_an_empty_mount_point_in_the_place_of_the_oldest_segments_stops_whatever_changes_the_store(tmp_path, is_archive):
    root, disk, away = tmp_path / "store", tmp_path / "disk", tmp_path / "not-mounted"
    disk.mkdir()
    names = stored(root, **{} if is_archive else {"store_path_commit_log": f"{disk},commitlog"})
    for name in names:
        if not ((folder := disk if name in names[:2] else root / "commitlog") / name).exists():
            shutil.move(StorePaths(root).commit_log_segment(int(name)), folder)
    if is_archive:
        with pyengine.Engine(root, read_only_commit_log_store_paths=str(disk)):
            assert read_all(root) == list(range(MESSAGES))
    disk.rename(away)
    disk.mkdir()
    before = picture(tmp_path)
    for command in ("clean", "recover", "rebuild", "start"):
        ran = run(command, root)
        assert ran.code == 3 and f"and {disk} has no segment: mount its disk" in ran.stderr, ran
    checked = run("check", root, "--json")
    assert checked.code == 3 and "gap" in [one["kind"] for one in checked.document["findings"]]
    assert changes(before, picture(tmp_path)) == []
    disk.rmdir()
    away.rename(disk)
    with pyengine.Engine(root):
        assert read_all(root) == list(range(MESSAGES))
    assert run("check", root, "--json").document["findings"] == []


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", usual(["killed", "cleaned", "not noted", "accepted", "left out"], ["killed"], pytest.mark.ci))
def test_an_archive_whose_segments_are_deleted_or_given_up_stops_no_start(tmp_path, how):
    root, disk = tmp_path / "store", tmp_path / "disk"
    disk.mkdir()
    first = stored(root)[0]
    shutil.move(root / "commitlog" / first, disk)
    setting = {"read_only_commit_log_store_paths": str(disk)}
    with pyengine.Engine(root, **setting):
        pass
    if how in ("cleaned", "not noted"):
        if how == "not noted":
            (root / "config" / "log-begin.tmp").mkdir()  # a write of the file fails, as on a full disk
        assert run("clean", root, "--older-than", "0").code == 0
    elif how == "killed":
        killed = subprocess.run(command_line("clean", root, "--older-than", "0"), timeout=scaled_timeout_s(60),
                                env=environment(PYENGINE_FAILPOINT="segment_removed:1:kill"), check=False)
        assert killed.returncode == -signal.SIGKILL
    else:
        (disk / first).unlink()
        assert run("start", root).code == 3
        if how == "accepted":
            assert run("recover", root, "--accept-loss").code == 0
        else:
            setting = {"read_only_commit_log_store_paths": ""}
    assert not list(disk.iterdir())
    for _ in range(2):
        with pyengine.Engine(root, **setting) as engine:
            assert engine.state == "running"
    with pyengine.Engine(root, read_only_commit_log_store_paths=str(disk)) as engine:
        assert engine.state == "running"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("is_same_place", [False, pytest.param(True, marks=pytest.mark.ci)])
def test_a_new_disk_for_one_that_died_with_the_oldest_segments_is_used_once_the_loss_is_accepted(tmp_path, is_same_place):
    root, disk = tmp_path / "store", tmp_path / "disk"
    disk.mkdir()
    first = stored(root, store_path_commit_log=f"{disk},commitlog")[0]
    for segment in list_log(root, SEGMENT):
        folder = disk if segment.path.name == first else root / "commitlog"
        if segment.path.parent != folder:
            shutil.move(segment.path, folder)
    shutil.rmtree(disk)
    new = disk if is_same_place else tmp_path / "new"
    new.mkdir()
    setting = {"store_path_commit_log": f"{new},commitlog"}
    for _ in range(2):
        with pytest.raises(CorruptionError, match="if older segments were deleted or are lost, run `pyengine recover STORE --accept-loss`"):
            pyengine.Engine(root, **setting).start()
    assert run("recover", root, "--accept-loss").code == 0
    for _ in range(2):
        with pyengine.Engine(root, **setting) as engine:
            assert engine.state == "running"
            assert 0 < len(read_all(root)) < MESSAGES


@pytest.mark.timeout(240)
def test_an_edit_of_the_file_moves_no_process_of_a_running_engine_to_other_folders(make_engine):
    engine = make_engine(**SMALL)
    engine.start()
    put_all(engine.root)
    with config_path(engine.root).open("a") as file:
        file.write('store_path_commit_log = "other"\n')
    with pyengine.open_store(engine.root) as store, pytest.raises(CorruptionError, match="is in none of the folders that are read here"):
        store.get_message("T", 0, 0)
    with (pyengine.consume(engine.root, "T", group="G") as consumer,
          pytest.raises(CorruptionError, match="store_path_commit_log changed")):
        consumer.pull(timeout_s=scaled_timeout_s(30))
    assert ConsumerOffsets(engine.root).read("T", "G").get(0, 0) == 0
    incarnation = engine.incarnation("allocator")
    engine.kill("allocator")
    engine.wait_back("allocator", incarnation)
    put_all(engine.root, MESSAGES)
    assert engine.stop() and not (engine.root / "other").exists()
    degraded = run("start", engine.root)
    assert "name the folder that has the segment in store_path_commit_log" in degraded.stdout
    assert engine.stop()
    assert run("config", "set", engine.root, "store_path_commit_log=commitlog,other").code == 0
    engine.start()
    assert read_all(engine.root) == list(range(2 * MESSAGES))


@pytest.mark.timeout(240)
def test_a_copy_does_not_write_the_log_of_an_engine_that_runs(make_engine, tmp_path):
    log, copy, copied_log = tmp_path / "log", tmp_path / "copy", tmp_path / "copied-log"
    engine = make_engine(**SMALL, store_path_commit_log=str(log))
    engine.start()
    put_all(engine.root)
    shutil.copytree(engine.root, copy)
    for command in ("start", "recover"):
        refused = run(command, copy)
        assert refused.code == ExitCode.BUSY and f"{log} has the log of another store, which is in use" in refused.stderr, refused
    engine.suspend("supervisor")  # its workers have the folder too
    engine.kill("supervisor")
    eventually(lambda: "supervisor" not in engine.pids(), "it is dead")
    assert run("start", copy).code == ExitCode.BUSY
    assert engine.start()["adopted"]
    shutil.copytree(log, copied_log)
    put_all(engine.root, MESSAGES)  # the original goes on: what the copy lacks is none of its segments
    started = run("start", copy, "--set", f"store_path_commit_log={copied_log}")
    try:
        assert started.code == 0, started
        put_all(copy, 2 * MESSAGES)
    finally:
        assert run("stop", copy).code == 0
    assert engine.stop()
    assert read_all(engine.root) == list(range(2 * MESSAGES))
    assert read_all(copy) == [*range(MESSAGES), *range(2 * MESSAGES, 3 * MESSAGES)]


@pytest.mark.java
@pytest.mark.maven
@pytest.mark.timeout(240)
def test_the_real_store_reads_the_spread_log(make_engine, tmp_path, judge):
    engine = make_engine(**SMALL, store_path_commit_log="log-a,log-b")
    engine.start()
    put_all(engine.root)
    assert engine.stop()
    copies = tmp_path / "copies"
    for name in ("log-a", "log-b"):
        shutil.copytree(engine.root / name, copies / name)
    geometry = Geometry(**SMALL)
    settings = {
        "mappedFileSizeCommitLog": geometry.mapped_file_size_commit_log_bytes, "mappedFileSizeConsumeQueue": 6000,
        "maxHashSlotNum": 1000, "maxIndexNum": 4000, "storePathCommitLog": f"{copies / 'log-a'},{copies / 'log-b'}",
    }
    theirs = judge.verify(engine.root, settings).result(timeout=scaled_timeout_s(200))
    assert (theirs["loadOk"], theirs["path"]) == (True, "normal")
    assert len(theirs["messages"]) == MESSAGES
    inspected = run("inspect", engine.root, "--json").document
    assert inspected["facts"]["maxPhy"] == theirs["facts"]["maxPhy"]
    assert [record["phy"] for record in inspected["records"]] == [record["phy"] for record in theirs["records"]]


@pytest.mark.parametrize(("again", "read_only"), [
    ("{store}/../link/commitlog", False), ("{store}/commitlog", True),
    pytest.param("{store}/commitlog", False, marks=pytest.mark.ci), pytest.param("x/../commitlog", False, marks=pytest.mark.ci)])
def test_a_log_folder_with_two_names_is_one(tmp_path, again, read_only):
    root = tmp_path / "store"
    (tmp_path / "link").symlink_to(root)
    again = again.format(store=root)
    with pyengine.Engine(root, **SMALL, **{} if read_only else {"store_path_commit_log": f"commitlog,{again}"}):
        put_all(root)
    with pyengine.Engine(root, **{"read_only_commit_log_store_paths": again} if read_only else {}) as engine:
        assert engine.state == "running" and read_all(root) == list(range(MESSAGES))
        put_all(root, MESSAGES)
    assert run("check", root).code == 0
    assert {segment.path.parent.name for segment in list_log(root, SEGMENT)} == {"commitlog"}


def test_a_log_is_read_beside_a_broker_that_has_deleted_what_one_of_its_folders_had(tmp_path):
    root = tmp_path / "store"
    with pyengine.Engine(root, **SMALL):
        put_all(root)
    with pyengine.Engine(root, store_path_commit_log="new", read_only_commit_log_store_paths=str(root / "commitlog")):
        put_all(root, MESSAGES)
    with held_by_a_broker(root):
        for path in (root / "commitlog").iterdir():
            path.unlink()
        with pyengine.open_store(root) as store:
            rows = sum(batch.num_rows for batch in store.scan(level="committed"))
            assert 0 < rows == len(read_all(root)) <= MESSAGES
        assert "the log began" not in run("check", root).stdout
    with pyengine.open_store(root) as store, pytest.raises(CorruptionError, match="the log began at 0"):
        store.scan()


def test_a_read_goes_on_from_before_a_start_in_other_folders_to_after_it(tmp_path):
    root = tmp_path / "store"
    with pyengine.Engine(root, **SMALL):
        put_all(root)
    with pyengine.open_store(root) as store:
        begun = [store.scan(), store.scan(["T"]), store.to_arrow(["T"])]
        rows = [next(batches).num_rows for batches in begun]
        with pyengine.Engine(root, store_path_commit_log="new", read_only_commit_log_store_paths=str(root / "commitlog")):
            put_all(root, MESSAGES)
            assert store.max_physical_offset("committed") > SEGMENT  # it meets the engine
            rows = [first + sum(batch.num_rows for batch in batches) for first, batches in zip(rows, begun)]
            assert rows == [MESSAGES] * 3 and len(list_log(root, SEGMENT)) > 8


@pytest.mark.parametrize("edit", ["", 'store_path_commit_log = "other"\n', 'store_path_commit_log = "config"\n'])
def test_a_reader_follows_no_edit_that_loses_segments_until_an_engine_uses_it(tmp_path, edit):
    root = tmp_path / "store"
    with pyengine.Engine(root, store_path_commit_log="a,b", **SMALL):
        put_all(root)
    settings = config_path(root)
    with pyengine.open_store(root) as store:
        kept = store.queue_range("T", 0), store.min_physical_offset
        text = settings.read_text()
        settings.write_text(edit)  # an editor is at work
        assert (store.queue_range("T", 0), store.min_physical_offset) == kept
        assert sum(batch.num_rows for batch in store.scan()) == MESSAGES
        settings.write_text(text)
        with pyengine.Engine(root, store_path_commit_log="c", read_only_commit_log_store_paths="a,b"):
            put_all(root, MESSAGES)
        assert sum(batch.num_rows for batch in store.scan()) == 2 * MESSAGES  # the reader has met no engine
