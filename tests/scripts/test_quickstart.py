"""The quickstart, its steps after the environment: put, kill, stop, check, count with Spark, compare."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from waiting import scaled_timeout_s

STEPS = Path(__file__).parents[2] / "scripts" / "quickstart_steps"


def run_quickstart(*arguments: object) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYENGINE_")}
    return subprocess.run([sys.executable, STEPS / "main.py", *map(str, arguments)], capture_output=True, text=True,
                          env=environ, timeout=scaled_timeout_s(240))


@pytest.mark.ci
@pytest.mark.spark
@pytest.mark.java
def test_spark_counts_every_message_put_although_the_writer_was_killed(tmp_path):
    source = Path(sysconfig.get_paths()["stdlib"]) / "email"
    done = run_quickstart("--input", source, "--megabytes", 2, "--producers", 2, "--mode", "sync", "--store", tmp_path / "store")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"SIGKILL to the writer, process \d+", done.stdout)
    assert re.search(r"the writer is back after \d+ ms as process \d+", done.stdout)
    assert "Nothing is wrong" in done.stdout and "Nothing was lost and nothing doubled" in done.stdout
    walked = sum(path.stat().st_size for path in source.rglob("*.py"))
    *_, total = (line for line in done.stdout.splitlines() if line.startswith("all "))
    assert int(total.split()[3].replace(",", "")) >= max(walked, 2 << 20) and "same" in total
    assert (tmp_path / "store" / "commitlog").is_dir()


def test_a_difference_in_counts_is_reported_and_fails(capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(STEPS))
    import main
    from counts import Count, add_up
    from crew import Kill

    put = {"a": Count(3, 30, 1), "b": Count(2, 20, 0)}
    kill = Kill("writer", dict)
    assert main.compare(put, add_up([put]), kill) == 0
    assert main.compare(put, {"a": Count(3, 30, 1), "b": Count(1, 20, 0)}, kill) == 1
    assert main.compare(put, {"a": Count(3, 30, 1)}, kill) == 1
    assert main.compare(put, {**put, "c": Count(1, 1, 0)}, kill) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_the_walk_is_repeated_up_to_the_size_that_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(STEPS))
    from crew import find_jobs

    (tmp_path / "pack age").mkdir()
    (tmp_path / "one.py").write_bytes(b"x" * 100)
    (tmp_path / "pack age" / "two.py").write_bytes(b"y" * 50)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_bytes(b"z")
    jobs, total = find_jobs(tmp_path, 0)
    assert [(topic, name) for topic, name, _ in jobs] == [("modules", "one.py"), ("pack age", "pack_age/two.py")] and total == 150
    assert find_jobs(tmp_path, 320)[1] == 400
    assert find_jobs(tmp_path / "pack age" / "nothing", 10) == ([], 0)


@pytest.mark.parametrize(("arguments", "sentence"),
                         [(("--input", "EMPTY"), "holds no Python sources"), (("--store", "EMPTY"), "exists: give a folder")])
def test_wrong_folders_are_reported(tmp_path, arguments, sentence):
    done = run_quickstart(*(tmp_path if one == "EMPTY" else one for one in arguments))
    assert done.returncode == 1 and sentence in done.stderr
