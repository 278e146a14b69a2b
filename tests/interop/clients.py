"""The published RocketMQ client 4.9.8 and its tools, unchanged: one JVM with clients that a test tells what to do.

The Java half is in clients/ and is built as the judge's is. Commands and answers are JSON lines.
"""

from __future__ import annotations

import json
import os
import queue
import shlex
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from interop.judge import build

SOURCES = Path(__file__).parent / "clients"
ANSWER_TIMEOUT_S = 120
SOURCES_5 = Path(__file__).parent / "clients5"
FLAGS = ("-Xmx300m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")  # quick to start


def class_path_5() -> str:
    """Return the class path of clients5/, built if it is new. JudgeUnavailableError."""
    target = build(SOURCES_5) / "target"
    # The client for gRPC first: it has classes that its tools bring too, for another copy of gRPC.
    first = [target / "gateway-clients5.jar", *(target / "lib").glob("rocketmq-client-java-*.jar")]
    return os.pathsep.join(map(str, (*first, target / "lib" / "*")))


class ClientError(AssertionError):
    """A client threw; the text is its exception."""


class Clients:
    """A running JVM with producers and consumers of one name server. A context manager."""

    def __init__(self, java: str, name_server: str, scratch: Path, flags: Sequence[str] = FLAGS, account: Sequence[str] = ()) -> None:
        """With an `account`, an access key and its secret, they sign what they ask."""
        target = build(SOURCES) / "target"
        self._errors = open(scratch / "clients.stderr", "w+")
        (scratch / "conf").mkdir(exist_ok=True)
        if account:
            (scratch / "conf" / "tools.yml").write_text("accessKey: {}\nsecretKey: {}\n".format(*account))
        (scratch / "conf" / "logback_tools.xml").write_text("<configuration/>")  # the tools do not start without one
        self._process = subprocess.Popen(
            [java, *flags, f"-Duser.home={scratch}",
             f"-Drocketmq.home.dir={scratch}", f"-Drocketmq.namesrv.addr={name_server}", "-cp",
             f"{target / 'gateway-clients.jar'}{os.pathsep}{target / 'lib' / '*'}", "clients.Clients", name_server, *account],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, cwd=scratch)  # some tools write files
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def ask(self, do: str, **arguments: Any) -> Any:
        """Run one command and wait for its answer; ClientError where it threw."""
        self.begin(do, **arguments)
        return self.answer()

    def begin(self, do: str, **arguments: Any) -> None:
        """Let one command run; answer() waits for it."""
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        line = self._answers.get(timeout=ANSWER_TIMEOUT_S)
        if not line:
            self._errors.seek(0)
            raise ClientError(f"the clients have ended: {self._errors.read()[-2000:]}")
        told = json.loads(line)
        if "error" in told:
            raise ClientError(told["error"])
        return told["ok"]

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()


def put_mqadmin(java: str, folder: Path) -> Path:
    """Write a command `mqadmin` into a new folder: the published tools, with a home there."""
    target = build(SOURCES) / "target"
    (folder / "conf").mkdir(parents=True)
    (folder / "conf" / "logback_tools.xml").write_text("<configuration/>")
    command = folder / "mqadmin"
    words = [java, *FLAGS, f"-Duser.home={folder}", f"-Drocketmq.home.dir={folder}", "-cp", str(target / "lib" / "*"),
             "org.apache.rocketmq.tools.command.MQAdminStartup"]
    command.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    command.chmod(0o755)
    return command
