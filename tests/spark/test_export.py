"""Exports in folders by topic and day, and exports that go on where they ended: every row once, whatever was killed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyarrow import parquet

from damage import flip
from fix_cli import run
from fix_store_builder import StoreBuilder
from pyengine.errors import CorruptionError, DiskError, DiskFullError, EngineError, StoreBusyError, UsageError
from pyengine.ipc.live_reader import open_store
from pyengine.spark import export, spark_session
from pyengine.spark.export import RUN, STATE, SUCCESS, PartFiles, Target, escaped, export_parquet, write_groups
from pyengine.spark.options import read_options
from pyengine.spark.partitions import DataLossError
from pyengine.spark.plan import plan
from pyengine.spark.remote_store import log_sample
from pyengine.spark.schema import chosen_columns
from pyengine.storage import durable_writes
from spark.logs import rows

DAY_MS = 86_400_000
ONE_CORE = SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=1))  # as much of a session as the plan of an export needs


def put(builder: StoreBuilder, count: int) -> None:
    """Messages of three topics over three days."""
    for number in range(count):
        builder.put(("orders", "events", "a%b")[number % 3], b"%05d" % number * 10, queue_id=number % 2)
        builder.now_ms += 3 * DAY_MS // count - 1000  # put itself adds a second


@pytest.fixture
def builder(tmp_path) -> StoreBuilder:
    made = StoreBuilder(tmp_path / "store")
    put(made, 60)
    return made


def table_of(**columns) -> pa.Table:
    return pa.table(columns)


def days(*numbers: int) -> pa.Array:
    return pa.array([number * DAY_MS * 1000 for number in numbers], pa.timestamp("us", tz="UTC"))


def running(folder: Path) -> Target:
    """The folder as a run with the name "run" has it."""
    (folder / RUN).write_text("run")
    return Target.opened(str(folder), "auto")


@pytest.mark.parametrize("most", [1, 128])
def test_rows_go_to_their_folders_in_their_order(tmp_path, monkeypatch, most):
    monkeypatch.setattr(export, "OPEN_FILES_MAX", most)
    table = table_of(topic=["a", "b/c", "a", "a", "b/c"], timestamp=days(0, 0, 1, 0, 0), n=[1, 2, 3, 4, 5])
    files = PartFiles(running(tmp_path), "part-0", pa.schema([("n", pa.int64())]), "snappy", "run", partitioned=True)
    assert list(tmp_path.rglob("part-*")) == []
    found = write_groups(files, iter(table.to_batches() + table.to_batches()))
    assert sum(count for _, count, _ in found) == 10
    read: dict[str, list[int]] = {}
    for path in sorted(tmp_path.rglob("part-*.parquet")):
        assert path.relative_to(tmp_path).as_posix() in [file for file, _, _ in found]
        read.setdefault(path.parent.relative_to(tmp_path).as_posix(), []).extend(parquet.ParquetFile(path).read()["n"].to_pylist())
    assert {folder: sorted(numbers) for folder, numbers in read.items()} == {
        "topic=a/date=1970-01-01": [1, 1, 4, 4], "topic=a/date=1970-01-02": [3, 3], "topic=b%2Fc/date=1970-01-01": [2, 2, 5, 5]}
    assert not list(tmp_path.rglob(".part-*"))


def test_a_part_that_fails_leaves_nothing(tmp_path):
    def broken():
        yield from table_of(n=[1, 2]).to_batches()
        raise OSError("gone")

    files = PartFiles(running(tmp_path), "part-0", pa.schema([("n", pa.int64())]), "snappy", "run", partitioned=False)
    with pytest.raises(OSError, match="gone"):
        write_groups(files, broken())
    assert list(tmp_path.iterdir()) == [tmp_path / RUN]


@pytest.mark.parametrize("over", ["before its file", "after its file"])
def test_a_task_that_lives_on_when_its_run_is_over_leaves_nothing(tmp_path, over):
    """The driver of a failed run deletes RUN, then the files that it sees; other tasks may still write."""
    files = PartFiles(running(tmp_path), "part-0", pa.schema([("n", pa.int64())]), "snappy", "run", partitioned=False)

    def rows_of_a_slow_task():
        yield from table_of(n=[1, 2]).to_batches()
        if over == "after its file":
            files.begin("")
        (tmp_path / RUN).unlink()

    with pytest.raises(EngineError, match="has failed or another has begun"):
        write_groups(files, rows_of_a_slow_task())
    assert list(tmp_path.iterdir()) == []


def test_the_disk_begins_with_a_row_group_before_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "ROW_GROUP_BYTES", 1)
    begun: list[list[int]] = []

    @contextlib.contextmanager
    def noted(paths):
        begun.append([path.stat().st_size for path in paths])
        yield

    monkeypatch.setattr(export, "start_writeback", noted)
    files = PartFiles(running(tmp_path), "part-0", pa.schema([("n", pa.int64())]), "snappy", "run", partitioned=True)
    batch = table_of(n=[1, 2], topic=["a", "a"], timestamp=days(0, 0)).to_batches()
    [(name, messages, size_bytes)] = write_groups(files, iter(batch * 3))
    sizes = [size for [size] in begun]
    assert messages == 6 and len(sizes) == 3 and 0 < sizes[0] < sizes[1] < sizes[2] < size_bytes
    assert parquet.ParquetFile(tmp_path / name).num_row_groups == 3


def refusing_direct(real):
    """Return os.open of a file system without direct writes."""

    def opened(path, flags, *rest, **given):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *rest, **given)

    return opened


def no_thread(thread):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("lacks", ["nothing", "direct writes", "threads"])
def test_a_file_that_bypasses_the_page_cache_has_the_same_rows(tmp_path, monkeypatch, lacks):
    monkeypatch.setattr(durable_writes, "DIRECT_BYTES", 8192)
    monkeypatch.setattr(export, "ROW_GROUP_BYTES", 10_000)
    table = table_of(n=list(range(20_000)), text=[f"text {number}" for number in range(20_000)])
    with monkeypatch.context() as patched:
        if lacks == "direct writes":
            patched.setattr(os, "open", refusing_direct(os.open))
        if lacks == "threads":
            patched.setattr(threading.Thread, "start", no_thread)
        files = PartFiles(running(tmp_path), "part-0", table.schema, "snappy", "run", partitioned=False)
        [(name, messages, size_bytes)] = write_groups(files, iter(table.to_batches(max_chunksize=500)))
    assert messages == 20_000 and (tmp_path / name).stat().st_size == size_bytes
    assert parquet.read_table(tmp_path / name).equals(table)


def open_paths() -> Iterator[str]:
    """Yield what the descriptors of this process lead to."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(f"/proc/self/fd/{name}")


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()], ids=["full", "interrupted"])
def test_an_export_that_fails_beside_the_page_cache_leaves_no_file_thread_or_descriptor(tmp_path, monkeypatch, fault):
    monkeypatch.setattr(durable_writes, "DIRECT_BYTES", 8192)
    pwrite, done = os.pwrite, []

    def fail_later(descriptor, content, position):
        done.append(position)
        if position >= 5 * 8192 and isinstance(fault, OSError):
            raise fault
        return pwrite(descriptor, content, position)

    def batches():
        for number in range(100):
            if number == 50 and isinstance(fault, KeyboardInterrupt):
                raise fault
            yield from table_of(text=[os.urandom(3000)] * 5).to_batches()

    monkeypatch.setattr(os, "pwrite", fail_later)
    monkeypatch.setattr(export, "ROW_GROUP_BYTES", 10_000)
    files = PartFiles(running(tmp_path), "part-0", pa.schema([("text", pa.binary())]), "none", "run", partitioned=False)
    with pytest.raises(DiskFullError if isinstance(fault, OSError) else KeyboardInterrupt):
        write_groups(files, batches())
    assert len(done) > 2 and list(tmp_path.iterdir()) == [tmp_path / RUN]
    assert not any(str(tmp_path) in path for path in open_paths())
    assert not any(thread.name.startswith("direct-file") for thread in threading.enumerate())


