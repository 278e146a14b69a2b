"""Run a program and keep what it prints, with the time of each line, for a picture of a terminal; or what it counts.

usage: python docs/pictures/record.py quickstart|top|report

quickstart: scripts/quickstart with 20 MiB. top: the last of four refreshes of `pyengine top`, beside a program that puts. report: what
`pyengine report` counts of two days of messages, whose store times a replay sets; needs Spark. Folders of this machine are shortened:
the store's to its name, that of Python's library to its last two parts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

import pyengine  # noqa: E402
from pyengine.cli.output import spark_session  # noqa: E402
from pyengine.cli.report import HOUR_MS, collect  # noqa: E402
from pyengine.formats.record import BatchMember  # noqa: E402

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
BATCHES = {"clicks": 160, "orders": 40, "bills": 10}
HOURLY = {"clicks": 4100, "orders": 1700, "bills": 600}  # messages in the busiest hour
BEGIN_MS, HOURS = 20_454 * 24 * HOUR_MS, 48


def run(command: list[str | Path], folder: str) -> list[tuple[float, str]]:
    """Seconds since the first line, and the line."""
    lines: list[tuple[float, str]] = []
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "108"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment) as process:
        begun_s = 0.0
        for line in process.stdout or ():
            begun_s = begun_s or time.monotonic()
            text = line.rstrip().replace(f"{folder}/", "").replace(str(LIBRARY), "/".join(LIBRARY.parts[-2:]))
            lines.append((round(time.monotonic() - begun_s, 2), text))
    if process.returncode:
        sys.exit(f"{command[0]} ended with {process.returncode}")
    return lines


def quickstart(folder: str) -> list[tuple[float, str]]:
    return run([ROOT / "scripts" / "quickstart", "--megabytes", "20", "--store", f"{folder}/my-store"], folder)


def top(folder: str) -> list[tuple[float, str]]:
    store, done = f"{folder}/my-store", threading.Event()

    def put() -> None:
        with pyengine.connect(store) as producer:
            while not done.wait(0.02):
                for topic, count in BATCHES.items():
                    producer.put_many(topic, [os.urandom(500)] * count)

    with pyengine.Engine(store):
        putting = threading.Thread(target=put)
        putting.start()
        try:
            lines = run([sys.executable, "-P", "-m", "pyengine", "top", store, "--count", "4"], folder)
        finally:
            done.set()
            putting.join()
    last = max(number for number, (_, line) in enumerate(lines) if line.startswith("store "))
    return [(0.0, line) for _, line in lines[last:]]


def report(folder: str) -> list[tuple[str, int, list[int]]]:
    """By topic the begin of the first hour (ms), and the messages of each: more by day than by night, and more in the second evening."""
    store = f"{folder}/my-store"
    with pyengine.Engine(store, replay_clock=True) as engine, engine.connect() as producer:
        for hour in range(HOURS):
            share = 0.55 - 0.45 * math.cos((hour % 24 - 3) / 12 * math.pi)
            for minute in range(60):
                at_ms = BEGIN_MS + hour * HOUR_MS + minute * 60_000
                for topic, most in HOURLY.items():
                    count = round(most / 60 * share * (1.25 if hour > 40 else 1) / 1.25) + (minute * 7 + hour) % 3
                    producer.put_batch_raw(pyengine.RawMessage(topic, born_timestamp_ms=at_ms, clock_ms=at_ms),
                                           [BatchMember(os.urandom(200), 0, "")] * max(1, count))
    with spark_session("record") as spark:
        counted = collect(spark, Path(store), {}, {}, level="flushed", drawn=len(HOURLY)).hours
    return [(topic, min(counted), [by_topic[topic].messages for by_topic in counted.values()]) for topic in HOURLY]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["quickstart", "top", "report"])
    what = parser.parse_args().what
    with tempfile.TemporaryDirectory() as folder:
        lines = {"quickstart": quickstart, "top": top, "report": report}[what](folder)
    text = "[\n" + ",\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n]\n"
    (HERE / f"{what}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
