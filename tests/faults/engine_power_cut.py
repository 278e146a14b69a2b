"""Power cuts under a running engine: one recorded run, and the trees that cuts of it could leave, each recovered and judged.

    python -m faults.engine_power_cut [--rounds 3] [--states 200] [--seed N] [--mode async|pool|sync] [--broken SWITCH]
                                      [--with [cleaning] [delayed] [consumers]] [--then SCENE] [--json] [--peer]

A round is one run of an engine under producers whose system calls are written down, and `--states` trees made from
that journal; cut_judge.py says what must be in every one. --with says what else goes on in each run: delayed messages
being delivered, groups that commit, old files being deleted. Without it the rounds take turns (IN_TURN). --then says
what is done after the engine was killed: no cut comes before that has begun (after_kill.py). With --broken
the engine is a build that is broken on purpose (mutants/), and must be caught.

Exit 0: held. 1: something promised was lost, torn, doubled or out of order. 3: the broken build was not caught.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from crash.audit import read_acked
from crash.report import Summary, crash_parser, ended_in_order, finish
from crash.rounds import RETENTION, CrashRun
from faults.after_kill import THEN, do
from faults.cut_judge import Promised, below, judge_tree, tell_removals
from faults.mapped_pages import PageWatch
from faults.memory_folder import memory_folder
from faults.mutants import SEEN_BY_POWER_CUTS, build, environment
from faults.power_cut import Outcome, Record, append_record, build_shim, explore, read_journal, shim_environment
from in_child import InChild
from pyengine.cli.torture import kill_engine, remove_memory, wait_for
from pyengine.engine_config import MODES
from pyengine.errors import EngineError
from pyengine.formats.paths import segment_name
from pyengine.storage.config import load_config
from pyengine.storage.consumer_offset import DelayOffsets
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.recover import recover

ACKS = 300
CALLS_A_CHILD = 200
FAILURES_SHOWN = 5
NOT_CAUGHT = 3
SEGMENT_BYTES = 64 << 10
COMPANY = ("cleaning", "delayed", "consumers")
IN_TURN = ((), ("delayed", "consumers"), COMPANY)  # alone; then with what adds to the store; then with what takes away too
NOTED, COMMITS, DELETED = 4, 10, 3  # delayed messages, of groups, segments: before a run has shown anything
RATE_IN_COMPANY = "400"  # so that these come about within some hundred messages
SETTINGS = {
    "mapped_file_size_commit_log_bytes": SEGMENT_BYTES,
    "mapped_file_size_consume_queue_bytes": 400,
    "max_hash_slot_num": 5,
    "max_index_num": 10,
    "flush_interval_commit_log_ms": 30,
    "commit_interval_commit_log_ms": 10,
    "transient_store_pool_size": 3,
}
UNSYNCED = {"flush_interval_commit_log_ms": 600_000}  # in the async modes the engine has synced next to nothing of the log
DELAY_LEVELS = 3
DELAYED = {"message_delay_level": "0s 1s 1h", "flush_delay_offset_interval_ms": 10}  # one is always still waiting
CLEANING = RETENTION | {"clean_resource_interval_ms": 200}  # so that several files go at once
MAPPED = {"sync": ("index",), "async": ("commitlog", "index"), "pool": ("index",)}  # folders that are written through mappings
START = "import sys, json; from pyengine.engine.embedded import start_engine; start_engine(sys.argv[1], json.loads(sys.argv[2]))"


def judge(mode: str, checked: mmap.mmap, tree: Path, acks: list[bytes]) -> str | None:
    """For explore(): None, or what is wrong, a tree that the engine refuses too. Adds the messages that it read to `checked`."""
    try:
        wrong, messages = judge_tree(mode, tree, Promised.of(acks))
    except EngineError as error:
        return f"{type(error).__name__}: {error}"
    checked[:8] = (int.from_bytes(checked[:8], "little") + messages).to_bytes(8, "little")
    return "; ".join(wrong) or None


def settings(mode: str, company: Collection[str], then: str = "") -> dict[str, object]:
    with_company = (DELAYED if "delayed" in company else {}) | (CLEANING if "cleaning" in company else {})
    return SETTINGS | MODES[mode] | (UNSYNCED if then else {}) | with_company


def record_run(
    shim: Path, folder: Path, seed: str, mode: str, company: Collection[str], environ: dict[str, str], enough: int,
    then: str = "",
) -> tuple[Path, Path, int]:
    """Runs engine, producers and `company` until all of them have done enough, then kills all, and does what comes `then`.

    (store, journal, the record with which that begins)
    """
    store, acks, journal = folder / "store", folder / "acks", folder / "journal"
    store.mkdir()
    acks.touch()
    written = environ | shim_environment(shim, journal, store, acks, MAPPED[mode])
    begins = 0

    def afterwards() -> None:
        nonlocal store, journal, begins
        if then == "salvage":  # into a disk of its own
            store, journal = folder / "salvaged", folder / "salvage-journal"
            after = environ | shim_environment(shim, journal, store, acks, ("index",))
            with contextlib.suppress(FileExistsError):
                store.mkdir()
        else:
            after = written
            with contextlib.closing(PageWatch(store, journal, MAPPED[mode])) as pages:
                pages.look_at_all()
        begins = len(read_journal(journal))
        with open(journal, "ab", buffering=0) as file:
            do(then, folder / "store", acks, after,
               lambda line: append_record(file.fileno(), Record("A", 0, 0, line, b"")), store)

    run_engine(store, acks, seed, mode, company, written, enough, lambda: PageWatch(store, journal, MAPPED[mode]),
               then, afterwards if then else lambda: None)
    return store, journal, begins


def run_engine(store: Path, acks: Path, seed: str, mode: str, company: Collection[str], environ: dict[str, str], enough: int,
               watch: Callable[[], contextlib.AbstractContextManager], then: str = "",
               afterwards: Callable[[], None] = lambda: None) -> None:
    """Engine, producers and `company`, watched, until they have done enough; then all are killed, their memory stays for
    `afterwards` and goes then."""
    more = ["--delayed", str(DELAY_LEVELS)] * ("delayed" in company) + ["--rate", RATE_IN_COMPANY] * bool(company)
    commands = [["acked_consumer"]] * ("consumers" in company)
    commands += [["acked_producer", "--name", f"p{number}", "--seed", seed, *more] for number in range(2)]
    clients = []
    try:
        command = [sys.executable, "-P", "-c", START, str(store), json.dumps(settings(mode, company, then))]
        started = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
        assert started.returncode == 0, started.stderr
        with watch():
            for module, *options in commands:
                command = [sys.executable, "-P", "-m", f"crash.{module}", str(store), str(acks), *options]
                clients.append(subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL))
                if module == "acked_consumer":
                    wait_for("a consumer", lambda: b'"reads"' in acks.read_bytes(), timeout_s=120)
            wait_for("acknowledgements", lambda: has_done_enough(store, acks, company, enough), timeout_s=120)
        for client in clients:
            client.kill()
            client.wait()
        kill_engine(store)
        afterwards()
    finally:
        for client in clients:
            client.kill()
            client.wait()
        end_engine(store)


def has_done_enough(store: Path, acks: Path, company: Collection[str], enough: int) -> bool:
    """Whether all that a run is to show has come about: messages, files that roll, notes of deliveries, commits, deletions."""
    lines = acks.read_bytes()
    return (
        lines.count(b"body_sha256") >= enough
        and len(list(store.glob("index/*"))) > 1
        and any(int(path.name) for path in store.glob("consumequeue/*/*/*"))
        and ("delayed" not in company or DelayOffsets(store).read()[0].get(1, 0) >= NOTED)
        and ("consumers" not in company or lines.count(b'"commits"') >= COMMITS)
        and ("cleaning" not in company or min(os.listdir(store / "commitlog")) >= segment_name(DELETED * SEGMENT_BYTES))
    )


def end_engine(store: Path) -> None:
    """Kills it at any instruction, and removes its memory."""
    kill_engine(store)
    remove_memory(store)


def cut(
    shim: Path, folder: Path, seed: str, mode: str, states: int, environ: dict[str, str], company: Collection[str] = (), *,
    enough: int = ACKS, stop_at: int = 5, then: str = ""
) -> Outcome:
    """One run with that `company`, and its trees; of what is done `then` only those that a cut leaves after it has begun."""
    store, journal, begins = record_run(shim, folder, seed, mode, company, environ, enough, then)
    records = read_journal(journal)
    if then == "salvage":  # what is not finished promises nothing, and may be no store
        begins = len(records) - 1
    elif not then:
        records = list(tell_removals(records, store))
    with memory_folder(folder / "scratch") as scratch:
        return judge_states(mode, company, seed, records, lambda judge: explore(
            records, store, judge, states=states, seed=seed, scratch=scratch, stop_at=stop_at, begin=begins))


def judge_states(mode: str, company: Collection[str], seed: str, records: Sequence[Record],
                 exploring: Callable[[Callable[[Path, list[bytes]], str | None]], Outcome]) -> Outcome:
    """Return what `exploring` finds in the states of these records with its judge, and print it on stderr."""
    began_s = time.monotonic()
    checked = mmap.mmap(-1, 4096)  # the judge is in children
    with contextlib.closing(InChild(functools.partial(judge, mode, checked), calls=CALLS_A_CHILD)) as in_child:
        outcome = exploring(in_child)
    outcome.acknowledged = sum(record.kind == "A" and b"body_sha256" in record.a for record in records)
    print(
        f"seed {seed}, {words(mode, company)}: {outcome.states} states of {outcome.records} records, "
        f"{outcome.acknowledged} acknowledged, {len(outcome.bad)} bad, {time.monotonic() - began_s:.1f} s", file=sys.stderr
    )
    outcome.checked = int.from_bytes(checked[:8], "little")
    return outcome


def words(mode: str, company: Collection[str]) -> str:
    return f"{mode} with {', '.join(company)}" if company else mode


def here() -> dict[str, str]:
    checkout = Path(__file__).parents[2]
    return os.environ | {"PYTHONPATH": f"{checkout}{os.pathsep}{checkout / 'scripts'}"}


@dataclass
class PowerCutSummary(Summary):
    """`states`: trees that were recovered and judged, of `records` system calls and stores; `scene`: what was done `then`."""

    scene: str = ""
    states: int = 0
    records: int = 0


class PowerCutRun(CrashRun):
    """Rounds of one recorded run and its trees. The store of the last one stays, recovered as after a kill."""

    kind = "power cut"

    def __init__(self, scratch: Path, mode: str, seed: int, states: int, environ: dict[str, str],
                 company: Sequence[str] | None, then: str = "") -> None:
        """`company` None: each round's own, by turns."""
        super().__init__(scratch / "store", scratch, self.kind, mode, seed)
        self.summary = PowerCutSummary(self.kind, mode, seed, scene=then)
        self.mode, self.states, self.environ, self.company, self.then = mode, states, environ, company, then
        self.program = self.build()

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Those that this rig has besides."""

    def take_options(self, arguments: argparse.Namespace) -> None:
        """Called once, with what stands in them."""

    def build(self) -> Path:
        """The C that writes down."""
        return build_shim(self.scratch)

    def cut(self, folder: Path, seed: str, company: Sequence[str]) -> Outcome:
        """One round in an empty folder; leaves `store` and `acks` there."""
        return cut(self.program, folder, seed, self.mode, self.states, self.environ, company, stop_at=FAILURES_SHOWN,
                   then=self.then)

    def run(self, rounds: int) -> PowerCutSummary:
        began_s = time.monotonic()
        for number in range(rounds):
            folder = self.scratch / f"round-{number}"
            folder.mkdir()
            company = IN_TURN[number % len(IN_TURN)] if self.company is None else self.company
            self.settings = settings(self.mode, company, self.then)
            outcome = self.cut(folder, f"{self.summary.seed}/{number}", company)
            self.summary.rounds += 1
            self.summary.states += outcome.states
            self.summary.records += outcome.records
            self.summary.acknowledged += outcome.acknowledged
            self.summary.checked += outcome.checked
            self.summary.lost += len(outcome.caught)
            self.summary.failures += [f"{words(self.mode, company)}: state {state}, cut behind record {point}: {sentence}"
                                      for point, state, sentence in outcome.bad]
            self.store = folder / "store"
            config = load_config(self.store, environ={})
            end = recover(MessageStore(self.store, config.geometry), options=config).end_offset
            rows = [row for row in read_acked([folder / "acks"]) if "body_sha256" in row]
            if self.mode == "pool" or self.then == "cut":  # what was in its buffers alone is gone, and what was cut
                rows = below(self.store, rows, end)
            (folder / "rows").write_text("".join(json.dumps(row) + "\n" for row in rows))
            self.acked = [folder / "rows"]
            if outcome.bad:
                break
        self.summary.seconds = round(time.monotonic() - began_s, 1)
        return self.summary


@ended_in_order
def main(words: str | None = __doc__, rig: type[PowerCutRun] = PowerCutRun) -> int:
    parser = crash_parser(words, rounds=len(IN_TURN), mode="sync")
    parser.add_argument("--states", type=int, default=200, help="states for each recorded run (200)")
    parser.add_argument("--with", dest="company", nargs="*", choices=COMPANY,
                        help="what else goes on in each run (by turns)")
    parser.add_argument("--then", choices=THEN, default="", help="what is done after the engine was killed, and then cut")
    parser.add_argument("--broken", choices=[mutant.id for mutant in SEEN_BY_POWER_CUTS],
                        help="an engine broken in this way: must be caught, in the mode and with the company where it can be")
    rig.add_options(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pyengine-broken-") as place:
        environ = here()
        if arguments.broken:
            (mutant,) = (mutant for mutant in SEEN_BY_POWER_CUTS if mutant.id == arguments.broken)
            environ = environment(build(Path(place)), mutant)
        runs: list[PowerCutRun] = []

        def make(store: Path, scratch: Path) -> PowerCutRun:
            run = rig(scratch, arguments.mode, arguments.seed, arguments.states, environ,
                      () if arguments.then else arguments.company, arguments.then)
            run.take_options(arguments)
            runs.append(run)
            return run

        code = finish(arguments, make, lambda run: run.run(arguments.rounds),
                      lambda summary: f"{summary.states} states of {summary.records} records")
    if arguments.broken and code in (0, 1) and not runs[0].summary.lost:
        print(f"not caught: an engine that {mutant.breaks}", file=sys.stderr)
        return NOT_CAUGHT
    return code


if __name__ == "__main__":
    sys.exit(main())
