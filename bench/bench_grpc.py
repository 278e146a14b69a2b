"""How fast RocketMQ's Python client sends to a store by gRPC and consumes from it, and what that costs the store's host.

    python bench/bench_grpc.py [--messages 3000] [--rounds 3] [--page]

The client runs in a process of its own, on the same machine. CPU is that of the engine's gRPC worker and gateway.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import pyengine  # noqa: E402
from measure import add_result_options, conditions, cpu_s, free_port, give_results  # noqa: E402
from pyengine.storage.config_table import TopicConfig, TopicConfigs  # noqa: E402

PAGE = HERE.parent / "docs" / "python.md"
MAKER = "bench/bench_grpc.py"
IN_FLIGHT = 32
CLIENT = """
import collections, sys, threading, time
from rocketmq.v5.client import ClientConfiguration, Credentials
from rocketmq.v5.consumer import PushConsumer
from rocketmq.v5.consumer.push import ConsumeResult, MessageListener
from rocketmq.v5.model import FilterExpression, Message
from rocketmq.v5.producer import Producer

port, topic, count, in_flight = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
settings = ClientConfiguration("127.0.0.1:" + port, Credentials())
producer = Producer(settings, (topic,))
producer.startup()

def message():
    made = Message()
    made.topic, made.body = topic, bytes(1024)
    return made

class Counter(MessageListener):
    left, all_came = 2 * count, threading.Event()

    def consume(self, message):
        self.left -= 1
        if not self.left:
            self.all_came.set()
        return ConsumeResult.SUCCESS

def measured(work):
    print("begin", flush=True)
    sys.stdin.readline()
    begin_s = time.perf_counter()
    work()
    print(time.perf_counter() - begin_s, flush=True)
    sys.stdin.readline()

def one_by_one():
    for _ in range(count):
        producer.send(message())

def many_at_once():
    waiting = collections.deque()
    for _ in range(count):
        if len(waiting) == in_flight:
            waiting.popleft().result()
        waiting.append(producer.send_async(message()))
    for each in waiting:
        each.result()

def consume():
    consumer = PushConsumer(settings, "readers", Counter(), {topic: FilterExpression("*")})
    consumer.startup()
    Counter.all_came.wait(300)

for work in (one_by_one, many_at_once, consume):
    measured(work)
"""
WORKS = {"send, one after the other": 1, f"send, {IN_FLIGHT} in flight": 1, "consume and acknowledge": 2}  # parts of the count


def turn(folder: Path, count: int) -> list[dict[str, float]]:
    """Messages a second and CPU of the store's host for each message, of each work."""
    port = free_port()
    with pyengine.Engine(folder, grpc_enable=True, grpc_port=port, gateway_namesrv_port=0, gateway_broker_port=0) as engine:
        TopicConfigs(engine.path).ensure(TopicConfig("bench", 4, 4))
        status = json.loads(subprocess.run([sys.executable, "-m", "pyengine", "status", str(engine.path), "--json"], check=True,
                                           capture_output=True, text=True, cwd=HERE.parent).stdout)
        pids = {one["kind"]: one["pid"] for one in status["workers"] if one["kind"] in ("grpc", "gateway")}
        with subprocess.Popen([sys.executable, "-c", CLIENT, str(port), "bench", str(count), str(IN_FLIGHT)], text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
            rows = []
            for work, parts in WORKS.items():
                if client.stdout.readline() != "begin\n":
                    raise SystemExit("the client has ended")
                before = cpu_s(pids)
                client.stdin.write("\n")
                client.stdin.flush()
                took_s = float(client.stdout.readline())
                spent_s = sum(cpu_s(pids).values()) - sum(before.values())
                rows.append({"work": work, "rate": parts * count / took_s, "cpu_us": 1e6 * spent_s / (parts * count)})
                client.stdin.write("\n")
                client.stdin.flush()
            client.kill()
    return rows


def table(rounds: list[list[dict[str, float]]], caption: str) -> str:
    """The page's table: medians of the rounds."""
    text = f"{caption}:\n\n| 1 KiB bodies | messages/s | CPU of the host, us |\n|---|---|---|\n"
    for rows in zip(*rounds):
        rate, cpu = (statistics.median(row[name] for row in rows) for name in ("rate", "cpu_us"))
        text += f"| {rows[0]['work']} | {rate:,.0f} | {cpu:,.0f} |\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of 200 messages")
    add_result_options(parser, "each round", PAGE)
    arguments = parser.parse_args()
    count, rounds = (200, 1) if arguments.quick else (arguments.messages, arguments.rounds)
    caption = f"One Python client on the same machine, medians of {rounds}; {conditions()}"
    with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
        done = [turn(Path(made) / f"store{number}", count) for number in range(rounds)]
    give_results(arguments, done, table(done, caption), PAGE, "costs", MAKER)


if __name__ == "__main__":
    main()
