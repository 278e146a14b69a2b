"""The source and the jobs on a standalone cluster of two workers, over a directory with no engine and no shared memory.

What each executor did is told by Spark's event log: the tasks of a job are numbered as its byte ranges are.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from damage import flip
from fix_golden import unpack
from pyengine.formats.paths import StorePaths
from pyengine.spark.options import read_options
from pyengine.spark.plan import plan
from spark import oracle

pytestmark = [pytest.mark.spark, pytest.mark.java, pytest.mark.long, pytest.mark.timeout(1200)]

SEGMENT_BYTES = 16384  # of the golden store `roll`
SCRIPT = Path(__file__).parents[2] / "scripts" / "spark_cluster.sh"
# Both executors are there before the first job, so that a job of two tasks has one for each.
SETTINGS = {
    "spark.cores.max": "2",
    "spark.executor.memory": "512m",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "300s",
    "spark.eventLog.enabled": "true",
    "spark.eventLog.rolling.enabled": "false",
    "spark.eventLog.compress": "false",
}
# Run once on the cluster and once in a local session; the answers must be equal.
PROGRAM = """
import hashlib, json, shutil, sys
from pathlib import Path
from pyengine.spark import export_parquet, session, skipped_ranges, stats, verify
from pyengine.spark.jobs import collect_from_workers
from pyengine.spark.options import read_options
from pyengine.spark.plan import plan
from pyengine.spark.schema import chosen_columns
from pyengine.spark.task_reader import arrow_schema, read_partition
store, damaged, out, settings = sys.argv[1:]
spark = session("cluster", cores=2, settings=json.loads(settings))
found = {"master": spark.sparkContext.master.split(":")[0].split("[")[0]}

def job(name, work):
    spark.sparkContext.setJobDescription(name)
    found[name] = json.loads(json.dumps(work(), default=str))

def rows(frame):
    return sorted(map(list, frame.collect()))

def read(**options):
    return spark.read.format("pyengine").options(**options).load(store)

for name, cut in (("halves", {"minPartitions": 2}), ("pieces", {"maxPartitionBytes": "16k"})):
    job(f"{name}: scan", lambda: rows(read(**cut).selectExpr("physicalOffset", "topic", "partition", "offset",
                                                             "sha2(value, 256)")))
    job(f"{name}: stats", lambda: rows(stats(spark, store, verifyCRC=True, **cut)))
    job(f"{name}: skipped", lambda: rows(skipped_ranges(spark, damaged, **cut)))
    job(f"{name}: export", lambda: export_parquet(spark, store, f"{out}/{name}", **cut).messages)
    job(f"{name}: exported", lambda: rows(spark.read.parquet(f"{out}/{name}").select("physicalOffset")))
def findings(root, **sizes):
    report = verify(spark, root, **sizes)
    return [[one.file, one.offset, one.text] for one in report.findings] + [report.messages, report.queue_entries, report.index_keys]

for name, task_bytes in (("halves", 1 << 30), ("pieces", 16384)):
    job(f"{name}: verify", lambda: findings(store, task_bytes=task_bytes))
    job(f"{name}: verify damaged", lambda: findings(damaged, task_bytes=task_bytes))
job("queue", lambda: rows(spark.read.format("pyengine").option("view", "queue").load(store)))
job("by queue", lambda: rows(read(access="queue", subscribe="Roll1").select("physicalOffset", "value")))

options = read_options({"path": store})
def loaded(number, part):
    columns = chosen_columns(options)
    for batch in read_partition(options, columns, part, arrow_schema(columns)):
        pass
    names = [name for name in sys.modules if name.startswith(("pyengine.ipc", "pyengine.services", "pyengine.workers"))]
    yield " ".join(names)
job("loaded", lambda: collect_from_workers(spark, loaded, plan(options)))
Path(out, "found.json").write_text(json.dumps(found))
spark.stop()
"""


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> tuple[Path, Path]:
    """A store, and one of the same shape with a record that is damaged."""
    folder = tmp_path_factory.mktemp("stores")
    whole, damaged = unpack("roll", folder / "whole"), unpack("roll", folder / "damaged")
    offset = oracle.log_messages(damaged)[20].physical_offset
    start = offset - offset % SEGMENT_BYTES
    flip(StorePaths(damaged).commit_log_segment(start), offset - start + 4)
    return whole, damaged


def run(stores: tuple[Path, Path], folder: Path, settings: dict[str, str], *before: object) -> dict:
    (folder / "out").mkdir(parents=True)
    program = folder / "program.py"
    program.write_text(PROGRAM)
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(Path(__file__).parents[2])}
    environment.pop("PYENGINE_SPARK_MASTER", None)
    done = subprocess.run([*before, sys.executable, program, *stores, folder / "out", json.dumps(settings)], env=environment,
                          capture_output=True, text=True, timeout=1000, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "out" / "found.json").read_text())


@pytest.fixture(scope="module")
def on_cluster(stores, tmp_path_factory) -> tuple[dict, dict[str, dict[int, str]]]:
    """The results of the jobs, and job -> task's number -> executor."""
    folder = tmp_path_factory.mktemp("cluster")
    events = folder / "events"
    events.mkdir()
    found = run(stores, folder, {**SETTINGS, "spark.eventLog.dir": events.as_uri()}, SCRIPT, "--folder", folder / "daemons")
    [log] = [path for path in events.iterdir() if path.is_file() and not path.name.startswith(".")]
    return found, executors_of_tasks(log)


