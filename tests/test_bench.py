"""The benchmarks run to their end and keep what they measured. What the figures are is not judged here."""

from __future__ import annotations

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
    outcomes = run_bench("bench_rivals.py", tmp_path, "--rivals", "rocketmq,chronicle,aeron,sqlite", "--only", "put")
    assert {outcome["work"]["kind"] for outcome in outcomes} == {"put", "async", "many"}
    for outcome in outcomes:
        assert set(outcome["turns"]) == {"pyengine", *outcome["work"]["rivals"]} - {"lmdb"}
        assert all(turn["rate"] > 0 and turn["busy_us"] > 0 for turns in outcome["turns"].values() for turn in turns)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_async_puts_are_measured(tmp_path):
    rows = run_bench("run.py", tmp_path, "--only", "async_puts")
    assert len(rows) == 2 and all(row["median"] > 0 for row in rows)
