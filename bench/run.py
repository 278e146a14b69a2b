"""Measure the engine against the machine it runs on. See bench/README.md.

usage: python bench/run.py [--quick] [--rounds N] [--folder DIR] [--json FILE] [--compare FILE] [--only TEXT]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from operator import truediv
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import pyengine  # noqa: E402
import raw  # noqa: E402
from measure import Row, earlier_medians, keep, quantile, show  # noqa: E402
from pyengine._native import ffi, lib  # noqa: E402
from pyengine.cli.bench import engine_pids, produce, visible_lags_us, wait_dispatched  # noqa: E402
from pyengine.cli.bench_producer import Produced  # noqa: E402
from pyengine.cli.engine_status import engine_status  # noqa: E402
from pyengine.cli.prove import measure_disk  # noqa: E402
from pyengine.cli.why import Waits, Why  # noqa: E402
from pyengine.engine.kinds import HEALTHY_AFTER_S  # noqa: E402
from pyengine.ipc.shared_objects import find_folder  # noqa: E402
from pyengine.native import store_stats  # noqa: E402
from pyengine.native.recorder import THRESHOLD_NS  # noqa: E402
from pyengine.storage.checkpoint import read_watermark  # noqa: E402

IDLE_SECONDS = 20
RECOVERY_LOG_BYTES = 1_000_000_000
READ_LOG_BYTES = 400_000_000
AWAITING_TASKS = 100
RECORD_OVERHEAD_BYTES = 91 + len("bench")
SETTINGS = {"mapped_file_size_commit_log_bytes": 1 << 28, "max_hash_slot_num": 100_000, "max_index_num": 400_000,
            "flush_disk_type": "ASYNC_FLUSH"}


class Bench:
    """Rounds of measurements over stores in one folder."""

    def __init__(self, folder: Path, rounds: int, seconds: float) -> None:
        self.folder = folder
        self.rounds = rounds
        self.seconds = seconds
        self.rows: list[Row] = []
        self._waited: dict[tuple, list[Why]] = {}

    def store(self, **settings) -> tuple[pyengine.Engine, Path]:
        path = Path(tempfile.mkdtemp(dir=self.folder)) / "store"
        return pyengine.Engine(path, **{**SETTINGS, **settings}), path

    def produce(self, store: Path, kind: str, size: int, producers: int = 1, count: int = 1) -> list[Produced]:
        """Run producer processes together; return the result of each. The causes of their waits are kept for stalls()."""
        waits = Waits(store)
        answers = produce(store, kind, size, self.seconds, count, producers)
        self._waited.setdefault((kind, size, producers, count), []).append(waits.why())
        return answers

    def stalls(self, kind: str, size: int, producers: int = 1, count: int = 1) -> dict[str, float]:
        """Return and clear the notes of the flight recorder about waits in those produce(), by cause."""
        notes: dict[str, float] = {}
        for why in self._waited.pop((kind, size, producers, count), []):
            for cause in why.causes:
                waits, longest = f"waits of {THRESHOLD_NS / 1e6:g} ms or more ({cause.means})", f"longest ms ({cause.means})"
                notes[waits] = notes.get(waits, 0) + cause.waits
                notes[longest] = max(notes.get(longest, 0.0), cause.longest_ms)
        return notes

    def rate(self, answers: list[Produced]) -> float:
        return sum(answer.messages / answer.seconds for answer in answers)


def bench_async_puts(bench: Bench) -> None:
    for size, floor, aim in ((128, 400_000, 1_170_000), (1024, 300_000, 590_000)):
        engine, path = bench.store()
        with engine:
            rounds, pages = [], []
            for _ in range(bench.rounds):
                pages.append(raw.warm_memory(1 << 30))
                rounds.append(bench.produce(path, "put", size))
        rates = [bench.rate(answers) for answers in rounds]
        best = rounds[rates.index(max(rates))][0]
        bench.rows.append(Row(f"put, async, one producer, {size} B", "msg/s", rates, floor=floor, aim=aim,
                              notes={"p50 us": best.p50_us, "p99 us": best.p99_us, "p99.9 us": best.p999_us,
                                     "us a page to warm memory": max(pages), **bench.stalls("put", size)}))
        shutil.rmtree(path.parent)


def bench_awaited_puts(bench: Bench) -> None:
    """Measure `await put_async` from 100 tasks in turns with put(), both in one event loop of this process."""
    for mode, floor, aim in (("async", 0.5, 0.8), ("sync", 10, 30)):
        engine, path = bench.store(flush_disk_type=f"{mode.upper()}_FLUSH")
        with engine, engine.connect() as producer:
            turns = [asyncio.run(_put_and_await(producer, bench.seconds / 2)) for _ in range(2 * bench.rounds)]
        puts, awaited, busy_us = ([turn[n] for turn in turns] for n in range(3))
        ratios = sorted(map(truediv, awaited, puts))
        bench.rows.append(Row(f"await put_async, {mode}, {AWAITING_TASKS} tasks, 128 B", "msg/s", awaited, statistics.median(puts),
                              "put() in the same loop, in turns", floor, aim,
                              notes={"median ratio of a turn": statistics.median(ratios), "worst": ratios[0],
                                     "CPU us of a put": statistics.median(busy_us)}))
        shutil.rmtree(path.parent)


async def _put_and_await(producer: pyengine.Producer, seconds: float) -> tuple[float, float, float]:
    """Return (put()/s, awaited puts/s from tasks, CPU us of this process for each awaited put)."""
    body, done, began_s = os.urandom(128), 0, time.perf_counter()
    while (now_s := time.perf_counter()) < began_s + seconds:
        producer.put("bench", body)
        done += 1
    puts_per_s, ends_s, done = done / (now_s - began_s), now_s + seconds, 0

    async def task() -> int:
        count = 0
        while time.perf_counter() < ends_s:
            await producer.put_async("bench", body)
            count += 1
        return count

    began_cpu_s = time.process_time()
    done = sum(await asyncio.gather(*(task() for _ in range(AWAITING_TASKS))))
    return puts_per_s, done / (time.perf_counter() - now_s), (time.process_time() - began_cpu_s) * 1e6 / done


def bench_async_many(bench: Bench) -> None:
    for size, producers, floor, aim, unit in ((1024, 1, 0.7e9, 2.5e9, "B/s"), (1024, 2, 1.0e9, 2.5e9, "B/s"),
                                              (128, 1, 2e6, 5e6, "msg/s")):
        engine, path = bench.store()
        with engine:
            rates, pages = [], []
            for _ in range(bench.rounds):
                pages.append(raw.warm_memory(int(2e9 * bench.seconds)))
                rates.append(bench.rate(bench.produce(path, "many", size, producers, 256)))
        values = [rate * size for rate in rates] if unit == "B/s" else rates
        bench.rows.append(Row(f"put_many(256), async, {producers} producer(s), {size} B", unit, values, floor=floor, aim=aim,
                              notes={"copy into a fresh mapping B/s": raw.copy_rate(bench.folder, 256 << 20),
                                     "us a page to warm memory": max(pages), **bench.stalls("many", size, producers, 256)}))
        shutil.rmtree(path.parent)


def bench_sync(bench: Bench) -> None:
    """Measure synced puts in turns of a second with the disk alone, whose speed changes from second to second."""
    engine, path = bench.store(flush_disk_type="SYNC_FLUSH")
    size = 1024
    seconds, bench.seconds = bench.seconds, 1.0
    limits, ones, fours, sixteens, groups, group_limits = [], [], [], [], [], []
    with engine:
        for _ in range(max(1, int(bench.rounds * seconds))):
            limits.append(measure_disk(bench.folder, 1.0, size + RECORD_OVERHEAD_BYTES).syncs_per_s)
            ones.append(bench.rate(bench.produce(path, "put", size)))
            fours.append(bench.rate(bench.produce(path, "put", size, 4)))
            sixteens.append(bench.rate(bench.produce(path, "put", size, 16)))
            group_limits.append(measure_disk(bench.folder, 1.0, 64 * (size + RECORD_OVERHEAD_BYTES)).syncs_per_s * 64)
            groups.append(bench.rate(bench.produce(path, "many", size, 1, 64)))
    bench.seconds = seconds
    shares = {"worst second beside raw": min(map(truediv, ones, limits)), "best": max(map(truediv, ones, limits))}
    raw_is = "raw pwrite + fdatasync, in turns"
    bench.rows.append(Row("put, sync, one producer", "msg/s", ones, statistics.median(limits), raw_is, 0.85, 0.93,
                          notes={**shares, **bench.stalls("put", size)}))
    for name, producers, rates, floor, aim in (("four", 4, fours, 2.5, 3), ("16", 16, sixteens, 6, 8)):
        bench.rows.append(Row(f"put, sync, {name} producers", "msg/s", rates, statistics.median(ones), "one producer", floor, aim,
                              notes=bench.stalls("put", size, producers)))
    bench.rows.append(Row("put_many(64), sync", "msg/s", groups, statistics.median(group_limits), f"{raw_is}, of 64", 0.7, 0.85,
                          notes=bench.stalls("many", size, 1, 64)))
    shutil.rmtree(path.parent)


def bench_visible(bench: Bench) -> None:
    for mode, settings in (("async", {}), ("sync", {"flush_disk_type": "SYNC_FLUSH"}), ("pool", {"transient_store_pool_enable": True})):
        engine, path = bench.store(**settings)
        with engine:
            visible_lags_us(path, b"first", 1)
            rounds = []
            for _ in range(bench.rounds):
                lags = visible_lags_us(path, b"x" * 100, 200)
                rounds.append(quantile(lags, 0.5))
            bench.rows.append(Row(f"put to visible in its queue, idle, {mode}", "us", rounds, floor=150, aim=50,
                                  higher_is_better=False, notes={"p99 us": quantile(lags, 0.99)}))
        shutil.rmtree(path.parent)


def bench_new_topics(bench: Bench) -> None:
    """Measure the time from the first put to a new topic until all messages can be read, and the orderly stop."""
    topics = 10_000 if bench.rounds > 1 else 2_000
    rates, limits, stops = [], [], []
    for _ in range(bench.rounds):
        limits.append(measure_disk(bench.folder, bench.seconds, 4096).syncs_per_s)
        engine, path = bench.store()
        with engine:
            with pyengine.connect(path) as producer:
                began = time.perf_counter()
                for number in range(topics):
                    producer.put(f"topic-{number}", b"x" * 100)
                wait_dispatched(path)
                rates.append(topics / (time.perf_counter() - began))
            began = time.perf_counter()
        stops.append(time.perf_counter() - began)
        shutil.rmtree(path.parent)
    bench.rows.append(Row(f"{topics:,} new topics, put to readable", "topics/s", rates, quantile(limits, 0.5),
                          "raw pwrite + fdatasync of a page", floor=0.25, aim=1, notes={"seconds of the stop": quantile(stops, 0.5)}))


def bench_recovery(bench: Bench) -> None:
    """Measure `recover` after kill -9 with and without the shared memory, and after an orderly stop.

    Of a log that was synced. One that was not is written over itself and synced (docs/recovery.md): beside a plain write and sync
    of as many bytes.
    """
    for title, ending, synced, floor, aim in (
            ("kill -9 of all, shared memory kept", "kill", True, 6, 10), ("kill -9 of all, shared memory deleted", "delete", True, 4, 6),
            ("kill -9 of all just after the puts, shared memory kept", "kill", False, None, None),
            ("an orderly stop", "stop", True, None, None)):
        rates, cpu_rates, seconds, takes, limits = [], [], [], [], []
        for _ in range(bench.rounds):
            if not synced:
                limits.append(raw.write_rate(bench.folder, RECOVERY_LOG_BYTES) / 1e9)
            engine, path = bench.store()
            with engine:
                _fill(path, RECOVERY_LOG_BYTES)
                if synced and ending != "stop":
                    _wait_synced(path)
                if ending != "stop":
                    kill_all(path)
                    if ending == "delete":
                        shutil.rmtree(find_folder(path).path)
                    report, took, cpu = recover(path)
            if ending == "stop":
                report, took, cpu = recover(path)
            rates.append(report["gigabytes_per_second"])
            cpu_rates.append((report["end_offset"] - report["scan_from"]) / cpu / 1e9)
            seconds.append(report["seconds"])
            takes.append(took)
            shutil.rmtree(path.parent)
        notes = {"log bytes": report["end_offset"], "read": report["end_offset"] - report["scan_from"],
                 "dispatched": report["dispatched_bytes"], "GB per second of CPU, command and all": quantile(cpu_rates, 0.5),
                 "seconds with start of the command": quantile(takes, 0.5)}
        if ending == "stop":
            bench.rows.append(Row(f"recovery after {title}", "s", seconds, floor=1, higher_is_better=False, notes=notes))
        elif synced:
            bench.rows.append(Row(f"recovery after {title}", "GB/s", rates, floor=floor, aim=aim, notes=notes))
        else:
            bench.rows.append(Row(f"recovery after {title}", "GB/s", rates, quantile(limits, 0.5), "writing and syncing as many bytes",
                                  notes=notes))


def _wait_synced(path: Path) -> None:
    """Wait until all messages are durable and in queues and index."""
    wait_dispatched(path)
    end = engine_status(path, {})["positions"]["wrote"]
    while (watermark := read_watermark(path).watermark) is None or watermark.flushed < end:
        time.sleep(0.05)


def bench_recovery_topics(bench: Bench) -> None:
    """Measure `recover` of many queues of one message each, after kill -9 and without the shared memory."""
    topics = 5_000 if bench.rounds > 1 else 1_000
    seconds, cpu_us = [], []
    for _ in range(bench.rounds):
        engine, path = bench.store()
        with engine:
            with pyengine.connect(path) as producer:
                for number in range(topics):
                    producer.put(f"topic-{number}", b"x" * 100)
            wait_dispatched(path)
            kill_all(path)
            shutil.rmtree(find_folder(path).path)
            report, _, cpu = recover(path)
        seconds.append(report["seconds"])
        cpu_us.append(cpu * 1e6 / topics)
        shutil.rmtree(path.parent)
    bench.rows.append(Row(f"recovery of {topics:,} topics after kill -9, shared memory deleted", "s", seconds, higher_is_better=False,
                          notes={"CPU us for each topic, command and all": quantile(cpu_us, 0.5)}))


def bench_reads(bench: Bench) -> None:
    """Measure reads from the page cache: queues as Python objects with their bodies, the log as Arrow columns."""
    for size in (128, 1024):
        engine, path = bench.store()
        with engine:
            _fill(path, READ_LOG_BYTES, size)
            wait_dispatched(path)
            for count in (32, 1024):
                turns = [_pull_all(path, count) for _ in range(bench.rounds)]
                bench.rows.append(Row(f"Consumer.pull({count}), {size} B", "msg/s", [rate for rate, _ in turns], floor=0.5e6, aim=1e6,
                                      notes={"CPU us for each message": quantile([busy for _, busy in turns], 0.5)}))
            if size == 1024:
                for columns, name in ((None, "all columns"), (["topic", "queueId", "queueOffset", "storeTimestamp", "body"], "5 columns")):
                    turns = [_scan_all(path, columns) for _ in range(bench.rounds)]
                    bench.rows.append(Row(f"Arrow, {name}, {size} B", "GB/s", [rate for rate, _ in turns], floor=3, aim=6,
                                          notes={"GB per second of CPU": quantile([busy for _, busy in turns], 0.5)}))
                turns = [_scan_newest(path) for _ in range(bench.rounds)]
                bench.rows.append(Row(f"Arrow, newest 1 %, {size} B", "ms", [chosen for chosen, _ in turns],
                                      quantile([filtered for _, filtered in turns], 0.5), "all, filtered by Arrow", floor=0.5, aim=0.2,
                                      higher_is_better=False))
        shutil.rmtree(path.parent)


def _pull_all(path: Path, count: int) -> tuple[float, float]:
    """Return (messages/s, CPU us for each message) of a consumer without a group."""
    with pyengine.consume(path, "bench", from_="first") as consumer:
        total, began_cpu_s, began_s = 0, time.process_time(), time.perf_counter()
        while found := consumer.pull(count, timeout_s=0):
            for message in found:
                message.body  # noqa: B018 - it is made when it is asked for
            total += len(found)
        return total / (time.perf_counter() - began_s), (time.process_time() - began_cpu_s) * 1e6 / total


def _scan_all(path: Path, columns: list[str] | None) -> tuple[float, float]:
    """Return (GB of log per second, GB of log per CPU second)."""
    with pyengine.open_store(path) as reader:
        log_bytes = reader.max_physical_offset()
        began_cpu_s, began_s = time.process_time(), time.perf_counter()
        for _ in reader.scan(columns=columns):
            pass
        return log_bytes / (time.perf_counter() - began_s) / 1e9, log_bytes / (time.process_time() - began_cpu_s) / 1e9


def _scan_newest(path: Path) -> tuple[float, float]:
    """Return (ms of a read that chooses the newest 1 % by their time, ms of a read of all rows that Arrow then filters)."""
    from pyarrow.compute import greater_equal

    columns = ["queueId", "queueOffset", "storeTimestamp", "body"]
    with pyengine.open_store(path) as reader:
        times = reader.to_arrow(["bench"], ["storeTimestamp"]).read_all()["storeTimestamp"]
        since = times[len(times) * 99 // 100]
        began_s = time.perf_counter()
        chosen = reader.to_arrow(["bench"], columns, since=since.as_py()).read_all()
        chosen_s, began_s = time.perf_counter() - began_s, time.perf_counter()
        every = reader.to_arrow(["bench"], columns).read_all()
        filtered = every.filter(greater_equal(every["storeTimestamp"], since))
        filtered_s = time.perf_counter() - began_s
    if not chosen.equals(filtered):
        raise SystemExit("the two reads gave different rows")
    return chosen_s * 1e3, filtered_s * 1e3


def _fill(path: Path, log_bytes: int, size: int = 1024) -> None:
    """Put messages of one size until the log has so many bytes."""
    with pyengine.connect(path) as producer:
        bodies, end = [os.urandom(size)] * 256, 0
        while end < log_bytes:
            end = producer.put_many("bench", bodies).end_physical_offset


def kill_all(path: Path) -> None:
    pids = [process.pid for process in processes_of(path)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=10)


def recover(path: Path) -> tuple[dict, float, float]:
    """Return (report, seconds, CPU seconds) of one `pyengine recover`."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    report = json.loads(subprocess.run([sys.executable, "-m", "pyengine", "recover", str(path), "--json"], check=True,
                                       capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(HERE.parent)}).stdout)
    took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return report, took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def counting_cost_ns(passes: int, entries: int) -> float:
    """Return the cost of the statistics for each put in ns, with `entries` puts in each pass."""
    stats, meter = store_stats.private(), ffi.new("struct ms_put_meter *")
    meter.stats = ffi.addressof(stats, "put")
    began_ns = time.monotonic_ns()
    lib.ms_put_meter_exercise(meter, passes, entries)
    return (time.monotonic_ns() - began_ns) / (passes * entries)


