"""Compare the engine with other logs, which take turns in one run. See bench/README.md.

usage: python bench/bench_rivals.py [--quick] [--rounds N] [--share N] [--folder DIR] [--only TEXT] [--rivals NAME,...]
                                    [--json FILE] [--compare FILE]

Needs Java 17 and Maven for RocketMQ, Chronicle Queue and Aeron Archive (rivals/, built at the first run), the package
`lmdb` for LMDB; a log that is not installed is left out and named.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE.parent / "tests"), str(HERE.parent / "scripts")]


import needs  # noqa: E402
import pyengine  # noqa: E402
import raw  # noqa: E402
from interop import judge as java  # noqa: E402
from measure import figure  # noqa: E402
from pyengine.cli.bench import engine_cpu_seconds, produce, run_together, wait_dispatched  # noqa: E402
from run import SETTINGS  # noqa: E402

OURS = "pyengine"
JAVA_LOGS = ("rocketmq", "chronicle", "aeron")
PYTHON_LOGS = ("sqlite", "lmdb")
# Chronicle and Aeron reach into the JDK by more ways than RocketMQ does.
OPENED = ("java.io", "java.lang", "java.lang.reflect", "java.nio", "java.util", "jdk.internal.misc", "jdk.internal.ref", "sun.nio.ch")
JVM_FLAGS = (*(f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in OPENED),
             *(f"--add-exports=java.base/{name}=ALL-UNNAMED" for name in ("jdk.internal.misc", "jdk.internal.ref", "sun.nio.ch")),
             "--add-opens=jdk.compiler/com.sun.tools.javac=ALL-UNNAMED", "-Xmx1g", "-Dchronicle.analytics.disable=true")
QUICK_SHARE = 10
SECONDS_MAX = 600.0


@dataclass(frozen=True)
class Work:
    """One kind of load, and the logs that are compared. `floor` and `aim`: pyengine's rate relative to RocketMQ's."""

    name: str
    kind: str           # of producing.py
    count: int          # of put_many: messages of a batch; of put_async: how many may wait for their answers
    size_bytes: int
    producers: int
    messages: int
    rivals: tuple[str, ...]
    floor: float
    aim: float
    sync: bool = False


ALL_ASYNC = ("rocketmq", "chronicle", "aeron", "sqlite", "lmdb")
WORKS = (
    Work("put, 128 B", "put", 1, 128, 1, 1_000_000, ALL_ASYNC, 1.0, 1.5),
    Work("put, 1 KiB", "put", 1, 1024, 1, 500_000, ALL_ASYNC, 1.0, 1.5),
    Work("put_async, 128 B", "async", 2000, 128, 1, 1_000_000, ALL_ASYNC[:3], 1.0, 2.0),
    Work("put_many(256), 128 B, two producers", "many", 256, 128, 2, 4_000_000, ALL_ASYNC[:3], 8, 15),
    Work("put_many(256), 1 KiB", "many", 256, 1024, 1, 1_000_000, ALL_ASYNC[:3], 3, 5),
    Work("put, sync, 1 KiB", "put", 1, 1024, 1, 5_000, ("rocketmq", "sqlite", "lmdb"), 1.0, 1.5, sync=True),
    Work("put, sync, 1 KiB, four producers", "put", 1, 1024, 4, 10_000, ("rocketmq",), 1.5, 2.0, sync=True),
)


@dataclass
class Turn:
    """The result of one log in one round. `busy_us`: CPU time of all its processes for each message."""

    rate: float
    busy_us: float
    p50_us: float
    p99_us: float


@dataclass
class Outcome:
    """The turns of one work, by log."""

    work: Work
    turns: dict[str, list[Turn]] = field(default_factory=dict)

    def median(self, log: str, of: Callable[[Turn], float]) -> float:
        return statistics.median(of(turn) for turn in self.turns[log])

    def ratio(self, rival: str) -> float:
        """Return the median over the rounds of pyengine's rate relative to the rival's."""
        return statistics.median(ours.rate / its.rate for ours, its in zip(self.turns[OURS], self.turns[rival], strict=True))


class Rivals:
    """Return the logs that are installed here."""

    def __init__(self, wanted: tuple[str, ...]) -> None:
        self.missing: dict[str, str] = {}
        self._command: list[str] = []
        names = [name for name in wanted if name in JAVA_LOGS]
        try:
            target = java.build(HERE / "rivals") / "target" if names else Path()
            self._command = [needs.java_command(), *JVM_FLAGS, "-cp", f"{target / 'rivals.jar'}{os.pathsep}{target / 'lib' / '*'}",
                             "rivals.Main"] if names else []
        except java.JudgeUnavailableError as error:
            self.missing |= dict.fromkeys(names, str(error).partition("\n")[0])
        if "lmdb" in wanted and importlib.util.find_spec("lmdb") is None:
            self.missing["lmdb"] = "the package lmdb is not installed"
        self.names = tuple(name for name in wanted if name not in self.missing)

    def turn(self, log: str, work: Work, messages: int, folder: Path) -> Turn:
        """Run one turn of a rival in a process of its own."""
        script = [sys.executable, str(HERE / "other_python.py")] if log in PYTHON_LOGS else self._command
        command = [*script, log, str(folder), str(work.size_bytes), str(work.producers), str(messages), *(["sync"] if work.sync else [])]
        (answer,) = run_together([command])
        return Turn(answer["messages"] / answer["seconds"], answer["cpu_seconds"] * 1e6 / answer["messages"],
                    answer["p50_us"], answer["p99_us"])


def our_turn(work: Work, messages: int, folder: Path) -> Turn:
    """Run one turn of the engine and its producer processes."""
    store = folder / "store"
    with pyengine.Engine(store, **SETTINGS | {"flush_disk_type": "SYNC_FLUSH" if work.sync else "ASYNC_FLUSH"}):
        before_s = engine_cpu_seconds(store)
        answers = produce(store, work.kind, work.size_bytes, SECONDS_MAX, work.count, work.producers, messages // work.producers)
        busy_s = engine_cpu_seconds(store) - before_s + sum(answer.cpu_seconds for answer in answers)
        wait_dispatched(store)
    put = sum(answer.messages for answer in answers)
    return Turn(put / max(answer.seconds for answer in answers), busy_s * 1e6 / put,
                statistics.median(answer.p50_us for answer in answers), max(answer.p99_us for answer in answers))


def measure(work: Work, rivals: Rivals, rounds: int, share: int, folder: Path) -> Outcome:
    """Let all logs put the same number of messages in each round; the order rotates."""
    outcome = Outcome(work)
    logs = [OURS, *(name for name in work.rivals if name in rivals.names)]
    messages = max(work.messages // share, 256 * work.producers)
    for number in range(rounds):
        turn = number % len(logs)
        for log in (*logs[turn:], *logs[:turn]):
            print(f"{work.name}: round {number + 1} of {rounds}, {log} ...", file=sys.stderr)
            place = Path(tempfile.mkdtemp(dir=folder))
            raw.warm_memory(min(messages * (work.size_bytes + 128) * 2, 2 << 30))
            took = our_turn(work, messages, place) if log == OURS else rivals.turn(log, work, messages, place)
            outcome.turns.setdefault(log, []).append(took)
            shutil.rmtree(place)
    return outcome


def machine(folder: Path, load: float) -> dict[str, object]:
    """Return what the figures depend on; `load` is the load before the run."""
    kind = max((part for part in psutil.disk_partitions(all=True) if folder.is_relative_to(part.mountpoint)),
               key=lambda part: len(part.mountpoint)).fstype
    return {"cpus": os.cpu_count(), "python": sys.version.split()[0], "kernel": os.uname().release, "file_system": kind,
            "load": round(load, 2), "date": time.strftime("%Y-%m-%d", time.gmtime())}


def earlier_outcomes(path: Path) -> dict[str, Outcome]:
    """Read the results of a run with --json, by the name of the work."""
    found = {}
    for one in json.loads(path.read_text())["outcomes"]:
        work = Work(**one["work"] | {"rivals": tuple(one["work"]["rivals"])})
        found[work.name] = Outcome(work, {log: [Turn(**turn) for turn in turns] for log, turns in one["turns"].items()})
    return found


def compared(now: Outcome, then: Outcome | None, rivals: Rivals) -> str:
    """Return pyengine's rate in the earlier run, and its ratio to each log of both runs, then and now."""
    if then is None:
        return ""
    both = [name for name in rivals.names if name in now.turns and name in then.turns]
    return "\n".join([f"{figure(then.median(OURS, lambda turn: turn.rate))}"
                      f" ({figure(then.median(OURS, lambda turn: turn.busy_us))} us CPU)",
                      *(f"{name}: {then.ratio(name):.2f} -> {now.ratio(name):.2f}" for name in both)])


