"""The producer processes of `pyengine ingest`: starts them, adds up what they report, ends them all."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
from collections.abc import Callable, Sequence

from pyengine.cli.ingest_work import Job, Tally
from pyengine.engine.children import child_environment
from pyengine.errors import EngineError, ExitCode

STOP_TIMEOUT_S = 20.0


def run_crew(jobs: Sequence[Job], report: Callable[[Tally], None]) -> Tally:
    """Run each job in a process of its own, to the end; the tally of all.

    If one fails the others are stopped, and its EngineError is raised here. However this
    is left (Ctrl-C too), no process stays behind.
    """
    crew: list[subprocess.Popen[bytes]] = []
    tallies = [Tally() for _ in jobs]
    done: set[int] = set()
    try:
        for job in jobs:
            crew.append(_start(job))
        with selectors.DefaultSelector() as selector:
            for number, process in enumerate(crew):
                selector.register(process.stdout, selectors.EVENT_READ, number)
            while selector.get_map():
                for key, _ in selector.select():
                    number = key.data
                    line = key.fileobj.readline()
                    if line:
                        tallies[number], finished = _read(line)
                        done |= {number} if finished else set()
                        report(_sum(tallies))
                        continue
                    selector.unregister(key.fileobj)
                    code = crew[number].wait()
                    if number not in done:
                        raise EngineError(
                            f"a producer (pid {crew[number].pid}) ended without an answer, exit code {code}; "
                            f"{tallies[number].messages:,} of its messages had been acknowledged")
        return _sum(tallies)
    finally:
        for process in crew:
            _stop(process)


def _start(job: Job) -> subprocess.Popen[bytes]:
    # In a group of its own: Ctrl-C in a terminal is for this process, which then ends the crew.
    process = subprocess.Popen([sys.executable, "-P", "-m", "pyengine.cli.ingest_producer"],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=child_environment(), process_group=0)
    process.stdin.write(job.to_json().encode())
    process.stdin.close()
    return process


def _read(line: bytes) -> tuple[Tally, bool]:
    """(tally, whether the producer has finished) from one report; raises the error that it tells of."""
    document = json.loads(line)
    finished, error, code = document.pop("done", False), document.pop("error", None), document.pop("exit_code", 1)
    if error is not None:
        failure = EngineError(error)
        failure.exit_code = ExitCode(code)
        raise failure
    return Tally(**document), finished


def _sum(tallies: Sequence[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        total.add(tally)
    return total


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    process.stdout.close()
