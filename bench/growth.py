"""What each part of the engine costs as the work grows: queues, segments, sessions, size of a message, its properties.

usage: python bench/growth.py [--quick] [--folder DIR] [--only TEXT] [--json FILE]
       python bench/growth.py --kept FILE...

Each point is a store of its own. Costs are CPU of the processes, which a busy machine changes less than rates: of the
producer, the writer and the reputter for each message, of a start after an orderly stop, of a `pyengine recover` after kill -9
without what shared memory remembers. The last column of the tables tells how a figure grows from the first point to the last:
0 is flat, 1 is in proportion.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import pyengine  # noqa: E402
from measure import cpu_s, figure  # noqa: E402
from pyengine.cli.bench import wait_dispatched  # noqa: E402
from pyengine.cli.engine_status import engine_status  # noqa: E402
from pyengine.ipc.shared_objects import find_folder  # noqa: E402
from run import SETTINGS, kill_all, private_bytes, processes_of, recover  # noqa: E402

QUEUES_OF_A_TOPIC = 8
IN_FLIGHT = 1000  # put_async that wait for their answers


@dataclass
class Point:
    """One store: `figures` by name, the unit is the last word of it."""

    value: int
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Dimension:
    """What grows, through which values, and what is put at each of them."""

    name: str
    values: tuple[int, ...]
    quick_values: tuple[int, ...]
    fill: Callable[[Measured, int], None]
    settings: Callable[[int], dict[str, object]] = lambda value: {}


class Measured:
    """An engine on a new store, and what was found of it."""

    def __init__(self, path: Path, point: Point) -> None:
        self.path = path
        self._point = point

    def note(self, name: str, value: float) -> None:
        self._point.figures[name] = value

    def put_each(self, producer: pyengine.Producer, messages: int, arguments: Callable[[int], tuple[str, bytes, dict]],
                 prefix: str = "") -> None:
        """Do `count` put_async; return the CPU time of each in us, of this process, the writer and the reputter."""
        before, began_cpu_s, began_s = self._worker_cpu_s(), time.process_time(), time.perf_counter()
        pending: deque = deque()
        for number in range(messages):
            topic, body, more = arguments(number)
            pending.append(producer.put_async(topic, body, **more))
            if len(pending) > IN_FLIGHT:
                pending.popleft().result(60)
        for future in pending:
            future.result(60)
        producer_s = time.process_time() - began_cpu_s
        wait_dispatched(self.path, timeout_s=1800.0)
        took_s, after = time.perf_counter() - began_s, self._worker_cpu_s()
        self.note(f"{prefix}producer, a message, us", producer_s * 1e6 / messages)
        for kind in ("writer", "reputter"):
            self.note(f"{prefix}{kind}, a message, us", (after[kind] - before[kind]) * 1e6 / messages)
        self.note(f"{prefix}put to dispatched, a message, us", took_s * 1e6 / messages)

    def _worker_cpu_s(self) -> dict[str, float]:
        return cpu_s({worker["kind"]: worker["pid"] for worker in engine_status(self.path, {})["workers"] if worker["pid"]})

    def note_processes(self) -> None:
        """Memory and descriptors of all processes of the engine."""
        processes = processes_of(self.path)
        self.note("private memory, all processes, MiB", sum(private_bytes(process.pid) for process in processes) / 1048576)
        self.note("most descriptors of a process", max(process.num_fds() for process in processes))


def fill_queues(measured: Measured, queues: int) -> None:
    """One message into each queue, which makes it; then as many more in turn."""
    def arguments(number: int) -> tuple[str, bytes, dict]:
        number %= queues
        return f"topic-{number // QUEUES_OF_A_TOPIC}", b"x" * 100, {"queue_id": number % QUEUES_OF_A_TOPIC}

    with pyengine.connect(measured.path) as producer:
        measured.put_each(producer, queues, arguments, "into a new queue: ")
        measured.put_each(producer, max(queues, 100_000), arguments)


def fill_segments(measured: Measured, segments: int) -> None:
    """Whole segments, then a message at a time into the last of them."""
    bodies = [os.urandom(8000)] * 64
    with pyengine.connect(measured.path) as producer:
        end = 0
        while end < (segments - 1) << 20:
            end = producer.put_many("bench", bodies).end_physical_offset
        measured.put_each(producer, 10_000, lambda number: ("bench", b"x" * 20, {}))


def fill_sessions(measured: Measured, sessions: int) -> None:
    """Open sessions of which one puts."""
    with ExitStack() as stack:
        began_s = time.perf_counter()
        producers = [stack.enter_context(pyengine.connect(measured.path, ring_bytes=1 << 18)) for _ in range(sessions)]
        measured.note("open a session, ms", (time.perf_counter() - began_s) * 1e3 / sessions)
        measured.put_each(producers[sessions // 2], 100_000, lambda number: ("bench", b"x" * 100, {}))


def fill_size(measured: Measured, size: int) -> None:
    """Messages of one size, 64 MiB of them and 50,000 at most."""
    body = os.urandom(size)
    messages = max(16, min(50_000, (64 << 20) // size))
    with pyengine.connect(measured.path, ring_bytes=16 << 20) as producer:
        measured.put_each(producer, messages, lambda number: ("bench", body, {}))


def fill_properties(measured: Measured, properties: int) -> None:
    """Messages with so many properties, whose values change."""
    with pyengine.connect(measured.path) as producer:
        measured.put_each(producer, 30_000, lambda number: (
            "bench", b"x" * 100, {"properties": {f"name-{n}": f"value-{number}" for n in range(properties)}}))


DIMENSIONS = (
    Dimension("queues", (1, 10, 100, 1000, 10_000, 100_000), (1, 100), fill_queues),
    Dimension("segments", (1, 10, 100, 1000), (1, 10), fill_segments, lambda value: {"mapped_file_size_commit_log_bytes": 1 << 20}),
    Dimension("sessions", (1, 10, 100, 1000), (1, 20), fill_sessions, lambda value: {"sessions_max": 1024}),
    Dimension("bytes of a body", (16, 128, 1024, 8192, 65_536, 524_288, (4 << 20) - 1), (16, 65_536), fill_size),
    Dimension("properties", (1, 4, 16, 64), (1, 16), fill_properties),
)


def measure(dimension: Dimension, value: int, folder: Path) -> Point:
    """One point: fill, look, stop and start, kill and recover."""
    point, path = Point(value), folder / "store"
    settings = SETTINGS | dimension.settings(value)
    measured = Measured(path, point)
    with pyengine.Engine(path, **settings):
        dimension.fill(measured, value)
        measured.note_processes()
        began_s = time.perf_counter()
    point.figures["orderly stop, ms"] = (time.perf_counter() - began_s) * 1e3
    began_s = time.perf_counter()
    with pyengine.Engine(path, **settings):
        point.figures["start until ready, ms"] = (time.perf_counter() - began_s) * 1e3
        measured.note("start, CPU, ms", sum(sum(process.cpu_times()[:2]) for process in processes_of(path)) * 1e3)
        kill_all(path)
        shutil.rmtree(find_folder(path).path)
        report, took_s, cpu_s = recover(path)
    point.figures["recover after kill -9, ms"] = took_s * 1e3
    point.figures["recover after kill -9, CPU, ms"] = cpu_s * 1e3
    point.figures["log, MB"] = report["end_offset"] / 1e6
    shutil.rmtree(folder)
    return point


def growth(points: Sequence[Point], name: str) -> float | None:
    """The exponent from the first point to the last: 0 flat, 1 in proportion to the value."""
    known = [(point.value, point.figures[name]) for point in points if point.figures.get(name, 0) > 0]
    if len(known) < 2:
        return None
    (value, cost), (last_value, last_cost) = known[0], known[-1]
    return math.log(last_cost / cost) / math.log(last_value / value)


def rows(points: Sequence[Point]) -> Iterator[list[str]]:
    """Lines of a table: a figure at each point, then how it grows."""
    for name in points[0].figures:
        exponent = growth(points, name)
        yield [name, *(figure(point.figures.get(name)) for point in points), "" if exponent is None else f"{exponent:.2f}"]


def markdown(measured: dict[str, list[Point]]) -> str:
    """All tables, as bench/notes/engine.md shows them."""
    lines = []
    for dimension in DIMENSIONS:
        if points := measured.get(dimension.name):
            lines += [f"| {dimension.name} | " + " | ".join(f"{point.value:,}" for point in points) + " | growth |",
                      "|---" + "|---:" * (len(points) + 1) + "|",
                      *("| " + " | ".join(row) + " |" for row in rows(points)), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small points of each")
    parser.add_argument("--folder", type=Path, help="where the stores go (default: a temporary folder beside this one's disk)")
    parser.add_argument("--only", default="", help="only dimensions with this in their name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every point")
    parser.add_argument("--kept", type=Path, nargs="+", metavar="FILE", help="measure nothing: show what --json kept in these files")
    arguments = parser.parse_args()
    measured: dict[str, list[Point]] = {}
    for file in arguments.kept or ():
        for name, points in json.loads(file.read_text()).items():
            measured[name] = [Point(**point) for point in points]
    with tempfile.TemporaryDirectory(dir=arguments.folder or Path.cwd(), prefix="bench-", ignore_cleanup_errors=True) as folder:
        for dimension in DIMENSIONS:
            if arguments.kept or arguments.only not in dimension.name:
                continue
            for value in dimension.quick_values if arguments.quick else dimension.values:
                print(f"{dimension.name}: {value:,} ...", file=sys.stderr)
                point = measure(dimension, value, Path(tempfile.mkdtemp(dir=folder)))
                measured.setdefault(dimension.name, []).append(point)
    print(markdown(measured))
    if arguments.json:
        document = {name: [asdict(point) for point in points] for name, points in measured.items()}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
