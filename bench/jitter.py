"""How long a single put stalls, and why: p99.9, the longest, and a cause for each stall.

    python bench/jitter.py [--minutes 5 | --quick] [--rate 20000] [--body-bytes 1024] [--stall-ms 5] [--spark] [--folder DIR]
                           [--json FILE]

One producer puts asynchronously, one message at a time, while segments roll each few seconds, old ones are deleted and
checkpoints are written; with --spark another process reads the store in a loop. A watcher process samples counters:
what the kernel says of writer and producer (/proc/PID/schedstat, stat, wchan), CPU time that the host took, and what
the engine's shared memory says. Each put of --stall-ms or longer gets the cause that covers at least half of it, else the event
that fell into it, else "not known". Puts are paced (--rate 0: as fast as they go, which measures the disk too).
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import pyengine  # noqa: E402
from measure import figure  # noqa: E402
from pyengine.ipc.control_block import EngineMemory  # noqa: E402
from pyengine.ipc.shared_objects import find_folder  # noqa: E402
from pyengine.native import control as native  # noqa: E402

SEGMENT_BYTES = 64 << 20
SETTINGS = {"mapped_file_size_commit_log_bytes": SEGMENT_BYTES, "mapped_file_size_consume_queue_bytes": 6_000_000,
            "max_hash_slot_num": 100_000, "max_index_num": 400_000, "file_reserved_time_hours": 0,
            "delete_when": ";".join(map(str, range(24))), "clean_resource_interval_ms": 5000}
SAMPLE_S = 0.002
COUNTERS_EACH = 5      # counters are read at every so many samples
BURST_S = 0.001        # puts are paced in bursts
QUICK_S = 3.0
TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
SHOWN = 10
WRITEBACK = ("writeback", "dirty_pages", "jbd2", "transaction", "folio_wait", "wait_on_page", "ext4", "io_schedule", "blk", "submit_bio")

PRODUCER_WAITS = "the producer waits for a CPU"
WRITER_WAITS = "the writer waits for a CPU"
BOTH_WAIT = "producer and writer wait for a CPU in turns"
STOLEN = "the host takes the CPU"
PAGES = "page writeback or file system"
BLOCKED = "the writer sleeps in a pass"
NOT_READY = "segment roll, allocator not ready"
ROLL = "segment roll"
RESTARTED = "the writer was restarted"
CHECKPOINT = "a checkpoint at that time"
CLEANING = "cleaning at that time"
NOT_KNOWN = "not known"


class Stall(NamedTuple):
    """One put that took long: CLOCK_MONOTONIC ns, and the ends of the log before and after it."""

    began_ns: int
    ended_ns: int
    end_before: int
    end_after: int


class Counters(NamedTuple):
    """What grows, at one moment."""

    at_ns: int
    writer_wait_ns: int      # runnable, without a CPU
    producer_wait_ns: int
    stolen_ns: int
    ready_end: int
    writer_incarnation: int
    min_offset: int
    checkpoint_ns: int       # of the file's last change


class Look(NamedTuple):
    """The writer in a pass that lasts: its state (R, S, D) and where in the kernel it is."""

    at_ns: int
    state: str
    where: str


@dataclass
class Watched:
    """What the watcher saw."""

    counters: list[Counters] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)


def cause_of(stall: Stall, watched: Watched) -> tuple[str, dict[str, float]]:
    """The cause of a stall, and the milliseconds of evidence for each that can be measured."""
    length_ns = stall.ended_ns - stall.began_ns
    before, after = _around(stall, watched.counters)
    looks = [look for look in watched.looks if stall.began_ns <= look.at_ns <= stall.ended_ns]
    asleep = [look for look in looks if look.state != "R"]
    in_pages = sum(any(word in look.where for word in WRITEBACK) or look.state == "D" for look in asleep)
    sample_ns = int(SAMPLE_S * 1e9)
    evidence_ns = {PRODUCER_WAITS: after.producer_wait_ns - before.producer_wait_ns,
                   WRITER_WAITS: after.writer_wait_ns - before.writer_wait_ns,
                   STOLEN: after.stolen_ns - before.stolen_ns,
                   PAGES: in_pages * sample_ns, BLOCKED: (len(asleep) - in_pages) * sample_ns}
    evidence = {name: round(min(ns, length_ns) / 1e6, 1) for name, ns in evidence_ns.items() if ns > 0}
    cause = max(evidence_ns, key=lambda name: evidence_ns[name])
    if evidence_ns[cause] * 2 >= length_ns:
        return cause, evidence
    if (evidence_ns[PRODUCER_WAITS] + evidence_ns[WRITER_WAITS]) * 2 >= length_ns:
        return BOTH_WAIT, evidence
    if stall.end_after // SEGMENT_BYTES != stall.end_before // SEGMENT_BYTES:
        rolled_to = (stall.end_after // SEGMENT_BYTES + 1) * SEGMENT_BYTES
        return (ROLL if before.ready_end >= rolled_to else NOT_READY), evidence
    for name, differs in ((RESTARTED, before.writer_incarnation != after.writer_incarnation),
                          (CHECKPOINT, before.checkpoint_ns != after.checkpoint_ns),
                          (CLEANING, before.min_offset != after.min_offset)):
        if differs:
            return name, evidence
    return NOT_KNOWN, evidence


def _around(stall: Stall, counters: list[Counters]) -> tuple[Counters, Counters]:
    """The last counters before the stall, and the first after it."""
    first = bisect_right(counters, stall.began_ns, key=lambda one: one.at_ns) - 1
    last = bisect_left(counters, stall.ended_ns, key=lambda one: one.at_ns)
    return counters[max(0, first)], counters[min(len(counters) - 1, last)]


# ---- the watcher's process ---------------------------------------------------------


def watch(store: Path, producer_pid: int, talk: Connection) -> None:
    """Sample until told to stop, then send what was seen."""
    watched = Watched()
    with EngineMemory.attach(find_folder(store), writable=False) as memory:
        control = memory.control
        talk.send("ready")
        started_ms, number = 0, 0
        while not talk.poll():
            if number % COUNTERS_EACH == 0:
                watched.counters.append(_counters(store, control, producer_pid))
            number += 1
            was_ms, started_ms = started_ms, native.load(control.writer, "pass_started_ms")
            if started_ms and started_ms == was_ms:
                watched.looks.append(_look(native.load(control.workers[native.WRITER], "pid")))
            time.sleep(SAMPLE_S)
        watched.counters.append(_counters(store, control, producer_pid))
    talk.send(watched)


def _counters(store: Path, control, producer_pid: int) -> Counters:
    line = control.workers[native.WRITER]
    steal = int(Path("/proc/stat").read_text().split(maxsplit=9)[8]) * TICK_NS
    try:
        checkpoint_ns = os.stat(store / "checkpoint").st_mtime_ns
    except OSError:
        checkpoint_ns = 0
    return Counters(time.monotonic_ns(), _wait_ns(native.load(line, "pid")), _wait_ns(producer_pid), steal,
                    native.load(control.allocator, "ready_end"), native.load(line, "incarnation"),
                    native.load_position(control.min_offset), checkpoint_ns)


def _wait_ns(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
    except OSError:
        return 0


def _look(pid: int) -> Look:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        where = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        state, where = "?", ""
    return Look(time.monotonic_ns(), state, where)


# ---- the producer's process ----------------------------------------------------------


class Latencies:
    """A histogram of ns with 16 steps for each power of two."""

    def __init__(self) -> None:
        self.counts = [0] * (64 * 16)
        self.longest_ns = 0

    def quantile_us(self, share: float) -> float:
        """The upper end of the step below which `share` of all lie."""
        left = share * sum(self.counts)
        for place, count in enumerate(self.counts):
            left -= count
            if left <= 0:
                return min(float(16 + place % 16 + 1) * 2.0 ** (place // 16 - 4), self.longest_ns) / 1000
        return self.longest_ns / 1000


def put_for(store: Path, seconds: float, rate: int, body_bytes: int, stall_ns: int) -> tuple[Latencies, list[Stall], float]:
    """Put one message at a time; latencies, stalls, seconds."""
    clock, latencies, stalls = time.monotonic_ns, Latencies(), []
    counts, body, end, number = latencies.counts, os.urandom(body_bytes), 0, 0
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
                    result = producer.put("jitter", body, queue_id=number % 4)
                    after_ns = clock()
                    if not result.ok:
                        raise SystemExit(f"{result.status.name}: {result.reason}")
                    took_ns = after_ns - before_ns
                    bits = took_ns.bit_length()
                    counts[(bits - 1) * 16 + ((took_ns << 4 >> (bits - 1)) & 15)] += 1
                    if took_ns > latencies.longest_ns:
                        latencies.longest_ns = took_ns
                    if took_ns >= stall_ns:
                        stalls.append(Stall(before_ns, after_ns, end, result.physical_offset + result.size_bytes))
                    end = result.physical_offset + result.size_bytes
            return latencies, stalls, (clock() - began_ns) / 1e9
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
            watched = ours.recv()
            watcher.join()
        finally:
            if reader is not None:
                reader.terminate()
                reader.communicate()
    found = []
    for stall in stalls:
        cause, evidence = cause_of(stall, watched)
        found.append({"ms": round((stall.ended_ns - stall.began_ns) / 1e6, 2), "cause": cause, "evidence_ms": evidence,
                      "at_s": round((stall.began_ns - watched.counters[0].at_ns) / 1e9, 3)})
    puts = sum(latencies.counts)
    events = [(one, two) for one, two in zip(watched.counters, watched.counters[1:])]
    return {"seconds": round(took_s, 1), "puts": puts, "rate": round(puts / took_s), "body_bytes": arguments.body_bytes,
            "spark": arguments.spark, "cpus": os.cpu_count(), "load": [round(one, 1) for one in os.getloadavg()],
            **{f"p{name}_us": round(latencies.quantile_us(float(name) / 100), 1) for name in ("50", "99", "99.9", "99.99")},
            "longest_ms": round(latencies.longest_ns / 1e6, 2), "stall_ms": arguments.stall_ms,
            "rolls": (watched.counters[-1].ready_end - watched.counters[0].ready_end) // SEGMENT_BYTES,
            "deletions": sum(one.min_offset != two.min_offset for one, two in events),
            "checkpoints": sum(one.checkpoint_ns != two.checkpoint_ns for one, two in events), "stalls": found}


def show(told: dict) -> None:
    """Tables for people."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 120)
    beside = (f"{told['rolls']} rolls, {told['deletions']} deletions, {told['checkpoints']} checkpoints"
              f"{', Spark reads' if told['spark'] else ''}")
    table = Table(title=f"{told['puts']:,} puts of {told['body_bytes']} B in {told['seconds']:g} s; {beside}; "
                        f"{told['cpus']} CPUs, load {told['load'][0]}")
    for name in ("p50", "p99", "p99.9", "p99.99"):
        table.add_column(f"{name}, us")
    table.add_column("longest, ms")
    table.add_column(f"stalls of {told['stall_ms']:g} ms")
    table.add_row(*(figure(told[f"{name}_us"]) for name in ("p50", "p99", "p99.9", "p99.99")), figure(told["longest_ms"]),
                  str(len(told["stalls"])))
    console.print(table)
    if told["stalls"]:
        table = Table("cause", "stalls", "longest, ms", "together, ms")
        causes = {stall["cause"] for stall in told["stalls"]}
        of = {cause: [stall["ms"] for stall in told["stalls"] if stall["cause"] == cause] for cause in causes}
        for cause in sorted(of, key=lambda cause: -sum(of[cause])):
            table.add_row(cause, str(len(of[cause])), figure(max(of[cause])), figure(sum(of[cause])))
        console.print(table)
        table = Table("at, s", "longest stalls, ms", "cause", "evidence, ms")
        for stall in sorted(told["stalls"], key=lambda stall: -stall["ms"])[:SHOWN]:
            table.add_row(f"{stall['at_s']:.1f}", figure(stall["ms"]), stall["cause"],
                          ", ".join(f"{name} {ms:g}" for name, ms in stall["evidence_ms"].items()))
        console.print(table)


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
        told = measure(folder, QUICK_S if arguments.quick else arguments.minutes * 60, arguments)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(told)
    if arguments.json:
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
