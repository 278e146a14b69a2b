"""The check in the workers finds what the check of one process finds: finding by finding, whatever is damaged, in parts of any size.
So does the comparison of two stores."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from fix_cli import run
from fix_golden import RECIPES, unpack
from fix_spark import run_units_here
from pyengine.errors import ConfigError, EngineError
from pyengine.ipc.live_reader import check_now
from pyengine.spark import store_verify
from pyengine.spark.store_verify import verify
from pyengine.storage.config import load_config
from spark.logs import write_log
from waiting import eventually

FILES = ("commitlog", "consumequeue", "index", "consumequeue_ext")
SIZES = {"mapped_file_size_commit_log_bytes": 1 << 16, "mapped_file_size_consume_queue_bytes": 2000, "max_hash_slot_num": 50,
         "max_index_num": 200}


def document(report) -> dict:
    """A report as JSON has it, but for the time it took."""
    return report.to_dict() | {"seconds": 0}


@pytest.fixture
def here(monkeypatch) -> list[int]:
    """Units run in this process, as tasks would: pickled in bundles, in any order. Gives how many each job had."""
    jobs = []

    def run_units(spark, work, common, *, task_bytes, progress=None):
        jobs.append(len(work))
        return run_units_here(spark, work, common, task_bytes=task_bytes)

    monkeypatch.setattr(store_verify, "run_units", run_units)
    return jobs


def compare(store: Path, task_bytes: int, **sizes: int) -> dict:
    """Both checks' document, which must be one and the same."""
    try:
        config = load_config(store, {name: str(value) for name, value in sizes.items()})
    except ConfigError:  # the files' lengths contradict the sizes: no check begins
        return {}
    try:
        wanted = document(check_now(store, config))
    except EngineError as error:
        with pytest.raises(type(error)) as raised:
            verify(None, store, config=config, task_bytes=task_bytes)
        assert str(raised.value) == str(error)
        return {}
    assert document(verify(None, store, config=config, task_bytes=task_bytes)) == wanted, f"parts of {task_bytes} bytes"
    return wanted


def spoil(store: Path, rng: random.Random) -> str:
    """Damage of one kind somewhere in the store's files; what it was."""
    files = [path for name in FILES for path in sorted((store / name).rglob("*")) if path.is_file() and path.stat().st_size]
    if not files:
        return "there is nothing to damage"
    path = rng.choice(files)
    kind = rng.choice(["flip", "flip", "zero", "swap", "gone", "shorter", "copy"])
    data = bytearray(path.read_bytes())
    used = len(data.rstrip(b"\0")) or 1
    at = rng.randrange(used)
    if kind == "gone":
        path.unlink()
        return f"{path} deleted"
    if kind == "shorter":
        path.write_bytes(data[:at])
    elif kind == "flip":
        data[at] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    elif kind == "zero":
        data[at : at + rng.randrange(1, 100)] = bytes(len(data[at : at + rng.randrange(1, 100)]))
        path.write_bytes(data[: path.stat().st_size].ljust(path.stat().st_size, b"\0"))
    elif kind == "swap":
        at -= at % 20
        data[at : at + 20], data[at + 20 : at + 40] = data[at + 20 : at + 40], data[at : at + 20]
        path.write_bytes(data)
    else:
        data[at : at + 20] = data[:20]
        path.write_bytes(data[: path.stat().st_size])
    return f"{path}: {kind} at {at}"


@pytest.mark.parametrize("recipe", RECIPES)
def test_golden_stores_in_parts_of_any_size(golden, here, recipe, request):
    store = golden(recipe)
    more = (311, 777, 100_000, 1 << 30) if request.config.run_long else ()
    files = sum(path.is_file() for name in ("consumequeue", "index") for path in (store.root / name).rglob("*"))
    for task_bytes in (*more, 30_000 if recipe == "bigmsg" else 4096):
        compare(store.root, task_bytes, **store.sizes)
    assert not here or recipe == "empty" or here[0] and here[1] == files, "a piece for each segment, and for each file beside the log"


@pytest.mark.parametrize("recipe", ["roll", "lmq", "cqext", "abnormal-multi", "cleaned", "multi-index"])
def test_damage_gives_the_same_findings(golden, here, recipe, rng, tmp_path, request):
    found = 0
    for round_ in range(60 if request.config.run_long else 3):
        store = golden(recipe)
        done = [spoil(store.root, rng) for _ in range(rng.randrange(1, 4))]
        print(round_, done)
        found += bool(compare(store.root, rng.choice([500, 3000, 50_000, 1 << 30]), **store.sizes).get("findings"))
        shutil.rmtree(store.root)
    assert found > 0


