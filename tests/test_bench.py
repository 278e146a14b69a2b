"""The benchmarks run to their end and keep what they measured. What the figures are is not judged here."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run_bench(name: str, tmp_path: Path, *arguments: str) -> list[dict]:
    kept = tmp_path / "kept.json"
    command = [sys.executable, ROOT / "bench" / name, "--quick", "--folder", tmp_path, "--json", kept, *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == [kept], "the stores are gone"
    return json.loads(kept.read_text())


@pytest.mark.long
@pytest.mark.java
@pytest.mark.maven
@pytest.mark.timeout(900)
def test_the_engine_is_held_against_other_logs(tmp_path):
    document = run_bench("bench_rivals.py", tmp_path, "--rivals", "rocketmq,chronicle,aeron,sqlite", "--only", "put")
    outcomes = document["outcomes"]
    assert document["machine"]["cpus"] > 0 and document["machine"]["file_system"]
    assert {outcome["work"]["kind"] for outcome in outcomes} == {"put", "async", "many"}
    for outcome in outcomes:
        assert set(outcome["turns"]) == {"pyengine", *outcome["work"]["rivals"]} - {"lmdb"}
        assert all(turn["rate"] > 0 and turn["busy_us"] > 0 for turns in outcome["turns"].values() for turn in turns)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_async_puts_are_measured(tmp_path):
    rows = run_bench("run.py", tmp_path, "--only", "async_puts")
    assert len(rows) == 2 and all(row["median"] > 0 for row in rows)


# ---- the table of the README -------------------------------------------------

def turns(rate: float) -> list[dict]:
    return [{"rate": rate * factor, "busy_us": 1.0, "p50_us": 1.0, "p99_us": 2.0} for factor in (0.5, 1, 2)]


DOCUMENT = {
    "machine": {"cpus": 2, "python": "3.11.2", "kernel": "6.1", "file_system": "ext4", "load": 0.25, "date": "2026-11-23"},
    "outcomes": [
        {"work": {"name": "put, 128 B"}, "turns": {"pyengine": turns(865_432), "rocketmq": turns(1_234_567), "sqlite": turns(42_000)}},
        {"work": {"name": "put, sync"}, "turns": {"pyengine": turns(950), "rocketmq": turns(512)}}]}


@pytest.fixture
def figures(monkeypatch, tmp_path):
    """bench/figures.py over a README and kept figures of the test's own."""
    spec = importlib.util.spec_from_file_location("figures", ROOT / "bench" / "figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "KEPT", tmp_path / "figures.json")
    monkeypatch.setattr(module, "PAGE", tmp_path / "README.md")
    module.PAGE.write_text(f"before\n{module.BEGIN}old\n{module.END}after\n")
    return module


def run_figures(figures, monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["figures.py", *map(str, arguments)])
    figures.main()


def test_the_tables_rates_are_medians_in_three_digits(figures, monkeypatch, tmp_path):
    run = tmp_path / "run.json"
    run.write_text(json.dumps(DOCUMENT))
    run_figures(figures, monkeypatch, run)
    assert figures.PAGE.read_text() == f"""before
{figures.BEGIN}Messages a second, medians of 3 rounds in turns, 2 CPUs, ext4, 2026-11-23, load 0.2 before the run:

| work | pyengine | RocketMQ 4.9.8 | SQLite WAL |
|---|---|---|---|
| put, 128 B | 865 k | 1.23 M | 42 k |
| put, sync | 950 | 512 | - |
{figures.END}after
"""
    run_figures(figures, monkeypatch, "--check")


def test_a_table_that_is_not_what_was_kept_fails_the_check(figures, monkeypatch):
    figures.KEPT.write_text(json.dumps(DOCUMENT))
    with pytest.raises(SystemExit, match="run bench/figures.py"):
        run_figures(figures, monkeypatch, "--check")
    assert "old" in figures.PAGE.read_text()


def test_a_page_without_the_markers_is_left_alone(figures, monkeypatch):
    figures.KEPT.write_text(json.dumps(DOCUMENT))
    figures.PAGE.write_text("nothing")
    with pytest.raises(SystemExit, match="has no line"):
        run_figures(figures, monkeypatch)
    assert figures.PAGE.read_text() == "nothing"


def test_an_earlier_run_is_shown_beside_this_one(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import bench_rivals

    def outcome(ours: float, its: float):
        made = {log: [bench_rivals.Turn(rate, 2.0, 1.0, 2.0)] for log, rate in (("pyengine", ours), ("rocketmq", its))}
        return bench_rivals.Outcome(bench_rivals.WORKS[0], made)

    rivals = bench_rivals.Rivals(("sqlite",))
    rivals.names = ("rocketmq",)
    bench_rivals.show([outcome(300, 100)], rivals, {bench_rivals.WORKS[0].name: outcome(200, 100)})
    assert "rocketmq: 2.00 -> 3.00" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.timeout(300)
def test_each_stall_of_single_puts_gets_a_cause(tmp_path):
    told = run_bench("jitter.py", tmp_path, "--stall-ms", "0.05")
    assert told["puts"] > 0 and told["p99.9_us"] <= told["longest_ms"] * 1000
    assert told["stalls"] and all(stall["cause"] and stall["ms"] > 0 for stall in told["stalls"])


def test_a_stall_has_the_cause_that_covers_half_of_it(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    jitter = importlib.import_module("jitter")
    ms, segment = 1_000_000, jitter.SEGMENT_BYTES
    quiet = jitter.Counters(0, 0, 0, 0, 2 * segment, 1, 0, 0)
    late = quiet._replace(at_ns=30 * ms)

    def cause(after=late, looks=(), before=quiet, stall=None):
        stall = stall or jitter.Stall(10 * ms, 20 * ms, 1000, 2000)
        return jitter.cause_of(stall, jitter.Watched([before, after], list(looks)))

    assert cause() == (jitter.NOT_KNOWN, {})
    assert cause(late._replace(writer_wait_ns=6 * ms)) == (jitter.WRITER_WAITS, {jitter.WRITER_WAITS: 6.0})
    assert cause(late._replace(producer_wait_ns=90 * ms))[1] == {jitter.PRODUCER_WAITS: 10.0}, "no more than the stall"
    assert cause(late._replace(writer_wait_ns=4 * ms))[0] == jitter.NOT_KNOWN
    assert cause(late._replace(writer_wait_ns=4 * ms, producer_wait_ns=2 * ms))[0] == jitter.BOTH_WAIT
    asleep = [jitter.Look(at * ms, "D", "folio_wait_writeback") for at in range(10, 18, 2)]
    assert cause(looks=asleep)[0] == jitter.PAGES
    assert cause(looks=[look._replace(state="S", where="pipe_read") for look in asleep])[0] == jitter.BLOCKED
    assert cause(looks=[look._replace(state="R") for look in asleep])[0] == jitter.NOT_KNOWN
    rolled = jitter.Stall(10 * ms, 20 * ms, segment - 10, segment + 10)
    assert cause(stall=rolled)[0] == jitter.ROLL
    assert cause(stall=rolled, before=quiet._replace(ready_end=segment))[0] == jitter.NOT_READY
    assert cause(late._replace(checkpoint_ns=1))[0] == jitter.CHECKPOINT
    assert cause(late._replace(min_offset=segment))[0] == jitter.CLEANING
    assert cause(late._replace(writer_incarnation=2, min_offset=segment))[0] == jitter.RESTARTED
