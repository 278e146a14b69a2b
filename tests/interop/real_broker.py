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


class RealBroker:
    """A name server and a broker that has `root` open from start() to stop(), at their own ports."""

    def __init__(self, java: str, root: Path, scratch: Path, name_server_port: int, port: int, heap: str = "512m",
                 flags: Sequence[str] = JVM_FLAGS, **settings: object) -> None:
        self.name_server, self.address = f"127.0.0.1:{name_server_port}", f"127.0.0.1:{port}"
        self._java, self._scratch, self._flags = java, scratch, (f"-Xmx{heap}", f"-Xms{heap}", *flags)
        self._libraries = build(SOURCES) / "target" / "lib"
        self.log = scratch / "rocketmq.log"
        (scratch / "conf").mkdir(parents=True, exist_ok=True)
        for part in ("broker", "namesrv"):
            (scratch / "conf" / f"logback_{part}.xml").write_text(_LOGBACK.format(self.log))
        (scratch / "namesrv.conf").write_text(f"listenPort={name_server_port}\n")
        settings = {"namesrvAddr": self.name_server, "listenPort": port, "brokerIP1": "127.0.0.1", "brokerName": "broker-a",
                    "brokerClusterName": "DefaultCluster", "brokerId": 0, "storePathRootDir": root,
                    "storePathCommitLog": root / "commitlog", **settings}
        (scratch / "broker.conf").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def pids(self) -> list[int]:
        """Return the pids of the name server and the broker."""
        return [process.pid for process in self._processes]

    def start(self) -> None:
        """Start both, and wait until a client would get the broker's address."""
        for main, conf, address in (("namesrv.NamesrvStartup", "namesrv.conf", self.name_server),
                                    ("broker.BrokerStartup", "broker.conf", self.address)):
            with open(self._scratch / f"{main}.out", "ab") as out:
                self._processes.append(subprocess.Popen(
                    [self._java, *self._flags, f"-Duser.home={self._scratch}",
                     f"-Drocketmq.home.dir={self._scratch}", "-cp", f"{self._libraries}{os.sep}*", f"org.apache.rocketmq.{main}",
                     "-c", str(self._scratch / conf)],
                    stdout=out, stderr=out, cwd=self._scratch))
            self._wait_for_port(address)

    def _wait_for_port(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        deadline_s = time.monotonic() + scaled_timeout_s(90)
        while True:
            try:
                socket.create_connection((host, int(port)), 5).close()
                return
            except OSError:
                if self._processes[-1].poll() is not None or time.monotonic() > deadline_s:
                    said = "".join(path.read_text(errors="replace")[-3000:] for path in self._scratch.glob("*.out"))
                    raise AssertionError(f"nothing listens at {address}: {said}") from None
                time.sleep(0.1)

    def stop(self) -> None:
        """Stop both in order: the broker writes what it has, and removes its `abort`."""
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            process.wait(scaled_timeout_s(90))
        self._processes.clear()

    def kill(self) -> None:
        """End both at once, as far as they run."""
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        self._processes.clear()
