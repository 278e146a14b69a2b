"""How fast RocketMQ's Java client sends to the gateway and consumes from it, beside RocketMQ's own name server and broker.

usage: python bench/bench_gateway.py [--quick] [--rounds N] [--only ours|real] [--acl] [--tls] [--folder DIR] [--json FILE]
    [--compare FILE]

The client is the published 4.9.8, the broker 4.9.7 (of 4.9.8 Maven has none), both built by Maven at the first run; the sides take
turns, each alone on the machine while it is its turn. CPU is that of all processes of the side, without the client. With --acl both
sides have an access list and the client signs what it asks, with --tls all connections are encrypted, on both sides. See
bench/README.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE.parent / "tests"), str(HERE.parent / "scripts")]

import psutil  # noqa: E402
import trustme  # noqa: E402

import needs  # noqa: E402
from fix_gateway import put_certificate, put_private  # noqa: E402
from interop import judge as judges  # noqa: E402
from interop.clients import Clients  # noqa: E402
from interop.real_broker import RealBroker  # noqa: E402
from measure import Row, earlier_medians, free_port, keep, show  # noqa: E402
from pyengine.cli.bench import engine_cpu_seconds, wait_dispatched  # noqa: E402
from pyengine.engine.embedded import start_engine, stop_engine  # noqa: E402

SEGMENT_BYTES = 1 << 28
BODY_BYTES = 1024
THREADS = (1, 4, 16)
CLIENT_FLAGS = ("-Xmx512m", "-XX:+UseParallelGC")
BROKER_FLAGS = tuple(flag for flag in judges.JVM_FLAGS if flag not in ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"))


ACCOUNT = ("bench-key", "bench-secret")
LIST = "accounts: [{{accessKey: {}, secretKey: {}, defaultTopicPerm: PUB|SUB, defaultGroupPerm: SUB}}]\n".format(*ACCOUNT).encode()


@dataclass(frozen=True)
class Guards:
    """What both sides ask of a client."""

    acl: bool = False
    tls: bool = False

    @property
    def shown(self) -> str:
        """Behind the name of a row."""
        return (", ACL" if self.acl else "") + (", TLS" if self.tls else "")


@dataclass
class Seen:
    """What one side did in one kind of work, turn by turn."""

    rate: list[float] = field(default_factory=list)
    p50_us: list[float] = field(default_factory=list)
    p99_us: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)  # for each message, of all processes of the side


@contextmanager
def ours(java: str, folder: Path, guards: Guards) -> Iterator[tuple[str, Callable[[], float]]]:
    """An engine with its gateway: (the name server's address, CPU seconds so far)."""
    store, name_port = folder / "store", free_port()
    asked: dict[str, object] = {}
    if guards.acl:
        asked |= {"acl_enable": True, "gateway_acl_file": str(put_private(folder / "plain_acl.yml", LIST))}
    if guards.tls:
        asked |= {"gateway_tls_mode": "enforcing", **put_certificate(folder, trustme.CA())}
    start_engine(store, asked | {"gateway_enable": True, "gateway_namesrv_port": name_port, "gateway_broker_port": free_port(),
                         "mapped_file_size_commit_log_bytes": SEGMENT_BYTES, "mapped_file_size_consume_queue_bytes": 6_000_000})
    try:
        yield f"127.0.0.1:{name_port}", lambda: engine_cpu_seconds(store)
        wait_dispatched(store)
    finally:
        stop_engine(store)


@contextmanager
def real(java: str, folder: Path, guards: Guards) -> Iterator[tuple[str, Callable[[], float]]]:
    """The same of RocketMQ's own."""
    flags = (*BROKER_FLAGS, "-Dtls.server.mode=enforcing") if guards.tls else BROKER_FLAGS  # with its own certificate for tests
    broker = RealBroker(java, folder / "store", folder / "real", free_port(), free_port(), "1g", flags, aclEnable=str(guards.acl).lower(),
                        mappedFileSizeCommitLog=SEGMENT_BYTES, mappedFileSizeConsumeQueue=6_000_000)
    put_private(folder / "real" / "conf" / "plain_acl.yml", LIST)
    try:
        broker.start()
        yield broker.name_server, lambda: float(sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in broker.pids))
        broker.stop()
    finally:
        broker.kill()