@pytest.mark.parametrize(("body_bytes", "rows"), [(100, 1024), (10_000, 104), (3 << 20, 1)])
def test_the_writer_looks_after_a_mib_of_bodies_whether_a_page_is_full(tmp_path, monkeypatch, body_bytes, rows):
    made, seen = parquet.ParquetWriter, []

    def noted(*arguments, write_batch_size, **given):
        seen.append(write_batch_size)
        return made(*arguments, write_batch_size=write_batch_size, **given)

    monkeypatch.setattr(parquet, "ParquetWriter", noted)
    bodies = [bytes([number]) * body_bytes for number in range(3)]
    files = PartFiles(running(tmp_path), "part-0", pa.schema([("value", pa.binary())]), "none", "run", partitioned=False)
    write_groups(files, iter(table_of(value=bodies).to_batches()))
    assert seen == [rows]
    assert parquet.read_table(tmp_path / "part-0.parquet")["value"].to_pylist() == bodies


def test_names_of_folders_are_escaped_as_spark_does():
    assert [escaped(text) for text in ("plain-1_x", "a%b", "a=b/c", "\u00e9", "")] == [
        "plain-1_x", "a%25b", "a%3Db%2Fc", "\u00e9", "__HIVE_DEFAULT_PARTITION__"]


def wanted(root: Path) -> list[tuple]:
    return sorted(rows(root, columns="physicalOffset,topic,offset,value"))


