"""The published RocketMQ store 4.9.8 as judge: one JVM that opens every store of a test run.

The Java half is in judge/ and is built by Maven into a cache folder outside the checkout, named
by the content of its sources ($PYENGINE_CACHE, else the user's cache folder). Requests and answers
are JSON lines over pipes; several stores are judged at once, because the real store sleeps whole
seconds at start and stop. `verify` opens a copy, so the store under test is never touched.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from replay import Put

SOURCES = Path(__file__).parent / "judge"
BUILD_TIMEOUT_S = 900
ANSWER_TIMEOUT_S = 240

# The store reaches into the JDK to unmap files; it cleans old files by force on a disk that is nearly full.
JVM_FLAGS = (
    # A store too large for the heap ends the judge, and says so on another stream than its answers.
    "-XX:+ExitOnOutOfMemoryError",
    "-XX:+DisplayVMOutputToStderr",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/java.lang=ALL-UNNAMED",
    "--add-opens=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "-Drocketmq.broker.diskSpaceWarningLevelRatio=0.999",
    "-Drocketmq.broker.diskSpaceCleanForciblyRatio=0.998",
)


class JudgeUnavailableError(Exception):
    """The judge cannot be built or started here; the text says why."""


class JudgeFailure(AssertionError):
    """The real store threw; the text is its stack trace and its log."""


def cache_folder() -> Path:
    named = os.environ.get("PYENGINE_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pyengine"


def build(sources: Path = SOURCES) -> Path:
    """Folder of a built Maven project, built if its sources are new. JudgeUnavailableError with Maven's own words."""
    files = sorted(path for path in sources.rglob("*") if path.suffix in (".java", ".xml"))
    digest = hashlib.sha256(b"".join(str(p.relative_to(sources)).encode() + p.read_bytes() for p in files)).hexdigest()
    cache, name = cache_folder(), sources.name
    built = cache / f"{name}-{digest[:16]}"
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once: the second finds what the first has built
        if built.is_dir():
            return built
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            place = Path(scratch, name)
            shutil.copytree(sources, place, ignore=shutil.ignore_patterns("target"))
            command = ["mvn", "-q", "-B", "package", "dependency:copy-dependencies", "-DoutputDirectory=target/lib"]
            try:
                told = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise JudgeUnavailableError(f"Maven did not build {sources}: {error}") from error
            if told.returncode != 0:
                raise JudgeUnavailableError(f"Maven did not build {sources}:\n{told.stdout}{told.stderr}")
            os.rename(place, built)
    return built


def put_row(put: Put, *, with_clock: bool = True) -> dict[str, Any]:
    """A put of a manifest as the judge's `write` takes it: the body spelt out, batches already encoded."""
    row = {
        "topic": put.topic,
        "queueId": put.queue_id,
        "propsIn": put.properties_text,
        "body": base64.b64encode(put.body).decode() if put.has_body else None,
        "batch": put.is_batch,
        "flag": put.flag,
        "sysFlagIn": put.sys_flag,
        "born": put.born_timestamp_ms,
        "bornHost": put.born_host,
        "storeHost": put.store_host,
        "reconsume": put.reconsume_times,
        "prepared": put.prepared_transaction_offset,
    }
    return {**row, "clock": put.clock_ms} if with_clock else row


