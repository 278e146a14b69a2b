"""What idle consumers cost: the CPU time of a process with many of them, beside messages of other topics, and a wake-up's latency.

    python bench/idle_consumers.py [--mode ASYNC_FLUSH|SYNC_FLUSH] [--asyncio] [--count 1 --count 50] [--rate 1000] [--seconds 5]

Compare two versions in turns, with the same line for each.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import click
import psutil

import pyengine

QUEUES = 8
WAKE_UPS = 300
PAUSE_S = 0.004  # between two messages whose wake-ups are measured


def hold(store: str, count: int, waits_in_asyncio: bool) -> None:
    """Wait in `count` consumers until standard input ends."""
    consumers = [pyengine.consume(store, f"idle{number}", group="g") for number in range(count)]

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


def cpu_percent(store: str, producer: pyengine.Producer, count: int, waits_in_asyncio: bool, rate: int, seconds: float) -> str:
    words = [sys.executable, __file__, "--hold", store, "--count", str(count), *(["--asyncio"] if waits_in_asyncio else [])]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        time.sleep(2)  # they have read what there is
        process = psutil.Process(child.pid)
        before = process.cpu_times()
        came = put_for(producer, seconds, rate)
        after = process.cpu_times()
        child.kill()
    used_s = after.user + after.system - before.user - before.system
    return f"{count:4} idle consumers, {came:6.0f} messages/s elsewhere: {used_s / seconds * 100:5.1f} % of a processor"


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
@click.option("--count", "counts", type=int, multiple=True, default=(1, 10, 50))
@click.option("--rate", type=int, default=1000)
@click.option("--seconds", type=float, default=5.0)
@click.option("--hold", "held", hidden=True)
def main(mode: str, waits_in_asyncio: bool, counts: tuple[int, ...], rate: int, seconds: float, held: str | None) -> None:
    """Measure idle consumers."""
    if held is not None:
        hold(held, counts[0], waits_in_asyncio)
        return
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
                for each in (0, rate):
                    print(cpu_percent(store, producer, count, waits_in_asyncio, each, seconds), flush=True)
            print(f"a wake-up takes {wake_up_ms(store, producer):.2f} ms (median of {WAKE_UPS})")


if __name__ == "__main__":
    main()