def exported(spark, folder: Path) -> list[tuple]:
    df = spark.read.parquet(str(folder))
    return sorted((row.physicalOffset, row.topic, row.offset, bytes(row.value)) for row in df.collect())


@pytest.mark.ci
@pytest.mark.spark
@pytest.mark.java
def test_an_incremental_export_by_topic_and_day_holds_every_row_once_whatever_was_killed(spark, builder, tmp_path):
    out = tmp_path / "out"
    given = {"partitioned": True, "incremental": True, "columns": "physicalOffset,topic,offset,value", "maxPartitionBytes": 4096}
    done = export_parquet(spark, builder.root, out, **given)
    assert done.messages == 60 and exported(spark, out) == wanted(builder.root)
    days_found = spark.read.parquet(str(out)).where("topic = 'a%b'").select("date").distinct().count()
    assert days_found == 3 and (out / SUCCESS).exists()
    before = {path: path.stat().st_mtime_ns for path in out.rglob("part-*.parquet")}
    assert export_parquet(spark, builder.root, out, **given).messages == 0
    put(builder, 31)
    state = json.loads((out / STATE).read_text())
    assert export_parquet(spark, builder.root, out, **given).messages == 31
    assert exported(spark, out) == wanted(builder.root)
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    # As if the run had been killed before it noted its end, with a file half written:
    (out / STATE).write_text(json.dumps(state))
    (out / SUCCESS).unlink()
    (out / "topic=orders" / ".part-00000000000000000000.parquet.run.1").write_bytes(b"half")
    put(builder, 5)
    assert export_parquet(spark, builder.root, out, **given).messages == 36
    assert exported(spark, out) == wanted(builder.root) and (out / SUCCESS).exists()
    assert not list(out.rglob(".part-*"))
    before = (out / STATE).read_text()
    (out / STATE).write_text(json.dumps(json.loads(before) | {"end": builder.end + 1}))
    with pytest.raises(DataLossError, match=f"startingPhysicalOffset {builder.end + 1}: the log ends at {builder.end}"):
        export_parquet(spark, builder.root, out, **given)
    (out / STATE).write_text(before)
    with pytest.raises(UsageError, match="columns was 'physicalOffset,offset,value', is 'offset'; continue with the same"):
        export_parquet(spark, builder.root, out, **{**given, "columns": "topic,offset"})
    assert exported(spark, out) == wanted(builder.root)
    with pytest.raises(UsageError, match="is not empty"):
        export_parquet(spark, builder.root, out)
    assert export_parquet(spark, builder.root, out, ["orders"], overwrite=True).messages == 33
    assert sorted(path.name for path in out.iterdir()) == [SUCCESS, "part-00000.parquet"]


