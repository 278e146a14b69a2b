"""How many messages a second the members of one group take and acknowledge, if they share messages and if they own queues.

    python bench/shared_work.py [--members 1 --members 2 --members 4] [--ask 1 --ask 32] [--messages 20000] [--mode ASYNC_FLUSH]

Each member is a process that asks for `--ask` messages, acknowledges them, and asks again. Compare two versions in turns, with
the same line for each.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

import pyengine

QUEUES = 8


def work(store: str, topic: str, sharing: str, ask: int) -> None:
    """Take and acknowledge messages of `topic` until standard input ends."""
    with pyengine.consume(store, topic, group=sharing, sharing=sharing, auto_commit=False) as consumer:
        print("ready", flush=True)
        sys.stdin.readline()
        while messages := consumer.pull(ask, timeout_s=1):
            consumer.ack(messages)
            print(len(messages), time.monotonic(), flush=True)


def rate(store: Path, topic: str, sharing: str, members: int, ask: int) -> float:
    """Return the messages a second of so many members, from the first one to the last one."""
    command = [sys.executable, __file__, "--work", str(store), topic, sharing, str(ask)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(members)]
    for process in processes:
        process.stdout.readline()
    time.sleep(1.5)  # until each has its share of the queues
    since_s = time.monotonic()
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    told = [line.split() for process in processes for line in process.communicate()[0].splitlines()]
    return sum(int(count) for count, _ in told) / (max(float(at_s) for _, at_s in told) - since_s)


@click.command(help=__doc__)
@click.option("--members", multiple=True, default=[1, 2, 4], type=click.IntRange(1), help="processes")
@click.option("--ask", multiple=True, default=[1, 32], type=click.IntRange(1), help="messages of a pull")
@click.option("--messages", default=20_000, type=click.IntRange(1), help="of each row")
@click.option("--mode", default="ASYNC_FLUSH", type=click.Choice(["ASYNC_FLUSH", "SYNC_FLUSH"]))
def main(members: tuple[int, ...], ask: tuple[int, ...], messages: int, mode: str) -> None:
    with tempfile.TemporaryDirectory() as folder, pyengine.Engine(Path(folder) / "store", flush_disk_type=mode) as engine:
        for count in members:
            for asked in ask:
                topic = f"jobs-{count}-{asked}"
                with engine.connect() as producer:
                    for queue_id in range(QUEUES):
                        producer.put_many(topic, [b"x" * 200] * (messages // QUEUES), queue_id=queue_id)
                rates = {sharing: rate(engine.path, topic, sharing, count, asked) for sharing in ("messages", "queues")}
                print(f"members {count}, {asked} a pull: " + ", ".join(f"sharing {name} {each:,.0f}/s" for name, each in rates.items()),
                      flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:5], int(sys.argv[5]))
    else:
        main()
