"""`pyengine prove`: measure and torture on the user's own disk."""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyengine.cli import output
from pyengine.cli.options import json_option, set_option
from pyengine.errors import DiskError, ExitCode, NotAStoreError
from pyengine.storage.config import load_config

if TYPE_CHECKING:
    from pyengine.cli.prove_rounds import ModeProof

DISK_SECONDS_MAX = 5.0
FREE_BYTES_MIN = 2 << 30
BLOCK_BYTES = 4096
FILE_BYTES = 8 << 20
HONEST_US_MIN = 15.0  # no medium that keeps its bytes without power has been seen to answer sooner


@click.command()
@click.argument("parent", type=click.Path(path_type=Path), metavar="STORE_PARENT")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=3.0, show_default=True, help="How long, in all.")
@click.option("--mode", "modes", multiple=True, type=click.Choice(["async", "pool", "sync"]),
              help="Only this flush mode; may be repeated.")
@click.option("--seed", type=int, default=None, help="Repeats the order of kills of an earlier run.")
@click.option("--keep", is_flag=True, help="Keep the stores; those of a failed run are always kept.")
@set_option
@json_option
def prove(parent: Path, minutes: float, modes: tuple[str, ...], seed: int | None, keep: bool, settings: dict[str, str],
          as_json: bool) -> int:
    """Try on your own disk what is promised: kill -9 under load, then look for every acknowledged message.

    STORE_PARENT is a directory on the disk in question; stores are made in a folder of their
    own in it, of 1 GiB each at most, and removed afterwards. First the disk by itself: how soon
    it says that bytes are safe. Then each flush mode in turn: two producers put, random
    processes of the engine die, also all at once. A power cut cannot be tried from here.

    Exit codes: 0 everything held, 1 something did not.

    \b
    Examples:
      pyengine prove /var/lib --minutes 10
      pyengine prove . --minutes 1 --mode sync --json
    """
    from pyengine.cli.prove_rounds import MODES, prove_mode

    if not parent.is_dir():
        raise NotAStoreError(f"{parent} is no directory: STORE_PARENT is an existing directory on the disk to be tried")
    free_bytes = shutil.disk_usage(parent).free
    if free_bytes < FREE_BYTES_MIN:
        raise DiskError(f"{output.size_text(free_bytes)} are free under {parent}, {output.size_text(FREE_BYTES_MIN)} are needed")
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    load_config(None, settings)  # a wrong setting is told before anything is made
    chosen = list(dict.fromkeys(modes)) or list(MODES)
    began_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="pyengine-prove-", dir=parent))
    held = False
    try:
        disk = measure_disk(folder, min(DISK_SECONDS_MAX, minutes * 6))
        until_s = began_s + minutes * 60
        proofs = []
        for turn, mode in enumerate(chosen):
            seconds = max(0.0, (until_s - time.monotonic()) / (len(chosen) - turn))
            proofs.append(prove_mode(folder, mode, seconds, seed, _show, settings))
        held = not any(proof.failures for proof in proofs)
    finally:
        if held and not keep:
            shutil.rmtree(folder, ignore_errors=True)
    document = {
        "held": held, "seed": seed, "seconds": round(time.monotonic() - began_s, 1), "stores": str(folder) if keep or not held else None,
        "disk": asdict(disk) | {"verdict": disk.verdict},
        "modes": [asdict(proof) | {"kills": dict(proof.kills), "kills_total": proof.kills.total()} for proof in proofs]}
    if as_json:
        output.write_json(document)
    else:
        _print(disk, proofs, document)
    return ExitCode.OK if held else ExitCode.FAILED


def _show(proof: ModeProof) -> None:
    if sys.stderr.isatty():
        print(f"\r{proof.mode}: {proof.kills.total()} kills, {proof.acknowledged:,} acknowledged ", end="", file=sys.stderr, flush=True)


def _print(disk: DiskMeasure, proofs: list[ModeProof], document: dict[str, Any]) -> None:
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(f"{disk.file_system or 'the disk'}: {disk.syncs_per_s:,.0f} syncs/s, p50 {disk.sync_p50_us:.0f} us, "
          f"p99 {disk.sync_p99_us:.0f} us; {disk.verdict}")
    output.write_table(
        ("mode", "kills", "of everything", "acknowledged", "found", "lost", "longest start s", "s"),
        [(proof.mode, proof.kills.total(), proof.recoveries, proof.acknowledged, proof.checked - proof.lost, proof.lost,
          proof.recovery_s_max, proof.seconds) for proof in proofs])
    for proof in proofs:
        for failure in proof.failures:
            print(f"{proof.mode}: {output.printable(failure)}")
    print("held" if document["held"] else f"did NOT hold; the stores are kept in {document['stores']} (seed {document['seed']})")


@dataclass(frozen=True, slots=True)
class DiskMeasure:
    """Overwriting a block of an allocated file and fdatasync, again and again, in one thread."""

    file_system: str
    syncs: int
    syncs_per_s: float
    sync_p50_us: float
    sync_p99_us: float

    @property
    def verdict(self) -> str:
        """What the figures say about the promise that a sync makes."""
        if self.file_system in ("tmpfs", "ramfs"):
            return f"{self.file_system} is memory: nothing survives a power cut here"
        if self.sync_p50_us < HONEST_US_MIN:
            return (f"fdatasync answers after {self.sync_p50_us:.1f} us: it may not wait for the medium; a power cut may take "
                    "what it called safe")
        return f"fdatasync answers after {self.sync_p50_us:.0f} us: it waits for something"


def measure_disk(folder: Path, seconds: float) -> DiskMeasure:
    """Measure for about so long; leaves nothing behind. OSError as the disk gives it."""
    took_ns: list[int] = []
    block = os.urandom(BLOCK_BYTES)
    with tempfile.TemporaryFile(dir=folder) as file:
        descriptor = file.fileno()
        os.posix_fallocate(descriptor, 0, FILE_BYTES)
        for at in range(0, FILE_BYTES, BLOCK_BYTES):
            os.pwrite(descriptor, block, at)
        os.fsync(descriptor)
        began_ns = now_ns = time.monotonic_ns()
        while now_ns < began_ns + seconds * 1e9 or not took_ns:
            os.pwrite(descriptor, block, len(took_ns) * BLOCK_BYTES % FILE_BYTES)
            os.fdatasync(descriptor)
            before_ns, now_ns = now_ns, time.monotonic_ns()
            took_ns.append(now_ns - before_ns)
    took_ns.sort()
    return DiskMeasure(file_system_of(folder), len(took_ns), len(took_ns) / ((now_ns - began_ns) / 1e9),
                       took_ns[len(took_ns) // 2] / 1000, took_ns[len(took_ns) * 99 // 100] / 1000)


def file_system_of(folder: Path | str) -> str:
    """The type of the file system that holds the folder, by the longest mount point; empty if nobody knows."""
    path = os.path.realpath(folder)
    best, kind = "", ""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, point, name, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, name
    return kind
