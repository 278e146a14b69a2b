"""`pyengine bench`: measures the engine on the user's own machine and disk, beside the disk alone.

It is a short form of the benchmarks in bench/, without other programs to compare. Each producer is a process of its own
(bench_producer.py). The stores are new and are removed at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

import click

import pyengine
from pyengine.cli import output
from pyengine.cli.bench_producer import TOPIC, Produced
from pyengine.cli.engine_status import engine_status
from pyengine.cli.output import GivenPath, NumberRange, Reply, answers, set_option
from pyengine.cli.prove import measure_disk, require_room
from pyengine.cli.why import Waits, write_stalls
from pyengine.client.producer import connect
from pyengine.engine.embedded import Engine
from pyengine.engine.kinds import child_environment
from pyengine.errors import EngineError
from pyengine.ipc.control_block import EngineMemory
from pyengine.native import control as native
from pyengine.storage.config import load_config
from pyengine.storage.file_system import file_system_of

FREE_BYTES_MIN = 8 << 30
SIZES = {"mapped_file_size_commit_log_bytes": 1 << 28, "max_hash_slot_num": 100_000, "max_index_num": 400_000}
RECORD_OVERHEAD_BYTES = 91 + len(TOPIC)
VISIBLE_PUTS = 200
VISIBLE_PAUSE_S = 0.002  # between two puts: an idle store, not a busy one
VISIBLE_TIMEOUT_S = 5.0
PULL_MESSAGES = 1024
DISPATCH_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One line of the table. `busy_us`: CPU time of all involved processes for each message."""

    what: str
    messages_per_s: float
    bytes_per_s: float
    p50_us: float | None = None
    p99_us: float | None = None
    busy_us: float | None = None
    beside_disk: float | None = None
    """The rate relative to pwrite + fdatasync of as many bytes, measured in turns with it."""
    stalls: dict[str, Any] | None = None
    """For puts: Why.summary of what made them wait, from the flight recorder."""


@click.command()
@click.argument("parent", type=GivenPath(path_type=Path), metavar="FOLDER", default=Path())
@click.option("--seconds", type=NumberRange(min=0.1), default=3.0, show_default=True, help="Duration of each measurement, in seconds.")
@click.option("--size", "size_bytes", type=click.IntRange(min=1, max=1 << 20), default=1024, show_default=True, help="Bytes of a body.")
@set_option
@answers
def bench(parent: Path, seconds: float, size_bytes: int, settings: dict[str, str]) -> Reply:
    """Measure puts, syncs, visibility and reads on your own disk.

    The stores in FOLDER (default: the current one) are removed afterwards.

    \b
    Example:
      pyengine bench --size 128 --seconds 10
    """
    require_room(parent, FREE_BYTES_MIN, "measure")
    load_config(None, settings)  # before anything is created: a wrong setting is an error
    with tempfile.TemporaryDirectory(prefix="pyengine-bench-", dir=parent) as folder:
        run = BenchRun(Path(folder).absolute(), seconds, size_bytes, settings)
        for mode, flush in (("async", "ASYNC_FLUSH"), ("sync", "SYNC_FLUSH")):
            run.measure_mode(mode, flush)
    document = {"file_system": file_system_of(parent), "cpus": os.cpu_count(), "load": os.getloadavg()[0], "body_bytes": size_bytes,
                "seconds": seconds, "measured": [asdict(row) for row in run.rows]}
    return Reply(document, lambda: _print(run.rows, document))


def _print(rows: Sequence[Measured], document: dict[str, Any]) -> None:
    output.write_rows(
        [row | {"MB/s": row["bytes_per_s"] / 1e6, "CPU_us_a_message": row["busy_us"]} for row in document["measured"]],
        "what messages_per_s MB/s p50_us p99_us CPU_us_a_message beside_disk",
        f"bodies of {document['body_bytes']:,} B on {document['file_system']}, {document['cpus']} CPUs, load {document['load']:.1f}")
    write_stalls("what", {row.what: row.stalls for row in rows if row.stalls is not None})


