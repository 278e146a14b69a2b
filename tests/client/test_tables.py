"""Topics as tables of Delta Lake and Iceberg, read back by those libraries: each message once, whatever is killed."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import pyengine
from fix_cli import environment, run
from fix_engine import wait_noted
from fix_golden import usual
from pyengine.client.backup import backup_store, restore_store
from pyengine.client.outgoing import RawMessage
from pyengine.errors import CorruptionError, DiskFullError, StoreBusyError, UsageError
from pyengine.ipc.live_reader import open_store
from pyengine.storage.backup_files import Folder, locked_folder
from pyengine.storage.log_holds import read_log_holds
from waiting import eventually, scaled_timeout_s

deltalake = pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")
pytest.importorskip("sqlalchemy")

from pyiceberg.catalog.sql import SqlCatalog  # noqa: E402 - after the packages were looked for

from pyengine.client import table_formats, tables  # noqa: E402
from pyengine.client.table_formats import table_name  # noqa: E402
from pyengine.client.tables import (  # noqa: E402
    STATE,
    MissedMessagesError,
    TopicsFailedError,
    is_internal,
    write_tables,
)

PAGE = Path(__file__).parents[2] / "docs" / "tables.md"
SEGMENT = 65536
SIZES = {"mapped_file_size_commit_log_bytes": SEGMENT, "mapped_file_size_consume_queue_bytes": 400}
PIECE = 30_000  # bytes: several commits a segment
FORMATS = ("delta", "iceberg")
both = pytest.mark.parametrize("to", FORMATS)
in_delta, in_iceberg = (pytest.mark.parametrize("to", usual(FORMATS, [form], pytest.mark.ci)) for form in ("delta", "iceberg"))
both_if_long = pytest.mark.parametrize("to", ["delta", pytest.param("iceberg", marks=pytest.mark.long)])


def put(root, topic, count, first=0):
    with pyengine.connect(root) as producer:
        for number in range(first, first + count):
            assert producer.put(topic, b"%06d" % number * 60, queue_id=number % 2, tags="t", keys=f"k{number}").ok


def rows(dest, to, topic):
    """The table's rows as its library reads them, in the log's order."""
    if to == "delta":
        table = deltalake.DeltaTable(dest / table_name(topic)).to_pyarrow_table()
    else:
        catalog = SqlCatalog("pyengine", uri=f"sqlite:///{dest / 'catalog.db'}", warehouse=f"file://{dest}")
        table = catalog.load_table(("topics", table_name(topic))).scan().to_arrow()
    return table.sort_by("physicalOffset").to_pylist()


def stored(root, topic):
    """The same of the log itself."""
    with open_store(root) as store:
        batches = list(store.scan(topics=[topic], columns=["queueId", "queueOffset", "physicalOffset", "storeTimestamp", "keys", "body"]))
        return [row for batch in batches for row in batch.to_pylist()]


def assert_equal(dest, to, root, *topics):
    for topic in topics:
        expected = stored(root, topic)
        found = rows(dest, to, topic)
        assert [{name: row[name] for name in expected[0]} for row in found] == expected, topic
        assert {row["date"] for row in found} == {row["storeTimestamp"].date() for row in expected}


@pytest.fixture
def engine(make_engine):
    made = make_engine(**SIZES)
    made.start()
    return made


def test_tables_without_the_extra_names_the_packages_to_install(tmp_path, monkeypatch):
    (tmp_path / "store" / "commitlog").mkdir(parents=True)
    monkeypatch.delitem(sys.modules, "pyengine.client.tables")
    monkeypatch.setitem(sys.modules, "deltalake", None)
    done = run("tables", tmp_path / "store", tmp_path / "lake", "--to", "delta")
    assert done.code == 2 and "deltalake is not installed" in done.stderr and "pip install 'pyengine-store[tables]'" in done.stderr


@in_delta
def test_a_disk_of_the_log_that_is_not_mounted_is_said_before_a_table_is_made(tmp_path, to):
    root, lake, old = tmp_path / "store", tmp_path / "lake", tmp_path / "store" / "commitlog"
    for folders in ({}, {"store_path_commit_log": "new", "read_only_commit_log_store_paths": str(old)}):
        with pyengine.Engine(root, **SIZES, **folders):
            put(root, "orders", 200)
    expected = stored(root, "orders")
    old.rename(tmp_path / "away")
    with pytest.raises(CorruptionError, match="commitlog is missing: mount its disk, .*; with --allow-loss the tables get what is there"):
        write_tables(root, lake, to)
    (tmp_path / "away").rename(old)
    assert write_tables(root, lake, to).messages == {"orders": len(expected)}
    assert_equal(lake, to, root, "orders")


def test_a_run_that_cannot_begin_holds_no_more_than_the_run_before(engine, tmp_path, monkeypatch):
    def fail_at_the_beginning(patch):
        patch.setattr(tables._Filling, "begin", _fails)
        with pytest.raises(OSError, match="made to fail"):
            write_tables(engine.root, tmp_path / "lake", "delta")

    put(engine.root, "orders", 3)
    with monkeypatch.context() as patched:
        fail_at_the_beginning(patched)
        assert read_log_holds(engine.root) == []
    write_tables(engine.root, tmp_path / "lake", "delta")
    (hold,) = read_log_holds(engine.root)
    assert hold.offset > 0
    fail_at_the_beginning(monkeypatch)
    assert [one.offset for one in read_log_holds(engine.root)] == [hold.offset]


def test_a_delta_log_has_a_checkpoint_each_so_many_commits_and_survives_a_torn_one(engine, tmp_path, monkeypatch):
    """delta-rs alone would write it, and delete commits, before anything is synced."""
    monkeypatch.setattr(table_formats, "CHECKPOINT_EACH", 4)
    put(engine.root, "orders", 100)
    synced = []
    sync_file = table_formats.sync_file
    monkeypatch.setattr(table_formats, "sync_file", lambda path: (synced.append(path.name), sync_file(path)))
    lake, log = tmp_path / "lake", tmp_path / "lake" / "orders" / "_delta_log"
    assert write_tables(engine.root, lake, "delta", piece_bytes=PIECE // 4).commits >= 6
    commits = sorted(path.name for path in log.glob("*.json"))
    checkpoints = sorted(path.name for path in log.glob("*.checkpoint.parquet"))
    assert checkpoints and [int(name[:20]) % 4 for name in checkpoints] == [0] * len(checkpoints)
    assert set(commits) | set(checkpoints) | {"_last_checkpoint"} <= set(synced)
    for torn in (checkpoints[-1], "_last_checkpoint"):
        (log / torn).write_bytes((log / torn).read_bytes()[:-9])
    put(engine.root, "orders", 5, first=100)
    assert write_tables(engine.root, lake, "delta").messages == {"orders": 5}
    assert checkpoints[-1] not in os.listdir(log)
    assert_equal(lake, "delta", engine.root, "orders")


@pytest.mark.parametrize("to", usual(FORMATS, ["delta"], pytest.mark.ci))
def test_what_a_commit_reads_and_writes_does_not_grow_with_the_commits_before_it(engine, tmp_path, to, monkeypatch):
    """Also of a table that has been filled without these settings."""
    keep, merge = 4, 3
    with monkeypatch.context() as before:
        before.setattr(table_formats, "ICEBERG_SETTINGS", {})
        before.setattr(table_formats, "DELTA_SETTINGS", {})
        put(engine.root, "orders", 150)
        assert write_tables(engine.root, tmp_path / "lake", to, piece_bytes=PIECE // 8).commits >= 15
    monkeypatch.setattr(table_formats, "CHECKPOINT_EACH", keep)
    monkeypatch.setitem(table_formats.ICEBERG_SETTINGS, "history.expire.min-snapshots-to-keep", str(keep))
    monkeypatch.setitem(table_formats.ICEBERG_SETTINGS, "commit.manifest.min-count-to-merge", str(merge))
    monkeypatch.setitem(table_formats.DELTA_SETTINGS, "delta.logRetentionDuration", "interval 0 seconds")
    put(engine.root, "orders", 150, first=150)
    assert write_tables(engine.root, tmp_path / "lake", to, piece_bytes=PIECE // 8).commits >= 15
    assert_equal(tmp_path / "lake", to, engine.root, "orders")
    if to == "delta":
        left = os.listdir(tmp_path / "lake/orders/_delta_log")
        assert len([name for name in left if name.endswith(".json")]) <= 2 * keep, left
    else:
        catalog = SqlCatalog("pyengine", uri=f"sqlite:///{tmp_path / 'lake/catalog.db'}", warehouse=f"file://{tmp_path / 'lake'}")
        table = catalog.load_table(("topics", "orders"))
        assert len(table.metadata.snapshots) <= keep * 3 // 2 and len(table.metadata.snapshot_log) <= keep * 3 // 2
        assert len(table.current_snapshot().manifests(table.io)) <= merge + 1


def _fails(*_arguments, **_named):
    raise OSError("made to fail")


@both
def test_each_topic_becomes_a_table_and_a_second_run_adds_only_new_messages(engine, tmp_path, to):
    put(engine.root, "orders", 300)
    put(engine.root, "%RETRY%billing", 3)
    first = write_tables(engine.root, tmp_path / "lake", to, piece_bytes=PIECE)
    assert first.messages == {"orders": 300, "%RETRY%billing": 3} and first.commits > 3
    assert_equal(tmp_path / "lake", to, engine.root, "orders", "%RETRY%billing")
    assert write_tables(engine.root, tmp_path / "lake", to).commits == 0
    put(engine.root, "orders", 20, first=300)
    put(engine.root, "later", 5)
    assert write_tables(engine.root, tmp_path / "lake", to).messages == {"orders": 20, "later": 5}
    assert_equal(tmp_path / "lake", to, engine.root, "orders", "%RETRY%billing", "later")
    engine.stop()
    assert write_tables(engine.root, tmp_path / "lake", to).commits == 0


def test_a_stopped_store_that_has_lost_its_end_is_damage_unless_that_is_given_up(engine, tmp_path):
    put(engine.root, "orders", 400)
    engine.stop()
    last = sorted((engine.root / "commitlog").iterdir())[-1]
    last.unlink()
    with pytest.raises(CorruptionError, match=rf"ends at {int(last.name)}, but everything up to \d+ had been synced: `pyengine check"):
        write_tables(engine.root, tmp_path / "lake", "delta")
    assert os.listdir(tmp_path / "lake") == [] and read_log_holds(engine.root) == []
    report = write_tables(engine.root, tmp_path / "lake", "delta", allow_loss=True)
    assert 0 < report.messages["orders"] < 400 and report.offset == int(last.name)


@pytest.mark.ci
@both
def test_kills_after_random_commits_lose_and_double_nothing(engine, tmp_path, rng, to):
    steps = {"delta": ("table_data_durable", "table_committed", "tables_noted"),
             "iceberg": ("table_metadata_due", "table_catalog_committed", "tables_noted")}[to]
    program = ("import sys; from pathlib import Path; from pyengine.client.tables import write_tables; "
               f"write_tables(Path(sys.argv[1]), Path(sys.argv[2]), {to!r}, piece_bytes={PIECE})")
    killed = 0
    for number, step in enumerate(steps):
        put(engine.root, "orders", 150, first=150 * number)
        put(engine.root, "other", 60, first=60 * number)
        armed = f"{step}:{rng.randrange(1, 4)}:kill"
        done = subprocess.run([sys.executable, "-P", "-c", program, str(engine.root), str(tmp_path / "lake")], capture_output=True,
                              text=True, env=environment(PYENGINE_FAILPOINT=armed), timeout=scaled_timeout_s(120))
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        killed += done.returncode != 0
        put(engine.root, "orders", 10, first=1000 + 10 * number)  # the next run's pieces have other boundaries
    assert killed == len(steps)
    write_tables(engine.root, tmp_path / "lake", to)
    assert_equal(tmp_path / "lake", to, engine.root, "orders", "other")
    if to == "delta":
        there = {path.name for path in (tmp_path / "lake/orders").rglob("*.parquet") if path.parent.name != "_delta_log"}
        named = {os.path.basename(uri) for uri in deltalake.DeltaTable(tmp_path / "lake/orders").file_uris()}
        assert there == named  # files of killed runs are gone


@pytest.mark.ci
@both
def test_an_engine_that_is_killed_while_tables_follow_it_loses_and_doubles_nothing(engine, tmp_path, rng, to):
    following = subprocess.Popen([sys.executable, "-P", "-m", "pyengine", "tables", str(engine.root), str(tmp_path / "lake"), "--to", to,
                                  "--follow", "--interval", "0.05"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                 env=environment())
    noted, count = tmp_path / "lake" / STATE, 0

    def offset() -> int:
        return json.loads(noted.read_bytes())["offset"] if noted.exists() else 0

    try:
        for _ in range(3):
            before = offset()
            for _ in range(rng.randint(1, 4)):
                put(engine.root, "orders", 50, first=count)
                count += 50
            eventually(lambda: offset() > before or following.poll() is not None, "a commit is noted", timeout_s=60)
            assert following.poll() is None, following.communicate()[1]
            engine.kill_all()
            engine.start()
        before = offset()
        put(engine.root, "orders", 50, first=count)
        eventually(lambda: offset() > before or following.poll() is not None, "it goes on with the engine that runs now", timeout_s=60)
    finally:
        following.kill()
        _, complaints = following.communicate()
    assert following.returncode == -signal.SIGKILL, complaints
    write_tables(engine.root, tmp_path / "lake", to)
    assert_equal(tmp_path / "lake", to, engine.root, "orders")
    assert len(rows(tmp_path / "lake", to, "orders")) == count + 50


def test_a_commit_that_a_power_cut_tore_is_made_again(engine, tmp_path):
    put(engine.root, "orders", 100)
    write_tables(engine.root, tmp_path / "lake", "delta")
    note = (tmp_path / "lake" / STATE).read_bytes()
    put(engine.root, "orders", 100, first=100)
    write_tables(engine.root, tmp_path / "lake", "delta")
    (tmp_path / "lake" / STATE).write_bytes(note)  # as before the last commit, of which a part is there
    last = sorted((tmp_path / "lake/orders/_delta_log").glob("*.json"))[-1]
    last.write_bytes(last.read_bytes()[:-20])
    assert 0 < write_tables(engine.root, tmp_path / "lake", "delta").messages["orders"] <= 100
    assert_equal(tmp_path / "lake", "delta", engine.root, "orders")


@both_if_long
def test_tables_that_follow_get_later_messages_and_the_cleaner_waits_for_them(engine, tmp_path, to):
    put(engine.root, "orders", 200)
    over, ended = threading.Event(), []
    thread = threading.Thread(target=lambda: ended.append(write_tables(
        engine.root, tmp_path / "lake", to, follow=True, interval_s=0.05, hold_hours=1, over=over)))
    thread.start()
    try:
        noted = tmp_path / "lake" / STATE
        for first in (200, 400):
            put(engine.root, "orders", 200, first=first)
            with open_store(engine.root) as store:
                end = store.max_physical_offset("written")
            eventually(lambda: noted.exists() and json.loads(noted.read_bytes())["offset"] >= end, "it has followed")
    finally:
        over.set()
        thread.join()
    assert ended[0].messages == {"orders": 600}
    assert_equal(tmp_path / "lake", to, engine.root, "orders")
    wait_noted(engine.root)
    (hold,) = run("status", engine.root, "--json").document["log_holds"]
    assert hold["active"] and hold["offset"] == ended[0].offset and f"tables in {tmp_path / 'lake'}" in hold["owner"]
    put(engine.root, "orders", 400, first=600)  # what the tables have not may not go, what they have may
    wait_noted(engine.root)
    assert run("clean", engine.root, "--older-than", 0).code == 0
    with open_store(engine.root) as store:
        assert 0 < store.min_physical_offset <= hold["offset"] < store.min_physical_offset + SEGMENT
    assert write_tables(engine.root, tmp_path / "lake", to).messages == {"orders": 400}
    assert [row["body"] for row in rows(tmp_path / "lake", to, "orders")] == [b"%06d" % number * 60 for number in range(1000)]


def test_messages_that_were_deleted_unread_are_an_error_until_they_are_given_up(engine, tmp_path):
    put(engine.root, "orders", 100)
    write_tables(engine.root, tmp_path / "lake", "delta", hold_hours=0)
    assert read_log_holds(engine.root) == []
    put(engine.root, "orders", 500, first=100)
    wait_noted(engine.root)
    assert run("clean", engine.root, "--older-than", 0).code == 0
    with pytest.raises(MissedMessagesError, match="were deleted before they were read; run it again with --allow-loss"):
        write_tables(engine.root, tmp_path / "lake", "delta", hold_hours=0)
    report = write_tables(engine.root, tmp_path / "lake", "delta", allow_loss=True)
    assert report.missed_bytes > 0 and 0 < report.messages["orders"] < 500
    found = [row["physicalOffset"] for row in rows(tmp_path / "lake", "delta", "orders")]
    assert len(found) == len(set(found)) == 100 + report.messages["orders"]


def test_only_the_topics_asked_for_and_never_internal_ones(engine, tmp_path):
    for topic in ("orders-eu", "orders-us", "other"):
        put(engine.root, topic, 2)
    with pyengine.connect(engine.root) as producer:
        assert producer.put("orders-eu", b"later", delay_level=1).ok
    report = write_tables(engine.root, tmp_path / "some", "delta", topics="orders-.*")
    assert report.messages.keys() == {"orders-eu", "orders-us"} and report.messages["orders-us"] == 2
    report = write_tables(engine.root, tmp_path / "all", "delta")
    assert not any(is_internal(topic) for topic in report.messages) and "other" in report.messages
    with pytest.raises(UsageError, match="was begun as delta .* topics orders-"):
        write_tables(engine.root, tmp_path / "some", "delta", topics="orders-eu")
    with pytest.raises(UsageError, match="topic pattern"):
        write_tables(engine.root, tmp_path / "none", "delta", topics="(")


def put_transactions(root):
    """Prepared, rolled back and committed messages of `orders`, of which consumers see one, and a plain one."""
    with pyengine.connect(root) as producer:
        for kind, body in ((4, b"undecided"), (12, b"rolled back"), (8, b"committed")):  # MessageSysFlag: prepared, rollback, commit
            producer.put_raw(RawMessage("orders", body, queue_id=0, sys_flag=kind))
        producer.put("orders", b"plain")


@both_if_long
def test_a_table_has_the_messages_that_consumers_see(engine, tmp_path, to):
    put_transactions(engine.root)
    assert write_tables(engine.root, tmp_path / "lake", to).messages == {"orders": 2}
    assert [row["body"] for row in rows(tmp_path / "lake", to, "orders")] == [b"committed", b"plain"]


@in_delta
def test_the_page_says_how_rows_that_consumers_do_not_see_are_deleted(engine, tmp_path, to, monkeypatch):
    monkeypatch.setattr(table_formats, "RowFilter", lambda **_: None)  # as version 0.2.0 did
    put_transactions(engine.root)
    assert write_tables(engine.root, tmp_path / "lake", to).messages == {"orders": 4}
    monkeypatch.undo()
    (block,) = [one for one in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL) if "delete(" in one]
    kept = {"delta": "DeltaTable", "iceberg": "catalog"}[to]
    lines = [line for line in block.splitlines() if "delete(" not in line or kept in line]
    catalog = SqlCatalog("pyengine", uri=f"sqlite:///{tmp_path / 'lake/catalog.db'}", warehouse=f"file://{tmp_path / 'lake'}")
    monkeypatch.chdir(tmp_path)
    exec("\n".join(lines), {"catalog": catalog, "deltalake": deltalake})
    put(engine.root, "orders", 1)
    assert write_tables(engine.root, tmp_path / "lake", to).messages == {"orders": 1}
    assert [row["body"] for row in rows(tmp_path / "lake", to, "orders")] == [b"committed", b"plain", b"000000" * 60]


def test_a_pattern_that_matches_no_topic_is_refused_before_anything_is_made(engine, tmp_path):
    lake = tmp_path / "lake"
    write_tables(engine.root, tmp_path / "empty", "delta", topics="order")  # a store without topics
    put(engine.root, "orders", 2)
    for follow in ("--once", "--follow"):
        ran = run("tables", engine.root, lake, "--to", "delta", "--topic", "order", follow)
        assert ran.code == 2 and "'order' matches none of the " in ran.stderr and "(did you mean orders?)" in ran.stderr
    assert not lake.exists() or os.listdir(lake) == []
    assert write_tables(engine.root, lake, "delta", topics="later", allow_missing=True).messages == {}
    put(engine.root, "later", 3)
    assert write_tables(engine.root, lake, "delta", topics="later").messages == {"later": 3}


def test_a_topic_pattern_matches_a_topic_that_only_the_log_has(tmp_path, builder):
    builder.put("orders", b"x")
    builder.put("late", b"x", dispatch=False)
    settings = dataclasses.asdict(builder.geometry)
    assert write_tables(builder.root, tmp_path / "lake", "delta", topics="late", settings=settings).messages == {"late": 1}


@both_if_long
def test_a_table_or_folder_of_something_else_is_left_alone(engine, make_engine, tmp_path, to):
    put(engine.root, "orders", 5)
    write_tables(engine.root, tmp_path / "lake", to)
    other = make_engine(name="other", **SIZES)
    other.start()
    put(other.root, "orders", 5)
    with pytest.raises(UsageError, match="from store"):
        write_tables(other.root, tmp_path / "lake", to)
    (tmp_path / "lake" / STATE).unlink()
    with pytest.raises(UsageError, match=f"and no {STATE}"):
        write_tables(engine.root, tmp_path / "lake", to)
    write_tables(other.root, tmp_path / "new", to, topics="nothing", allow_missing=True)
    state = json.loads((tmp_path / "new" / STATE).read_text())
    (tmp_path / "lake" / STATE).write_text(json.dumps(state | {"topics": None, "offset": 0, "before": None}))
    with pytest.raises(TopicsFailedError, match="is filled from topic orders of store .*nothing is added"):
        write_tables(other.root, tmp_path / "lake", to)
    assert len(rows(tmp_path / "lake", to, "orders")) == 5


@both_if_long
def test_a_run_that_was_killed_before_it_read_anything_is_begun_again(engine, tmp_path, to):
    put(engine.root, "orders", 5)
    write_tables(engine.root, tmp_path / "lake", to, topics="nothing", allow_missing=True)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / f"{STATE}.tmp").write_text("half")
    assert write_tables(engine.root, tmp_path / "new", to).messages == {"orders": 5}
    assert_equal(tmp_path / "new", to, engine.root, "orders")


@pytest.mark.parametrize("content", usual([b"", b"{}", b"[]", b'{"offset": "x"}', b"\xff"], [b"{}", b"\xff"], pytest.mark.ci))
def test_a_note_that_cannot_be_read_is_refused(engine, tmp_path, content):
    (tmp_path / "lake").mkdir()
    (tmp_path / "lake" / STATE).write_bytes(content)
    with pytest.raises(UsageError, match="is not readable"):
        write_tables(engine.root, tmp_path / "lake", "delta")


def test_a_note_that_was_moved_ahead_is_found_by_the_bytes_before_it(engine, tmp_path):
    put(engine.root, "orders", 50)
    write_tables(engine.root, tmp_path / "lake", "delta")
    put(engine.root, "orders", 50, first=50)
    state = json.loads((tmp_path / "lake" / STATE).read_text())
    (tmp_path / "lake" / STATE).write_text(json.dumps(state | {"offset": state["offset"] + 2000}))
    with pytest.raises(CorruptionError, match="is not the one that"):
        write_tables(engine.root, tmp_path / "lake", "delta")


def test_two_runs_at_once_for_one_folder_are_refused(engine, tmp_path):
    put(engine.root, "orders", 5)
    (tmp_path / "lake").mkdir()
    with locked_folder(tmp_path / "lake"), pytest.raises(StoreBusyError):
        write_tables(engine.root, tmp_path / "lake", "delta")


def test_a_table_that_another_program_made_is_refused_and_the_others_go_on(engine, tmp_path):
    put(engine.root, "orders", 5)
    write_tables(engine.root, tmp_path / "lake", "delta", topics="nothing|orders|theirs")
    import pyarrow

    deltalake.write_deltalake(tmp_path / "lake/theirs", pyarrow.table({"x": [1]}))
    put(engine.root, "theirs", 5)
    put(engine.root, "orders", 5, first=5)
    ran = run("tables", engine.root, tmp_path / "lake", "--to", "delta", "--topic", "nothing|orders|theirs", "--json")
    assert ran.code == 1 and ran.document["messages"] == {"orders": 5} and ran.document["failed"].keys() == {"theirs"}
    assert "was not made by `pyengine tables`" in ran.document["failed"]["theirs"]
    assert_equal(tmp_path / "lake", "delta", engine.root, "orders")
    assert deltalake.DeltaTable(tmp_path / "lake/theirs").to_pyarrow_table().num_rows == 1
    ran = run("tables", engine.root, tmp_path / "lake", "--to", "delta", "--topic", "nothing|orders|theirs")
    assert ran.code == 1 and "'theirs' (table theirs in " in ran.stdout, "each run says so"


@in_iceberg
def test_a_topic_that_failed_gets_what_it_lacks_once_its_cause_is_gone(engine, tmp_path, to, monkeypatch):
    """Other topics go on meanwhile, the log is held for it, and nothing is doubled."""
    put(engine.root, "orders", 100)
    put(engine.root, "other", 20)
    kind = {"delta": table_formats.DeltaTables, "iceberg": table_formats.IcebergTables}[to]
    append, broken = kind.append, []

    def fails_for_orders(self, topic, rows, start, end):
        append(self, topic, rows, start, end)
        if topic == "orders" and len(broken) < 40:  # the second piece and later ones, after its commit
            broken.append(end)
            if len(broken) > 1:
                raise ValueError("made to fail")

    monkeypatch.setattr(kind, "append", fails_for_orders)
    with pytest.raises(TopicsFailedError, match=r"'orders' \(ValueError: made to fail\); the next run tries again") as caught:
        write_tables(engine.root, tmp_path / "lake", to, piece_bytes=PIECE)
    assert caught.value.exit_code == 1 and caught.value.report.messages["other"] == 20
    again = pickle.loads(pickle.dumps(caught.value))  # as from a process pool
    assert (type(again), str(again), again.report) == (TopicsFailedError, str(caught.value), caught.value.report)
    lacks_from = json.loads((tmp_path / "lake" / STATE).read_text())["failed"]["orders"]
    assert [hold.offset for hold in read_log_holds(engine.root)] == [lacks_from] and 0 < lacks_from < caught.value.report.offset
    put(engine.root, "orders", 30, first=100)
    put(engine.root, "other", 5, first=20)
    monkeypatch.undo()
    assert write_tables(engine.root, tmp_path / "lake", to, piece_bytes=PIECE // 2).messages["other"] == 5
    assert_equal(tmp_path / "lake", to, engine.root, "orders", "other")
    assert "failed" not in json.loads((tmp_path / "lake" / STATE).read_text())


def test_a_topic_that_failed_is_tried_again_while_tables_follow(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RETRY_INTERVAL_S", 0)
    append, tries = table_formats.DeltaTables.append, []

    def fails_at_first(self, topic, *rest):
        tries.append(topic)
        if tries.count(topic) <= 3 and topic == "orders":
            raise ValueError("made to fail")
        append(self, topic, *rest)

    monkeypatch.setattr(table_formats.DeltaTables, "append", fails_at_first)
    put(engine.root, "orders", 20)
    over, ended = threading.Event(), []
    thread = threading.Thread(target=lambda: ended.append(write_tables(
        engine.root, tmp_path / "lake", "delta", follow=True, interval_s=0.02, over=over)))
    thread.start()
    try:
        eventually(lambda: tries.count("orders") >= 4, "it is tried again")
    finally:
        over.set()
        thread.join()
    assert ended[0].failed == {} and ended[0].messages == {"orders": 20}
    assert_equal(tmp_path / "lake", "delta", engine.root, "orders")


def test_what_a_failed_topic_lacks_may_be_deleted_and_given_up(engine, tmp_path):
    write_tables(engine.root, tmp_path / "lake", "delta", topics="orders|other", hold_hours=0)
    import pyarrow

    deltalake.write_deltalake(tmp_path / "lake/orders", pyarrow.table({"x": [1]}))
    put(engine.root, "orders", 200)
    with pytest.raises(TopicsFailedError):
        write_tables(engine.root, tmp_path / "lake", "delta", topics="orders|other", hold_hours=0)
    put(engine.root, "other", 400)
    wait_noted(engine.root)
    with pytest.raises(TopicsFailedError):
        write_tables(engine.root, tmp_path / "lake", "delta", topics="orders|other", hold_hours=0)
    assert run("clean", engine.root, "--older-than", 0).code == 0
    shutil.rmtree(tmp_path / "lake/orders")
    with pytest.raises(TopicsFailedError, match="were deleted before they were read; run it again with --allow-loss"):
        write_tables(engine.root, tmp_path / "lake", "delta", topics="orders|other")
    report = write_tables(engine.root, tmp_path / "lake", "delta", topics="orders|other", allow_loss=True)
    assert report.failed == {}
    put(engine.root, "orders", 3, first=200)
    assert write_tables(engine.root, tmp_path / "lake", "delta", topics="orders|other").messages == {"orders": 3}


@in_delta
def test_each_topic_has_a_table_of_its_own_whatever_its_name(engine, tmp_path, to):
    """Names that differ only in what is escaped, and names that are too long once they are escaped."""
    long, longer = "订" * 42, "订" * 41 + "单"
    names = ["a.b", "a_2eb", "a_2eb_2e", "a.b.", long, longer, "x" * 127, "Orders", "orders"]
    for number, topic in enumerate(names):
        put(engine.root, topic, 2, first=10 * number)
    assert write_tables(engine.root, tmp_path / "lake", to).messages == dict.fromkeys(names, 2)
    for number, topic in enumerate(names):
        put(engine.root, topic, 1, first=10 * number + 2)
    assert write_tables(engine.root, tmp_path / "lake", to).messages == dict.fromkeys(names, 1)
    found = {}
    for folder in (tmp_path / "lake" if to == "delta" else tmp_path / "lake/topics").iterdir():
        if folder.is_dir() and folder.name != "topics":
            found[folder.name] = [row["body"] for row in rows(tmp_path / "lake", to, folder.name)]
    assert sorted(found.values()) == sorted([b"%06d" % (10 * number + one) * 60 for one in range(3)] for number in range(len(names)))
    assert {"a_2eb", "orders", "Orders", "x" * 127} <= found.keys() and max(map(len, found)) <= 255


@both
def test_strange_times_of_producers_are_the_nearest_that_a_calendar_has(engine, tmp_path, to):
    epoch, least, most = datetime(1970, 1, 1, tzinfo=UTC), datetime(1677, 9, 23, tzinfo=UTC), datetime(2262, 4, 10, tzinfo=UTC)
    inside = [0, -1, 1, -9223200000000, 9223200000000, 1764331200000]
    given = [*inside, -9223200000001, -(2**63), 9223200000001, 2**63 - 1]
    with pyengine.connect(engine.root) as producer:
        for number, born_ms in enumerate(given):
            assert producer.put_raw(RawMessage("orders", b"%d" % number, born_timestamp_ms=born_ms)).ok
    assert write_tables(engine.root, tmp_path / "lake", to).messages == {"orders": len(given)}
    expected = [*(epoch + timedelta(milliseconds=born_ms) for born_ms in inside), least, least, most, most]
    assert [row["bornTimestamp"] for row in rows(tmp_path / "lake", to, "orders")] == expected


@in_iceberg
def test_a_folder_that_the_libraries_read_otherwise_is_refused_before_anything_is_made(engine, tmp_path, to):
    put(engine.root, "orders", 2)
    for name in ("lake%20x", "la\\ke", "tab\tx", "new\nline", os.fsdecode(b"b\xff"), *(("lake#1", "lake?x=1") if to == "iceberg" else ())):
        ran = run("tables", engine.root, tmp_path / "wrong" / name, "--to", to)
        assert ran.code == 2 and "give a folder of another name" in ran.stderr, ran
    assert not (tmp_path / "wrong").exists()
    for name in ("my lake", "läke", "la+ke", "lake~1", "la:ke", "it's", "a&b", "x[1]", "{x}", *(("a#1?b",) if to == "delta" else ())):
        assert write_tables(str(engine.root), str(tmp_path / name), to).messages == {"orders": 2}
        assert len(rows(tmp_path / name, to, "orders")) == 2
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "er")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    assert write_tables(engine.root, tmp_path / "link/../other", to).messages == {"orders": 2}
    assert len(rows(tmp_path / "deep/other", to, "orders")) == 2


def test_a_store_whose_path_is_not_text_can_be_read_into_tables(tmp_path, builder):
    builder.put("orders", b"x")
    root = tmp_path / os.fsdecode(b"gbk \xb6\xa9")
    builder.root.rename(root)
    settings = dataclasses.asdict(builder.geometry)
    for to in FORMATS:
        for count in (1, 0):
            assert sum(write_tables(root, tmp_path / to, to, settings=settings).messages.values()) == count
    given = [f"--set={name}={value}" for name, value in settings.items()]
    assert run("tables", root, tmp_path / "lake", "--to", "delta", *given).code == 0


@pytest.mark.parametrize(("wrong", "error", "says"), [
    ({"hold_hours": "24"}, TypeError, "hold_hours must be a number"), ({"interval_s": math.nan}, UsageError, "interval_s is nan"),
    ({"piece_bytes": 0}, UsageError, "piece_bytes is 0"), ({"to": "parquet"}, UsageError, "'parquet': give delta or iceberg"),
    *usual([
        ({"hold_hours": math.nan}, UsageError, "hold_hours is nan"), ({"hold_hours": 1e9}, UsageError, "a log hold of 1e"),
        ({"interval_s": math.inf}, UsageError, "interval_s is inf"), ({"piece_bytes": 1.5}, TypeError, "piece_bytes must be int"),
    ], [], pytest.mark.ci),
])
def test_a_wrong_argument_is_refused(engine, tmp_path, wrong, error, says):
    with pytest.raises(error, match=says):
        write_tables(engine.root, tmp_path / "lake", **{"to": "delta", **wrong})
    assert read_log_holds(engine.root) == []


def test_tables_refuse_a_log_that_was_cut_or_restored(engine, tmp_path):
    put(engine.root, "orders", 400)
    backup_store(engine.root, Folder(tmp_path / "backup"))
    put(engine.root, "orders", 100, first=400)
    write_tables(engine.root, tmp_path / "lake", "delta")
    engine.stop()
    restore_store(Folder(tmp_path / "backup"), tmp_path / "restored")
    with pytest.raises(UsageError, match="from store"):  # a store of its own: the same offsets will be other messages
        write_tables(tmp_path / "restored", tmp_path / "lake", "delta")
    used = [path for path in sorted((engine.root / "commitlog").iterdir()) if path.read_bytes().strip(b"\0")]
    used[-1].write_bytes(bytes(SEGMENT))
    assert run("recover", engine.root, "--accept-loss").code == 0
    engine.start()
    put(engine.root, "orders", 300, first=900)  # beyond where the tables are
    with pytest.raises(CorruptionError, match="is not the one that"):
        write_tables(engine.root, tmp_path / "lake", "delta")


def test_damage_in_the_log_ends_the_run_and_names_the_offset(engine, tmp_path):
    put(engine.root, "orders", 400)
    engine.stop()
    with open(engine.root / f"commitlog/{SEGMENT:020d}", "r+b") as file:
        file.seek(30_000)
        file.write(b"damage!")
    with pytest.raises(CorruptionError, match="the log is damaged at"):
        write_tables(engine.root, tmp_path / "lake", "delta")
    found = rows(tmp_path / "lake", "delta", "orders")
    assert [row["body"] for row in found] == [b"%06d" % number * 60 for number in range(len(found))]


def enlarge(root, topic, number):
    """Give a record a size beyond the end of the log; return its offset."""
    at = stored(root, topic)[number]["physicalOffset"]
    with open(root / f"commitlog/{at - at % SEGMENT:020d}", "r+b") as file:
        file.seek(at % SEGMENT)
        file.write(b"\x40")
    return at


@pytest.mark.parametrize("number", [200, 390], ids=["in a full segment", "in the last segment"])
def test_a_size_beyond_the_end_of_the_log_is_damage_in_every_run(engine, tmp_path, number):
    put(engine.root, "orders", 400)
    at = enlarge(engine.root, "orders", number)
    for _ in range(2):
        with pytest.raises(CorruptionError, match=f"the log is damaged at {at}: overrun"):
            write_tables(engine.root, tmp_path / "lake", "delta")


def test_a_failed_topic_stays_failed_while_what_it_lacks_is_damaged(engine, tmp_path, monkeypatch):
    put(engine.root, "orders", 50)

    def append(*given):
        raise ValueError("no")

    with monkeypatch.context() as patched, pytest.raises(TopicsFailedError, match="ValueError: no"):
        patched.setattr(table_formats.DeltaTables, "append", append)
        write_tables(engine.root, tmp_path / "lake", "delta")
    at = enlarge(engine.root, "orders", 20)
    with pytest.raises(TopicsFailedError, match=f"the log is damaged at {at}: overrun"):
        write_tables(engine.root, tmp_path / "lake", "delta")


@both_if_long
def test_the_tables_command_reports_the_number_of_added_messages(engine, tmp_path, to):
    put(engine.root, "orders", 7)
    document = run("tables", engine.root, tmp_path / "lake", "--to", to, "--json").document
    assert (document["messages"], document["to"], document["exit_code"]) == ({"orders": 7}, to, 0)
    ran = run("tables", engine.root, tmp_path / "lake", "--to", to, "--once")
    assert ran.code == 0 and "0 messages of 0 topics" in ran.stdout
    ran = run("tables", engine.root, "s3://bucket/lake", "--to", to)
    assert ran.code == 2 and "is a URI: give a directory of this host" in ran.stderr


def test_a_full_disk_ends_the_run_with_its_folder_and_the_next_one_goes_on(engine, tmp_path, monkeypatch):
    put(engine.root, "orders", 7)

    def append(*given):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as the libraries name no file

    with monkeypatch.context() as patched:
        patched.setattr(table_formats.DeltaTables, "append", append)
        with pytest.raises(DiskFullError, match=f"cannot write a table in {tmp_path / 'lake'}: No space"):
            write_tables(engine.root, tmp_path / "lake", "delta")
        ran = run("tables", engine.root, tmp_path / "lake", "--to", "delta")
        assert ran.code == 1 and str(tmp_path / "lake") in ran.stderr and "stdout" not in ran.stderr, ran
    assert write_tables(engine.root, tmp_path / "lake", "delta").messages == {"orders": 7}
