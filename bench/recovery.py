"""Hold the recovery time that `pyengine plan` names against recoveries.

usage: python bench/recovery.py [--rounds N] [--quick] [--folder DIR] [--json FILE] [--page]

Of each load an engine gets the log until four seconds' worth of messages are beyond the end of a segment, the last of it at the load's
rate: recovery then reads the segment before, too, as the plan's formula has it. All processes are killed, and `pyengine recover` is
timed. The plan is asked in the same round. Medians of the rounds; --page writes the table into bench/notes/engine.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import pyengine  # noqa: E402
from measure import add_result_options, conditions, give_results  # noqa: E402
from pyengine.cli.output import size_text  # noqa: E402
from pyengine.cli.plan import Load, make_plan, measure_reading  # noqa: E402
from pyengine.storage.config import load_config  # noqa: E402
from run import SETTINGS, kill_all, recover  # noqa: E402

PAGE = HERE / "notes" / "engine.md"
NAME, MAKER = "recoveries", "bench/recovery.py"
SEGMENT_BYTES = int(SETTINGS["mapped_file_size_commit_log_bytes"])  # type: ignore[call-overload]
TOPIC = "bench"
LOADS = ((100_000, 128), (20_000, 1024), (2_000, 10_240))  # messages a second, bytes of a body
PACED_S = 10.0  # at the load's rate before the kill, four of them beyond the segment
BEYOND_S = 4.0
BATCHES_A_S = 20


@dataclass(frozen=True, slots=True)
class Round:
    """One kill: what the plan said at most, and what was found."""

    planned_bytes: int
    planned_s: float
    read_bytes: int
    recovery_s: float
    command_s: float


def put(path: Path, rate: int, size: int, segment_bytes: int) -> None:
    """Fill the log to the end of its second segment and `BEYOND_S` beyond it, the last of it at the rate."""
    bodies = [os.urandom(size)] * (rate // BATCHES_A_S)
    bytes_per_s = Load(rate, size, len(TOPIC)).bytes_per_s
    paced_from = 2 * segment_bytes - (PACED_S - BEYOND_S) * bytes_per_s
    with pyengine.connect(path) as producer:
        end, due_s = 0, 0.0
        while end < 2 * segment_bytes + BEYOND_S * bytes_per_s:
            if end >= paced_from:
                due_s = (due_s or time.monotonic()) + 1 / BATCHES_A_S
                time.sleep(max(0.0, due_s - time.monotonic()))
            end = producer.put_many(TOPIC, bodies).end_physical_offset


def measure(rate: int, size: int, segment_bytes: int, folder: Path) -> Round:
    """One store: fill, kill, recover; and what the plan says of it now."""
    settings = SETTINGS | {"mapped_file_size_commit_log_bytes": segment_bytes}
    path = folder / "store"
    with pyengine.Engine(path, **settings):
        put(path, rate, size, segment_bytes)
        kill_all(path)
        report, command_s, _ = recover(path)
    made = make_plan(Load(rate, size, len(TOPIC), queues=1, producers=1), load_config(path), measure_reading(size))
    shutil.rmtree(path)
    return Round(made["recovery_read_bytes"], made["recovery_s"], report["end_offset"] - report["scan_from"], report["seconds"], command_s)


def table(document: dict) -> str:
    """The lines of the page."""
    rounds = max(len(load["rounds"]) for load in document["loads"])
    lines = [f"Segments of {size_text(document['segment_bytes'])}, medians of {rounds} rounds; {document['conditions']}:", "",
             "| load | plan: read at most | read | plan | recovery | with the start of the command |", "|---|---:|---:|---:|---:|---:|"]
    for load in document["loads"]:
        of = {name: statistics.median(each[name] for each in load["rounds"]) for name in load["rounds"][0]}
        lines.append(f"| {load['rate']:,} messages/s of {size_text(load['size'])} | {size_text(int(of['planned_bytes']))} | "
                     f"{size_text(int(of['read_bytes']))} | {of['planned_s']:.2f} s | {of['recovery_s']:.2f} s | {of['command_s']:.2f} s |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of each with segments of 64 MiB at a quarter of the rates")
    add_result_options(parser, "every round", PAGE)
    arguments = parser.parse_args()
    share = 4 if arguments.quick else 1
    document: dict = {"conditions": conditions(), "segment_bytes": SEGMENT_BYTES // share, "loads": []}
    with tempfile.TemporaryDirectory(dir=arguments.folder or Path.cwd(), prefix="bench-", ignore_cleanup_errors=True) as folder:
        for rate, size in LOADS:
            rate //= share
            print(f"{rate:,} messages/s of {size_text(size)} ...", file=sys.stderr)
            rounds = [asdict(measure(rate, size, SEGMENT_BYTES // share, Path(folder)))
                      for _ in range(1 if arguments.quick else arguments.rounds)]
            document["loads"].append({"rate": rate, "size": size, "rounds": rounds})
    give_results(arguments, document, table(document), PAGE, NAME, MAKER)


if __name__ == "__main__":
    main()
