"""The benchmarks run to their end and keep what they measured. What the figures are is not judged here."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyengine.cli import why

ROOT = Path(__file__).resolve().parent.parent


def run_bench(name: str, tmp_path: Path, *arguments: str) -> list[dict]:
    kept = tmp_path / "kept.json"
    command = [sys.executable, ROOT / "bench" / name, "--quick", "--folder", tmp_path, "--json", kept, *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == [kept], "the stores are gone"
    return json.loads(kept.read_text())


WITH_OPTIONS = sorted({path.name for path in (ROOT / "bench").glob("*.py") if "ArgumentParser" in path.read_text()} - {"measure.py"})


@pytest.mark.ci
@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_each_benchmark_starts(name, tmp_path):
    """With nothing on the path but what it puts there itself."""
    if name == "bench_gateway.py":
        pytest.importorskip("trustme")
    done = subprocess.run([sys.executable, ROOT / "bench" / name, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr


@pytest.mark.ci
def test_the_task_benchmark_measures_each_library_on_a_store(tmp_path):
    turns = run_bench("bench_tasks.py", tmp_path, "--without-redis")
    assert [one["framework"] for one in turns] == ["Celery", "Dramatiq", "taskiq"]
    assert all(one["broker"] == "pyengine" and min(one["sent_per_s"], one["run_per_s"], one["wait_ms"]) > 0 for one in turns)


@pytest.mark.ci
def test_the_benchmark_of_grpc_measures_the_client_of_rocketmq_5(tmp_path):
    rows, = run_bench("bench_grpc.py", tmp_path)
    assert len(rows) == 3 and all(row["rate"] > 0 and row["cpu_us"] > 0 for row in rows)


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


def test_bench_measures_a_counting_cost_above_zero(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    assert importlib.import_module("run").counting_cost_ns(passes=10, entries=3) > 0


def test_a_bench_row_lists_the_causes_of_its_waits_once(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "bench")
    run = importlib.import_module("run")
    sync = why.Cause("sync", 2, 30.0, 20.0, "the device took long", "")
    causes = iter([[sync], [dataclasses.replace(sync, waits=1, longest_ms=25.0), why.Cause("cpu", 1, 6.0, 6.0, "no processor", "")], []])
    monkeypatch.setattr(run, "Waits", lambda store: SimpleNamespace(why=lambda: SimpleNamespace(causes=next(causes))))
    monkeypatch.setattr(run, "produce", lambda *arguments: [])
    bench = run.Bench(tmp_path, 2, 1.0)
    bench.produce(tmp_path, "put", 128)
    bench.produce(tmp_path, "put", 128)
    bench.produce(tmp_path, "put", 128, producers=4)
    assert bench.stalls("put", 128) == {
        "waits of 5 ms or more (the device took long)": 3, "longest ms (the device took long)": 25.0,
        "waits of 5 ms or more (no processor)": 1, "longest ms (no processor)": 6.0}
    assert bench.stalls("put", 128) == {} == bench.stalls("put", 128, 4), "each is told once"


# ---- the tables of the pages -------------------------------------------------

def turns(rate: float) -> list[dict]:
    return [{"rate": rate * factor, "busy_us": 1.0, "p50_us": 1.0, "p99_us": 2.0} for factor in (0.5, 1, 2)]


DOCUMENT = {
    "machine": {"cpus": 2},
    "outcomes": [
        {"work": {"name": "put, 128 B"}, "turns": {"pyengine": turns(865_432), "rocketmq": turns(1_730_864), "lmdb": turns(42_000)}},
        {"work": {"name": "put, sync"}, "turns": {"pyengine": turns(950), "rocketmq": turns(475)[::-1]}}],
    "run": [{"question": "engine ready", "unit": "s", "rounds": [0.3]}, {"question": "counting one put", "unit": "ns", "rounds": [9]}],
    "jitter": {"body_bytes": 1024, "rate": 20000, "rolls": 9, "deletions": 8, "checkpoints": 7, "spark": False, "stall_ms": 5,
               "p50_us": 0.8, "p99_us": 57.0, "p99.9_us": 1600.0},
    "spark": [{"body_bytes": 1024, "full read": 1.071}],
    "gateway": [{"work": "consume", "rate": 49580, "rate_ratio": 0.891, "cpu_ratio": 0.611}]}


def place(name: str, lines: str) -> str:
    return f"<!-- {name}: made by bench/figures.py -->\n{lines}<!-- end of {name} -->\n"


def pages(**lines: str) -> tuple[str, str]:
    """README and the page with these lines in their places."""
    long = "".join(place(name, lines.get(name, "old\n")) for name in ("comparison", "single", "spark", "gateway"))
    return "before\n" + place("figures", lines.get("figures", "old\n")) + "after\n", long


@pytest.fixture
def figures(monkeypatch, tmp_path):
    """bench/figures.py over pages and kept figures of the test's own."""
    spec = importlib.util.spec_from_file_location("figures", ROOT / "bench" / "figures.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.syspath_prepend(ROOT / "bench")
    spec.loader.exec_module(module)
    for name, text in zip(("README", "PAGE"), pages(), strict=True):
        monkeypatch.setattr(module, name, tmp_path / name)
        getattr(module, name).write_text(text)
    monkeypatch.setattr(module, "KEPT", tmp_path / "figures.json")
    monkeypatch.setattr(module, "SHORT", ("put, 128 B",))
    module.KEPT.write_text(json.dumps(DOCUMENT))
    return module


def run_figures(figures, monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["figures.py", *map(str, arguments)])
    figures.main()


def test_the_pages_have_the_tables_of_the_run_that_is_kept():
    done = subprocess.run([sys.executable, ROOT / "bench" / "figures.py", "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_comparison_is_the_median_of_the_rounds_ratios_with_its_spread(figures, monkeypatch, tmp_path):
    run = tmp_path / "run.json"
    run.write_text(json.dumps({"machine": {"cpus": 4}, "outcomes": DOCUMENT["outcomes"]}))
    (rows := tmp_path / "rows.json").write_text(json.dumps([{"question": "engine ready", "unit": "s", "rounds": [0.2, 0.25, 0.31]}]))
    run_figures(figures, monkeypatch, run, rows)
    assert (figures.README.read_text(), figures.PAGE.read_text()) == pages(
        figures="| work | messages a second | RocketMQ |\n|---|---|---|\n| put, 128 B | 865k (433k-1.73M) | 0.50 (0.50-0.50) |\n",
        comparison="| work | messages a second | RocketMQ | LMDB |\n|---|---|---|---|\n"
                   "| put, 128 B | 865k (433k-1.73M) | 0.50 (0.50-0.50) | 20.61 (20.61-20.61) |\n"
                   "| put, sync | 950 (475-1.9k) | 2.00 (0.50-8.00) | - |\n",
        single="| question | figure | measured by |\n|---|---|---|\n| engine ready | 0.25 (0.20-0.31) s | `bench/run.py` |\n"
               "| single puts of 1,024 B at 20,000 a second beside 9 rolls, 8 deletions, 7 checkpoints: p50, p99, p99.9 | 0.8, 57, 1600 us "
               "| `bench/jitter.py` |\n",
        spark="| bodies | full read |\n|---|---|\n| 1,024 B | 1.07 |\n",
        gateway="| work | messages a second | rate, of RocketMQ's | CPU a message, of RocketMQ's |\n|---|---|---|---|\n"
                "| consume | 49,580 | 0.89 | 0.61 |\n")
    assert json.loads(figures.KEPT.read_text())["machine"] == {"cpus": 4}
    run_figures(figures, monkeypatch, "--check")


def test_a_page_that_differs_from_the_kept_figures_fails_the_check(figures, monkeypatch):
    with pytest.raises(SystemExit, match="run bench/figures.py"):
        run_figures(figures, monkeypatch, "--check")
    assert "old" in figures.README.read_text()


def test_a_page_without_the_markers_is_left_alone(figures, monkeypatch):
    figures.README.write_text("nothing")
    with pytest.raises(SystemExit, match="has no line"):
        run_figures(figures, monkeypatch)
    assert figures.README.read_text() == "nothing"


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
def test_an_engine_without_its_recorder_is_held_against_one_with_it(tmp_path):
    document = run_bench("recorder.py", tmp_path, "--only", "put, sync")
    (pairs,) = document["pairs"].values()
    assert len(pairs) == 3 and all(ratio > 0 for pair in pairs for ratio in pair)


@pytest.mark.parametrize(("count", "left_out"), [(5, 0), (6, 0), (9, 1), (40, 13)])
def test_an_interval_leaves_out_as_much_as_its_level_lets_it(monkeypatch, count, left_out):
    """By the binomial distribution: of 40 values the 14th and the 27th, as tables of the sign test have it."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    recorder = importlib.import_module("recorder")
    assert recorder.confidence(list(range(count))[::-1]) == (left_out, (count - 1) / 2, count - 1 - left_out)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_recoveries_are_held_against_the_plan(tmp_path):
    document = run_bench("recovery.py", tmp_path)
    assert len(document["loads"]) == 3
    for load in document["loads"]:
        (found,) = load["rounds"]
        assert 0 < found["read_bytes"] <= found["planned_bytes"] and found["recovery_s"] > 0 and found["planned_s"] > 0.5


@pytest.mark.parametrize("module", ["recorder", "recovery"])
def test_a_table_has_its_place_on_its_page(monkeypatch, module):
    monkeypatch.syspath_prepend(ROOT / "bench")
    made, measure = importlib.import_module(module), importlib.import_module("measure")
    written = measure.page_with(made.PAGE.read_text(), made.NAME, made.MAKER, "| a table |\n")
    again = measure.page_with(written, made.NAME, made.MAKER, "| another |\n")
    assert written.count("| a table |") == again.count("| another |") == 1 and "| a table |" not in again


@pytest.mark.long
@pytest.mark.timeout(300)
def test_each_stall_of_single_puts_gets_a_cause(tmp_path):
    told = run_bench("jitter.py", tmp_path, "--stall-ms", "0.05")
    assert told["puts"] > 0 and told["p50_us"] <= told["p99.9_us"]
    assert told["stalls"] and all(stall["cause"] and stall["ms"] > 0 for stall in told["stalls"])
    assert told["recorded"]["waits"] == sum(cause["waits"] for cause in told["recorded"]["causes"]) + told["recorded"]["forgotten"]


def test_a_stall_has_the_cause_that_covers_most_of_it(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    jitter = importlib.import_module("jitter")
    ms = 1_000_000
    quiet = jitter.Counters(0, 0, 0, 0, 0, 0)
    late = quiet._replace(at_ns=30 * ms)

    def cause(after=late, recorded=("", 0)):
        return jitter.cause_of(jitter.Stall(10 * ms, 20 * ms), [quiet, after], recorded)

    assert cause() == (jitter.NOT_KNOWN, {})
    assert cause(recorded=("the disk", 6 * ms)) == ("the disk", {"the disk": 6.0})
    assert cause(recorded=("the disk", 4 * ms)) == (jitter.NOT_KNOWN, {"the disk": 4.0})
    assert cause(late._replace(producer_wait_ns=90 * ms)) == (jitter.PRODUCER_WAITS, {jitter.PRODUCER_WAITS: 10.0}), "no more than it"
    assert cause(late._replace(producer_wait_ns=3 * ms), ("the disk", 4 * ms))[0] == "the disk", "both together cover half"
    assert cause(late._replace(stolen_ns=5 * ms), ("the disk", 4 * ms))[0] == jitter.STOLEN


@pytest.mark.long
@pytest.mark.timeout(900)
def test_growth_is_measured_at_points_of_their_own(tmp_path):
    measured = run_bench("growth.py", tmp_path, "--only", "properties")
    assert list(measured) == ["properties"] and [point["value"] for point in measured["properties"]] == [1, 16]
    for point in measured["properties"]:
        assert all(value > 0 for value in point["figures"].values())
