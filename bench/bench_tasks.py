"""Celery, Dramatiq and taskiq on a store and on Redis, in turns: tasks sent a second, run a second, and how long one waits for a worker.

    python bench/bench_tasks.py [--tasks 3000] [--rounds 3] [--without-redis] [--page]

Each turn has queues of its own. It sends all tasks, then starts two worker processes, which run them, and at last sends single tasks
to the idle workers. Tasks are acknowledged when they have ended. Redis writes its append-only file and syncs it every second, the
engine its log each 0.5 s. Redis needs redis-server on PATH and the packages redis and taskiq-redis.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import pyengine  # noqa: E402
from measure import add_result_options, conditions, free_port, give_results, quantile  # noqa: E402

PAGE = HERE.parent / "docs" / "tasks.md"
MAKER = "bench/bench_tasks.py"
NOTE = struct.Struct("<qq")  # when a task was sent and run, in ns
SINGLE_PAUSE_S = 0.02
NOTING = """
import asyncio, os, struct, sys, time
STORE, REDIS, NAME = (os.environ[name] for name in ("BENCH_STORE", "BENCH_REDIS", "BENCH_NAME"))
NOTES = os.open("notes", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def noted(sent_ns):
    os.write(NOTES, struct.pack("<qq", sent_ns, time.time_ns()))
"""
SENDING = """
async def main(count, pause_s):
    await started()
    begin_s = time.perf_counter()
    for _ in range(count):
        await send(time.time_ns())
        if pause_s:
            await asyncio.sleep(pause_s)
    print(time.perf_counter() - begin_s)
    await stopped()

async def nothing():
    pass

if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
"""
JOBS = {
    "Celery": ("""
import celery
import pyengine.celery

app = celery.Celery("jobs", broker=REDIS or f"pyengine://{STORE}")
app.conf.update(task_ignore_result=True, task_acks_late=True, broker_transport_options={} if REDIS else {"namespace": NAME})

@app.task(name="job")
def job(sent_ns):
    noted(sent_ns)

async def send(sent_ns):
    job.delay(sent_ns)

async def started():
    pass

stopped = started
""", ["celery", "--app", "jobs", "worker", "--concurrency", "2", "--loglevel", "WARNING"]),
    "Dramatiq": ("""
import dramatiq
if REDIS:
    from dramatiq.brokers.redis import RedisBroker
    broker = RedisBroker(url=REDIS)
else:
    from pyengine.dramatiq import PyengineBroker
    broker = PyengineBroker(STORE, namespace=NAME)
dramatiq.set_broker(broker)

@dramatiq.actor
def job(sent_ns):
    noted(sent_ns)

async def send(sent_ns):
    job.send(sent_ns)

async def started():
    pass

stopped = started
""", ["dramatiq", "jobs", "--processes", "2", "--threads", "4"]),
    "taskiq": ("""
if REDIS:
    from taskiq_redis import RedisStreamBroker
    broker = RedisStreamBroker(url=REDIS)
else:
    from pyengine.taskiq import PyengineBroker
    broker = PyengineBroker(STORE, topic=NAME, group=NAME)

@broker.task(task_name="job")
async def job(sent_ns: int) -> None:
    noted(sent_ns)

async def send(sent_ns):
    await job.kiq(sent_ns)

started, stopped = broker.startup, broker.shutdown
""", ["taskiq", "worker", "jobs:broker", "--workers", "2", "--log-level", "WARNING"]),
}


@dataclass(frozen=True, slots=True)
class Turn:
    """What one library did on one broker."""

    framework: str
    broker: str
    sent_per_s: float
    run_per_s: float
    wait_ms: float


def notes(folder: Path) -> list[tuple[int, int]]:
    """(when it was sent, when it was run) of the tasks that have run."""
    data = (folder / "notes").read_bytes() if (folder / "notes").exists() else b""
    return list(NOTE.iter_unpack(data[:len(data) // NOTE.size * NOTE.size]))


def wait_for(folder: Path, count: int, limit_s: float = 300) -> list[tuple[int, int]]:
    until_s = time.monotonic() + limit_s
    while len(found := notes(folder)) < count:
        if time.monotonic() > until_s:
            raise SystemExit(f"{len(found)} of {count} tasks ran in {limit_s:g} s: see {folder}/log")
        time.sleep(0.05)
    return found


def turn(framework: str, redis_url: str, folder: Path, store: Path, tasks: int, singles: int) -> Turn:
    """One turn in a folder of its own."""
    program, command = JOBS[framework]
    folder.mkdir()
    (folder / "jobs.py").write_text(NOTING + program + SENDING)
    environment = {**os.environ, "BENCH_STORE": str(store), "BENCH_REDIS": redis_url, "BENCH_NAME": folder.name,
                   "PYTHONPATH": os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])}

    def send(count: int, pause_s: float) -> float:
        done = subprocess.run([sys.executable, "jobs.py", str(count), str(pause_s)], cwd=folder, env=environment, check=True,
                              stdout=subprocess.PIPE, text=True)
        return float(done.stdout)

    sending_s = send(tasks, 0)
    with (folder / "log").open("wb") as log:
        worker = subprocess.Popen([sys.executable, "-m", *command], cwd=folder, env=environment, stdout=log, stderr=log,
                                  start_new_session=True)
    try:
        ran = sorted(at_ns for _, at_ns in wait_for(folder, tasks))
        send(singles, SINGLE_PAUSE_S)
        waits_ms = [(at_ns - sent_ns) / 1e6 for sent_ns, at_ns in wait_for(folder, tasks + singles)[tasks:]]
    finally:
        os.killpg(worker.pid, signal.SIGKILL)  # an orderly stop may take half a minute, and is not measured
        worker.wait()
    return Turn(framework, "Redis" if redis_url else "pyengine", tasks / sending_s, (tasks - 1) / ((ran[-1] - ran[0]) / 1e9),
                quantile(waits_ms, 0.5))


@contextlib.contextmanager
def redis(folder: Path) -> Iterator[str]:
    """Run a server of Redis with an append-only file; yield its URL."""
    server = shutil.which("redis-server")
    if server is None:
        raise SystemExit("there is no redis-server on PATH: install it, or use --without-redis")
    port = free_port()
    folder.mkdir()
    options = {"port": str(port), "bind": "127.0.0.1", "dir": str(folder), "save": "", "appendonly": "yes", "appendfsync": "everysec"}
    process = subprocess.Popen([server, *(word for name, value in options.items() for word in (f"--{name}", value))],
                               stdout=subprocess.DEVNULL)
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait()


def table(turns: list[Turn], caption: str) -> str:
    """The page's table: medians of the rounds."""
    brokers = list(dict.fromkeys(one.broker for one in turns))
    text = f"{caption}; {' / '.join(brokers)}:\n\n| | sent/s | run/s | wait, ms |\n|---|---|---|---|\n"
    for library in dict.fromkeys(one.framework for one in turns):
        cells = [library]
        for name, form in (("sent_per_s", "{:,.0f}"), ("run_per_s", "{:,.0f}"), ("wait_ms", "{:.1f}")):
            medians = [statistics.median(getattr(one, name) for one in turns if (one.framework, one.broker) == (library, broker))
                       for broker in brokers]
            cells.append(" / ".join(form.format(value) for value in medians))
        text += "| " + " | ".join(cells) + " |\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of 200 tasks")
    parser.add_argument("--without-redis", action="store_true", help="measure the store alone")
    add_result_options(parser, "each turn", PAGE)
    arguments = parser.parse_args()
    tasks, rounds = (200, 1) if arguments.quick else (arguments.tasks, arguments.rounds)
    caption = f"{tasks:,} tasks, two worker processes, medians of {rounds}; {conditions()}"  # the load is that before the first turn
    turns = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as made, contextlib.ExitStack() as stack:
        folder = Path(made)
        engine = stack.enter_context(pyengine.Engine(folder / "store"))
        urls = [""] if arguments.without_redis else ["", stack.enter_context(redis(folder / "redis"))]
        for number in range(rounds):
            for library in JOBS:
                for url in urls if number % 2 == 0 else urls[::-1]:
                    name = f"{library.lower()}-{'redis' if url else 'pyengine'}-{number}"
                    if url:
                        subprocess.run([sys.executable, "-c", f"import redis; redis.from_url({url!r}).flushall()"], check=True)
                    turns.append(turn(library, url, folder / name, engine.path, tasks, 20 if arguments.quick else 100))
                    print(turns[-1], file=sys.stderr)
    give_results(arguments, [asdict(one) for one in turns], table(turns, caption), PAGE, "tasks", MAKER)


if __name__ == "__main__":
    main()
