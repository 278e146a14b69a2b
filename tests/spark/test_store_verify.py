"""The check in the workers finds what the check of one process finds: finding by finding, whatever is damaged, in parts of any size.
So does the comparison of two stores."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from damage import flip
from fix_cli import run
from fix_golden import RECIPES, load_manifest, size_settings, unpack, usual
from fix_spark import run_units_here
from pyengine.errors import ConfigError, EngineError
from pyengine.formats.paths import StorePaths
from pyengine.formats.record import HEAD_BY_FLAGS, V6_FLAGS
from pyengine.ipc.live_reader import check_now, diff_now
from pyengine.spark import store_verify
from pyengine.spark.store_verify import diff, verify
from pyengine.storage.config import load_config
from spark.logs import write_log
from spark.oracle import log_messages
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
    for task_bytes in (*more, 30_000 if recipe == "bigmsg" else 4096):
        compare(store.root, task_bytes, **store.sizes)
    assert not here or recipe == "empty" or max(here) >= 2


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


def test_an_index_file_that_is_full_while_jobs_run_is_left_to_the_next_check(tmp_path, here, monkeypatch):
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
        assert (report.index_files, report.findings) == (before - 1, [])


def compare_diffs(store: Path, other: Path, task_bytes: int, sizes: dict[str, int], spark=None) -> dict:
    """The document that both ways of comparing two stores give, which must be one and the same."""
    try:
        wanted = document(diff_now(store, other, settings=sizes))
    except EngineError as error:
        with pytest.raises(type(error)) as raised:
            diff(spark, store, other, task_bytes=task_bytes, **sizes)
        assert str(raised.value) == str(error)
        return {}
    assert document(diff(spark, store, other, task_bytes=task_bytes, **sizes)) == wanted, f"parts of {task_bytes} bytes"
    return wanted


def sizes_of(recipe: str) -> dict[str, int]:
    return size_settings(load_manifest(recipe)["config"])


def others(recipe: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """(what it is, where) of stores to compare with a golden one: a copy, changed copies, another golden store."""
    yield "a copy", unpack(recipe, folder / "copy")
    segment_bytes = sizes_of(recipe)["mapped_file_size_commit_log_bytes"]
    messages = [] if recipe == "abnormal-shortfile" else log_messages(folder / "copy" / recipe)  # that one is refused
    for message in [message for message in messages if message.body][:1]:
        flipped, at = unpack(recipe, folder / "flipped"), message.physical_offset + HEAD_BY_FLAGS[message.sys_flag & V6_FLAGS].size
        flip(StorePaths(flipped).commit_log_segment(at // segment_bytes * segment_bytes), at % segment_bytes)
        yield "a body flipped", flipped
    shorter = unpack(recipe, folder / "shorter")
    used = [path for path in sorted((shorter / "commitlog").iterdir()) if path.read_bytes().strip(b"\0")]
    if used:
        used[-1].unlink()
        yield "its last segment missing", shorter
    following = RECIPES[RECIPES.index(recipe) + 1 :] + RECIPES
    another = next((name for name in following if name != recipe and sizes_of(name) == sizes_of(recipe)), following[0])
    yield f"the golden store {another}", unpack(another, folder / "another")


@pytest.mark.parametrize("recipe", usual(RECIPES, ("roll", "lmq", "tx", "abnormal-multi", "cleaned", "widetopic")))
def test_a_golden_store_and_another_differ_alike_in_parts_of_any_size(golden, here, recipe, rng, request, tmp_path):
    store = golden(recipe)
    for what, other in others(recipe, tmp_path / "others"):
        print(what)
        compare_diffs(store.root, other, 30_000 if recipe == "bigmsg" else 4096, store.sizes)
    for round_ in range(20 if request.config.run_long else 2):
        other = unpack(recipe, tmp_path / f"damaged-{round_}")
        done = [spoil(other, rng) for _ in range(rng.randrange(1, 4))]
        print(round_, done)
        compare_diffs(store.root, other, rng.choice([30_000 if recipe == "bigmsg" else 700, 100_000, 1 << 30]), store.sizes)


def test_logs_that_went_apart_differ_alike(here, tmp_path, rng):
    from logs import LogBuilder
    from pyengine.formats.paths import StorePaths, segment_name

    logs = LogBuilder(1 << 16), LogBuilder(1 << 16)
    for log in logs:
        for number in range(50):
            log.append("T", b"x" * number)
    for log, name in zip(logs, ("store", "other")):
        log.append_varied(rng, 2000)
        folder = StorePaths(tmp_path / name).commit_log
        folder.mkdir(parents=True)
        for number, data in enumerate(log.segments):
            (folder / segment_name(number << 16)).write_bytes(bytes(data).ljust(1 << 16, b"\0"))
    for task_bytes in (1000, 1 << 30):
        found = compare_diffs(tmp_path / "store", tmp_path / "other", task_bytes, {"mapped_file_size_consume_queue_bytes": 2000})
        assert found["records"]["equal"] >= 50 and found["left_out"] > 0


@pytest.mark.ci
@pytest.mark.spark
@pytest.mark.java
def test_the_diff_command_finds_the_same_with_spark(spark, tmp_path):
    store, other = unpack("roll", tmp_path / "a"), unpack("roll", tmp_path / "b")
    with open(other / "commitlog" / f"{0:020d}", "r+b") as file:
        file.seek(300)
        file.write(b"damage")
    alone, spread = run("diff", store, other, "--json"), run("diff", store, other, "--spark", "--json")
    assert alone.code == spread.code == 3 and alone.document["first_difference"] is not None
    assert spread.document | {"seconds": 0} == alone.document | {"seconds": 0}
    equal = run("diff", store, store, "--spark")
    assert equal.code == 0 and "The stores are equal" in equal.stdout


@pytest.mark.spark
@pytest.mark.java
@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_workers_find_the_differences_that_one_process_finds(spark, tmp_path, recipe, rng):
    store, sizes = unpack(recipe, tmp_path / "store"), sizes_of(recipe)
    found = {"itself": compare_diffs(store, store, 20_000, sizes, spark)}
    for what, other in others(recipe, tmp_path):
        found[what] = compare_diffs(store, other, 20_000, sizes, spark)
    spoiled = unpack(recipe, tmp_path / "spoiled")
    print(spoil(spoiled, rng))
    compare_diffs(store, spoiled, 20_000, sizes, spark)
    wanted = {"itself": True, "a copy": True, "a body flipped": False}
    assert {what: report["is_equal"] for what, report in found.items() if report and what in wanted} == (
        {} if recipe == "abnormal-shortfile" else {what: wanted[what] for what in found if what in wanted})


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


@pytest.mark.spark
@pytest.mark.java
def test_the_check_command_finds_the_same_with_spark(spark, tmp_path):
    store = unpack("abnormal-garbled", tmp_path)
    alone, spread = run("check", store, "--json"), run("check", store, "--spark", "--json")
    assert (spread.code, spread.stderr) == (alone.code, "")
    assert spread.document | {"seconds": 0} == alone.document | {"seconds": 0}
    assert json.dumps(alone.document["findings"])
    assert run("check", tmp_path / "nothing", "--spark").code == 2