BEGUN = {"subscribePattern": "orders|events", "tags": "a || b", "columns": "offset,value"}


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"subscribePattern": "orders|event.*"}, "subscribePattern was 'orders|events', is 'orders|event.*'"),
        ({"tags": "a"}, "tags was 'a || b', is 'a'"),
        ({"sql": "a > 5"}, "sql was '', is 'a > 5'"),
        ({"columns": "value,offset"}, "columns was 'offset,value', is 'value,offset'"),
        ({"subscribePattern": None, "topics": ["orders", "events"]},
         "subscribe was '', is 'events,orders'; subscribePattern was 'orders|events', is ''"),
        ({"subscribePattern": None, "assign": '{"orders": [1, 0]}'}, """assign was '', is '{"orders": [0, 1]}'"""),
        ({"readLevel": "committed"}, "readLevel was 'flushed', is 'committed'"),
        ({"onCorrupt": "skip", "verifyCRC": True}, "onCorrupt was 'fail', is 'skip'; verifyCRC was 'false', is 'true'"),
        ({"decompress": False}, "decompress was 'true', is 'false'"),
        ({"partitioned": True}, "partitioned was 'false', is 'true'"),
        ({"startingTimestamp": 5}, "give no offsets and times"),
        ({"endingOffsetsByTimestamp": '{"orders": {"0": 5}}'}, "give no offsets and times"),
        ({"startingOffsetsByTimestamp": '{"orders": {"0": 5}}'}, "give no offsets and times"),
        ({"startingPhysicalOffset": 5}, "give no offsets and times"),
    ],
)
def test_an_incremental_export_refuses_another_selection_than_it_began_with(tmp_path, builder, changed, sentence):
    """Refused before Spark is asked for anything."""
    out = tmp_path / "out"
    out.mkdir()
    read = read_options({"path": str(builder.root), **BEGUN})
    state = export.ExportState(export.selection_of(read, chosen_columns(read), False), end=100)
    (out / STATE).write_text(json.dumps(asdict(state)))
    (out / ".part-00000000000000000000.parquet.run.1").write_bytes(b"half")
    with pytest.raises(UsageError) as refused:
        export_parquet(ONE_CORE, builder.root, out, incremental=True, **without_none({**BEGUN, **changed}))
    assert sentence in str(refused.value)
    assert json.loads((out / STATE).read_text()) == asdict(state) and len(list(out.iterdir())) == 2
    same = {**BEGUN, "tags": "b||a", "maxPartitionBytes": 5, "failOnDataLoss": False, "allowMissing": True}
    with pytest.raises(AttributeError, match="getLocalProperty"):  # it goes on, to Spark
        export_parquet(ONE_CORE, builder.root, out, incremental=True, **same)


def test_an_incremental_export_looks_at_the_record_where_the_last_one_ended(tmp_path, builder, monkeypatch):
    Local(monkeypatch)
    out, given = tmp_path / "out", {"incremental": True, "columns": "physicalOffset"}
    assert export_parquet(ONE_CORE, builder.root, out, **given).messages == 60
    end = builder.end
    put(builder, 9)
    builder.write_log(b"\xff" * 8, at=end + 28)
    with pytest.raises(CorruptionError, match=f"damaged at {end}"):
        export_parquet(ONE_CORE, builder.root, out, **given)


