"""`pyengine prove`: tests durability on the user's own disk.

It makes one store for each flush mode. Two producers put, and list what was answered PUT_OK. Each round kills something at a
random moment: a worker, the supervisor, or all processes of the engine, after which it restarts and recovers the store. At the
end it stops the engine in order and checks the whole store against the list.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from pyengine.cli import output
from pyengine.cli.ingest import AckedList
from pyengine.cli.output import GivenPath, NumberRange, Reply, answers, set_option
from pyengine.cli.torture import EngineWatch, KillRounds, check_acked, kill, kill_all
from pyengine.cli.why import Waits, write_stalls
from pyengine.client.producer import connect
from pyengine.engine_config import MODES
from pyengine.errors import DiskError, EngineError, ExitCode, NotAStoreError
from pyengine.results import PutResult
from pyengine.storage.config import load_config
from pyengine.storage.file_system import file_system_of

DISK_SECONDS_MAX = 5.0
FREE_BYTES_MIN = 2 << 30
BLOCK_BYTES = 4096
FILE_BYTES = 8 << 20
SIZES = {"mapped_file_size_commit_log_bytes": 4 << 20, "mapped_file_size_consume_queue_bytes": 60_000,
         "max_hash_slot_num": 10_000, "max_index_num": 40_000, "transient_store_pool_size": 3,
         "disk_max_used_space_ratio": 95, "clean_file_forcibly_enable": "false"}  # so that a rather full disk does not cause deletions
PRODUCERS = 2
QUEUES = 4
PUT_BYTES_MAX = 4000
PROVE_MOMENT_S_MAX = 0.2  # from "acknowledgements move" to the kill
HANG_S = 60.0             # without an acknowledgement for so long the run fails
LOG_BYTES_MAX = 1 << 30   # of one mode's store: then the next mode follows
RETRY_INTERVAL_S = 0.01
EVERYTHING = "everything"
DURABLE_SYNC_US_MIN = 15.0  # no known medium that survives power loss syncs faster


@dataclass
class ModeProof:
    """The result of one mode; without `failures` it passed."""

    mode: str
    kills: Counter[str] = field(default_factory=Counter)
    acknowledged: int = 0
    checked: int = 0
    lost: int = 0
    recoveries: int = 0
    recovery_s_max: float = 0.0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    stalls: dict[str, Any] = field(default_factory=dict)
    """Why.summary of what made puts wait, from the flight recorder."""


@click.command()
@click.argument("parent", type=GivenPath(path_type=Path), metavar="STORE_PARENT")
@click.option("--minutes", type=NumberRange(min=0, min_open=True), default=3.0, show_default=True, help="Minutes of the whole run.")
@click.option("--mode", "modes", multiple=True, type=click.Choice(list(MODES)),
              help="Only this flush mode; may be repeated.")
@click.option("--seed", type=int, default=None, help="Repeats an earlier run's order of kills.")
@click.option("--keep", is_flag=True, help="Keep the stores, not only those of a failed run.")
@set_option
@answers
def prove(parent: Path, minutes: float, modes: tuple[str, ...], seed: int | None, keep: bool, settings: dict[str, str]) -> Reply:
    """Test durability on your own disk. It kills under load, then looks for every acknowledged message.

    The stores in STORE_PARENT are removed afterwards.

    \b
    Example:
      pyengine prove /var/lib --minutes 10
    """
    require_room(parent, FREE_BYTES_MIN, "test")
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    load_config(None, settings)  # before anything is created: a wrong setting is an error
    chosen = list(dict.fromkeys(modes)) or list(MODES)
    began_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="pyengine-prove-", dir=parent))
    runs: list[ModeRun] = []
    try:
        disk = measure_disk(folder, min(DISK_SECONDS_MAX, minutes * 6))
        until_s = began_s + minutes * 60
        for turn, mode in enumerate(chosen):
            runs.append(ModeRun(folder, mode, seed, _show, settings))
            runs[-1].run(max(0.0, (until_s - time.monotonic()) / (len(chosen) - turn)))
    except BaseException as error:
        if runs and (keep or not isinstance(error, KeyboardInterrupt) or any(run.failures for run in runs)):
            print(f"the stores are kept in {folder} (seed {seed})", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    proofs = [run.proof for run in runs]
    held = not any(proof.failures for proof in proofs)
    if held and not keep:
        shutil.rmtree(folder, ignore_errors=True)
    document = {
        "held": held, "seed": seed, "seconds": round(time.monotonic() - began_s, 1), "stores": str(folder) if keep or not held else None,
        "disk": asdict(disk) | {"verdict": disk.verdict},
        "modes": [asdict(proof) | {"kills": dict(proof.kills), "kills_total": proof.kills.total()} for proof in proofs]}
    return Reply(document, lambda: _print(disk, proofs, document), ExitCode.OK if held else ExitCode.FAILED)


def require_room(parent: Path, needed_bytes: int, purpose: str) -> None:
    """Raise NotAStoreError if `parent` is not a directory, DiskError if its disk has less room."""
    if not parent.is_dir():
        raise NotAStoreError(f"{parent} is not a directory: give an existing directory on the disk to {purpose}")
    free_bytes = shutil.disk_usage(parent).free
    if free_bytes < needed_bytes:
        raise DiskError(f"{output.size_text(free_bytes)} are free under {parent}, {output.size_text(needed_bytes)} are needed")


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
    write_stalls("mode", {proof.mode: proof.stalls for proof in proofs})
    for proof in proofs:
        for failure in proof.failures:
            print(f"{proof.mode}: {output.printable(failure)}")
    print("held" if document["held"] else f"did NOT hold; the stores are kept in {document['stores']} (seed {document['seed']})")


@dataclass(frozen=True, slots=True)
class DiskMeasure:
    """The time to overwrite a block of an allocated file and fdatasync it, in one thread."""

    file_system: str
    syncs: int
    syncs_per_s: float
    sync_p50_us: float
    sync_p99_us: float

    @property
    def verdict(self) -> str:
        """Return what the figures say about the durability of a sync."""
        if self.file_system in ("tmpfs", "ramfs"):
            return f"{self.file_system} is memory: nothing survives a power cut here"
        if self.sync_p50_us < DURABLE_SYNC_US_MIN:
            return (f"fdatasync answers after {self.sync_p50_us:.1f} us: it may not wait for the medium; a power cut may take "
                    "what it called safe")
        return f"fdatasync answers after {self.sync_p50_us:.0f} us: it waits for something"


def measure_disk(folder: Path, seconds: float, block_bytes: int = BLOCK_BYTES) -> DiskMeasure:
    """Measure syncs of `block_bytes` for about `seconds`; remove the file afterwards. OSError if the disk fails."""
    took_ns: list[int] = []
    block = os.urandom(block_bytes)
    with tempfile.TemporaryFile(dir=folder) as file:
        descriptor = file.fileno()
        os.posix_fallocate(descriptor, 0, FILE_BYTES)
        places = FILE_BYTES // block_bytes
        for place in range(places):
            os.pwrite(descriptor, block, place * block_bytes)
        os.fsync(descriptor)
        began_ns = now_ns = time.monotonic_ns()
        while now_ns < began_ns + seconds * 1e9 or not took_ns:
            os.pwrite(descriptor, block, len(took_ns) % places * block_bytes)
            os.fdatasync(descriptor)
            before_ns, now_ns = now_ns, time.monotonic_ns()
            took_ns.append(now_ns - before_ns)
    took_ns.sort()
    return DiskMeasure(file_system_of(folder), len(took_ns), len(took_ns) / ((now_ns - began_ns) / 1e9),
                       took_ns[len(took_ns) // 2] / 1000, took_ns[len(took_ns) * 99 // 100] / 1000)


class ModeRun(KillRounds):
    """Runs the rounds of one flush mode on a new store in `folder`, which it leaves there, stopped."""

    def __init__(self, folder: Path, mode: str, seed: int, advance: Callable[[ModeProof], None], settings: Mapping[str, str]) -> None:
        """`advance` is called after each round."""
        self.proof = ModeProof(mode)
        super().__init__(folder / mode, {**SIZES, **MODES[mode], **settings}, random.Random(f"{seed}/{mode}"))
        self.ack_timeout_s = HANG_S
        self.moment_s_max = PROVE_MOMENT_S_MAX
        self.end_offset = 0
        self._acked_path = folder / f"{mode}.acked"
        self._acked = AckedList(self._acked_path)
        self._unlisted: DiskError | None = None  # why a producer could not list what was acknowledged
        self._advance = advance
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._waits = Waits(self.store)
        self._producers: list[threading.Thread] = []

    def run(self, seconds: float) -> ModeProof:
        """Run rounds for `seconds`, and at least one; return `proof`."""
        until_s = time.monotonic() + seconds

        def should_continue() -> bool:
            return not self.proof.kills or time.monotonic() < until_s and self.end_offset <= LOG_BYTES_MAX

        with self._acked:
            self.proof.seconds = self.run_rounds(should_continue)
        self.proof.stalls = self._waits.why().summary
        return self.proof

    @property
    def failures(self) -> list[str]:
        return self.proof.failures

    def end_round(self) -> None:
        self._waits.collect()
        self._advance(self.proof)

    # -- producers

    def make_producers(self) -> None:
        """Start the producers as threads of this process, which reconnect after each restart of the engine."""
        while len(self._producers) < PRODUCERS:
            self._producers.append(threading.Thread(target=self._produce, args=(len(self._producers),), daemon=True))
            self._producers[-1].start()

    def end_producers(self) -> None:
        self._ending.set()
        for thread in self._producers:
            thread.join(HANG_S)
        self._waits.collect()
        self._acked.write()

    def acked_count(self) -> int:
        if self._unlisted is not None:
            raise self._unlisted
        return self.proof.acknowledged

    def _produce(self, number: int) -> None:
        """Put until the end, and list each PUT_OK; refusals and unknown outcomes promise nothing."""
        rng = random.Random(f"{self.rng.random()}/{number}")
        while not self._ending.is_set():
            try:
                with connect(self.store, timeout_s=HANG_S, refusals="return") as producer:
                    while not self._ending.is_set():
                        body = rng.randbytes(rng.randrange(PUT_BYTES_MAX))
                        self._note(producer.put("prove", body, queue_id=rng.randrange(QUEUES), timeout_s=HANG_S / 4), body)
            except EngineError:
                self._ending.wait(RETRY_INTERVAL_S)  # between two engines

    def _note(self, result: PutResult, body: bytes) -> None:
        if not result.ok:
            self._ending.wait(RETRY_INTERVAL_S)
            return
        with self._lock:
            try:
                self._acked.add(result, [body])
            except DiskError as error:  # which is no engine's that is gone for a moment
                self._unlisted = error
                self._ending.set()
                return
            self.proof.acknowledged += 1
            self.end_offset = max(self.end_offset, result.physical_offset)

    # -- kills

    def strike(self) -> None:
        with EngineWatch(self.store) as watch:
            pids = watch.pids()
            victim = self.rng.choice([*sorted(pids), EVERYTHING, EVERYTHING])
            self.proof.kills[victim] += 1
            if victim == EVERYTHING:
                kill_all(watch, rng=self.rng)
            else:
                kill(pids[victim])
        if victim == EVERYTHING:
            self.kill_remaining()  # a worker that was just being started
            began_s = time.monotonic()
            self.start_engine()
            self.proof.recoveries += 1
            self.proof.recovery_s_max = round(max(self.proof.recovery_s_max, time.monotonic() - began_s), 3)
        elif victim == "supervisor":
            self.start_successor()

    def clean_up(self) -> None:
        try:
            self.end_producers()
        finally:
            super().clean_up()

    # -- judgement

    def check_store(self, *, final: bool = False) -> None:
        checked, lost, failure = check_acked(self.store, self._acked_path)
        self.proof.checked, self.proof.lost = checked, lost
        if failure or checked != self.proof.acknowledged:
            self.failures.append(f"{checked} of {self.proof.acknowledged} acknowledged messages were looked for, {lost} are missing: "
                                 f"{failure}")
