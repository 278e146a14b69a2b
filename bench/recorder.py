"""Measure the cost of the flight recorder: one build with and without it, in turns.

usage: python bench/recorder.py [--pairs N] [--quick] [--only TEXT] [--folder DIR] [--json FILE] [--page]

Two engines run on stores of their own, new ones for every PAIRS_OF_ENGINES pairs, since two engines differ by chance for as long as
they live. The workers of both are started anew; the recorder's name is removed from one before, so that its workers go on without it.
Each pair puts as many messages into both, the first of them by turns. Its ratio is with / without: of the writer's CPU
time for a message, of that of all processes of the engine, and of the messages a second. The table has the median of all pairs and
its 95 % confidence interval by order statistics, which asks nothing of how the ratios are distributed. --page writes it into
bench/notes/engine.md.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import pyengine  # noqa: E402
from measure import add_result_options, conditions, cpu_s, give_results  # noqa: E402
from pyengine.cli.bench import produce, wait_dispatched  # noqa: E402
from pyengine.cli.engine_status import engine_status  # noqa: E402
from pyengine.cli.torture import wait_for  # noqa: E402
from pyengine.ipc.shared_objects import RECORDER, find_folder  # noqa: E402
from run import SETTINGS  # noqa: E402

PAGE = HERE / "notes" / "engine.md"
NAME, MAKER = "recorder", "bench/recorder.py"
PAIRS_OF_ENGINES = 8
RATIOS = ("writer's CPU a message", "engine's CPU a message", "messages a second")


@dataclass(frozen=True)
class Work:
    """What is put in a turn."""

    name: str
    kind: str
    size: int
    count: int
    messages: int
    settings: dict[str, object] = field(default_factory=dict)


WORKS = (
    Work("put, async, 128 B", "put", 128, 1, 100_000),
    Work("put_many(256), async, 1 KiB", "many", 1024, 256, 100_000),
    Work("put, sync, 1 KiB", "put", 1024, 1, 1_500, {"flush_disk_type": "SYNC_FLUSH"}),
)


def worker_pids(path: Path) -> dict[str, int]:
    """The processes of an engine all of whose workers are up; {} for one that is not."""
    workers = engine_status(path, {})["workers"]
    return {one["kind"]: one["pid"] for one in workers if one["pid"]} if all(one["state"] == "ready" for one in workers) else {}


def start_workers_anew(path: Path, *, with_recorder: bool) -> None:
    """Replace all workers of a running engine; without its recorder from now on if so asked."""
    before = wait_for("all workers are up", lambda: worker_pids(path))
    if not with_recorder:
        find_folder(path).unlink(RECORDER)
    for kind, pid in before.items():
        if kind == "supervisor":
            continue
        os.kill(pid, signal.SIGTERM)
        wait_for(f"a new {kind}", lambda kind=kind, pid=pid: worker_pids(path).get(kind, pid) != pid)
    if (RECORDER in find_folder(path).names()) != with_recorder:
        raise SystemExit("the recorder is gone, or came back: nothing can be compared")


def turn(path: Path, work: Work) -> tuple[float, float, float]:
    """Return the figures for RATIOS of one engine: CPU seconds of the writer and of all, and messages per second."""
    before = cpu_s(worker_pids(path))
    (done,) = produce(path, work.kind, work.size, 3600.0, work.count, messages_max=work.messages)
    wait_dispatched(path)
    after = cpu_s(worker_pids(path))
    used = {kind: after[kind] - before[kind] for kind in after}
    return used["writer"] / done.messages, sum(used.values()) / done.messages, done.messages / done.seconds


def confidence(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """(lowest, median, highest): the median of the values and an interval that has their true median at this level.

    By order statistics: as many values as possible are left out at both ends while those that are left out have the true median with
    a probability below 1 - level. With fewer than six values it is all of them.
    """
    ordered, count, left_out, probability = sorted(values), len(values), 0, 0.0
    while left_out < count // 2 and (probability := probability + 2 * math.comb(count, left_out) / 2**count) <= 1 - level:
        left_out += 1
    at = max(0, left_out - 1)
    return ordered[at], statistics.median(ordered), ordered[count - 1 - at]


def measure(work: Work, pairs: int, folder: Path) -> list[list[float]]:
    """The ratios of each pair."""
    found: list[list[float]] = []
    while len(found) < pairs:
        found += measure_two_engines(work, min(PAIRS_OF_ENGINES, pairs - len(found)), folder, first=len(found) // PAIRS_OF_ENGINES % 2 == 0)
    return found


def measure_two_engines(work: Work, pairs: int, folder: Path, *, first: bool) -> list[list[float]]:
    """The ratios of pairs of two new engines; `first`: whether the first of them keeps its recorder."""
    with ExitStack() as stack:
        stores = {}
        for with_recorder in (first, not first):
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True))) / "store"
            stack.enter_context(pyengine.Engine(path, **{**SETTINGS, **work.settings}))
            start_workers_anew(path, with_recorder=with_recorder)
            stores[with_recorder] = path
        for path in stores.values():
            turn(path, work)  # page tables, new files
        found = []
        for pair in range(pairs):
            order = (True, False) if pair % 2 == 0 else (False, True)
            turns = {which: turn(stores[which], work) for which in order}
            found.append([ours / other for ours, other in zip(turns[True], turns[False], strict=True)])
        return found


def table(document: dict) -> str:
    """The lines of the page."""
    lines = [f"With / without, medians of pairs in turns with their 95 % confidence intervals; {document['conditions']}:", "",
             f"| work | pairs | {' | '.join(RATIOS)} |", "|---|---:|---:|---:|---:|"]
    for name, pairs in document["pairs"].items():
        cells = ["{1:.3f} ({0:.3f} to {2:.3f})".format(*confidence([pair[which] for pair in pairs])) for which in range(len(RATIOS))]
        lines.append(f"| {name} | {len(pairs)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="three pairs of a tenth of the messages")
    parser.add_argument("--only", default="", help="only works with this in their name")
    add_result_options(parser, "the ratios of every pair", PAGE)
    arguments = parser.parse_args()
    document: dict = {"conditions": conditions(), "pairs": {}}
    works, pairs = [work for work in WORKS if arguments.only in work.name], arguments.pairs
    if arguments.quick:
        works, pairs = [replace(work, messages=work.messages // 10) for work in works], 3
    with tempfile.TemporaryDirectory(dir=arguments.folder or Path.cwd(), prefix="bench-", ignore_cleanup_errors=True) as folder:
        for work in works:
            print(f"{work.name} ...", file=sys.stderr)
            document["pairs"][work.name] = measure(work, pairs, Path(tempfile.mkdtemp(dir=folder)))
    give_results(arguments, document, table(document), PAGE, NAME, MAKER)


if __name__ == "__main__":
    main()