@pytest.mark.parametrize("system", ["auto", "arrow"])
def test_an_incremental_export_refuses_another_log_than_it_began_with(tmp_path, builder, monkeypatch, system):
    Local(monkeypatch)
    out, copy, other = tmp_path / "out", tmp_path / "copy", StoreBuilder(tmp_path / "other")
    given = {"incremental": True, "columns": "physicalOffset,value", "fileSystem": system}
    assert export_parquet(ONE_CORE, builder.root, out, **given).messages == 60
    put(other, 100)
    state = (out / STATE).read_bytes()
    with pytest.raises(UsageError, match="out was begun with another log: in .*/other the segment at 8192 has other messages"):
        export_parquet(ONE_CORE, other.root, out, **given)
    assert (out / STATE).read_bytes() == state
    cut = tmp_path / "cut"  # below that end, and written on
    shutil.copytree(builder.root, cut)
    flip(cut / "commitlog" / f"{8192:020d}", builder.end - 8192 - 3)
    with pytest.raises(UsageError, match="has other messages up to"):
        export_parquet(ONE_CORE, cut, out, **given)
    put(builder, 70)
    shutil.copytree(builder.root, copy)  # as a slave has it
    assert export_parquet(ONE_CORE, copy, out, **given).messages == 70
    put(builder, 70)
    for segment in sorted((builder.root / "commitlog").iterdir()):
        if int(segment.name) + 4096 < json.loads((out / STATE).read_text())["end"]:
            segment.unlink()
    assert export_parquet(ONE_CORE, builder.root, out, **given).messages == 70
    current = json.loads((out / STATE).read_text())
    with open_store(builder.root) as store:
        sample = log_sample(store, current["end"])
    put(builder, 7)
    for noted in ("0" * 256, sample.head.hex() + sample.tail[-64:].hex()):  # as version 0.2.0 noted it
        (out / STATE).write_text(json.dumps(current | {"sample": noted}))
        with contextlib.nullcontext() if sample.is_of(noted) else pytest.raises(UsageError, match="has other messages up to"):
            assert export_parquet(ONE_CORE, builder.root, out, **given).messages == 7
    (out / STATE).write_text(json.dumps(json.loads(state) | {"segment": None, "sample": ""}))  # of a version that noted no log
    with pytest.raises(DataLossError, match="the log begins at"):
        export_parquet(ONE_CORE, builder.root, out, **given)


def test_a_first_run_that_was_refused_or_killed_decides_nothing(tmp_path, builder):
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="has no topic .order. [(]did you mean orders[?][)]: allowMissing=true"):
        export_parquet(ONE_CORE, builder.root, out, ["order"], incremental=True)
    assert not out.exists()
    for columns in ("offset", "value"):
        with pytest.raises(AttributeError, match="getLocalProperty"):  # as if killed: the state is there, and has no end
            export_parquet(ONE_CORE, builder.root, out, ["orders"], incremental=True, columns=columns)
        assert json.loads((out / STATE).read_text())["selection"]["columns"] == columns


