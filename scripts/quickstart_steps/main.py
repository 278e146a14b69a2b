"""The quickstart's steps in order; see scripts/quickstart, which prepares the environment and starts this."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]

from counts import WORD, Counts, count_with_spark  # noqa: E402
from crew import Crew, Kill, Report, find_jobs  # noqa: E402

from pyengine.cli.engine_status import engine_status  # noqa: E402
from pyengine.cli.output import size_text, write_table  # noqa: E402

MODES = {
    "async": {},
    "sync": {"flush_disk_type": "SYNC_FLUSH"},
    "pool": {"transient_store_pool_enable": "true", "transient_store_pool_size": "3"},
}
SIZES = {  # small files: the store takes little more room than its messages
    "mapped_file_size_commit_log_bytes": "64MiB", "max_hash_slot_num": "1000000", "max_index_num": "4000000",
}
KILL_AT = 0.4
TOPICS_SHOWN = 12


def main() -> int:
    asked = arguments()
    jobs, total_bytes = find_jobs(asked.input, asked.megabytes << 20)
    if not jobs:
        raise SystemExit(f"{asked.input} holds no Python sources")
    with store_folder(asked.store) as store:
        print(f"{len(jobs):,} files of Python source, {size_text(total_bytes)}, from {asked.input}\n")
        settings = [f"--set={name}={value}" for name, value in (SIZES | MODES[asked.mode]).items()]
        command("start", store, *settings)
        try:
            report, kill = put_everything(asked, store, jobs, total_bytes)
        except BaseException:
            command("stop", store, may_fail=True)
            raise
        command("stop", store)
        command("check", store)
        print("\ncounting with Spark ...", flush=True)
        begun_s = time.monotonic()
        found = count_with_spark(str(store))
        print(f"read in {time.monotonic() - begun_s:.1f} s, the session's start included\n")
        return compare(report.counts, found, kill)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/quickstart", description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=0, help="repeat the walk until so much is put (default: one walk)")
    parser.add_argument("--producers", type=int, default=4)
    parser.add_argument("--mode", choices=list(MODES), default="async", help="how the engine writes")
    parser.add_argument("--kill", default="writer", help="the kind of worker that gets SIGKILL half-way")
    parser.add_argument("--input", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="a folder with Python sources")
    parser.add_argument("--store", type=Path, help="keep the store here (default: a temporary folder)")
    return parser.parse_args()


@contextmanager
def store_folder(asked: Path | None) -> Iterator[Path]:
    if asked is not None:
        if asked.exists():
            raise SystemExit(f"{asked} exists: give a folder that does not, for the new store")
        yield asked.absolute()
        return
    folder = Path(tempfile.mkdtemp(prefix="pyengine-quickstart-"))
    try:
        yield folder / "store"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def command(name: str, store: Path, *options: str, may_fail: bool = False) -> None:
    """Print a command as a user would type it, and run it."""
    print("$ " + shlex.join(["pyengine", name, str(store), *options]), flush=True)
    done = subprocess.run([sys.executable, "-P", "-m", "pyengine", name, str(store), *options], env=environment())
    if done.returncode and not may_fail:
        raise SystemExit(f"pyengine {name} ended with exit code {done.returncode}")


def environment() -> dict[str, str]:
    """Return the environment of the commands, in which they import this checkout."""
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def put_everything(asked: argparse.Namespace, store: Path, jobs: list, total_bytes: int) -> tuple[Report, Kill]:
    """Put all jobs and kill one worker half-way; return the final report and the kill."""
    kill = Kill(asked.kill, lambda: engine_status(store, {}))
    errors = store.parent / f"{store.name}.producers.log"
    print(f"\n{asked.producers} producers, a process each; at {KILL_AT:.0%} the {asked.kill} gets SIGKILL")
    crew = Crew(store, jobs, asked.producers, errors)
    begun_s = time.monotonic()
    try:
        with progress(store, total_bytes) as show:
            for report in crew.reports():
                if not kill.pid and report.read_bytes >= KILL_AT * total_bytes:
                    kill.strike()
                    show.say(f"SIGKILL to the {kill.kind}, process {kill.pid}, after {report.messages:,} acknowledged messages")
                if kill.check_replaced():
                    show.say(f"the {kill.kind} is back after {kill.back_after_ms} ms as process {kill.back_pid}; no other process "
                             f"was restarted")
                show.report(report)
    finally:
        crew.kill()
    seconds = time.monotonic() - begun_s
    if any(report.exit_codes):
        raise SystemExit(f"a producer failed:\n{errors.read_text()}")
    errors.unlink()
    wait_until_back(kill)
    print(f"{report.messages:,} messages, {size_text(report.read_bytes)}, acknowledged in {seconds:.2f} s: "
          f"{report.messages / seconds:,.0f} messages/s, {size_text(report.read_bytes / seconds)}/s\n")
    return report, kill


def wait_until_back(kill: Kill) -> None:
    deadline_s = time.monotonic() + 30
    while not kill.back_pid and time.monotonic() < deadline_s:
        if kill.check_replaced():
            print(f"the {kill.kind} is back after {kill.back_after_ms} ms as process {kill.back_pid}")
        time.sleep(0.02)
    if not kill.back_pid:
        raise SystemExit(f"the {kill.kind} was killed and did not come back")


class Lines:
    """Progress for a log: a line now and then."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._said = 0

    def report(self, report: Report) -> None:
        tenths = 10 * report.read_bytes // self._total_bytes
        if tenths > self._said:
            print(f"  {10 * tenths:3} %  {report.messages:>12,} messages", flush=True)
            self._said = tenths

    def say(self, text: str) -> None:
        print(f"  {text}", flush=True)