def bench_statistics(bench: Bench) -> None:
    """Measure the cost of counting a put, and compare it with the producer's cost of a put."""
    counting = [counting_cost_ns(passes=5_000_000, entries=1) for _ in range(bench.rounds)]
    grouped = [counting_cost_ns(passes=50_000, entries=100) for _ in range(bench.rounds)]
    engine, path = bench.store()
    with engine:
        rates = [bench.rate(bench.produce(path, "put", 128)) for _ in range(bench.rounds)]
    bench.rows.append(Row("counting one put", "ns", counting, 1e9 / quantile(rates, 0.5), "one put, async, 128 B", floor=0.02,
                          aim=0.01, higher_is_better=False,
                          notes={"ns, 100 puts a pass": quantile(grouped, 0.5), **bench.stalls("put", 128)}))
    shutil.rmtree(path.parent)


def bench_workers(bench: Bench) -> None:
    engine, path = bench.store()
    began = time.perf_counter()
    with engine:
        ready = time.perf_counter() - began
        status = engine_status(path, {})
        processes = processes_of(path)
        time.sleep(2)
        before = [sum(process.cpu_times()[:2]) for process in processes]
        time.sleep(IDLE_SECONDS)
        used = sum(sum(process.cpu_times()[:2]) - was for process, was in zip(processes, before))
        private = {worker["kind"]: private_bytes(worker["pid"]) / 1048576 for worker in status["workers"] if worker["pid"]}
        owner = psutil.Process(engine.pid)
        whole = sum(private_bytes(process.pid) for process in (owner, *owner.children())) / 1048576
        replaced = [_writer_replaced_ms(path) for _ in range(bench.rounds)]
    bench.rows.append(Row("engine ready", "s", [ready], floor=0.5, aim=0.25, higher_is_better=False))
    bench.rows.append(Row("kill -9 of the writer until the next ack", "ms", replaced, higher_is_better=False))
    bench.rows.append(Row("private memory of all processes of an engine", "MiB", [whole], floor=80, aim=50, higher_is_better=False))
    bench.rows.append(Row("idle cost of all workers together", "% of a core", [used / IDLE_SECONDS * 100], floor=1, higher_is_better=False))
    bench.rows.append(Row("private memory of the largest worker", "MiB", [max(private.values())], floor=40, aim=25,
                          higher_is_better=False, notes=private))
    shutil.rmtree(path.parent)