class Local:
    """Runs the tasks of an export here, and notes what is synced: of files how many bytes, of folders the names in them."""

    def __init__(self, monkeypatch) -> None:
        self.bytes: dict[int, int] = {}  # by inode: a file gets its name later
        self.names: dict[Path, set[str]] = {}
        self.at_state: list[str] = []
        self.end: int | None = None
        real_sync, write = os.fsync, Target.write

        def sync(descriptor: int) -> None:
            real_sync(descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path.is_dir():
                self.names[path] = set(os.listdir(path))
            else:
                self.bytes[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

        def write_when_synced(target: Target, name: str, content: bytes) -> None:
            end = json.loads(content)["end"] if name == STATE else self.end
            if name == SUCCESS or end != self.end:  # a run begins by writing the end of the last one
                self.at_state += self.not_durable(Path(target.tree.root))
            self.end = end
            write(target, name, content)

        monkeypatch.setattr(os, "fsync", sync)
        monkeypatch.setattr(Target, "write", write_when_synced)
        monkeypatch.setattr(export, "watched", lambda *_: contextlib.nullcontext())
        monkeypatch.setattr(export, "collect_from_workers", self.run)

    def run(self, spark, work, parts):
        return [found for number, part in enumerate(parts) for found in work(number, part)]

    def not_durable(self, out: Path) -> list[str]:
        """Return what a power cut could take away or bring back now."""
        files = list(out.rglob("*.parquet"))
        empty = [str(path) for path in files if self.bytes.get(path.stat().st_ino) != path.stat().st_size]
        folders = {out, *(out / folder for path in files for folder in path.relative_to(out).parents)}
        nameless = [str(path) for path in {*files, *folders} if path.name not in self.names.get(path.parent, ())]
        back = [f"{folder}/{name}" for folder, names in self.names.items() for name in names
                if name.endswith(".parquet") and not (folder / name).exists()]
        return [*empty, *nameless, *back]


@pytest.mark.parametrize("given", [{}, {"incremental": True}, {"partitioned": True}, {"partitioned": True, "incremental": True}])
def test_an_export_writes_its_state_and_success_files_after_data_and_folders_are_synced(tmp_path, builder, monkeypatch, given):
    local, out = Local(monkeypatch), tmp_path / "new" / "out"
    assert export_parquet(ONE_CORE, builder.root, out, **given).messages == 60
    assert local.at_state == [] and SUCCESS in local.names[out]
    if "incremental" in given:
        late = next(out.rglob("*.parquet")).with_name("part-99999999999999999999.parquet")  # of a run that was killed
        late.write_bytes(b"late")
        local.names[late.parent] |= {late.name}
        builder.put("later", b"x")
        assert export_parquet(ONE_CORE, builder.root, out, **given).messages == 1
        assert local.at_state == [] and not late.exists() and STATE in local.names[out]


def test_one_export_at_a_time_writes_into_a_folder_of_this_host(tmp_path, builder, monkeypatch):
    Local(monkeypatch)
    out, given, settle = tmp_path / "out", {"incremental": True, "columns": "physicalOffset"}, export._settle

    def settled_beside_others(*arguments):
        settle(*arguments)
        for other in (given, {"incremental": True, "overwrite": True}, {"overwrite": True}):
            with pytest.raises(StoreBusyError, match=f"is using {out}: wait for it"):
                export_parquet(ONE_CORE, builder.root, out, **other)

    for overwrite in (False, True):
        with monkeypatch.context() as patched:
            patched.setattr(export, "_settle", settled_beside_others)
            assert export_parquet(ONE_CORE, builder.root, out, overwrite=overwrite, **given).messages == 60
        assert export_parquet(ONE_CORE, builder.root, out, **given).messages == 0
        assert sorted(path.name for path in out.iterdir()) == [SUCCESS, STATE, "part-00000000000000000000.parquet"]


def test_exports_into_one_remote_folder_lose_nothing_and_leave_the_others_files(tmp_path, builder, monkeypatch):
    local = Local(monkeypatch)
    monkeypatch.setattr(Target, "is_local", False)
    out, given, settle = tmp_path / "out", {"incremental": True, "columns": "physicalOffset"}, export._settle

    def another_follows(*arguments):
        settle(*arguments)
        monkeypatch.setattr(export, "_settle", settle)
        assert export_parquet(ONE_CORE, builder.root, out, **given).messages == 60

    monkeypatch.setattr(export, "_settle", another_follows)
    with pytest.raises(EngineError, match="another has begun"):
        export_parquet(ONE_CORE, builder.root, out, **given)
    assert json.loads((out / STATE).read_text())["end"] == builder.end
    assert parquet.read_table(out, columns=["physicalOffset"]).num_rows == 60
    builder.put("later", b"x")

    def another_begins(*arguments):
        (out / RUN).write_text("other")
        (out / ".part-1.parquet.other.1").write_bytes(b"half")
        return local.run(*arguments)

    monkeypatch.setattr(export, "collect_from_workers", another_begins)
    with pytest.raises(EngineError, match="another has begun"):
        export_parquet(ONE_CORE, builder.root, out, **given)
    assert (out / RUN).read_text() == "other" and [path.name for path in out.glob(".part-*")] == [".part-1.parquet.other.1"]
    assert parquet.read_table(out, columns=["physicalOffset"]).num_rows == 60

    def another_ends(*arguments):
        (out / STATE).write_bytes((out / STATE).read_bytes() + b" ")
        return plan(arguments[1])

    monkeypatch.setattr(export, "planned_parts", another_ends)
    with pytest.raises(EngineError, match="another export has written into .* meanwhile"):
        export_parquet(ONE_CORE, builder.root, out, **given)


def without_none(given: dict) -> dict:
    return {name: value for name, value in given.items() if value is not None}


def test_a_state_of_a_version_that_did_not_note_the_whole_selection_is_refused_with_what_to_do(tmp_path, builder):
    out = tmp_path / "out"
    out.mkdir()
    (out / STATE).write_text(json.dumps({"columns": ["offset"], "topics": [], "partitioned": False, "end": 77}))
    with pytest.raises(UsageError, match="stored columns and topics only") as refused:
        export_parquet(ONE_CORE, builder.root, out, incremental=True, columns="offset")
    (out / STATE).write_text(str(refused.value).partition("write into it ")[2])
    state = json.loads((out / STATE).read_text())
    assert (state["end"], state["selection"]["columns"], state["selection"]["readLevel"]) == (77, "offset", "flushed")
    with pytest.raises(UsageError, match="columns was 'offset', is 'value'"):
        export_parquet(ONE_CORE, builder.root, out, incremental=True, columns="value")
    for damaged in ("{", "[]", '{"selection": 5}', '{"selection": {}, "end": "x"}', '{"end": 5}'):
        (out / STATE).write_text(damaged)
        with pytest.raises(UsageError, match="is no state of an export"):
            export_parquet(ONE_CORE, builder.root, out, incremental=True)


@pytest.mark.parametrize(("dest", "sentence"), [
    ("dbfs:/x", "tasks cannot open this"), ("s3:/bucket/x", "write a URI like s3://bucket/store"),
    ("nosuch://host/x", "pyarrow has no file system for it"), ("hdfs://localhost:1/x", "cannot be reached"),
    ("file://out/x", "write a URI like .* or file:///store"), ("hdfs:x", "tasks cannot open this"), ("file:x", "tasks cannot open this"),
    (os.fsdecode(b"gbk\xb6"), "is not text in UTF-8"),
    (" nosuch://host/x", "pyarrow has no file system for it"),
])
def test_a_destination_that_cannot_be_reached_is_refused_before_anything_is_made(tmp_path, monkeypatch, builder, dest, sentence):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for given in ({}, {"incremental": True}):
        with pytest.raises(UsageError, match=sentence):
            export_parquet(ONE_CORE, builder.root, dest, **given)
    assert list((tmp_path / "here").iterdir()) == []


def test_a_destination_in_the_store_itself_is_refused(builder):
    before = sorted(builder.root.rglob("*"))
    for folder in (builder.root / "commitlog" / "x", builder.root / "lake", f"file:{builder.root}/lake"):
        with pytest.raises(UsageError, match="is inside the store .*, which must not contain other folders"):
            export_parquet(ONE_CORE, builder.root, folder, incremental=True)
    assert sorted(builder.root.rglob("*")) == before


def test_export_refuses_a_target_that_is_neither_a_path_nor_a_uri(builder, monkeypatch):
    monkeypatch.setattr(spark_session, "borrowed_session", None)  # none is started for it
    done = run("export", builder.root, "s3:/bucket/x")
    assert done.code == 2 and "tasks cannot open this: write a URI like s3://bucket/store" in done.stderr


@pytest.mark.ci
@pytest.mark.spark
@pytest.mark.java
def test_tasks_of_a_killed_run_do_not_count_once_another_has_begun(spark, builder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    given = {"incremental": True, "columns": "physicalOffset,topic,offset,value"}
    assert export_parquet(spark, builder.root, out, **given).messages == 60
    put(builder, 9)
    settle = export._settle

    def with_a_late_file(*arguments):
        """What a task of an earlier run has finished meanwhile."""
        (out / "part-99999999999999999999.parquet").write_bytes(b"late")
        settle(*arguments)

    monkeypatch.setattr(export, "_settle", with_a_late_file)
    assert export_parquet(spark, builder.root, out, **given).messages == 9
    assert exported(spark, out) == wanted(builder.root)
    put(builder, 5)
    state = json.loads((out / STATE).read_text())
    read = read_options({"path": str(builder.root), "columns": given["columns"]})
    work = export._PartWriter(read, chosen_columns(read), str(out), "auto", "snappy", "killed", False, True)
    with pytest.raises(EngineError, match="this export into .* has failed or another has begun"):
        list(work(0, plan(read)[0]))
    assert json.loads((out / STATE).read_text()) == state and exported(spark, out)[:69] == wanted(builder.root)[:69]
    assert not list(out.glob(".part-*"))


@pytest.mark.ci
@pytest.mark.spark
@pytest.mark.java
def test_a_file_that_another_run_has_replaced_fails_the_run(spark, builder, tmp_path, monkeypatch):
    settle, out = export._settle, tmp_path / "out"

    def replaced(target, written, begin):
        (out / written[0][0]).write_bytes(b"other")
        settle(target, written, begin)

    monkeypatch.setattr(export, "_settle", replaced)
    with pytest.raises(EngineError, match="is not what this run wrote"):
        export_parquet(spark, builder.root, out, incremental=True, columns="offset")
    assert json.loads((out / STATE).read_text())["end"] is None and not (out / SUCCESS).exists()
    monkeypatch.undo()
    assert export_parquet(spark, builder.root, out, incremental=True, columns="offset").messages == 60


@pytest.mark.spark
@pytest.mark.java
def test_a_destination_may_be_a_file_uri(spark, builder, tmp_path):
    assert export_parquet(spark, builder.root, f"file://{tmp_path}/a%20b", columns="offset").messages == 60
    assert (tmp_path / "a b" / SUCCESS).exists()


@pytest.mark.ci
@pytest.mark.spark
@pytest.mark.java
def test_the_export_command_adds_only_new_messages_in_a_second_incremental_run(spark, builder, tmp_path):
    for count in (20, 4):
        done = run("export", builder.root, tmp_path / "lake", "--topic", "orders", "--incremental", "--columns", "offset", "--json")
        assert (done.code, done.document["messages"]) == (0, count), done.stderr
        put(builder, 12)
    assert spark.read.parquet(str(tmp_path / "lake")).count() == 24


@pytest.mark.spark
@pytest.mark.java
def test_an_incremental_export_that_overwrites_begins_anew(spark, builder, tmp_path):
    for columns in ("offset", "topic,offset"):
        done = export_parquet(spark, builder.root, tmp_path / "lake", incremental=True, overwrite=True, columns=columns)
        assert done.messages == spark.read.parquet(str(tmp_path / "lake")).count() == 60
    assert export_parquet(spark, builder.root, tmp_path / "lake", incremental=True, columns="topic,offset").messages == 0


@pytest.mark.spark
@pytest.mark.java
def test_after_an_overwrite_that_breaks_off_no_incremental_run_goes_on(spark, builder, tmp_path, monkeypatch):
    given = {"incremental": True, "columns": "offset"}
    export_parquet(spark, builder.root, tmp_path / "lake", **given)

    def broken(target: Target) -> None:
        next((tmp_path / "lake").glob("part-*")).unlink()
        raise DiskError("cannot delete the rest")

    with monkeypatch.context() as patched:
        patched.setattr(Target, "empty", broken)
        with pytest.raises(DiskError, match="the rest"):
            export_parquet(spark, builder.root, tmp_path / "lake", overwrite=True, **given)
    with pytest.raises(UsageError, match="is not empty: .*overwrite"):
        export_parquet(spark, builder.root, tmp_path / "lake", **given)


@pytest.mark.spark
@pytest.mark.java
def test_the_command_writes_bodies_as_their_producers_had_them_unless_raw(spark, builder, tmp_path):
    stored = zlib.compress(b"a body " * 20)
    builder.put("zipped", stored, sys_flag=0x1)
    for dest, more, body in (("plain", (), b"a body " * 20), ("raw", ("--raw",), stored)):
        done = run("export", builder.root, tmp_path / dest, "--topic", "zipped", "--columns", "value", *more, "--json")
        assert done.code == 0, done.stderr
        assert parquet.read_table(tmp_path / dest).column("value").to_pylist() == [body]
