"""A rebuild in the workers makes the bytes that a rebuild in one process makes, in parts of any size, wherever it is killed."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from damage import flip
from dying import run_and_die_at
from fix_cli import run
from fix_golden import CLEAN, HALTED, RECIPES, unpack, usual
from fix_spark import run_units_here
from pyengine.engine_config import Geometry
from pyengine.errors import EngineError, ExitCode
from pyengine.formats.paths import segment_name
from pyengine.ipc.crashed_engine_memory import rebuild_offline
from pyengine.spark import store_rebuild
from pyengine.spark.store_rebuild import rebuild
from pyengine.storage.check.check import check
from pyengine.storage.checkpoint import read_rebuild_marker
from pyengine.storage.config import load_config
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.recover import recover
from spark.oracle import log_messages

BEGAN_NS = time.time_ns()
ALONE = {"cqext": "its queues have an extension"}


def made(root: Path) -> dict[str, object]:
    """Everything that a rebuild is answerable for: queues with their times, index files in their order, checkpoint.

    A file whose last message cannot be read keeps the time at which it was made: that is none here.
    """
    queues = {str(path.relative_to(root)): (path.read_bytes(), time_ns if (time_ns := path.stat().st_mtime_ns) < BEGAN_NS else 0)
              for path in sorted((root / "consumequeue").rglob("*")) if path.is_file()}
    index = [path.read_bytes() for path in sorted((root / "index").glob("*"))]
    return {"queues": queues, "index": index, "checkpoint": (root / "checkpoint").read_bytes()}


@pytest.fixture
def here(monkeypatch):
    """Units run in this process, as tasks would: pickled in bundles, the last ones first."""
    monkeypatch.setattr(store_rebuild, "run_units", run_units_here)


def compare(store: Path, task_bytes: int, sizes: dict[str, int], spark=None, by_workers: bool | None = None) -> str:
    """Rebuild two copies, by one process and by workers; the note that tells why not by workers."""
    alone, spread = store.with_name("alone"), store.with_name("spread")
    for copy in (alone, spread):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(store, copy)
    config = load_config(alone, {name: str(value) for name, value in sizes.items()})
    try:
        wanted = rebuild_offline(alone, config)
    except EngineError as error:
        with pytest.raises(type(error)):
            rebuild(spark, spread, config=config, task_bytes=task_bytes)
        return ""
    found = rebuild(spark, spread, config=config, task_bytes=task_bytes)
    assert made(spread) == made(alone), f"parts of {task_bytes} bytes"
    assert (found.state, found.exit_code, found.queues, found.kept, found.index, found.end_offset) == (
        wanted.state, wanted.exit_code, wanted.queues, wanted.kept, wanted.index, wanted.end_offset)
    assert [note for note in found.notes if "one process" not in note] == list(wanted.notes)
    assert found.replaced == wanted.replaced and read_rebuild_marker(spread) is None
    note = next((note for note in found.notes if "one process" in note), "")
    return note


USUAL = ("lmq", "roll", "prefill", "tx", "cqext", "widetopic")


@pytest.mark.parametrize("recipe", usual(CLEAN, USUAL))
def test_golden_stores_come_back_byte_for_byte(golden, here, recipe, request):
    store = golden(recipe)
    for task_bytes in (777, 4096, 100_000, 1 << 30) if request.config.run_long else (30_000 if recipe == "bigmsg" else 3000,):
        note = compare(store.root, task_bytes, store.sizes)
        assert (ALONE.get(recipe, "") in note) and bool(note) == (recipe in ALONE), note


@pytest.mark.parametrize("is_undercounted", [False, True])
def test_a_task_that_is_done_twice_changes_nothing_and_a_wrong_index_is_not_taken(golden, here, monkeypatch, is_undercounted):
    """As when an executor dies with a task half done, or under spark.speculation."""
    once = store_rebuild.put_keys

    def twice(*given):
        once(*given)
        found = once(*given)
        if is_undercounted:
            with open(found.path, "r+b") as file:
                file.seek(36)
                file.write((found.keys).to_bytes(4, "big"))
        return found

    monkeypatch.setattr(store_rebuild, "put_keys", twice)
    store = golden("roll")
    note = compare(store.root, 3000, store.sizes)
    assert ("does not hold the keys" in note) is is_undercounted and bool(note) is is_undercounted
    assert not (store.root.with_name("spread") / ".index.new").exists()


def test_a_task_makes_no_queue_file_and_no_folder(tmp_path):
    from pyengine.errors import DiskError
    from pyengine.native.dispatch import touched_queues
    from pyengine.storage.mapped_file import list_segments, mapped
    from pyengine.storage.recovery.rebuild import LogRange, put_entries, put_keys
    from spark.logs import SEGMENT_BYTES, end_of, write_log

    write_log(tmp_path, [{"topic": "T", "queue_offset": 0, "body": b"x" * 100}])
    geometry = Geometry(SEGMENT_BYTES, 60, 3, 5)
    part = LogRange(list_segments(tmp_path / "commitlog", SEGMENT_BYTES)[0], 0, end_of(tmp_path))
    with mapped(part.segment.path) as view:
        queues = touched_queues(view, 0, 0, part.end).queues
    begins = {(queue.topic, queue.queue_id): queue.min_queue_offset for queue in queues}
    with pytest.raises(DiskError, match="another process has changed the store"):
        put_entries(MessageStore(tmp_path, geometry), part, begins, 1, message_delay_level="1s", multi_dispatch=True)
    with pytest.raises(DiskError, match="cannot make"):
        put_keys(tmp_path / ".index.new", "20200101000000000", geometry.index_layout, [part], None, 60)
    assert [path.name for path in tmp_path.iterdir()] == ["commitlog"]


@pytest.mark.parametrize("recipe", usual(HALTED, ["abnormal", "abnormal-multi"]))
def test_a_store_that_was_not_stopped_in_order_comes_back_alike(golden, here, recipe, request):
    store = golden(recipe)
    for task_bytes in (777, 4096, 100_000, 1 << 30) if request.config.run_long else (3000,):
        assert compare(store.root, task_bytes, store.sizes) == ""


@pytest.mark.parametrize("recipe", usual([name for name in RECIPES if name != "cqext"], ["lmq", "abnormal-multi"]))
def test_a_rebuild_of_a_damaged_log_by_workers_equals_that_of_one_process(golden, here, recipe, rng, request):
    """Bytes flipped and zeroed all over the log, its end among them; the store stopped in order or not."""
    by_workers = 0
    for round_ in range(40 if request.config.run_long else 3):
        store = golden(recipe)
        for path in sorted((store.root / "commitlog").iterdir()):
            data = bytearray(path.read_bytes())
            used = len(data.rstrip(b"\0"))
            for _ in range(rng.randrange(4) if used else 0):
                at = rng.randrange(used)
                length = rng.choice([1, 1, 4, 200])
                data[at : at + length] = bytes(len(data[at : at + length])) if rng.random() < 0.5 else bytes(
                    byte ^ 1 << rng.randrange(8) for byte in data[at : at + length])
            path.write_bytes(data)
        if rng.random() < 0.5:
            (store.root / "abort").touch()
        task_bytes = rng.choice([30_000 if recipe == "bigmsg" else 700, 100_000, 1 << 30])
        print(round_, task_bytes)
        note = compare(store.root, task_bytes, store.sizes)
        by_workers += not note
        shutil.rmtree(store.root)
    assert by_workers > 0


def test_a_log_whose_lengths_add_up_and_that_recovery_ends_earlier_comes_back_alike(golden, here):
    """The checksum of a body is wrong, in a store that was stopped in order: nothing is made up to the later end and cut again."""
    store = golden("basic")
    last = max(log_messages(store.root), key=lambda message: message.physical_offset if message.body else -1)
    size_bytes = store.sizes["mapped_file_size_commit_log_bytes"]
    flip(store.root / "commitlog" / segment_name(last.physical_offset // size_bytes * size_bytes), last.physical_offset % size_bytes + 88)
    assert compare(store.root, 3000, store.sizes) == ""


@pytest.mark.parametrize("keys", usual(range(7), [3]))
def test_index_files_of_every_size_end_where_they_must(here, tmp_path, keys, request):
    """The last file full, one short of it, one beyond; files smaller than the keys of one record."""
    from pyengine.formats.paths import StorePaths
    from record_bytes import encode_record

    root = tmp_path / "store"
    log = b""
    for number in range(10):
        words = " ".join(f"w{number}-{k}" for k in range((number * 3 + keys) % 5 if number < 9 else keys % 2 * 3))
        properties = f"KEYS\x01{words}\x02" if words else ""
        log += encode_record(topic="T", body=b"x" * 50, queue_offset=number, physical_offset=len(log), properties=properties,
                             store_timestamp_ms=1_700_000_000_000 + number * 1500)
    for entries in (2, 3, 4, 5, 8, 12, 20) if request.config.run_long else (2, 3, 8):
        shutil.rmtree(root, ignore_errors=True)
        folder = StorePaths(root).commit_log
        folder.mkdir(parents=True)
        (folder / f"{0:020d}").write_bytes(log.ljust(8192, b"\0"))
        sizes = {"mapped_file_size_commit_log_bytes": 8192, "mapped_file_size_consume_queue_bytes": 60, "max_hash_slot_num": 3,
                 "max_index_num": entries}
        recover(MessageStore(root, Geometry(8192, 60, 3, entries)))
        for task_bytes in (200, 1 << 30) if request.config.run_long else (200,):
            assert compare(root, task_bytes, sizes) == ""
        shutil.rmtree(root / "index")


@pytest.mark.parametrize("offsets", usual(["0112", "023", "102", "002", "567", "301945"], ["023", "002"]))
def test_queue_offsets_that_do_not_follow_each_other_give_the_same_places(here, tmp_path, offsets, request):
    from spark.logs import write_log

    root = tmp_path / "store"
    write_log(root, [{"topic": "T", "queue_offset": int(offset), "body": b"x" * 900} for offset in offsets])
    sizes = {"mapped_file_size_commit_log_bytes": 4096, "mapped_file_size_consume_queue_bytes": 60, "max_hash_slot_num": 3,
             "max_index_num": 5}
    recover(MessageStore(root, Geometry(4096, 60, 3, 5)))
    hidden = "made by one process: queue offsets do not follow each other in the log"
    for task_bytes, hides in ((1000, ("102",)), (1 << 30, ("102", "002"))) if request.config.run_long else ((1000, ("102",)),):
        assert compare(root, task_bytes, sizes) == (hidden if offsets in hides else "")  # what fits by least, greatest and count


def test_a_rebuild_of_a_log_with_damage_in_its_durable_part_is_refused(here, build_store):
    stopped = build_store(120)
    recover(MessageStore(stopped.root, stopped.geometry))
    sizes = {name: getattr(stopped.geometry, name) for name in (
        "mapped_file_size_commit_log_bytes", "mapped_file_size_consume_queue_bytes", "max_hash_slot_num", "max_index_num")}
    assert compare(stopped.root, 3000, sizes) == ""
    flip(stopped.root / "commitlog" / f"{0:020d}", stopped.records[3].start + 4)
    config = load_config(stopped.root, {name: str(value) for name, value in sizes.items()})
    report = rebuild(None, stopped.root, config=config, task_bytes=3000)
    assert (report.exit_code, report.damage_offset) == (ExitCode.CORRUPTION, stopped.records[3].start)


SYSTEM_CALLS = ("rename", "unlink", "rmdir", "fsync", "ftruncate", "utime", "mkdir")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("was_stopped", [True, False])
def test_killed_anywhere_it_is_finished_by_the_next_start(here, build_store, tmp_path, request, was_stopped):
    stopped = build_store(30)
    recover(MessageStore(stopped.root, stopped.geometry))
    config = load_config(stopped.root, {name: str(getattr(stopped.geometry, name)) for name in (
        "mapped_file_size_commit_log_bytes", "mapped_file_size_consume_queue_bytes", "max_hash_slot_num", "max_index_num")})
    before = made(stopped.root)
    flip(stopped.root / "consumequeue" / "topic-0" / "0" / f"{0:020d}", 3)
    if not was_stopped:
        (stopped.root / "abort").touch()
    done, step, unchanged = False, 0, 0
    while not done:
        root = tmp_path / f"copy-{step}"
        shutil.copytree(stopped.root, root)
        done = run_and_die_at(step, lambda: rebuild(None, root, config=config, task_bytes=4000), SYSTEM_CALLS)
        recover(MessageStore(root, stopped.geometry))
        if check(MessageStore(root, stopped.geometry)).findings:
            unchanged += 1  # killed before anything was to be made again
        else:
            found = made(root)
            assert {name: data for name, (data, _) in found["queues"].items()} == {
                name: data for name, (data, _) in before["queues"].items()}, step
            assert found["index"] == before["index"], step
        assert read_rebuild_marker(root) is None and not (root / "config" / "recovery").exists()
        shutil.rmtree(root)
        step += 1 if request.config.run_long else 11
    assert step > 20 and unchanged < 20


@pytest.mark.spark
@pytest.mark.java
@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_rebuild_by_workers_equals_that_of_one_process(spark, tmp_path, recipe):
    store = unpack(recipe, tmp_path)
    compare(store, 20_000, {}, spark)


@pytest.mark.ci
@pytest.mark.spark
@pytest.mark.java
def test_the_rebuild_command_makes_the_same_with_spark(spark, tmp_path):
    store = unpack("roll", tmp_path)
    before = made(store)
    flip(next(path for path in sorted((store / "consumequeue").rglob("*")) if path.is_file()), 3)
    done = run("rebuild", store, "--spark", "--json")
    assert done.code == 0, done.stderr
    assert made(store) == before and done.document["index"] and done.document["log_bytes"] > 0
    refused = run("rebuild", store, "--spark", "--topic", "T")
    assert refused.code == 2 and "all queues and the index" in refused.stderr
    assert run("check", store).code == 0 and os.listdir(store / "quarantine")
