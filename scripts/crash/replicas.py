"""The rounds for a replicator: a SYNC_MASTER and its slave, of which one loses its replicator or all processes.

Afterwards both must have every acknowledged message, and their logs must be equal byte for byte. The slave is
another pyengine; it is stopped, killed and started like the master.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
from pathlib import Path

from crash.audit import audit, check, read_acked
from crash.rounds import AIM_SHARE, CrashRun
from crash.watch import CrashWatch
from pyengine.cli.torture import COMMAND_TIMEOUT_S, wait_for
from pyengine.engine.embedded import start_engine, stop_engine
from pyengine.ipc.store_lock import living_kinds
from pyengine.native import control as native
from pyengine.storage.commit_log import list_log

PIECE_BYTES = 1 << 20
PORT_MIN = 10_000
WHOLE_ENGINE_SHARE = 0.25
ACKED_BYTES = 40_000  # of rows, a few hundred of them


class ReplicatorRun(CrashRun):
    """A CrashRun of a master and its slave."""

    def __init__(self, store: Path, scratch: Path, kind: str, mode: str, seed: int, aim: float = AIM_SHARE) -> None:
        super().__init__(store, scratch, kind, mode, seed, aim)
        port = free_port()
        self.slave = store.with_name("slave")
        sizes = {name: value for name, value in self.settings.items() if name.startswith("m")}
        secret = store.with_name("ha.secret")
        with open(os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        self.settings |= {"broker_role": "SYNC_MASTER", "ha_listen_port": port, "slave_timeout_ms": 1000,
                          "ha_secret_file": str(secret)}
        self.slave_settings = sizes | {
            "ha_secret_file": str(secret),
            "broker_role": "SLAVE", "ha_master_address": f"127.0.0.1:{port}", "sync_from": "first",
            "flush_disk_type": self.settings.get("flush_disk_type", "ASYNC_FLUSH")}

    def start_engine(self) -> dict[str, object]:
        """Start each of the two that has no supervisor; return the master's report, or {} if it runs."""
        started = super().start_engine() if not is_run(self.store) else {}
        if not is_run(self.slave):
            self.start_slave()
        return started

    def start_slave(self) -> dict[str, object]:
        return start_engine(self.slave, self.slave_settings, timeout_s=COMMAND_TIMEOUT_S)

    def wait_for_acks(self) -> None:
        """Wait for many acknowledgements, so that the slave follows for a while between two kills."""
        before = self.acked_count()
        wait_for("acknowledgements move", lambda: self.acked_count() > before + ACKED_BYTES)

    def strike(self) -> None:
        """Kill one side's replicator, or one side as a whole, and start that again."""
        is_slave = self.rng.random() < 0.5
        store = self.slave if is_slave else self.store
        if self.rng.random() < WHOLE_ENGINE_SHARE:
            self.kill_engine(store)
            if is_slave:
                self.start_slave()
            else:
                self.start_engine()
            return
        with CrashWatch(store) as watch:
            pid = wait_for("a living replicator", lambda: watch.pids().get("replicator"))
            self.aimed_kill(watch, "replicator", pid)
            wait_for("a new replicator", lambda: watch.pids().get("replicator", pid) != pid)

    def check_store(self, *, final: bool = False) -> None:
        """Run both until the slave has everything, stop both, and check both."""
        if not living_kinds(self.store):
            start_engine(self.store, self.settings, timeout_s=COMMAND_TIMEOUT_S)
        if not living_kinds(self.slave):
            self.start_slave()
        try:
            with CrashWatch(self.store) as master, CrashWatch(self.slave) as slave:
                wait_for("the slave has everything", lambda: slave.positions().wrote == master.positions().wrote)
        finally:
            stop_engine(self.store)
        stop_engine(self.slave)
        super().check_store(final=final)
        rows = read_acked(self.acked)
        found = audit(self.slave, rows)
        self.summary.lost += found.lost
        self.summary.failures += [f"on the slave: {sentence}" for sentence in found.failures]
        self.summary.failures += [f"on the slave: {sentence}" for sentence in check(self.slave, rows, self.scratch)]
        self.summary.failures += differences(self.store, self.slave, int(self.settings["mapped_file_size_commit_log_bytes"]))

    def clean_up(self) -> None:
        super().clean_up()
        master, self.store = self.store, self.slave
        try:
            super().clean_up()
        finally:
            self.store = master


def is_run(store: Path) -> bool:
    """Whether the store has a supervisor; without one, a start adopts the workers."""
    return native.SUPERVISOR in living_kinds(store)


def differences(one: Path, other: Path, segment_bytes: int) -> list[str]:
    """Return a sentence about the first difference of two logs; a segment that only one side has must be zeros."""
    left = {segment.start_offset: segment.path for segment in list_log(one, segment_bytes)}
    right = {segment.start_offset: segment.path for segment in list_log(other, segment_bytes)}
    for start in sorted(left.keys() | right.keys()):
        at = start
        for mine, yours in zip(_pieces(left.get(start), segment_bytes), _pieces(right.get(start), segment_bytes), strict=True):
            if mine != yours:
                place = next(number for number, pair in enumerate(zip(mine, yours, strict=True)) if pair[0] != pair[1])
                return [f"the logs differ at {at + place}"]
            at += len(mine)
    return []


def _pieces(path: Path | None, size_bytes: int):
    if path is None:
        for at in range(0, size_bytes, PIECE_BYTES):
            yield bytes(min(PIECE_BYTES, size_bytes - at))
        return
    with open(path, "rb") as opened:
        while piece := opened.read(PIECE_BYTES):
            yield piece


def free_port() -> int:
    """Return a port at which no process listens now, below those that the system gives to outgoing connections.

    A slave that connects to one of those before its master listens can be connected to itself.
    """
    outgoing_from = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(PORT_MIN, max(outgoing_from, 2 * PORT_MIN))
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
