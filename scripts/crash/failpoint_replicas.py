"""Failpoints of two engines: a SYNC_MASTER and its slave under puts, and the change of their roles.

    replicated   a step of either side is struck; each side has a board of its own
    promoted     the slave is promoted, and the old master, whose log has messages that no slave got, returns as its slave;
                 `promote` or that start is killed at the step. Bytes that are cut must be in quarantine/

Afterwards both sides have what was acknowledged, and the two logs are equal byte for byte (replicas.py).
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pyengine
from crash.acked_producer import make_body
from crash.board import Board
from crash.failpoint_rounds import SUPERVISOR, TRIES, FailpointRun, NotReachedError, using_board
from crash.replicas import ReplicatorRun, free_port
from crash.rounds import DEATHS_SEEN_MAX
from crash.steps import MASTER, SLAVE, Failpoint
from crash.watch import CrashWatch
from pyengine.cli.torture import COMMAND_TIMEOUT_S, HangError, kill, wait_for
from pyengine.engine.embedded import start_engine, stop_engine
from pyengine.errors import EngineError, ExitCode
from pyengine.ipc.store_lock import living_kinds
from pyengine.results import PutStatus
from pyengine.storage.commit_log import list_log

OWN_SHARE = 4             # of so many nudges one is for the process of the step, the others for the other side
SEGMENT_BYTES = 64 << 10  # of the promoted scene, so that several segments are cut
NUDGED_S = 15.0
TAIL_BYTES = 2 * SEGMENT_BYTES + SEGMENT_BYTES // 2
PROMOTE = "promote"
CRASHES_SEEN_MAX = 8      # the audit follows each crash of this number, and the last: a lost message stays lost


class ReplicatedRun(FailpointRun, ReplicatorRun):
    """A step of one side's replicator, or of the slave's writer, under puts."""

    def __init__(self, store: Path, scratch: Path, scene: str, mode: str, seed: int) -> None:
        super().__init__(store, scratch, scene, mode, seed)
        self.boards = {MASTER: self.board, SLAVE: Board(scratch / "slave-board")}
        self._deaths: dict[Path, int] = {}
        self._crashes = 0

    def start_slave(self) -> dict[str, object]:
        with using_board(self.boards[SLAVE]):
            return super().start_slave()

    def check_store(self, *, final: bool = False) -> None:
        self._crashes += 1
        if final or self._crashes % CRASHES_SEEN_MAX == 0:
            super().check_store(final=final)

    def steps_of(self, point: Failpoint, way: str) -> list[tuple[Failpoint, str, str]]:
        return [(point, way, side) for side in ([point.side] if point.side else [MASTER, SLAVE])]

    def strike_at(self, point: Failpoint, way: str, side: str, nth: int) -> None:
        self.board = self.boards[side]
        self.victim = self.slave if side == SLAVE else self.store
        for store in (self.store, self.slave):  # now, while no step is armed: a start waits for every worker
            self._refresh(store)
        if point.after:  # its predecessor dies first
            self._count_death(self.victim)
        super().strike_at(point, way, side, nth)

    def nudge(self, point: Failpoint, number: int) -> None:
        """Kill the other side's replicator, so that the link is made again, or each fourth time the process of the step."""
        with CrashWatch(self.slave) as watch, contextlib.suppress(HangError):  # the effect of the last nudge
            wait_for("it follows", lambda: self.board.struck_pid or (watch.is_linked and watch.pids().get("replicator")),
                     NUDGED_S)
        if self.board.struck_pid:
            return
        own = number % OWN_SHARE == OWN_SHARE - 1
        store = self.victim if own else self.store if self.victim == self.slave else self.slave
        with CrashWatch(store) as watch:
            pid = watch.pids().get(point.process if own else "replicator", 0)
            if pid and pid != self.board.struck_pid:
                kill(pid)
                self._count_death(store)

    def keep_supervisor_fresh(self) -> None:
        self._count_death(self.victim)

    def _count_death(self, store: Path) -> None:
        self._deaths[store] = self._deaths.get(store, 0) + 1

    def _refresh(self, store: Path) -> None:
        """As CrashRun.keep_supervisor_fresh, for either engine."""
        if self._deaths.get(store, 0) >= DEATHS_SEEN_MAX:
            self._deaths[store] = 0
            with CrashWatch(store) as watch:
                kill(watch.pid(SUPERVISOR))
            self.start_successor(self.start_slave if store == self.slave else self.start_engine)