SIDES = {"ours": ours, "real": real}


def turn(side: str, java: str, folder: Path, quick: bool, guards: Guards, seen: dict[str, dict[str, Seen]]) -> None:
    """One side's turn: warm up, send with each number of threads, consume all of it."""
    def work(name: str, ask: Callable[[], dict[str, Any]]) -> int:
        cpu_s = cpu()
        result = ask()
        if result.get("failed") or not result.get("whole", True):
            raise SystemExit(f"{side}, {name}: {result}")
        found = seen.setdefault(name, {}).setdefault(side, Seen())
        found.rate.append(result["messages"] / result["seconds"])
        found.cpu_us.append((cpu() - cpu_s) / result["messages"] * 1e6)
        if "p50_us" in result:
            found.p50_us.append(result["p50_us"])
            found.p99_us.append(result["p99_us"])
        return int(result["messages"])

    folder.mkdir()
    flags = (*CLIENT_FLAGS, "-Dtls.enable=true") if guards.tls else CLIENT_FLAGS
    with (SIDES[side](java, folder, guards) as (name_server, cpu),
          Clients(java, name_server, folder, flags, ACCOUNT if guards.acl else ()) as clients):
        load = {"group": "bench", "topic": "bench", "size": BODY_BYTES}
        clients.ask("load", **load, threads=4, ms=2000 if quick else 8000)  # both JVMs compile what they need
        sent = 0
        for threads in THREADS:
            sent += work(f"send, {threads} thread{'s' if threads > 1 else ''}", lambda threads=threads: clients.ask(
                "load", **load | {"topic": "measured"}, threads=threads, ms=2000 if quick else 8000))
        time.sleep(1.0)  # dispatched on both sides
        work("consume", lambda: clients.ask("drain", group="drain", topic="measured", count=sent))


def rows_of(seen: dict[str, dict[str, Seen]], guards: Guards) -> list[Row]:
    """A row for each kind of work and side; ours is held against the real one's rate of the same rounds."""
    rows = []
    for name, sides in seen.items():
        limit = statistics.median(sides["real"].rate) if "real" in sides else None
        for side, found in sides.items():
            notes = {what: statistics.median(values) for what, values in (
                ("p50, us", found.p50_us), ("p99, us", found.p99_us), ("CPU us a message", found.cpu_us)) if values}
            rows.append(Row(f"{name}, 1 KiB{guards.shown}, {side}", "msg/s", found.rate, limit if side == "ours" else None,
                            "RocketMQ's broker", *((0.7, 1.5) if side == "ours" else (None, None)), notes=notes))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=SIDES, help="one side alone")
    parser.add_argument("--acl", action="store_true", help="with an access list; the client signs what it asks")
    parser.add_argument("--tls", action="store_true", help="over TLS")
    parser.add_argument("--folder", type=Path, help="where the stores go (default: a temporary folder in this one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every row")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="show what an earlier run kept beside this one's")
    arguments = parser.parse_args()
    java = needs.java_command()
    if java is None:
        raise SystemExit("this needs Java 17 and Maven: the client and the broker run in JVMs")
    earlier = earlier_medians(arguments.compare) if arguments.compare else None
    guards, seen = Guards(arguments.acl, arguments.tls), dict[str, dict[str, Seen]]()
    with tempfile.TemporaryDirectory(dir=arguments.folder or Path.cwd(), prefix="bench-") as folder:
        for number in range(1 if arguments.quick else arguments.rounds):
            for side in [arguments.only] if arguments.only else SIDES:
                turn(side, java, Path(folder, f"{side}-{number}"), arguments.quick, guards, seen)
    rows = rows_of(seen, guards)
    show(rows, earlier)
    if arguments.json:
        keep(rows, arguments.json)


if __name__ == "__main__":
    main()