def show(outcomes: list[Outcome], rivals: Rivals, earlier: dict[str, Outcome] | None) -> None:
    """Print a line for each work: pyengine's rate, its ratio to each rival's, and those of an earlier run."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{os.cpu_count()} CPUs, Python {sys.version.split()[0]}, load {os.getloadavg()[0]:.1f}: messages a second; "
                        "beside a rival: ours / its (CPU us a message, p50 us)")
    table.add_column("work")
    table.add_column(OURS, justify="right")
    for name in rivals.names:
        table.add_column(name, justify="right")
    table.add_column("floor, aim beside rocketmq")
    if earlier is not None:
        table.add_column("earlier run")

    def cell(outcome: Outcome, log: str) -> str:
        if log not in outcome.turns:
            return ""
        costs = f"({figure(outcome.median(log, lambda turn: turn.busy_us))}, {figure(outcome.median(log, lambda turn: turn.p50_us))})"
        rate = figure(outcome.median(log, lambda turn: turn.rate))
        return f"{rate}\n{costs}" if log == OURS else f"{outcome.ratio(log):.2f} of {rate}\n{costs}"

    for outcome in outcomes:
        table.add_row(outcome.work.name, *(cell(outcome, log) for log in (OURS, *rivals.names)),
                      f"{figure(outcome.work.floor)}, {figure(outcome.work.aim)}",
                      *([] if earlier is None else [compared(outcome, earlier.get(outcome.work.name), rivals)]))
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    for name, why in rivals.missing.items():
        print(f"without {name}: {why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"one round of a {QUICK_SHARE}th of the messages")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--share", type=int, default=1, help="a Nth of the messages (default: all)")
    parser.add_argument("--folder", type=Path, help="where the logs go (default: a temporary folder beside this one's disk)")
    parser.add_argument("--only", default="", help="only works with this in their name")
    parser.add_argument("--rivals", default=",".join(ALL_ASYNC), help="beside these only (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every turn; bench/figures.py makes README's table of it")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="show what an earlier run kept beside this one's")
    arguments = parser.parse_args()
    earlier = earlier_outcomes(arguments.compare) if arguments.compare else None
    load = os.getloadavg()[0]
    rivals = Rivals(tuple(arguments.rivals.split(",")))
    rounds, share = (1, QUICK_SHARE) if arguments.quick else (arguments.rounds, arguments.share)
    with tempfile.TemporaryDirectory(dir=arguments.folder or Path.cwd(), prefix="bench-") as folder:
        outcomes = [measure(work, rivals, rounds, share, Path(folder)) for work in WORKS if arguments.only in work.name]
        where = machine(Path(folder).resolve(), load)
    show(outcomes, rivals, earlier)
    if arguments.json:
        document = {"machine": where, "outcomes": [asdict(outcome) for outcome in outcomes]}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