class BenchRun:
    """Measures the lines of one run, with a new store for each flush mode."""

    def __init__(self, folder: Path, seconds: float, size_bytes: int, settings: dict[str, str]) -> None:
        self.rows: list[Measured] = []
        self._folder = folder
        self._seconds = seconds
        self._size_bytes = size_bytes
        self._settings = settings

    def measure_mode(self, mode: str, flush_disk_type: str) -> None:
        """Add the lines of one flush mode."""
        store = self._folder / mode
        settings: dict[str, Any] = SIZES | {"flush_disk_type": flush_disk_type} | self._settings
        with Engine(store, **settings):
            if mode == "async":
                self._puts(store, "put, async", "put")
                self._puts(store, "put_async, 1,000 under way, async", "async", count=1000)
                self._puts(store, "put_many(256), async", "many", count=256)
                self._pulls(store)
            else:
                self._synced_puts(store)
                self._puts(store, "put, sync, four producers", "put", producers=4)
            self._visible(store, mode)
        shutil.rmtree(store)

    def _puts(self, store: Path, what: str, kind: str, count: int = 1, producers: int = 1) -> None:
        self._show(what)
        waits, before_s = Waits(store), engine_cpu_seconds(store)
        answers = produce(store, kind, self._size_bytes, self._seconds, count, producers)
        busy_s = engine_cpu_seconds(store) - before_s + sum(answer.cpu_seconds for answer in answers)
        self._add(what, answers, busy_s, waits)
        wait_dispatched(store)

    def _add(self, what: str, answers: Sequence[Produced], busy_s: float, waits: Waits,
             raw_rates: Sequence[float] = ()) -> None:
        messages = sum(answer.messages for answer in answers)
        rate = sum(answer.messages / answer.seconds for answer in answers) / (len(raw_rates) or 1)
        self.rows.append(Measured(
            what, rate, rate * self._size_bytes, statistics.median(answer.p50_us for answer in answers),
            max(answer.p99_us for answer in answers), busy_s * 1e6 / messages,
            rate / statistics.mean(raw_rates) if raw_rates else None, waits.why().summary))

    def _synced_puts(self, store: Path) -> None:
        """Measure synced puts in turns of a second with the disk alone, whose speed changes from second to second."""
        self._show("put, sync")
        raw_rates, answers, busy_s, waits = [], [], 0.0, Waits(store)
        for _ in range(max(1, round(self._seconds))):
            turn_s = min(1.0, self._seconds)
            raw_rates.append(measure_disk(self._folder, turn_s, self._size_bytes + RECORD_OVERHEAD_BYTES).syncs_per_s)
            before_s = engine_cpu_seconds(store)
            answers += produce(store, "put", self._size_bytes, turn_s)
            busy_s += engine_cpu_seconds(store) - before_s
        self._add("put, sync", answers, busy_s + sum(answer.cpu_seconds for answer in answers), waits, raw_rates)

    def _visible(self, store: Path, mode: str) -> None:
        """Measure the time from a put's answer until its queue has the message."""
        what = f"put to visible in its queue, {mode}"
        self._show(what)
        waits = Waits(store)
        lags_us = visible_lags_us(store, bytes(self._size_bytes), VISIBLE_PUTS)
        total_s = sum(lags_us) / 1e6
        self.rows.append(Measured(what, VISIBLE_PUTS / total_s, VISIBLE_PUTS * self._size_bytes / total_s,
                                  lags_us[VISIBLE_PUTS // 2], lags_us[VISIBLE_PUTS * 99 // 100], stalls=waits.why().summary))

    def _pulls(self, store: Path) -> None:
        """Measure reads of messages as Python objects, by a consumer group."""
        self._show("consumer.pull")
        with pyengine.consume(store, TOPIC, group="pyengine-bench", from_="first") as consumer:
            messages, began_cpu_s, began_s = 0, time.process_time(), time.perf_counter()
            while time.perf_counter() < began_s + self._seconds and (found := consumer.pull(max_messages=PULL_MESSAGES, timeout_s=0)):
                messages += len(found)
            took_s, busy_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        self.rows.append(Measured("consumer.pull", messages / took_s, messages * self._size_bytes / took_s,
                                  busy_us=busy_s * 1e6 / max(1, messages)))

    def _show(self, what: str) -> None:
        if sys.stderr.isatty():
            print(f"{what} ...", file=sys.stderr)


def visible_lags_us(store: Path, body: bytes, puts: int) -> list[float]:
    """Measure the time from each put's answer until a reader finds the message in its queue, on an idle store; sorted.

    A message is visible once `reput_from` is beyond it. EngineError if that takes too long.
    """
    lags_us = []
    with connect(store) as producer, EngineMemory.of(store) as memory:
        reput_from = memory.control.reput_from
        for _ in range(puts):
            wanted = producer.put(TOPIC, body).physical_offset
            began_s = time.perf_counter()
            while native.load_position(reput_from) <= wanted:
                if time.perf_counter() > began_s + VISIBLE_TIMEOUT_S:
                    raise EngineError(f"a message was not visible in its queue within {VISIBLE_TIMEOUT_S:g} s")
            lags_us.append((time.perf_counter() - began_s) * 1e6)
            time.sleep(VISIBLE_PAUSE_S)
    return sorted(lags_us)


def produce(store: Path, kind: str, size_bytes: int, seconds: float, count: int = 1, producers: int = 1,
            messages_max: int = sys.maxsize) -> list[Produced]:
    """Run several producer processes, which begin together; return what each of them did."""
    command = [sys.executable, "-P", "-m", "pyengine.cli.bench_producer",
               *map(str, (store, kind, size_bytes, seconds, count, messages_max))]
    return [Produced(**answer) for answer in run_together([command] * producers)]


def run_together(commands: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Run programs with bench_producer's protocol, which begin once all are ready; return the JSON line of each.

    EngineError if one fails.
    """
    children = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                 env=child_environment()) for command in commands]
    try:
        for child in children:
            if cast(IO[str], child.stdout).readline().strip() != "ready":
                raise EngineError(f"a producer did not start: {child.communicate()[1][-2000:]}")
        for child in children:
            stdin = cast(IO[str], child.stdin)
            stdin.write("go\n")
            stdin.flush()
        answers = []
        for child in children:
            stdout, errors = child.communicate()
            if child.returncode:
                raise EngineError(f"a producer ended with {child.returncode}: {errors[-2000:]}")
            answers.append(json.loads(stdout.strip().splitlines()[-1]))
        return answers
    finally:
        for child in children:
            child.kill()


def engine_pids(store: Path) -> list[int]:
    """Return the living processes of the engine, with the supervisor."""
    from pyengine.cli.torture import EngineWatch

    with EngineWatch(store) as watch:
        return list(watch.pids().values())


def engine_cpu_seconds(store: Path) -> float:
    """Return the CPU time that the living processes of the engine have used."""
    import psutil

    return float(sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in engine_pids(store)))


def wait_dispatched(store: Path, timeout_s: float = DISPATCH_TIMEOUT_S) -> None:
    """Wait until all messages are durable and in queues and index; EngineError if that takes too long."""
    until_s = time.monotonic() + timeout_s
    while (found := engine_status(store, {}))["dispatch_lag_bytes"] or found["unflushed_bytes"]:
        if time.monotonic() > until_s:
            raise EngineError(f"the messages were not dispatched and flushed within {timeout_s:g} s")
        time.sleep(0.05)
