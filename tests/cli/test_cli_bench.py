"""`pyengine bench`: a short run measures every line and leaves nothing behind."""

from __future__ import annotations

import json
import sys

import pytest

from fix_cli import run
from fix_golden import usual
from pyengine.cli import bench
from pyengine.cli.bench_producer import PUTS
from pyengine.errors import EngineError


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_every_line_is_measured_and_nothing_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "VISIBLE_PUTS", 5)
    done = run("bench", tmp_path, "--seconds", 0.1, "--size", 100, "--json")
    assert done.code == 0, done.stderr
    rows = {row["what"]: row for row in done.document["measured"]}
    assert len(rows) == 8 and all(row["messages_per_s"] > 0 and row["bytes_per_s"] == pytest.approx(row["messages_per_s"] * 100)
                                  for row in rows.values())
    assert rows["put, sync"]["beside_disk"] > 0 and rows["put, async"]["beside_disk"] is None
    assert all(0 < row["p50_us"] <= row["p99_us"] for row in rows.values() if row["p50_us"])
    assert {row["what"] for row in rows.values() if row["stalls"] is None} == {"consumer.pull"}, "puts say what made them wait"
    assert done.document["cpus"] and done.document["file_system"]
    assert list(tmp_path.iterdir()) == []


def test_the_table_has_a_line_for_each(tmp_path, monkeypatch):
    monkeypatch.setattr(bench.BenchRun, "measure_mode", lambda self, mode, flush: self.rows.append(bench.Measured(mode, 12345.6, 1e6)))
    done = run("bench", tmp_path)
    assert done.code == 0 and done.stdout.count("12,346") == 2 and "async" in done.stdout
    assert "no put waited 5 ms or more" in done.stdout


def test_a_path_that_is_no_directory_is_refused(tmp_path):
    done = run("bench", tmp_path / "missing")
    assert done.code == 2 and "is not a directory" in done.stderr


def test_programs_begin_together_and_each_answers():
    program = "import sys, json; print('ready', flush=True); sys.stdin.readline(); print(json.dumps({'n': int(sys.argv[1])}))"
    assert bench.run_together([[sys.executable, "-c", program, str(n)] for n in (1, 2)]) == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize("program", ["raise SystemExit('no engine')", "print('ready'); input(); raise SystemExit('no engine')"])
def test_a_program_that_fails_is_named_with_its_words(program):
    with pytest.raises(EngineError, match="no engine"):
        bench.run_together([[sys.executable, "-u", "-c", program]])


@pytest.mark.parametrize("kind", usual(PUTS, ["many", "async"], pytest.mark.ci))
def test_a_producer_ends_after_its_messages(make_engine, kind):
    engine = make_engine()
    engine.start()
    (answer,) = bench.produce(engine.root, kind, 10, 60, count=32, messages_max=96)
    assert answer.messages == 96 and 0 < answer.p50_us <= answer.p99_us <= answer.max_us and json.dumps(answer.cpu_seconds)
