"""Stop one process after the other with SIGSTOP, put meanwhile, and resume it or kill it; then audit.

    python -m crash.hang_rounds [--rounds 1] [--seed N] [--mode async|pool|sync] [--kind KIND]... [--json] [--peer]

A round stops every kind of process that runs in the mode twice, and ends the stop with SIGCONT or SIGKILL.
What is acknowledged meanwhile must be in the store at the end, and puts that do not need the stopped process go on.

Exit 0: held. 1: a message was lost, torn, doubled or out of order, or something hung; the store is kept and named.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from crash.report import Summary, crash_parser, ended_in_order, finish
from crash.rounds import CrashRun
from pyengine.cli.torture import EngineWatch, kill, state_of, wait_for
from pyengine.engine.kinds import kinds_for
from pyengine.ipc.control_block import MODE_NUMBERS

SUPERVISOR = "supervisor"
STOPPED_S_MAX = 0.3
# Puts need these; the others may be stopped for a while without an effect on puts.
NEEDED = {"async": ("writer",), "pool": ("writer",), "sync": ("writer", "flusher")}


@dataclass
class HangSummary(Summary):
    """`stops`: the number of stops; `went_on`: the number of them in which puts went on."""

    stops: int = 0
    went_on: int = 0


class HangRun(CrashRun):
    """Each round stops every kind twice."""

    def __init__(self, store: Path, scratch: Path, mode: str, seed: int, kinds: list[str]) -> None:
        super().__init__(store, scratch, "hang", mode, seed)
        self.summary = HangSummary("hang", mode, seed)
        self.mode = mode
        self.kinds = kinds

    def strike(self) -> None:
        cases = [(kind, ends) for kind in self.kinds for ends in (False, True)]
        self.rng.shuffle(cases)
        for kind, ends in cases:
            print(f"{kind} {'SIGKILL' if ends else 'SIGCONT'}", file=sys.stderr)
            self.make_producers()
            self.stop_one(kind, ends=ends)
            self.make_producers()
            self.wait_for_acks()

    def stop_one(self, kind: str, *, ends: bool) -> None:
        with EngineWatch(self.store) as watch:
            pid = wait_for(f"a living {kind}", lambda: watch.pids().get(kind))
            os.kill(pid, signal.SIGSTOP)
            wait_for(f"the {kind} is stopped", lambda: state_of(pid) == "T")
            self.summary.stops += 1
            self.put_meanwhile(kind)
            if not ends:
                os.kill(pid, signal.SIGCONT)
                return
            kill(pid)
            self.summary.kills += 1
            if kind == SUPERVISOR:
                self.start_successor()
                return
            wait_for(f"a new {kind}", lambda: watch.pids().get(kind, pid) != pid)
        self.keep_supervisor_fresh()

    def put_meanwhile(self, kind: str) -> None:
        """Wait for acknowledgements, or a moment if they need the stopped process."""
        if kind in NEEDED[self.mode]:
            time.sleep(self.rng.uniform(0, STOPPED_S_MAX))
            return
        self.wait_for_acks()
        self.summary.went_on += 1


@ended_in_order
def main() -> int:
    parser = crash_parser(__doc__, rounds=1)
    parser.add_argument("--kind", action="append", help="only this kind; may be repeated")
    arguments = parser.parse_args()
    names = [*(kind.name for kind in kinds_for(MODE_NUMBERS[arguments.mode], False)), SUPERVISOR]
    unknown = set(arguments.kind or ()) - set(names)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: in mode {arguments.mode} there are {', '.join(names)}")

    def make(store: Path, scratch: Path) -> HangRun:
        return HangRun(store, scratch, arguments.mode, arguments.seed, arguments.kind or names)

    def words(summary: HangSummary) -> str:
        return f"{summary.stops} stops, puts went on through {summary.went_on} of them"

    return finish(arguments, make, lambda run: run.run(arguments.rounds), words)


if __name__ == "__main__":
    sys.exit(main())
