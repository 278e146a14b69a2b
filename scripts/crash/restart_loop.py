"""Stop and start an engine in every way, in many rounds, while producers put; then audit.

    python -m crash.restart_loop [--rounds 20] [--seed N] [--mode async|pool|sync] [--json] [--peer]

Each round ends the engine in one of these ways and starts it again: an orderly stop; a kill of the supervisor, whose
workers live and are adopted; a kill of everything, which the start recovers, or `pyengine recover` before it.
Producers wait meanwhile, and connect again.

Exit 0: held. 1: a message was lost, torn, doubled or out of order, or something hung; the store is kept and named.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from crash.report import crash_parser, ended_in_order, finish
from crash.rounds import CrashRun
from pyengine.cli.torture import EngineWatch, wait_for
from pyengine.engine.embedded import stop_engine


class RestartRun(CrashRun):
    """Rounds of one end and one start."""

    def __init__(self, store: Path, scratch: Path, mode: str, seed: int) -> None:
        super().__init__(store, scratch, "restart", mode, seed)
        self.ends: list = []

    def strike(self) -> None:
        if not self.ends:  # each way once, in a random order, before one is repeated
            self.ends = [self.stop, self.stop_by_signal, self.kill_supervisor, self.die_and_start, self.die_and_recover]
            self.rng.shuffle(self.ends)
        end = self.ends.pop()
        print(end.__name__, file=sys.stderr)
        end()
        self.wait_for_acks()

    def stop(self) -> None:
        stop_engine(self.store)
        self.start_engine()

    def stop_by_signal(self) -> None:
        """Stop it by SIGTERM, as a service manager does, while producers wait for answers."""
        with EngineWatch(self.store) as watch:
            supervisor, workers = watch.pid("supervisor"), watch.pids()
            os.kill(supervisor, signal.SIGTERM)
            wait_for("the engine has stopped", lambda: not set(watch.pids()) & set(workers))
        if (self.store / "abort").exists():
            self.summary.failures.append("an orderly stop has left the abort file")
        self.start_engine()

    def die_and_start(self) -> None:
        self.kill_engine(self.store)
        self.start_engine()

    def die_and_recover(self) -> None:
        self.kill_engine(self.store)
        self.recover()
        self.check_store()
        self.start_engine()


@ended_in_order
def main() -> int:
    arguments = crash_parser(__doc__).parse_args()

    def make(store: Path, scratch: Path) -> RestartRun:
        return RestartRun(store, scratch, arguments.mode, arguments.seed)

    return finish(arguments, make, lambda run: run.run(arguments.rounds))


if __name__ == "__main__":
    sys.exit(main())
