"""How long a single put stalls, and why: p99.9, the longest, and a cause for each stall.

    python bench/jitter.py [--minutes 5 | --quick] [--rate 20000] [--body-bytes 1024] [--stall-ms 5] [--spark] [--folder DIR]
                           [--json FILE]

One producer puts asynchronously, one message at a time, while segments roll each few seconds, old ones are deleted and
checkpoints are written; with --spark another process reads the store in a loop. The engine's flight recorder (`pyengine why`)
says what kept the writer for 5 ms and longer. A watcher process samples what it cannot know: how long the producer was without
a CPU (/proc/PID/schedstat), and CPU time that the host took. Each put of --stall-ms or longer gets the cause that covers most of
it, or "not known" where all of them together cover less than half. Puts are paced (--rate 0: as fast as they go, which measures
the disk too).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left, bisect_right
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import pyengine  # noqa: E402
from measure import figure  # noqa: E402
from pyengine._native import ffi, lib  # noqa: E402
from pyengine.cli import why  # noqa: E402
from pyengine.cli.why import Waits, write_stalls  # noqa: E402
from pyengine.ipc.control_block import EngineMemory  # noqa: E402
from pyengine.native import control as native  # noqa: E402
from pyengine.native import recorder, store_stats  # noqa: E402

SEGMENT_BYTES = 64 << 20
SETTINGS = {"mapped_file_size_commit_log_bytes": SEGMENT_BYTES, "mapped_file_size_consume_queue_bytes": 6_000_000,
            "max_hash_slot_num": 100_000, "max_index_num": 400_000, "file_reserved_time_hours": 0,
            "delete_when": ";".join(map(str, range(24))), "clean_resource_interval_ms": 5000}
SAMPLE_S = 0.01
RECORDER_EACH = 25     # the recorder is read at every so many samples: long before newer stalls take the places of what is there
BURST_S = 0.001        # puts are paced in bursts
QUICK_S = 3.0
TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
SHOWN = 10

PRODUCER_WAITS = "the producer was ready to run and had no processor"
STOLEN = "the host took the processor"
NOT_KNOWN = "not known"


class Stall(NamedTuple):
    """One put that took long: CLOCK_MONOTONIC ns."""

    began_ns: int
    ended_ns: int


class Counters(NamedTuple):
    """What grows, at one moment."""

    at_ns: int
    producer_wait_ns: int    # runnable, without a CPU
    stolen_ns: int
    ready_end: int
    min_offset: int
    checkpoint_ns: int       # of the file's last change


def cause_of(stall: Stall, counters: list[Counters], recorded: tuple[str, int]) -> tuple[str, dict[str, float]]:
    """The cause of a stall, and the milliseconds of evidence for each; `recorded`: what main_stall() says of that time."""
    length_ns = stall.ended_ns - stall.began_ns
    before, after = _around(stall, counters)
    cause, recorded_ns = recorded
    evidence_ns = {PRODUCER_WAITS: after.producer_wait_ns - before.producer_wait_ns, STOLEN: after.stolen_ns - before.stolen_ns,
                   **({cause: recorded_ns} if cause else {})}
    evidence = {name: round(min(ns, length_ns) / 1e6, 1) for name, ns in evidence_ns.items() if ns > 0}
    if sum(evidence_ns.values()) * 2 < length_ns:
        return NOT_KNOWN, evidence
    return max(evidence_ns, key=lambda name: evidence_ns[name]), evidence


def main_stall(waits: Waits, began_ns: int, ended_ns: int) -> tuple[str, int]:
    """Return the writer's main stall in that time, in one clause, and its duration there; ("", 0) without one."""
    stalls = [*waits._stalls[native.WRITER].values(), *waits._stalls[recorder.PUTS_RING].values()]
    found = max(stalls, key=lambda one: why._shared_ns(one, began_ns, ended_ns), default=None)
    if found is None or (shared_ns := why._shared_ns(found, began_ns, ended_ns)) <= 0:
        return "", 0
    return why._means(found.cause, [found]), shared_ns


def _around(stall: Stall, counters: list[Counters]) -> tuple[Counters, Counters]:
    """The last counters before the stall, and the first after it."""
    first = bisect_right(counters, stall.began_ns, key=lambda one: one.at_ns) - 1
    last = bisect_left(counters, stall.ended_ns, key=lambda one: one.at_ns)
    return counters[max(0, first)], counters[min(len(counters) - 1, last)]