def bench_memory(bench: Bench) -> None:
    """Measure the private bytes of each worker before and after many puts: they must not grow with the messages."""
    messages = 10_000_000 if bench.rounds > 1 else 1_000_000
    warm_up = messages // 10
    engine, path = bench.store()
    with engine, pyengine.connect(path) as producer:
        workers = {worker["kind"]: worker["pid"] for worker in engine_status(path, {})["workers"] if worker["pid"]}
        put_messages(producer, warm_up)
        wait_dispatched(path)
        before = {kind: private_bytes(pid) / 1048576 for kind, pid in workers.items()}
        began = time.perf_counter()
        put_messages(producer, messages)
        wait_dispatched(path)
        took = time.perf_counter() - began
        after = {kind: private_bytes(pid) / 1048576 for kind, pid in workers.items()}
        if workers != {worker["kind"]: worker["pid"] for worker in engine_status(path, {})["workers"] if worker["pid"]}:
            raise SystemExit("a worker died on the way")
    notes = {f"{kind} {when}, MiB": value[kind] for kind in workers for when, value in (("before", before), ("after", after))}
    bench.rows.append(Row(f"growth of the worker that grew most, {messages:,} messages", "MiB",
                          [max(after[kind] - before[kind] for kind in workers)], floor=1, aim=0.25, higher_is_better=False,
                          notes={"seconds": took, **notes}))
    shutil.rmtree(path.parent)