class Bars:
    """Progress for a terminal: a bar, the rate, and how far the engine's positions are."""

    def __init__(self, bars, store: Path, total_bytes: int) -> None:
        self._bars = bars
        self._store = store
        self._task = bars.add_task("acknowledged", total=total_bytes, messages="", positions="")
        self._looked_s = 0.0

    def report(self, report: Report) -> None:
        self._bars.update(self._task, completed=report.read_bytes, messages=f"{report.messages:,} messages")
        if time.monotonic() - self._looked_s > 0.1:
            self._looked_s = time.monotonic()
            positions = engine_status(self._store, {})["positions"]
            texts = "  ".join(f"{name} {size_text(positions[name])}" for name in ("wrote", "flushed", "reput_from"))
            self._bars.update(self._task, positions=texts)

    def say(self, text: str) -> None:
        self._bars.console.print(f"  {text}")


@contextmanager
def progress(store: Path, total_bytes: int) -> Iterator[Lines | Bars]:
    if not sys.stdout.isatty():
        yield Lines(total_bytes)
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
               TextColumn("{task.fields[messages]}"), TextColumn("{task.fields[positions]}"))
    with Progress(*columns) as bars:
        yield Bars(bars, store, total_bytes)


def compare(put: Counts, found: Counts, kill: Kill) -> int:
    """Print both results side by side; return 0 if they are equal."""
    topics = sorted(put.keys() | found.keys(), key=lambda topic: -put[topic].messages if topic in put else 0)
    word = WORD.decode().strip()
    rows, different = [], []
    for topic in topics:
        mine, theirs = put.get(topic), found.get(topic)
        if mine != theirs:
            different.append(topic)
        if len(rows) < TOPICS_SHOWN or mine != theirs:
            rows.append((topic, *_cells(mine, theirs), "same" if mine == theirs else "DIFFERENT"))
    if len(rows) < len(topics):
        rows.append((f"... {len(topics) - len(rows)} more", *[""] * 6, "same"))
    rows.append(("all", *_cells(_sum(put), _sum(found)), "same" if not different else "DIFFERENT"))
    write_table(("topic", "messages put", "in Spark", "bytes put", "in Spark", f"with '{word}' put", "in Spark", ""),
                [[f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in rows])
    if different:
        print(f"\n{len(different)} topics differ")
        return 1
    print(f"\nNothing was lost and nothing doubled, though the {kill.kind} was killed with SIGKILL on the way.")
    return 0


def _cells(mine, theirs) -> list:
    return [cell for name in ("messages", "body_bytes", "with_word")
            for cell in (getattr(mine, name, 0), getattr(theirs, name, 0))]


def _sum(counts: Counts):
    from counts import Count

    total = Count()
    for count in counts.values():
        total += count
    return total


if __name__ == "__main__":
    sys.exit(main())
