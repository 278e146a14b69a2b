"""Measure catch-up of a slave, and synchronous puts, for each pair of pyengine and the real RocketMQ store.

usage: python bench/bench_replication.py [--quick] [--rounds N] [--pairs ours+ours,real+real] [--only catch-up|sync]
           [--folder DIR] [--json FILE]

A pair is master+slave. The real store runs in JVMs of its own (tests/interop/judge, built by Maven at the first run, with the
server compiler on); pairs take turns, so that compared rows are measured in the same minutes.
See bench/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE.parent / "tests"), str(HERE.parent / "scripts")]

import psutil  # noqa: E402

import needs  # noqa: E402
import pyengine  # noqa: E402
from interop import judge as judges  # noqa: E402
from measure import Row, free_port, keep, quantile, show  # noqa: E402
from pyengine.engine.embedded import start_engine, stop_engine  # noqa: E402
from pyengine.ipc.control_block import EngineMemory  # noqa: E402
from pyengine.native import control as native  # noqa: E402

PAIRS = ("ours+ours", "ours+real", "real+ours", "real+real")
SEGMENT_BYTES = 1 << 28
SIZES = {"mapped_file_size_commit_log_bytes": SEGMENT_BYTES, "mapped_file_size_consume_queue_bytes": 6_000_000,
         "max_hash_slot_num": 100_000, "max_index_num": 400_000}
REAL_SIZES = {"mappedFileSizeCommitLog": SEGMENT_BYTES, "mappedFileSizeConsumeQueue": 6_000_000, "maxHashSlotNum": 100_000,
              "maxIndexNum": 400_000}
BODY_BYTES = 1024
WARM_UP = 3000  # puts; a JVM has compiled what it needs by then
STEP_S = 0.005
TIMEOUT_S = 120.0
FLAGS = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")  # of the judge in tests, which is started often


class Side(Protocol):
    """One store in one role, running."""

    def end(self) -> int: ...

    def cpu_s(self) -> float: ...

    def close(self) -> None: ...


class Ours:
    """An engine of this package."""

    def __init__(self, store: Path, settings: dict[str, Any]) -> None:
        self.store = store
        start_engine(store, SIZES | settings)
        self._memory = EngineMemory.of(store)

    @classmethod
    def master(cls, store: Path, port: int, role: str) -> Ours:
        return cls(store, {"broker_role": role, "ha_listen_port": port, "ha_allow_plain": "127.0.0.1"})

    @classmethod
    def slave(cls, store: Path, port: int) -> Ours:
        return cls(store, {"broker_role": "SLAVE", "ha_master_address": f"127.0.0.1:{port}"})

    def end(self) -> int:
        return native.load_position(self._memory.control.wrote)

    def cpu_s(self) -> float:
        """Return the CPU seconds of all its processes."""
        pids = {native.load(line, "pid") for line in self._memory.control.workers} - {0}
        return sum(cpu_seconds(pid) for pid in pids)

    def puts(self, count: int) -> dict[str, Any]:
        """Put messages one after the other; return statuses, seconds, quantiles in us."""
        body, took, statuses, clock = os.urandom(BODY_BYTES), [], {}, time.perf_counter
        with pyengine.connect(self.store, refusals="return") as producer:
            began = now = clock()
            for number in range(count):
                before = now
                status = producer.put("Ha", body, queue_id=number % 4, tags="t1", keys=f"k{number}").status.name
                now = clock()
                took.append((now - before) * 1e6)
                statuses[status] = statuses.get(status, 0) + 1
        return {"statuses": statuses, "seconds": now - began, "p50Us": quantile(took, 0.5), "p99Us": quantile(took, 0.99)}

    def close(self) -> None:
        self._memory.close()
        stop_engine(self.store)


class Real:
    """The published store 4.9.8 in a JVM of its own."""

    def __init__(self, store: Path, settings: dict[str, Any], master: str = "") -> None:
        self.store = store
        store.mkdir(exist_ok=True)
        self._scratch = Path(tempfile.mkdtemp(dir=store.parent))
        self._judge = judges.Judge(needs.java_command(), self._scratch)
        self._judge.ha_open(store, REAL_SIZES | settings, master).result(TIMEOUT_S)

    @classmethod
    def master(cls, store: Path, port: int, role: str) -> Real:
        return cls(store, {"brokerRole": role, "haListenPort": port})

    @classmethod
    def slave(cls, store: Path, port: int) -> Real:
        return cls(store, {"brokerRole": "SLAVE"}, f"127.0.0.1:{port}")

    def cpu_s(self) -> float:
        return cpu_seconds(self._judge.pid)

    def end(self) -> int:
        return int(self._judge.ha_look(self.store)["maxPhy"])

    def puts(self, count: int) -> dict[str, Any]:
        return self._judge.ha_put(self.store, count, body_bytes=BODY_BYTES).result(TIMEOUT_S)

    def close(self) -> None:
        self._judge.ha_close(self.store)
        self._judge.__exit__()


SIDES = {"ours": Ours, "real": Real}


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def wait_until(what: str, condition) -> float:
    """Wait for a condition; return the time at which it was true, SystemExit after TIMEOUT_S."""
    deadline = time.perf_counter() + TIMEOUT_S
    while not condition():
        if time.perf_counter() > deadline:
            raise SystemExit(f"{what}: not within {TIMEOUT_S:g} s")
        time.sleep(STEP_S)
    return time.perf_counter()


def make_log(folder: Path, size_bytes: int) -> Path:
    """Make a stopped store with `size_bytes` of log in one segment."""
    store = folder / "made"
    bodies = [os.urandom(BODY_BYTES)] * 64
    with pyengine.Engine(store, **SIZES), pyengine.connect(store) as producer:
        put = 0
        while put < size_bytes:
            producer.put_many("Ha", bodies, queue_id=put // 65536 % 4)
            put += len(bodies) * (BODY_BYTES + 100)
    return store


def catch_up(folder: Path, pair: str, made: Path) -> tuple[float, float]:
    """Return MB per second and the CPU seconds per GB of both sides.

    The time is from the slave's first byte to its last, since a real slave waits up to 5 s before the first one.
    """
    master_kind, slave_kind = pair.split("+")
    port, place = free_port(), Path(tempfile.mkdtemp(dir=folder))
    subprocess.run(["cp", "-a", str(made), str(place / "master")], check=True)
    sides: list[Side] = []
    try:
        sides.append(SIDES[master_kind].master(place / "master", port, "ASYNC_MASTER"))
        end = sides[0].end()
        began = time.perf_counter()
        sides.append(SIDES[slave_kind].slave(place / "slave", port))
        slave = sides[1]
        first = wait_until(f"{pair}: the first byte", lambda: slave.end() > 0)
        there, cpu = slave.end(), sum(side.cpu_s() for side in sides)
        last = wait_until(f"{pair}: the last byte", lambda: slave.end() >= end)
        cpu = sum(side.cpu_s() for side in sides) - cpu
        if there >= end:  # the slave had all at the first poll
            return end / (first - began) / 1e6, float("nan")
        return (end - there) / (last - first) / 1e6, cpu / (end - there) * 1e9
    finally:
        for side in reversed(sides):
            side.close()
        shutil.rmtree(place, ignore_errors=True)


class SyncPair:
    """A running SYNC_MASTER and its slave, after WARM_UP puts."""

    def __init__(self, folder: Path, pair: str) -> None:
        master_kind, slave_kind = pair.split("+")
        port, self._place = free_port(), Path(tempfile.mkdtemp(dir=folder))
        self.master = SIDES[master_kind].master(self._place / "master", port, "SYNC_MASTER")
        self.slave = SIDES[slave_kind].slave(self._place / "slave", port)
        wait_until(f"{pair}: a first PUT_OK", lambda: self.master.puts(1)["statuses"] == {"PUT_OK": 1})
        self.master.puts(WARM_UP)

    def cpu_s(self) -> float:
        return self.master.cpu_s() + self.slave.cpu_s()

    def close(self) -> None:
        for side in (self.slave, self.master):
            side.close()
        shutil.rmtree(self._place, ignore_errors=True)


def bench_catch_up(folder: Path, pairs: list[str], rounds: int, size_bytes: int) -> list[Row]:
    made = make_log(folder, size_bytes)
    found: dict[str, list[tuple[float, float]]] = {pair: [] for pair in pairs}
    for _ in range(rounds):
        for pair in pairs:
            found[pair].append(catch_up(folder, pair, made))
    limit = statistics.median(rate for rate, _ in found["real+real"]) if "real+real" in found else None
    return [Row(f"catch-up of {size_bytes / 1e6:.0f} MB, {pair}", "MB/s", [rate for rate, _ in result], limit, "real+real",
                notes={"CPU s a GB, both sides": statistics.median(cpu for _, cpu in result)})
            for pair, result in found.items()]


def bench_sync(folder: Path, pairs: list[str], rounds: int, count: int) -> list[Row]:
    found: dict[str, list[dict[str, Any]]] = {pair: [] for pair in pairs}
    for _ in range(rounds):
        for pair in pairs:  # one at a time: a real store at rest still polls each millisecond
            with contextlib.closing(SyncPair(folder, pair)) as up:
                cpu = up.cpu_s()
                result = up.master.puts(count)
                result["cpuUs"] = (up.cpu_s() - cpu) / count * 1e6
            if set(result["statuses"]) != {"PUT_OK"}:
                raise SystemExit(f"{pair}: {result['statuses']}")
            found[pair].append(result)
    rows = []
    for name, unit, of, better in (("rate", "puts/s", lambda one: count / one["seconds"], True),
                                   ("p50", "us", lambda one: one["p50Us"], False)):
        limit = statistics.median(map(of, found["real+real"])) if "real+real" in found else None
        for pair, result in found.items():
            notes = {"p99, us": statistics.median(one["p99Us"] for one in result)} if name == "p50" else {
                "CPU us a put, both sides": statistics.median(one["cpuUs"] for one in result)}
            floor, aim = (1, 2) if (name, pair) == ("rate", "ours+ours") else (None, None)
            rows.append(Row(f"SYNC_MASTER, one producer, 1 KiB: {name}, {pair}", unit, list(map(of, result)), limit, "real+real",
                            floor=floor, aim=aim, higher_is_better=better, notes=notes))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round of each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", default=",".join(PAIRS), help="which of them, master+slave (default: %(default)s)")
    parser.add_argument("--only", choices=("catch-up", "sync"), help="one half of it")
    parser.add_argument("--folder", type=Path, help="where the stores go (default: a temporary folder in this one)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    pairs = arguments.pairs.split(",")
    if not set(pairs) <= set(PAIRS):
        parser.error(f"--pairs: give some of {', '.join(PAIRS)}")
    judges.JVM_FLAGS = tuple(flag for flag in judges.JVM_FLAGS if flag not in FLAGS)
    rounds = 1 if arguments.quick else arguments.rounds
    with tempfile.TemporaryDirectory(dir=arguments.folder or Path.cwd(), prefix="bench-") as folder:
        rows = []
        if arguments.only != "sync":
            rows += bench_catch_up(Path(folder), pairs, rounds, (64 if arguments.quick else 240) << 20)
        if arguments.only != "catch-up":
            rows += bench_sync(Path(folder), pairs, rounds, 1000 if arguments.quick else 5000)
    show(rows)
    if arguments.json:
        keep(rows, arguments.json)


if __name__ == "__main__":
    main()