class PromotedRun(FailpointRun, ReplicatorRun):
    """`store` is the current master; each round the two change roles."""

    def __init__(self, store: Path, scratch: Path, scene: str, mode: str, seed: int) -> None:
        super().__init__(store, scratch, scene, mode, seed)
        self.ports = {self.store: int(self.settings["ha_listen_port"]), self.slave: free_port()}
        self.settings |= {"mapped_file_size_commit_log_bytes": SEGMENT_BYTES, "dispatch_at": "replicated"}
        self.slave_settings |= {name: value for name, value in self.settings.items() if name.startswith("ma")}
        self._changes = 0  # of roles, one or more a round: each has bodies of its own

    def start_engine(self) -> dict[str, object]:
        self.settings["ha_listen_port"] = self.ports[self.store]
        return super().start_engine()

    def start_slave(self) -> dict[str, object]:
        settings = self.slave_settings | {"ha_master_address": f"127.0.0.1:{self.ports[self.store]}"}
        return start_engine(self.slave, settings, timeout_s=COMMAND_TIMEOUT_S)

    def in_life(self, point: Failpoint, way: str, nth: int) -> None:
        """Change roles until the step is reached: some depend on where in a segment the slave's log ends."""
        if not any(self.change_places(point) for _ in range(TRIES)):
            raise NotReachedError

    def change_places(self, point: Failpoint) -> bool:
        """Kill the slave under puts, let the master write alone and end it, promote the slave, and start the old master as its slave.

        Returns whether one of the last two was struck. The slave must have had all acknowledged messages when it was killed.
        """
        self._changes += 1
        self.kill_engine(self.slave)
        self.end_producers()
        with CrashWatch(self.slave) as slave:
            end = slave.positions().slot_end
        self.put_what_is_lost(end)
        if self.rng.random() < 0.5:
            self.kill_engine(self.store)
            self.recover()
        else:
            stop_engine(self.store)
        tail = self.read_tail(end)
        was_struck = self.promote_slave(point)
        self.store, self.slave = self.slave, self.store  # by their new roles
        if self.rng.random() < 0.5:  # otherwise the old master's log is longer and does not differ
            with pyengine.connect(self.store, refusals="return") as producer:
                producer.put("crash-promoted", make_body(f"new-{self._changes}", 0, b""), timeout_s=5.0)
        was_struck |= self.return_old_master(point)
        self.board.disarm()
        self.summary.failures += not_kept(self.slave, tail)
        self.make_producers()
        self.wait_for_acks()
        return was_struck

    def put_what_is_lost(self, end: int) -> None:
        """Put messages that no slave gets: none of them may be answered PUT_OK."""
        with CrashWatch(self.store) as watch, pyengine.connect(self.store, refusals="return") as producer:
            number = 0
            while watch.positions().wrote < end + TAIL_BYTES:
                body = make_body(f"lost-{self._changes}", number, self.rng.randbytes(2000))
                if producer.put("crash-a", body, timeout_s=10.0).status is PutStatus.PUT_OK:
                    self.summary.failures.append("PUT_OK without a slave")
                    return
                number += 1

    def read_tail(self, end: int) -> dict[int, bytes]:
        """Return the content of the master's files from `end` on: physical offset -> bytes without the zeros at their end."""
        found = {}
        for segment in list_log(self.store, SEGMENT_BYTES):
            start = max(end, segment.start_offset)
            content = segment.path.read_bytes()[start - segment.start_offset:].rstrip(b"\0")
            if content:
                found[start] = content
        return found

    def promote_slave(self, point: Failpoint) -> bool:
        """Promote the slave, which is a running master afterwards; return whether `promote` was struck."""
        words = [sys.executable, "-P", "-m", "pyengine", PROMOTE, str(self.slave), "--role", "SYNC_MASTER", "--force"]
        for name, value in (self.settings | {"ha_listen_port": self.ports[self.slave]}).items():
            words += ["--set", f"{name}={value}"] if name != "broker_role" else []
        if point.process == PROMOTE:
            self.start_slave()  # its master does not run
            self.board.arm(point.name, 1, "kill", PROMOTE)
        done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
        was_struck = done.returncode == -signal.SIGKILL and self.board.struck_pid != 0
        self.board.disarm()
        if was_struck:
            done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
        finished = was_struck and done.returncode == ExitCode.FAILED and "is not a slave" in done.stderr
        if done.returncode and not finished:
            raise EngineError(f"promote ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}")
        self.settings["ha_listen_port"] = self.ports[self.slave]
        if not living_kinds(self.slave):  # a slave that ran runs again
            start_engine(self.slave, self.settings, timeout_s=COMMAND_TIMEOUT_S)
        return was_struck

    def return_old_master(self, point: Failpoint) -> bool:
        """Start the old master as a slave; return whether that start was struck."""
        if point.process == PROMOTE:
            self.start_slave()
            return False
        self.board.arm(point.name, 1, "kill", SUPERVISOR)
        with contextlib.suppress(EngineError):
            self.start_slave()
        was_struck = bool(self.board.struck_pid)
        self.board.disarm()
        if was_struck and self.rng.random() < 0.5:
            self.recover(self.slave)
        if not living_kinds(self.slave):
            self.start_slave()
        return was_struck


def not_kept(store: Path, tail: dict[int, bytes]) -> list[str]:
    """Return sentences about bytes that were cut and are not in quarantine/."""
    kept: dict[int, list[bytes]] = {}
    for note in (store / "quarantine").glob("*.json"):
        said = json.loads(note.read_bytes())
        with contextlib.suppress(FileNotFoundError):
            kept.setdefault(said["physical_offset"], []).append(note.with_suffix("").read_bytes().rstrip(b"\0"))
    return [f"LOST: {len(content)} bytes at {start} were cut and are not in quarantine" for start, content in sorted(tail.items())
            if content not in kept.get(start, [])] + (["nothing was there to be cut"] if len(tail) < 2 else [])
