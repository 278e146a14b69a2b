"""fail_engine.py for a SYNC_MASTER and its slave: one system call of a worker of either side fails, for each in turn.

    python fail_replicas.py SHIM FOLDER MODE CASES LIMIT SEED --role master|slave [--traffic S]

The calls of the other side do not fail. What was acknowledged must be on both, and at the end their logs are equal
byte for byte. Where a link fails, the reason is what `status` says of replication.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from crash.audit import audit, check
from crash.replicas import differences, free_port
from faults.fail_engine import SETTINGS, TIMEOUT_S, TOPICS, Plan, Rig, Traffic, options, run
from fix_slave import secret_file
from pyengine.cli.engine_status import engine_status
from pyengine.cli.torture import HangError, wait_for
from pyengine.engine.embedded import start_engine, stop_engine
from pyengine.engine_config import MODES
from pyengine.ipc.store_lock import living_kinds

OF_THE_SHIM = ("LD_PRELOAD", "PYENGINE_FAILING_PLAN")


class Pair(Rig):
    """Master and slave; `root` is the side whose calls fail."""

    def __init__(self, folder: Path, mode: str, cleaning: bool, plan: Plan, rng: random.Random, traffic_s: float, *,
                 role: str) -> None:
        super().__init__(folder, mode, cleaning, plan, rng, traffic_s)
        port = free_port()
        self.roots = {"master": folder / "store", "slave": folder / "slave"}
        self.root = self.roots[role]
        self.role = role
        own = SETTINGS | {"shm_directory": str(folder / "shm"), "ha_secret_file": secret_file(folder)}
        slave_mode = MODES["async" if mode == "pool" else mode]
        self.settings_of = {
            "master": own | MODES[mode] | {"broker_role": "SYNC_MASTER", "ha_listen_port": port, "slave_timeout_ms": 1000},
            "slave": own | slave_mode | {"broker_role": "SLAVE", "ha_master_address": f"127.0.0.1:{port}", "sync_from": "first"}}
        self.traffic = Traffic(self.roots["master"], rng, late_share=0.0)
        self.slave_reader = Traffic(self.roots["slave"], rng)

    # -- the engines

    def start(self) -> None:
        for role, root in self.roots.items():
            if not living_kinds(root):
                with contextlib.nullcontext() if role == self.role else without_shim():
                    pid = int(start_engine(root, self.settings_of[role], timeout_s=60)["pid"])
                if role == self.role:
                    self.supervisor = pid

    def status(self) -> dict:
        """The failing side's; what is said of how a link ended is a reason as long as there is none."""
        status = engine_status(self.root, {})
        replication = status["replication"] or {}
        said = (replication.get("last_closed") or {}).get("detail", "")
        if said and not status["reason"] and replication.get("slaves_connected") == 0 and self.role == "master":
            status["reason"] = f"no slave: {said}"
        return status

    def end(self) -> None:
        failing = self.root
        try:
            for self.root in self.roots.values():
                super().end()
                self.supervisor = 0
        finally:
            self.root = failing

    # -- judgement

    def work(self) -> None:
        super().work()
        self.slave_reader.read()

    def is_noted(self) -> bool:
        ends = {engine_status(root, {})["positions"]["wrote"] for root in self.roots.values()}
        return len(ends) == 1 and super().is_noted()

    def look_at_refusal(self) -> None:
        """How a put ends is the living master's matter; it is not acknowledged."""
        if self.traffic.put():
            self.bad.append(f"a put was acknowledged while the {self.role} was read-only")

    def judge(self) -> None:
        try:
            wait_for("both have everything", self.is_noted, TIMEOUT_S)
        except HangError as error:
            self.bad.append(f"{error}: {[engine_status(root, {})['positions'] for root in self.roots.values()]}")
        for role, root in self.roots.items():
            self.bad += [f"{role}: {sentence}" for sentence in audit(root, self.traffic.acked, topics=TOPICS).failures]

    def finish(self) -> dict:
        self.bad = []
        self.traffic.close()
        self.judge()
        for root in self.roots.values():
            stop_engine(root, timeout_s=60)
            self.bad += check(root, self.traffic.acked, self.folder)
        self.bad += differences(*self.roots.values(), SETTINGS["mapped_file_size_commit_log_bytes"])
        return {"acknowledged": len(self.traffic.acked), "kept": len(self.traffic.acked), "late": 0, "restarts": self.restarts,
                "bad": self.bad}


@contextlib.contextmanager
def without_shim() -> Iterator[None]:
    """What is started meanwhile has no failing calls."""
    taken = {name: os.environ.pop(name) for name in OF_THE_SHIM if name in os.environ}
    try:
        yield
    finally:
        os.environ |= taken


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--role", choices=("master", "slave"), required=True)
    given = vars(parser.parse_args())
    role = given.pop("role")
    run(**given, make=partial(Pair, role=role))
