"""The published RocketMQ client 4.9.8 and its tools, unchanged: one JVM with clients that a test tells what to do.

The Java half is in clients/ and is built as the judge's is. Commands and answers are JSON lines.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import queue
import shlex
import shutil
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from interop.judge import build, cache_folder
from waiting import scaled_timeout_s

SOURCES = Path(__file__).parent / "clients"
ANSWER_TIMEOUT_S = 120
SOURCES_5 = Path(__file__).parent / "clients5"
SOURCES_NODE = Path(__file__).parent / "node"
FLAGS = ("-Xmx300m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")  # quick to start


def class_path_5() -> str:
    """Return the class path of clients5/, built if it is new. JudgeUnavailableError."""
    target = build(SOURCES_5) / "target"
    # The client for gRPC first: it has classes that its tools bring too, for another copy of gRPC.
    first = [target / "gateway-clients5.jar", *(target / "lib").glob("rocketmq-client-java-*.jar")]
    return os.pathsep.join(map(str, (*first, target / "lib" / "*")))


def node_programs() -> Path:
    """Return the folder of node/'s programs, below which npm has brought the client; skips without its registry."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(SOURCES_NODE.iterdir()))).hexdigest()
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    place = cache / f"node-{digest[:16]}"
    with open(cache / "node.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "installed").exists():
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(SOURCES_NODE, place)
            done = subprocess.run(["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=place, capture_output=True,
                                  text=True, timeout=scaled_timeout_s(200))
            if done.returncode != 0:
                pytest.skip(f"node: npm did not bring the client: {done.stderr[-1000:]}")
            (place / "installed").touch()
    return place


class ClientError(AssertionError):
    """A client threw; the text is its exception."""


class Clients:
    """A running JVM with producers and consumers of one name server. A context manager."""

    def __init__(self, java: str, name_server: str, scratch: Path, flags: Sequence[str] = FLAGS, account: Sequence[str] = ()) -> None:
        """With an `account`, an access key and its secret, they sign what they ask."""
        target = build(SOURCES) / "target"
        self.errors = open(scratch / "clients.stderr", "w+")
        (scratch / "conf").mkdir(exist_ok=True)
        if account:
            (scratch / "conf" / "tools.yml").write_text("accessKey: {}\nsecretKey: {}\n".format(*account))
        (scratch / "conf" / "logback_tools.xml").write_text("<configuration/>")  # the tools do not start without one
        self.process = subprocess.Popen(
            [java, *flags, f"-Duser.home={scratch}",
             f"-Drocketmq.home.dir={scratch}", f"-Drocketmq.namesrv.addr={name_server}", "-cp",
             f"{target / 'gateway-clients.jar'}{os.pathsep}{target / 'lib' / '*'}", "clients.Clients", name_server, *account],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, cwd=scratch)  # some tools write files
        self.answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put("")

    def ask(self, do: str, **arguments: Any) -> Any:
        """Run one command and wait for its answer; ClientError where it threw."""
        self.begin(do, **arguments)
        return self.answer()

    def begin(self, do: str, **arguments: Any) -> None:
        """Let one command run; answer() waits for it."""
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        line = self.answers.get(timeout=ANSWER_TIMEOUT_S)
        if not line:
            self.errors.seek(0)
            raise ClientError(f"the clients have ended: {self.errors.read()[-2000:]}")
        told = json.loads(line)
        if "error" in told:
            raise ClientError(told["error"])
        return told["ok"]

    @property
    def pid(self) -> int:
        return self.process.pid

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.errors.close()


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