# ---- the watcher's process ---------------------------------------------------------


def watch(store: Path, producer_pid: int, talk: Connection) -> None:
    """Sample until told to stop, then send the counters and what the flight recorder had."""
    counters, waits = [], Waits(store)
    with EngineMemory.of(store) as memory:
        talk.send("ready")
        while not talk.poll(SAMPLE_S):
            counters.append(_counters(store, memory.control, producer_pid))
            if len(counters) % RECORDER_EACH == 0:
                waits.collect()
        counters.append(_counters(store, memory.control, producer_pid))
    waits.collect()
    talk.send((counters, waits))


def _counters(store: Path, control, producer_pid: int) -> Counters:
    steal = int(Path("/proc/stat").read_text().split(maxsplit=9)[8]) * TICK_NS
    try:
        checkpoint_ns = os.stat(store / "checkpoint").st_mtime_ns
    except OSError:
        checkpoint_ns = 0
    waited_ns = int(Path(f"/proc/{producer_pid}/schedstat").read_text().split()[1])
    return Counters(time.monotonic_ns(), waited_ns, steal, native.load(control.allocator, "ready_end"),
                    native.load_position(control.min_offset), checkpoint_ns)


# ---- the producer's process ----------------------------------------------------------


def put_for(store: Path, seconds: float, rate: int, body_bytes: int, stall_ns: int) -> tuple[store_stats.Latency, list[Stall], float]:
    """Put one message at a time; latencies, stalls, seconds."""
    clock, counted, add, stalls = time.monotonic_ns, ffi.new("struct ms_latency *"), lib.ms_latency_add, []
    body, number = os.urandom(body_bytes), 0
    per_burst = max(1, round(rate * BURST_S)) if rate else 1000
    gc.collect()
    gc.disable()  # a collection of this process is no stall of the engine
    try:
        with pyengine.connect(store) as producer:
            began_ns = due_ns = clock()
            until_ns = began_ns + int(seconds * 1e9)
            while (now_ns := clock()) < until_ns:
                if rate and now_ns < due_ns:
                    time.sleep((due_ns - now_ns) / 1e9)
                due_ns = max(due_ns + int(per_burst / rate * 1e9), now_ns) if rate else 0
                for _ in range(per_burst):
                    number += 1
                    before_ns = clock()
                    producer.put("jitter", body, queue_id=number % 4)
                    after_ns = clock()
                    add(counted, after_ns - before_ns)
                    if after_ns - before_ns >= stall_ns:
                        stalls.append(Stall(before_ns, after_ns))
            return store_stats.latency(counted), stalls, (clock() - began_ns) / 1e9
    finally:
        gc.enable()


def read_with_spark(store: Path) -> None:
    """Count the messages again and again, until this process is ended."""
    from pyengine import spark

    running = spark.session()
    while True:
        try:
            print(running.read.format("pyengine").option("failOnDataLoss", "false").load(str(store)).count(), flush=True)
        except Exception as error:  # noqa: BLE001 - segments are deleted under it
            print(f"a read failed: {str(error)[:200]}", file=sys.stderr, flush=True)


