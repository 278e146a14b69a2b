"""Power cuts under a running engine, on a real file system: a run on a disk that writes down what reaches it.

    scripts/power_cut.sh --block [--rounds 3] [--states 200] [--seed N] [--mode async|pool|sync] [--broken SWITCH]
                                 [--with [cleaning] [delayed] [consumers]] [--file-system ext4|xfs] [--json] [--peer]

A round is one run of an engine under producers on a new ext4, and `--states` states of its disk (logged_disk.py):
what was flushed, and a part of what was not. Each is mounted, so that ext4 replays its journal, recovered and judged
by the same promises as the strict trees are (engine_power_cut.py). What is stored through mappings is in it as the
kernel wrote it back, which it is made to do all the time (WriteBack). A folder that is not synced is not missed here:
ext4 makes a name durable with its file.

Exit 0: held. 1: something promised was lost, torn, doubled or out of order. 2: it cannot run here, which a sentence says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import needs
from faults.after_kill import do
from faults.engine_power_cut import ACKS, FAILURES_SHOWN, SEGMENT_BYTES, PowerCutRun, judge_states, main, run_engine
from faults.flushed_watch import FlushedWatch
from faults.logged_disk import FILE_SYSTEMS, BlockDisk, FileSystem, LoggedDisk, build_server, logged_disk
from faults.memory_folder import memory_folder
from faults.mounts import own_mounts
from faults.power_cut import Outcome, Record, explore_states
from pyengine.formats.paths import parse_segment_name

WRITTEN_BACK = ("commitlog", "consumequeue", "index")


def cut(
    program: Path, folder: Path, seed: str, mode: str, states: int, environ: dict[str, str], company: Collection[str] = (), *,
    kind: FileSystem = FILE_SYSTEMS["ext4"], enough: int = ACKS, stop_at: int = 5, then: str = ""
) -> Outcome:
    """One round; `store` and `acks` stay in `folder`, as all processes' death left them.

    With a bad state also `journal` and `image`, the disk before it, of which explore_states makes the same states again.
    """
    with memory_folder(folder / "scratch") as scratch:
        with logged_disk(program, scratch, kind) as disk:
            begins = record_run(disk, seed, mode, company, environ, enough, then)
            records = tell_beginning(disk.records(), disk.store)
            shutil.copytree(disk.store, folder / "store")
            (folder / "acks").write_bytes(disk.acks.read_bytes())
        model, place = BlockDisk(disk.kind, disk.base), scratch / "state"
        place.mkdir()
        outcome = judge_states(mode, company, seed, records, lambda judge: explore_states(
            records, model, lambda rng: model.state(rng, place), judge, states=states, seed=seed, stop_at=stop_at,
            begin=begins))
        if outcome.bad:  # the reason is in them
            shutil.copy(disk.journal, folder / "journal")
            (folder / "image").write_bytes(disk.base)
        return outcome


def record_run(disk: LoggedDisk, seed: str, mode: str, company: Collection[str], environ: dict[str, str], enough: int,
               then: str = "") -> int:
    """Runs the engine, and does what comes `then`; the record with which that begins, 0 without."""
    begins = 0

    def afterwards() -> None:
        nonlocal begins
        begins = len(disk.records())
        do(then, disk.store, disk.acks, environ, acks.write)

    with open(disk.acks, "ab", buffering=0) as acks:
        run_engine(disk.store, disk.acks, seed, mode, company, environ, enough,
                   lambda: WriteBack(disk.store, acks.write, random.Random(seed)), then, afterwards if then else lambda: None)
    return begins


def tell_beginning(records: list[Record], store: Path) -> list[Record]:
    """Add a line: in each state what was deleted when the run ended may be gone, and nothing after it.

    When a deletion began is not seen here.
    """
    first = min(start for name in os.listdir(store / "commitlog") if (start := parse_segment_name(name)) is not None)
    line = json.dumps({"removing": first - SEGMENT_BYTES}).encode() + b"\n"
    return [Record("A", 0, 0, line, b""), *records] if first else records


class WriteBack(FlushedWatch):
    """Lets the kernel write back one file after another while it watches, and tells which segments may go.

    As the kernel does of itself for want of memory, or after seconds; a run takes less. No flush follows: what is
    written may be lost all the same, and may survive what was stored before it. One at a time, or a sync that is
    forgotten would be made up for.
    """

    def __init__(self, store: Path, tell: Callable[[bytes], object], rng: random.Random) -> None:
        super().__init__(store, tell)
        self.store = store
        self.rng = rng

    def look(self) -> None:
        super().look()
        paths = sorted(os.path.join(place, name) for folder in WRITTEN_BACK
                       for place, _, names in os.walk(self.store / folder) for name in names)
        if paths:
            with contextlib.suppress(FileNotFoundError), open(self.rng.choice(paths), "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class BlockPowerCutRun(PowerCutRun):
    kind = "power cut, blocks"

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        present = [name for name, kind in FILE_SYSTEMS.items() if shutil.which(kind.command[0])]
        parser.add_argument("--file-system", choices=present, default="ext4", help="one that can be made here")

    def take_options(self, arguments: argparse.Namespace) -> None:
        self.file_system = FILE_SYSTEMS[arguments.file_system]
        if self.then == "salvage":
            raise SystemExit("power_cut.sh: a salvage is cut in trees only: leave out --block")
        if arguments.file_system != "ext4":
            self.summary.kind += f", {arguments.file_system}"

    def build(self) -> Path:
        return build_server(self.scratch)

    def cut(self, folder: Path, seed: str, company: Sequence[str]) -> Outcome:
        return cut(self.program, folder, seed, self.mode, self.states, self.environ, company, kind=self.file_system,
                   stop_at=FAILURES_SHOWN, then=self.then)


if __name__ == "__main__":
    if reason := needs.NEEDS["block"].absent():
        print(f"no disk that writes down what reaches it can be made here: {reason}", file=sys.stderr)
        sys.exit(2)
    own_mounts()
    sys.exit(main(__doc__, BlockPowerCutRun))
