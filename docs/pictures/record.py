"""Run a program and keep what it prints, with the time of each line, for a picture of a terminal; or what it counts.

usage: python docs/pictures/record.py quickstart|top|report|dashboard

quickstart: scripts/quickstart with 20 MiB. top: the last of four refreshes of `pyengine top`, beside a program that puts. report:
what `pyengine report` counts of two days of messages, whose store times a replay sets; needs Spark. dashboard: what Prometheus,
which must be on PATH, answers to the queries of monitoring/dashboard.json after ten minutes of a master with a slave. Folders of
this machine are shortened: the store's to its name, that of Python's library to its last two parts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
RUN_S, STEP_S = 600, 10  # of the dashboard: how long, and how often Prometheus asks


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


def shop(store: str, second: float, writer: Callable[[], int]) -> None:
    """The second `second` of the dashboard's run: its puts, delayed ones too, and at two thirds the death of the writer."""
    with pyengine.connect(store, refusals="return") as producer:
        for topic, count in BATCHES.items():
            producer.put_many(topic, [os.urandom(500)] * round(count * (4 + 3 * math.sin(second / 40)) / 4))
        producer.put("reminders", b"later", delay_level=4)
    if second == RUN_S * 2 // 3:
        os.kill(writer(), signal.SIGKILL)


def dashboard(folder: str) -> list[Any]:
    """First the times (s since the first) of all values, then of each line of each panel: panel, its legend, its values."""
    store, slave, port = f"{folder}/my-store", f"{folder}/slave", 10952
    secret, targets = Path(folder, "ha.secret"), []
    secret.write_text(secrets.token_hex(32), encoding="ascii")
    secret.chmod(0o600)
    configuration = Path(folder, "prometheus.yml")
    settings = {"ha_secret_file": str(secret), "flush_disk_type": "SYNC_FLUSH"}
    pyengine_command = [sys.executable, "-P", "-m", "pyengine"]
    with (pyengine.Engine(store, broker_role="SYNC_MASTER", ha_listen_port=port, **settings),
          pyengine.Engine(slave, broker_role="SLAVE", ha_master_address=f"127.0.0.1:{port}", **settings)):
        processes = []
        for number, path in enumerate((store, slave)):
            address = f"127.0.0.1:{port + 1 + number}"
            processes.append(subprocess.Popen([*pyengine_command, "metrics", path, "--listen", address], stdout=subprocess.DEVNULL))
            targets.append({"targets": [address], "labels": {"instance": Path(path).name}})
        configuration.write_text(json.dumps({"global": {"scrape_interval": f"{STEP_S}s"}, "scrape_configs": [
            {"job_name": "pyengine", "static_configs": targets}]}), encoding="utf-8")
        api = f"127.0.0.1:{port + 3}"
        processes.append(subprocess.Popen(
            ["prometheus", f"--config.file={configuration}", f"--storage.tsdb.path={folder}/tsdb", f"--web.listen-address={api}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        try:
            begin_s = time.time()
            status = [*pyengine_command, "status", store, "--json"]

            def writer() -> int:
                workers = json.loads(subprocess.run(status, capture_output=True, text=True, check=True).stdout)["workers"]
                return int(next(worker["pid"] for worker in workers if worker["kind"] == "writer"))

            with pyengine.consume(store, "orders", group="billing") as billing, pyengine.consume(store, "clicks", group="audit") as audit:
                for second in range(RUN_S):
                    shop(store, second, writer)
                    billing.pull(max_messages=1000, timeout_s=0)
                    if not RUN_S // 3 < second < RUN_S // 2:             # the group audit is away for a while
                        for _ in range(4):
                            audit.pull(max_messages=1000, timeout_s=0)
                    time.sleep(max(0.0, begin_s + second + 1 - time.time()))
            return [["", "", list(range(0, RUN_S + 1, STEP_S))],
                    *([title, legend.replace(f"{folder}/", ""), values] for title, legend, values in answers(api, begin_s))]
        finally:
            for process in processes:
                process.terminate()
                process.wait()


def answers(api: str, begin_s: float) -> list[Any]:
    """The lines of each panel of the dashboard, as Prometheus computes them."""
    lines = []
    for panel in json.loads((ROOT / "monitoring" / "dashboard.json").read_text(encoding="utf-8"))["panels"]:
        for target in panel["targets"]:
            query = urllib.parse.urlencode({"query": target["expr"].replace("$store", ".*"), "start": begin_s, "end": begin_s + RUN_S,
                                            "step": STEP_S})
            with urllib.request.urlopen(f"http://{api}/api/v1/query_range?{query}", timeout=60) as answer:
                found = json.load(answer)["data"]["result"]
            for series in found:
                legend = re.sub(r"\{\{(\w+)\}\}", lambda name, labels=series["metric"]: labels.get(name[1], ""), target["legendFormat"])
                values = {round((at_s - begin_s) / STEP_S): float(f"{float(value):.3g}") for at_s, value in series["values"]}
                lines.append([panel["title"], legend, [values.get(number) for number in range(RUN_S // STEP_S + 1)]])
    return [[title, legend, [None if value is None or math.isnan(value) else value for value in values]] for title, legend, values in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["quickstart", "top", "report", "dashboard"])
    what = parser.parse_args().what
    with tempfile.TemporaryDirectory() as folder:
        lines = {"quickstart": quickstart, "top": top, "report": report, "dashboard": dashboard}[what](folder)
    text = "[\n" + ",\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n]\n"
    (HERE / f"{what}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