class Judge:
    """A running judge. Every call gives a Future; use as a context manager."""

    def __init__(self, java: str, scratch: Path, heap: str = "1g") -> None:
        target = build() / "target"
        self.scratch = scratch
        self.lock = threading.Lock()
        self.waiting: dict[int, Future[dict[str, Any]]] = {}
        self.last_id = 0
        self.errors = open(scratch / "judge.stderr", "w+")
        self.process = subprocess.Popen(
            [java, f"-Xmx{heap}", *JVM_FLAGS, "-cp", f"{target / 'store-judge.jar'}{os.pathsep}{target / 'lib' / '*'}", "judge.Judge"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            encoding="utf-8",
            env={**os.environ, "LC_ALL": "C.UTF-8"},  # else Java cannot name a topic's folder beyond ASCII
        )
        self.reader = threading.Thread(target=self.read, name="judge-answers", daemon=True)
        self.reader.start()

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.reader.join(timeout=30)
        self.errors.close()

    def verify(self, store: Path, settings: Mapping[str, Any]) -> Future[dict[str, Any]]:
        """All that the real store reads from a copy of `store` (records, queues, messages, queries, positions)."""
        copy = self.copy(store)
        answer = self.ask("verify", copy, settings)
        answer.add_done_callback(lambda _: shutil.rmtree(copy, ignore_errors=True))
        return answer

    def write(
        self, store: Path, settings: Mapping[str, Any], puts: Sequence[Mapping[str, Any]]
    ) -> Future[dict[str, Any]]:
        """Puts into `store` itself as a master, creating it or going on with it, then stops in good order.

        A put is a row as `put_row` makes it. With `clock` in the rows the store time is where the
        row says.
        """
        return self.ask("write", store, settings, puts=list(puts))

    def offsets(self, path: Path, commit: Mapping[str, Mapping[str, int]] | None = None) -> Future[dict[str, Any]]:
        """The table of a consumerOffset.json as a broker loads it; with `commit` it then writes the file its way."""
        more = {} if commit is None else {"commit": commit}
        return self.ask("offsets", path.parent.parent, {}, path=str(path), **more)

    def filter(self, cases: Sequence[tuple[str, Sequence[Mapping[str, str]]]]) -> Future[dict[str, Any]]:
        """`verdicts`: for each (condition, property sets) what a broker's SQL92 filter says of each set; None: refused."""
        return self.ask("filter", self.scratch, {}, cases=[{"sql": sql, "sets": list(sets)} for sql, sets in cases])

    def ha_open(self, store: Path, settings: Mapping[str, Any], master: str = "") -> Future[dict[str, Any]]:
        """Opens `store` itself in the role of its settings and lets it run; a SLAVE follows `master` (host:port).

        This and the other ha_ calls answer with `minPhy`, `maxPhy`, `dispatchBehind`, `pushedToSlave`, `connections`.
        """
        return self.ask("ha_open", store, settings, master=master)

    def ha_put(self, store: Path, count: int, *, body_bytes: int = 300, seed: int = 1) -> Future[dict[str, Any]]:
        """So many made-up messages, one after the other, into an open master; adds `statuses`, `okEnd`, times."""
        return self.ask("ha_put", store, {}, count=count, bodyBytes=body_bytes, seed=seed)

    def ha_look(self, store: Path) -> dict[str, Any]:
        """How far an open store is, now."""
        return self.ask("ha_look", store, {}).result(ANSWER_TIMEOUT_S)

    def ha_close(self, store: Path) -> dict[str, Any]:
        """Stops an open store in good order, when its queues have caught up; adds `facts`."""
        return self.ask("ha_close", store, {}).result(ANSWER_TIMEOUT_S)

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """kill -9: every store that is open in it ends as a broker's does then."""
        self.process.kill()

    def copy(self, store: Path) -> Path:
        place = Path(tempfile.mkdtemp(prefix=f"{store.name}-", dir=self.scratch))
        # File times matter to the store's look-up by time; copies of sparse files stay sparse.
        subprocess.run(["cp", "-a", "--sparse=always", f"{store}/.", str(place)], check=True)
        return place

    def ask(self, command: str, store: Path, settings: Mapping[str, Any], **more: Any) -> Future[dict[str, Any]]:
        answer: Future[dict[str, Any]] = Future()
        text = {name: str(value) for name, value in settings.items()}
        with self.lock:
            self.last_id += 1
            self.waiting[self.last_id] = answer
            request = {"id": self.last_id, "command": command, "store": str(store), "settings": text, **more}
            try:
                self.process.stdin.write(json.dumps(request) + "\n")
                self.process.stdin.flush()
            except OSError as error:
                del self.waiting[self.last_id]
                answer.set_exception(JudgeFailure(f"the judge is gone: {error}\n{self.stderr()}"))
        return answer

    def read(self) -> None:
        for line in self.process.stdout:
            reply = json.loads(line)
            with self.lock:
                answer = self.waiting.pop(reply["id"])
            if "failure" in reply:
                answer.set_exception(JudgeFailure("\n".join([reply["failure"], *reply.get("log", [])])))
            else:
                answer.set_result(reply["answer"])
        with self.lock:
            for answer in self.waiting.values():
                answer.set_exception(JudgeFailure(f"the judge ended without an answer\n{self.stderr()}"))
            self.waiting.clear()

    def stderr(self) -> str:
        self.errors.flush()
        return Path(self.errors.name).read_text()[-4000:]
