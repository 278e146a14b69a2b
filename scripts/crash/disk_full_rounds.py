"""Fill the disk under a running engine in each round; make room, or kill everything first; then audit.

    python -m crash.disk_full_rounds [--rounds 5] [--seed N] [--mode async|pool|sync] [--json] [--peer]

The store has a file system of its own (a tmpfs, which only root may mount), in which a second file takes all free
space. Puts without room are refused, and accepted again once there is room. In the first round and every second
one after it all processes are killed while the disk is full: recovery works without room, or says that it needs some.

Exit 0: held. 1: a message was lost, torn, doubled or out of order, or something hung; the store is kept and named.
2: no file system can be mounted here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from crash.report import Summary, crash_parser, ended_in_order, finish
from crash.rounds import CrashRun
from pyengine.cli.torture import COMMAND_TIMEOUT_S, EngineWatch, HangError
from pyengine.errors import ExitCode

DISK_BYTES = 96 << 20
# So that the disk gets full: no segment is deleted for room, and no put is refused earlier.
UNTIL_FULL = {"clean_file_forcibly_enable": False, "file_reserved_time_hours": 1000, "disk_space_warning_level_ratio": 100,
               "disk_space_clean_forcibly_ratio": 100, "disk_max_used_space_ratio": 95}
PIECE_BYTES = 64 << 10
QUIET_S = 0.5       # without an acknowledgement for so long the disk counts as full
FULL_TIMEOUT_S = 60.0
ROOM_WORDS = ("room", "full", "No space left")  # one of them is in the sentence of a recovery that needs room


@dataclass
class DiskFullSummary(Summary):
    """`times_full`: how often puts waited for room; `without_room`: recoveries that succeeded without room."""

    times_full: int = 0
    without_room: int = 0


class NoDiskError(Exception):
    """A file system cannot be mounted; the text is what mount said."""


def take_room(ballast: Path) -> None:
    """Let the file `ballast` take all free space of its file system."""
    descriptor = os.open(ballast, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        while True:
            os.write(descriptor, bytes(PIECE_BYTES))
    except OSError:
        pass
    finally:
        os.close(descriptor)


class SmallDisk:
    """A tmpfs, with a file in it that can take all free space."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", folder]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except BaseException:
            self.unmount()  # the mount may have succeeded
            raise
        if done.returncode:
            raise NoDiskError(f"no small disk can be mounted here, which takes root: {done.stderr.strip()}")

    def fill(self) -> None:
        """Take all free space."""
        take_room(self._ballast)

    def give_room(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def unmount(self) -> None:
        """Unmount it, if it is mounted."""
        if os.path.ismount(self.folder):
            subprocess.run(["umount", "--lazy", self.folder], check=True)


class DiskFullRun(CrashRun):
    """Rounds in which the disk is full for a time."""

    def __init__(self, disk: SmallDisk, scratch: Path, mode: str, seed: int) -> None:
        super().__init__(disk.folder / "store", scratch, "disk full", mode, seed)
        self.disk = disk
        self.settings |= UNTIL_FULL
        self.summary = DiskFullSummary("disk full", mode, seed)

    def leave(self, *, held: bool) -> None:
        """Unmount the disk; keep the store of a failed run in the run's folder."""
        try:
            if not held and self.store.exists():
                shutil.copytree(self.store, self.scratch / "store")
        finally:
            self.disk.unmount()

    def strike(self) -> None:
        self.disk.fill()
        self.wait_until_full()
        if self.summary.rounds % 2 == 0:
            self.kill_everything_without_room()
        else:
            self.disk.give_room()
        self.make_producers()
        self.wait_for_acks()

    def wait_until_full(self) -> None:
        """Wait until acknowledgements stop, once the segments that were made ahead are full."""
        deadline_s = time.monotonic() + FULL_TIMEOUT_S
        bytes_before, since_s = -1, time.monotonic()
        while time.monotonic() - since_s < QUIET_S:
            if self.acked_count() != bytes_before:
                bytes_before, since_s = self.acked_count(), time.monotonic()
                self.disk.fill()
            if time.monotonic() > deadline_s:
                raise HangError("the disk is full, and puts go on")
            time.sleep(0.01)
        self.summary.times_full += 1

    def kill_everything_without_room(self) -> None:
        with EngineWatch(self.store) as watch:
            self.kill_all(watch)
        command = [sys.executable, "-P", "-m", "pyengine", "recover", str(self.store)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
        if done.returncode == ExitCode.OK:
            self.summary.without_room += 1
        elif not any(word in done.stderr for word in ROOM_WORDS) or "Traceback" in done.stderr:
            self.summary.failures.append(f"recovery on a full disk ended with {done.returncode} and does not say so: "
                                         f"{done.stderr[-1000:]}")
        self.disk.give_room()
        self.recover()
        self.check_store()
        self.start_engine()


@ended_in_order
def main() -> int:
    arguments = crash_parser(__doc__, rounds=5).parse_args()

    def make(store: Path, scratch: Path) -> DiskFullRun:
        disk = SmallDisk(scratch / "disk", DISK_BYTES)
        try:
            return DiskFullRun(disk, scratch, arguments.mode, arguments.seed)
        except BaseException:
            disk.unmount()
            raise

    def words(summary: DiskFullSummary) -> str:
        return f"{summary.times_full} times full, {summary.without_room} recoveries without room"

    try:
        return finish(arguments, make, lambda run: run.run(arguments.rounds), words)
    except NoDiskError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
