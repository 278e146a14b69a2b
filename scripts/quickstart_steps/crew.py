"""The producers as processes: their jobs, what they report, and the one kill on the way."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from counts import Counts, add_up, from_plain

HERE = Path(__file__).resolve().parent
Job = tuple[str, str, str]  # topic, name, path


def find_jobs(folder: Path, wanted_bytes: int) -> tuple[list[Job], int]:
    """Every Python source under `folder`, its package as topic, the walk repeated up to `wanted_bytes` (0: once).

    And their bytes.
    """
    walk = []
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder)
        if "site-packages" not in inside.parts:
            topic = inside.parts[0] if len(inside.parts) > 1 else "modules"
            walk.append(((topic, str(inside).replace(" ", "_"), str(path)), path.stat().st_size))
    jobs, total = [], 0
    while walk and (not jobs or total < wanted_bytes):
        for job, size in walk:
            if jobs and 0 < wanted_bytes <= total:
                break
            jobs.append(job)
            total += size
    return jobs, total


@dataclass
class Report:
    """How far all producers are."""

    messages: int = 0
    read_bytes: int = 0
    counts: Counts = field(default_factory=dict)
    exit_codes: list[int] = field(default_factory=list)


class Crew:
    """Several producers at work; `reports()` yields after each batch of any of them, then once more at the end."""

    def __init__(self, store: Path, jobs: list[Job], producers: int, errors: Path) -> None:
        self._parts: list[dict[str, int]] = [{} for _ in range(producers)]
        self._counts: list[Counts] = [{} for _ in range(producers)]
        self._processes = []
        with open(errors, "wb") as log:
            for number in range(producers):
                process = subprocess.Popen([sys.executable, str(HERE / "producer.py"), str(store), str(number)],
                                           stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
                self._processes.append(process)
        for number, process in enumerate(self._processes):
            job_file = "".join(json.dumps(job) + "\n" for job in jobs[number::producers])
            self._feed(process, job_file.encode())

    @staticmethod
    def _feed(process: subprocess.Popen, text: bytes) -> None:
        """Hand over the jobs while the reports are read: neither pipe may fill up and stop both sides."""

        def write() -> None:
            with contextlib.suppress(BrokenPipeError), process.stdin:  # its exit code tells
                process.stdin.write(text)

        threading.Thread(target=write, daemon=True).start()

    def reports(self) -> Iterator[Report]:
        with selectors.DefaultSelector() as selector:
            for number, process in enumerate(self._processes):
                os.set_blocking(process.stdout.fileno(), False)
                selector.register(process.stdout, selectors.EVENT_READ, [number, b""])
            while selector.get_map():
                for key, _ in selector.select(0.1):
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fileobj)
                        continue
                    *lines, key.data[1] = (key.data[1] + data).split(b"\n")
                    for line in lines:
                        self._take(key.data[0], json.loads(line))
                yield self._report()
        last = self._report()
        last.exit_codes = [process.wait() for process in self._processes]
        last.counts = add_up(self._counts)
        yield last

    def kill(self) -> None:
        """End what still runs; for the way out of a failure."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def _take(self, number: int, said: dict) -> None:
        if "counts" in said:
            self._counts[number] = from_plain(said["counts"])
        else:
            self._parts[number] = said

    def _report(self) -> Report:
        return Report(*(sum(part.get(name, 0) for part in self._parts) for name in ("messages", "read_bytes")))


@dataclass
class Kill:
    """SIGKILL for one worker of the engine, once, and what came of it."""

    kind: str
    status: Callable[[], dict]
    pid: int = 0
    killed_s: float = 0.0
    back_after_ms: int = -1
    back_pid: int = 0

    def strike(self) -> None:
        self.pid = self._worker()["pid"]
        os.kill(self.pid, signal.SIGKILL)
        self.killed_s = time.monotonic()

    def check_replaced(self) -> bool:
        """True at the first call that finds the replacement ready."""
        if not self.pid or self.back_pid:
            return False
        worker = self._worker()
        if worker["pid"] == self.pid or worker["state"] != "ready":
            return False
        self.back_pid = worker["pid"]
        self.back_after_ms = round((time.monotonic() - self.killed_s) * 1000)
        return True

    def _worker(self) -> dict:
        workers = [one for one in self.status()["workers"] if one["kind"] == self.kind]
        if not workers:
            raise SystemExit(f"no worker of the kind {self.kind} runs in this mode; "
                             f"running are {', '.join(one['kind'] for one in self.status()['workers'])}")
        return workers[0]
