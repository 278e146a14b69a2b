"""What idle consumers cost: the CPU time of many of them, beside messages of other topics, and a wake-up's latency.

    python bench/idle_consumers.py [--mode ASYNC_FLUSH|SYNC_FLUSH] [--asyncio] [--processes] [--sharing queues|messages]
                                   [--count 1 --count 50] [--rate 1000] [--seconds 5]

They are in one process, or with --processes each in its own.

Compare two versions in turns, with the same line for each.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import click

import pyengine
from pyengine.client.consumer import Sharing

QUEUES = 8
SETTLE_S = 8  # they have read what there is, and found that no queue is new any more
WAKE_UPS = 300
PAUSE_S = 0.004  # between two messages whose wake-ups are measured


def hold(store: str, numbers: range, waits_in_asyncio: bool, sharing: Sharing) -> None:
    """Wait in the consumers of these numbers until standard input ends."""
    consumers = [pyengine.consume(store, f"idle{number}", group="g", sharing=sharing) for number in numbers]

    async def wait_in_asyncio() -> None:
        async def drain(consumer: pyengine.Consumer) -> None:
            async for _ in consumer:
                pass

        for consumer in consumers:
            tasks.append(asyncio.create_task(drain(consumer)))
        await asyncio.gather(*tasks)

    tasks: list[asyncio.Task[None]] = []
    if waits_in_asyncio:
        threading.Thread(target=lambda: asyncio.run(wait_in_asyncio()), daemon=True).start()
    else:
        for consumer in consumers:
            threading.Thread(target=lambda consumer=consumer: [None for _ in consumer], daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()


def put_for(producer: pyengine.Producer, seconds: float, rate: int) -> float:
    """Put `rate` messages a second for so long; return how many came about."""
    began_s, count = time.perf_counter(), 0
    while (passed_s := time.perf_counter() - began_s) < seconds:
        if count < passed_s * rate:
            producer.put("busy", b"x")
            count += 1
        else:
            time.sleep(0.0005)
    return count / passed_s


def cpu_percent(store: str, producer: pyengine.Producer, holders: list[range], options: list[str], rate: int, seconds: float) -> str:
    with contextlib.ExitStack() as stack:
        children = []
        for numbers in holders:
            words = [sys.executable, __file__, "--hold", store, "--first", str(numbers.start), "--count", str(len(numbers)), *options]
            child = stack.enter_context(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            stack.callback(child.kill)
            children.append(child)
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()
        time.sleep(SETTLE_S)
        before_s = sum(cpu_s(child.pid) for child in children)
        came = put_for(producer, seconds, rate)
        used_s = sum(cpu_s(child.pid) for child in children) - before_s
    count = sum(map(len, holders))
    return (f"{count:4} idle consumers in {len(holders):2} processes, {came:6.0f} messages/s elsewhere: "
            f"{used_s / seconds * 100:5.2f} % of a processor")


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process, by the scheduler's clock: short runs between two ticks count too."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def wake_up_ms(store: str, producer: pyengine.Producer) -> float:
    """Return the median time from a put to its message in a consumer that waits in another thread."""
    arrived: list[float] = []
    times_ms = []
    with pyengine.consume(store, "woken", from_="last") as consumer:
        threading.Thread(target=lambda: [arrived.append(time.perf_counter()) for _ in consumer], daemon=True).start()
        for number in range(WAKE_UPS):
            time.sleep(PAUSE_S)
            began_s = time.perf_counter()
            producer.put("woken", b"x", queue_id=0)
            while len(arrived) <= number:
                time.sleep(0.0001)
            times_ms.append((arrived[number] - began_s) * 1000)
    return statistics.median(times_ms)


@click.command()
@click.option("--mode", default="ASYNC_FLUSH")
@click.option("--asyncio", "waits_in_asyncio", is_flag=True)
@click.option("--processes", "are_processes", is_flag=True)
@click.option("--sharing", type=click.Choice(["queues", "messages"]), default="queues")
@click.option("--count", "counts", type=int, multiple=True, default=(1, 10, 50))
@click.option("--rate", type=int, default=1000)
@click.option("--seconds", type=float, default=5.0)
@click.option("--hold", "held", hidden=True)
@click.option("--first", type=int, default=0, hidden=True)
def main(mode: str, waits_in_asyncio: bool, are_processes: bool, sharing: Sharing, counts: tuple[int, ...], rate: int, seconds: float,
         held: str | None, first: int) -> None:
    """Measure idle consumers."""
    if held is not None:
        hold(held, range(first, first + counts[0]), waits_in_asyncio, sharing)
        return
    options = ["--sharing", sharing, *["--asyncio"] * waits_in_asyncio]
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        with pyengine.Engine(store, flush_disk_type=mode) as engine, engine.connect() as producer:
            for number in range(max(counts)):
                for queue_id in range(QUEUES):
                    producer.put(f"idle{number}", b"x", queue_id=queue_id)
            producer.put("woken", b"x", queue_id=0)
            with pyengine.open_store(store) as reader:
                reader.wait_for_message("woken", 0, 0, timeout_s=30)
            for count in counts:
                holders = [range(number, number + 1) for number in range(count)] if are_processes else [range(count)]
                for each in (0, rate):
                    print(cpu_percent(store, producer, holders, options, each, seconds), flush=True)
            print(f"a wake-up takes {wake_up_ms(store, producer):.2f} ms (median of {WAKE_UPS})")


if __name__ == "__main__":
    main()