def executors_of_tasks(log: Path) -> dict[str, dict[int, str]]:
    """Of the first stage of each job, where the byte ranges are read."""
    job_of_stage: dict[int, str] = {}
    executor_of: dict[str, dict[int, str]] = defaultdict(dict)
    for line in log.read_text().splitlines():
        event = json.loads(line)
        if event["Event"] == "SparkListenerJobStart" and event["Stage IDs"]:
            name = event["Properties"]["spark.job.description"]
            if name not in job_of_stage.values():
                job_of_stage[min(event["Stage IDs"])] = name
        elif event["Event"] == "SparkListenerTaskEnd" and event["Stage ID"] in job_of_stage:
            assert event["Task End Reason"]["Reason"] == "Success"
            executor_of[job_of_stage[event["Stage ID"]]][event["Task Info"]["Index"]] = event["Task Info"]["Executor ID"]
    return executor_of


def test_the_answers_are_those_of_a_local_session_and_of_the_parser(stores, tmp_path, on_cluster):
    found, _ = on_cluster
    local = run(stores, tmp_path, {})
    assert (found.pop("master"), local.pop("master")) == ("spark", "local")
    assert found == local
    messages = oracle.log_messages(stores[0])
    assert found["halves: scan"] == found["pieces: scan"] == sorted(
        [m.physical_offset, m.topic, m.queue_id, m.queue_offset, hashlib.sha256(m.body).hexdigest()] for m in messages)
    assert found["halves: stats"] == found["pieces: stats"]
    assert found["halves: export"] == found["pieces: export"] == len(messages)
    assert [offset for [offset] in found["pieces: exported"]] == [m.physical_offset for m in messages]
    assert found["halves: verify"] == found["pieces: verify"] and found["halves: verify"][-3] == len(messages)
    assert found["halves: verify damaged"] == found["pieces: verify damaged"] and len(found["halves: verify damaged"]) > 3
    [[offset, length, reason]] = found["halves: skipped"]
    assert (offset, length, reason) == (messages[20].physical_offset, messages[20].size_bytes, "foreign")


def test_executors_load_nothing_of_a_running_engine(on_cluster):
    assert on_cluster[0]["loaded"] == [""]


@pytest.mark.parametrize("job", ["scan", "stats", "skipped", "export"])
def test_the_work_is_split_evenly(stores, on_cluster, job):
    _, executor_of = on_cluster
    halves = plan(read_options({"path": str(stores[0]), "minPartitions": "2"}))
    sizes: dict[str, int] = defaultdict(int)
    for number, executor in executor_of[f"halves: {job}"].items():
        sizes[executor] += halves[number].log_bytes
    assert sum(sizes.values()) == halves[-1].stop - halves[0].start
    assert len(sizes) == 2 and max(sizes.values()) - min(sizes.values()) <= halves[0].segment_bytes
    pieces = plan(read_options({"path": str(stores[0]), "maxPartitionBytes": "16k"}))
    assert executor_of[f"pieces: {job}"].keys() == set(range(len(pieces))) and len(pieces) > 4
    assert len(set(executor_of[f"pieces: {job}"].values())) == 2


def test_both_workers_take_part_in_a_check_of_a_whole_store(on_cluster):
    _, executor_of = on_cluster
    for name in ("halves", "pieces"):
        assert len(executor_of[f"{name}: verify"]) > 1
        assert len(set(executor_of[f"{name}: verify"].values())) == 2


def test_the_block_of_the_page_runs(stores, tmp_path):
    page = SCRIPT.parents[1] / "docs" / "spark.md"
    [block] = re.findall(r"```sh\n(scripts/spark_cluster.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    pyengine = tmp_path / "bin" / "pyengine"
    pyengine.parent.mkdir()
    pyengine.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m pyengine "$@"\n')
    pyengine.chmod(0o755)
    environment = os.environ | {"PYTHON": sys.executable, "PATH": f"{pyengine.parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-euc", block.replace("/var/lib/pyengine/store", str(stores[0]))], env=environment,
                          cwd=SCRIPT.parents[1], capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"{len(oracle.log_messages(stores[0])):,} messages" in done.stdout