def measure(folder: Path, seconds: float, arguments: argparse.Namespace) -> dict:
    """One run, as the document that --json keeps."""
    store = folder / "store"
    with pyengine.Engine(store, **SETTINGS):
        put_for(store, 0.2, 0, arguments.body_bytes, 1 << 62)  # queues and index exist
        reader = None
        if arguments.spark:
            reader = subprocess.Popen([sys.executable, __file__, "--read-with-spark", str(store)], stdout=subprocess.PIPE, text=True)
        try:
            if reader is not None:
                reader.stdout.readline()  # its first read is done
            ours, theirs = multiprocessing.Pipe()
            watcher = multiprocessing.get_context("fork").Process(target=watch, args=(store, os.getpid(), theirs), daemon=True)
            watcher.start()
            ours.recv()
            latencies, stalls, took_s = put_for(store, seconds, arguments.rate, arguments.body_bytes,
                                                int(arguments.stall_ms * 1e6))
            ours.send("stop")
            counters, waits = ours.recv()
            watcher.join()
        finally:
            if reader is not None:
                reader.terminate()
                reader.communicate()
        recorded = waits.why().summary
    found = []
    for stall in stalls:
        cause, evidence = cause_of(stall, counters, main_stall(waits, stall.began_ns, stall.ended_ns))
        found.append({"ms": round((stall.ended_ns - stall.began_ns) / 1e6, 2), "cause": cause, "evidence_ms": evidence,
                      "at_s": round((stall.began_ns - counters[0].at_ns) / 1e9, 3)})
    pairs = list(itertools.pairwise(counters))
    quantiles = {f"p{name}_us": round(store_stats.percentile_ns(latencies.buckets, float(name) / 100) / 1000, 1)
                 for name in ("50", "99", "99.9", "99.99")}
    return {"seconds": round(took_s, 1), "puts": latencies.count, "rate": round(latencies.count / took_s),
            "body_bytes": arguments.body_bytes, "spark": arguments.spark, "cpus": os.cpu_count(),
            "load": [round(one, 1) for one in os.getloadavg()], **quantiles,
            "longest_ms": round(latencies.max_ns / 1e6, 2), "stall_ms": arguments.stall_ms,
            "rolls": (counters[-1].ready_end - counters[0].ready_end) // SEGMENT_BYTES,
            "deletions": sum(one.min_offset != two.min_offset for one, two in pairs),
            "checkpoints": sum(one.checkpoint_ns != two.checkpoint_ns for one, two in pairs), "stalls": found,
            "recorded": recorded}


def show(result: dict) -> None:
    """Tables for people."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 120)
    beside = (f"{result['rolls']} rolls, {result['deletions']} deletions, {result['checkpoints']} checkpoints"
              f"{', Spark reads' if result['spark'] else ''}")
    table = Table(title=f"{result['puts']:,} puts of {result['body_bytes']} B in {result['seconds']:g} s; {beside}; "
                        f"{result['cpus']} CPUs, load {result['load'][0]}")
    for name in ("p50", "p99", "p99.9", "p99.99"):
        table.add_column(f"{name}, us")
    table.add_column("longest, ms")
    table.add_column(f"stalls of {result['stall_ms']:g} ms")
    table.add_row(*(figure(result[f"{name}_us"]) for name in ("p50", "p99", "p99.9", "p99.99")), figure(result["longest_ms"]),
                  str(len(result["stalls"])))
    console.print(table)
    if result["stalls"]:
        table = Table("cause", "stalls", "longest, ms", "together, ms")
        causes = {stall["cause"] for stall in result["stalls"]}
        of = {cause: [stall["ms"] for stall in result["stalls"] if stall["cause"] == cause] for cause in causes}
        for cause in sorted(of, key=lambda cause: -sum(of[cause])):
            table.add_row(cause, str(len(of[cause])), figure(max(of[cause])), figure(sum(of[cause])))
        console.print(table)
        table = Table("at, s", "longest stalls, ms", "cause", "evidence, ms")
        for stall in sorted(result["stalls"], key=lambda stall: -stall["ms"])[:SHOWN]:
            table.add_row(f"{stall['at_s']:.1f}", figure(stall["ms"]), stall["cause"],
                          ", ".join(f"{name} {ms:g}" for name, ms in stall["evidence_ms"].items()))
        console.print(table)
    write_stalls("the flight recorder", {"all puts": result["recorded"]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_S:g} seconds")
    parser.add_argument("--rate", type=int, default=20_000, help="puts a second, 0 as fast as they go (%(default)s)")
    parser.add_argument("--body-bytes", type=int, default=1024, help="(%(default)s)")
    parser.add_argument("--stall-ms", type=float, default=5.0, help="a put that takes so long is a stall (%(default)s)")
    parser.add_argument("--spark", action="store_true", help="Spark reads the store meanwhile")
    parser.add_argument("--folder", type=Path, help="where the store goes (default: a temporary folder in this one)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--read-with-spark", type=Path, metavar="STORE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read_with_spark:
        read_with_spark(arguments.read_with_spark)
    folder = Path(tempfile.mkdtemp(dir=arguments.folder or Path.cwd(), prefix="bench-"))
    try:
        result = measure(folder, QUICK_S if arguments.quick else arguments.minutes * 60, arguments)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