def put_messages(producer: pyengine.Producer, count: int) -> None:
    """Put `count` messages of 128 B with a key into 64 queues of 4 topics."""
    bodies = [os.urandom(128)] * 256
    for number in range(-(-count // len(bodies))):
        producer.put_many(f"bench-{number % 4}", bodies, queue_id=number // 4 % 16, keys="some-key")


def processes_of(path: Path) -> list[psutil.Process]:
    """Return all living processes of the engine, with the supervisor."""
    return [psutil.Process(pid) for pid in engine_pids(path)]


def _writer_replaced_ms(path: Path) -> float:
    """Measure the time from the writer's death to an acknowledged put, at least 10 s after the last death: no restart pause."""
    writer = next(worker for worker in engine_status(path, {})["workers"] if worker["kind"] == "writer")
    time.sleep(max(0.0, psutil.Process(writer["pid"]).create_time() + HEALTHY_AFTER_S + 1 - time.time()))
    with pyengine.connect(path) as producer:
        producer.put("bench", b"before")
        began = time.perf_counter()
        os.kill(writer["pid"], signal.SIGKILL)
        producer.put("bench", b"after")
        return (time.perf_counter() - began) * 1e3


def private_bytes(pid: int) -> int:
    """Return the process's private dirty bytes: neither a file's nor shared since a fork."""
    total, is_own = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            is_own = rest[0].endswith("p")
        elif is_own and first in ("Private_Dirty:", "Swap:"):
            total += int(rest[0]) * 1024
    return total


BENCHES: tuple[Callable[[Bench], None], ...] = (
    bench_workers, bench_statistics, bench_memory, bench_visible, bench_async_puts, bench_awaited_puts, bench_async_many, bench_sync,
    bench_new_topics, bench_reads, bench_recovery, bench_recovery_topics)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round of each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the stores go (default: a temporary folder beside this one's disk)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every round")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="show what an earlier run kept beside this one's")
    parser.add_argument("--only", default="", help="only benches with this in their name")
    arguments = parser.parse_args()
    earlier = earlier_medians(arguments.compare) if arguments.compare else None
    with tempfile.TemporaryDirectory(dir=arguments.folder or Path.cwd(), prefix="bench-") as folder:
        bench = Bench(Path(folder), 1 if arguments.quick else arguments.rounds, 1.0 if arguments.quick else 3.0)
        for each in BENCHES:
            if arguments.only in each.__name__:
                print(f"{each.__name__} ...", file=sys.stderr)
                each(bench)
    show(bench.rows, earlier)
    if arguments.json:
        keep(bench.rows, arguments.json)


if __name__ == "__main__":
    main()
