"""The source in executor processes that share only the files with the driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fix_golden import unpack
from spark import oracle
from waiting import scaled_timeout_s

pytestmark = [pytest.mark.spark, pytest.mark.java, pytest.mark.long, pytest.mark.timeout(1200)]

# Runs in a process of its own, because a process has one Spark. Executors find the package by their PYTHONPATH.
PROGRAM = """
import json, os, sys
from pyengine.spark import export_parquet, session, stats
store, out = sys.argv[1:]
spark = session("cluster", settings={
    "spark.master": "local-cluster[2,1,1024]",
    "spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"],
    "spark.executor.memory": "512m",
    "spark.locality.wait": "0",
})
df = spark.read.format("pyengine").option("maxPartitionBytes", "16k").load(store)

def whose(batches):
    import pyarrow
    rows = sum(b.num_rows for b in batches)
    yield pyarrow.RecordBatch.from_arrays([pyarrow.array([os.getppid()]), pyarrow.array([rows])], ["executor", "rows"])

rows = sorted(map(list, df.selectExpr("physicalOffset", "topic", "partition", "offset", "sha2(value, 256)").collect()))
shares = {}
for row in df.select("physicalOffset").mapInArrow(whose, "executor LONG, rows LONG").collect():
    shares[row.executor] = shares.get(row.executor, 0) + row.rows
done = export_parquet(spark, store, out, maxPartitionBytes="16k")
summed = sum(row.messages for row in stats(spark, store, maxPartitionBytes="16k").collect())
print(json.dumps({"rows": rows, "shares": list(shares.values()), "exported": done.messages, "stats": summed,
                  "parquet": spark.read.parquet(out).count()}))
spark.stop()
"""


@pytest.mark.usefixtures("no_work_folder_stays")
def test_two_executors_read_the_same_rows_and_share_the_work(tmp_path):
    import hashlib

    root = unpack("roll", tmp_path / "store")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    package = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": package, "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run([sys.executable, str(program), str(root), str(tmp_path / "out")], env=environment,
                          capture_output=True, text=True, timeout=scaled_timeout_s(300), stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    messages = oracle.log_messages(root)
    wanted = sorted([m.physical_offset, m.topic, m.queue_id, m.queue_offset, hashlib.sha256(m.body).hexdigest()]
                    for m in messages)
    assert found["rows"] == wanted
    assert found["exported"] == found["stats"] == found["parquet"] == len(messages)
    assert len(found["shares"]) == 2 and sum(found["shares"]) == len(messages)
    assert min(found["shares"]) >= len(messages) / 5, "one executor did nearly all"
