"""The published RocketMQ name server and broker 4.9.7 as two JVMs on a directory: what a user's own installation would do with it.

Maven has no broker 4.9.8; the formats on disk and on the wire are the same.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from interop.judge import JVM_FLAGS, build
from waiting import scaled_timeout_s

SOURCES = Path(__file__).parent / "broker"
_LOGBACK = """<configuration><appender name="file" class="ch.qos.logback.core.FileAppender"><file>{}</file><encoder>
<pattern>%d %-5level %logger %msg%n</pattern></encoder></appender><root level="WARN"><appender-ref ref="file"/></root></configuration>"""



def _write_log_settings(scratch: Path, *parts: str) -> None:
    (scratch / "conf").mkdir(parents=True, exist_ok=True)
    for part in parts:
        (scratch / "conf" / f"logback_{part}.xml").write_text(_LOGBACK.format(scratch / "rocketmq.log"))


def _start(java: str, flags: Sequence[str], libraries: Path, scratch: Path, main: str, conf: str, address: str) -> subprocess.Popen[bytes]:
    """Start a server of RocketMQ's and wait until it listens."""
    with open(scratch / f"{main}.out", "ab") as out:
        process = subprocess.Popen([java, *flags, f"-Duser.home={scratch}", f"-Drocketmq.home.dir={scratch}", "-cp",
                                    f"{libraries}{os.sep}*", f"org.apache.rocketmq.{main}", "-c", str(scratch / conf)],
                                   stdout=out, stderr=out, cwd=scratch)
    host, _, port = address.rpartition(":")
    deadline_s = time.monotonic() + scaled_timeout_s(90)
    while True:
        try:
            socket.create_connection((host, int(port)), 5).close()
            return process
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline_s:
                said = "".join(path.read_text(errors="replace")[-3000:] for path in scratch.glob("*.out"))
                raise AssertionError(f"nothing listens at {address}: {said}") from None
            time.sleep(0.1)


class RealBroker:
    """A name server and a broker that has `root` open from start() to stop(), at their own ports."""

    def __init__(self, java: str, root: Path, scratch: Path, name_server_port: int, port: int, heap: str = "512m",
                 flags: Sequence[str] = JVM_FLAGS, **settings: object) -> None:
        host = settings.get("brokerIP1", "127.0.0.1")
        self.name_server, self.address = f"{host}:{name_server_port}", f"{host}:{port}"
        self.java, self.scratch, self.flags = java, scratch, (f"-Xmx{heap}", f"-Xms{heap}", *flags)
        self.libraries = build(SOURCES) / "target" / "lib"
        self.log = scratch / "rocketmq.log"
        _write_log_settings(scratch, "broker", "namesrv")
        (scratch / "namesrv.conf").write_text(f"listenPort={name_server_port}\n")
        settings = {"namesrvAddr": self.name_server, "listenPort": port, "brokerIP1": host, "brokerName": "broker-a",
                    "brokerClusterName": "DefaultCluster", "brokerId": 0, "storePathRootDir": root,
                    "storePathCommitLog": root / "commitlog", **settings}
        (scratch / "broker.conf").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        self.processes: list[subprocess.Popen[bytes]] = []

    @property
    def pids(self) -> list[int]:
        """Return the pids of the name server and the broker."""
        return [process.pid for process in self.processes]

    def start(self) -> None:
        """Start both, and wait until a client would get the broker's address."""
        for main, conf, address in (("namesrv.NamesrvStartup", "namesrv.conf", self.name_server),
                                    ("broker.BrokerStartup", "broker.conf", self.address)):
            self.processes.append(_start(self.java, self.flags, self.libraries, self.scratch, main, conf, address))

    def stop(self) -> None:
        """Stop both in order: the broker writes what it has, and removes its `abort`."""
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
            process.wait(scaled_timeout_s(90))
        self.processes.clear()

    def kill(self) -> None:
        """End both at once, as far as they run."""
        for process in reversed(self.processes):
            process.kill()
            process.wait()
        self.processes.clear()


class RealNameServer:
    """A name server of RocketMQ 5.5.0, from start() to kill()."""

    def __init__(self, java: str, scratch: Path, host: str, port: int) -> None:
        self.address = f"{host}:{port}"
        self.java, self.scratch = java, scratch
        self.libraries = build(Path(__file__).parent / "clients5") / "target" / "lib"
        _write_log_settings(scratch, "namesrv")
        (scratch / "conf" / "rmq.namesrv.logback.xml").write_text(_LOGBACK.format(scratch / "rocketmq.log"))
        (scratch / "namesrv.conf").write_text(f"listenPort={port}\n")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it listens."""
        self.process = _start(self.java, ("-Xmx128m", *JVM_FLAGS), self.libraries, self.scratch, "namesrv.NamesrvStartup",
                               "namesrv.conf", self.address)

    def kill(self) -> None:
        """End it at once, if it runs."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