def test_a_body_that_looks_like_a_record_where_a_task_begins_changes_nothing(here, tmp_path):
    from record_bytes import encode_record

    def false_record(offset: int) -> bytes:
        """Records in the body, each naming the very place it gets."""
        body, at = b"", offset + 84
        while len(body) < 2000:
            record = encode_record(topic="False", body=b"y" * 50, physical_offset=at + len(body))
            body += record
        return body

    write_log(tmp_path, [{"topic": "T", "queue_offset": n, "body": false_record if n % 3 else b"x" * 100} for n in range(40)],
              segment_bytes=1 << 16)
    for task_bytes in (300, 1000, 5000):
        assert compare(tmp_path, task_bytes)["messages"] == 40


def test_more_findings_than_are_shown_are_counted_alike(here, golden):
    store = golden("roll")
    for path in sorted((store.root / "consumequeue").rglob("*")):
        if path.is_file():
            data = bytearray(path.read_bytes())
            for at in range(0, len(data.rstrip(b"\0")), 20):
                data[at + 11] ^= 1
            path.write_bytes(data)
    assert compare(store.root, 4096, **store.sizes)["left_out"] > 0


def test_an_index_header_that_names_no_record_in_a_damaged_segment_counts_the_same_keys(tmp_path, here):
    """One process counts again from each place where whole records follow damage."""
    import pyengine
    from pyengine.storage.index_file import list_index_files

    with pyengine.Engine(tmp_path / "store", **SIZES | {"max_index_num": 20}) as engine, engine.connect() as producer:
        places = [producer.put("T", b"x" * 400, keys=f"k{number}").physical_offset for number in range(60)]
    index, *others = list_index_files(tmp_path / "store")
    for path in others:
        path.unlink()
    with open(index, "r+b") as file:
        file.seek(16)
        file.write((places[0] + 1).to_bytes(8, "big"))
    with open(tmp_path / "store" / "commitlog" / f"{0:020d}", "r+b") as file:
        file.seek(places[20] + 200)
        file.write(b"damage")
    for task_bytes in (500, 3000, 1 << 30):
        assert "missing keys" in [finding["kind"] for finding in compare(tmp_path / "store", task_bytes)["findings"]]


def test_verify_beside_a_running_engine_checks_all_dispatched_messages(tmp_path, here):
    import pyengine

    with pyengine.Engine(tmp_path / "store", **SIZES) as engine, engine.connect() as producer:
        for number in range(200):
            assert producer.put("T", b"x" * 500, keys=f"k{number}").ok
        config = load_config(tmp_path / "store", {})
        eventually(lambda: check_now(tmp_path / "store", config).messages == 200, "everything is dispatched")
        report = verify(None, tmp_path / "store", task_bytes=5000)
        assert (report.messages, report.queue_entries, report.findings) == (200, 200, [])


def test_an_index_file_that_is_made_while_jobs_run_is_left_to_the_next_check(tmp_path, here, monkeypatch):
    import pyengine
    from pyengine.storage.index_file import list_index_files

    with pyengine.Engine(tmp_path / "store", **SIZES) as engine, engine.connect() as producer:

        def put(count: int) -> None:
            for number in range(count):
                assert producer.put("T", b"x" * 50, keys=f"k{number}").ok

        put(300)
        files = lambda: len(list_index_files(tmp_path / "store"))  # noqa: E731
        eventually(lambda: files() > 1, "an index file is full")
        before, run_units = files(), store_verify.run_units

        def run_while_it_grows(*given, **settings):
            found = run_units(*given, **settings)
            if files() == before:
                put(300)
                eventually(lambda: files() > before, "the next index file is full")
            return found

        monkeypatch.setattr(store_verify, "run_units", run_while_it_grows)
        report = verify(None, tmp_path / "store", task_bytes=1 << 20)
        assert (report.index_files, report.findings) == (before, [])


@pytest.mark.spark
@pytest.mark.java
@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_verify_by_workers_reports_the_findings_of_one_process(spark, tmp_path, recipe):
    store = unpack(recipe, tmp_path)
    told = []
    config = load_config(store, {})
    try:
        wanted = document(check_now(store, config))
    except EngineError as error:
        with pytest.raises(type(error)):
            verify(spark, store, config=config)
        return
    found = verify(spark, store, config=config, task_bytes=20_000, progress=lambda done, total: told.append((done, total)))
    assert document(found) == wanted
    assert told == sorted(told) and all(done <= total for done, total in told)


@pytest.mark.ci
@pytest.mark.spark
@pytest.mark.java
def test_the_check_command_finds_the_same_with_spark(spark, tmp_path):
    store = unpack("abnormal-garbled", tmp_path)
    alone, spread = run("check", store, "--json"), run("check", store, "--spark", "--json")
    assert (spread.code, spread.stderr) == (alone.code, "")
    assert spread.document | {"seconds": 0} == alone.document | {"seconds": 0}
    assert json.dumps(alone.document["findings"])
    assert run("check", tmp_path / "nothing", "--spark").code == 2
