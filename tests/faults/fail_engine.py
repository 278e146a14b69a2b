"""A running engine with one system call of one worker failing, for each call in turn; started by its test.

    python fail_engine.py SHIM FOLDER MODE CASES LIMIT SEED [--traffic S]

CASES is JSON: a list of [kind, call, errno name, how]; `how` is "once" (the first call fails, then the second, ... at
most LIMIT), "start" and "stop" (the same, while the engine starts or stops), "killed" (once, after a kill of the
worker) or "lasting" (all of them fail until status says why). An engine serves all cases of its mode, started anew
where a fault has made it read-only. While a call fails messages are put, delivered late, read and deleted.

Prints a JSON line for each n: case, n, whether it came, whether the store is read-only now, the reason that `status`
gave, and what was wrong as sentences:

  - a put ends with a result or an EngineError, and in time; reading goes on
  - status gives a reason while something fails; afterwards everything works again without help, or the store is
    read-only for good (and says why), then the next start brings everything back that was acknowledged
  - at the end `pyengine check` finds all of it

The lines of a mode end with a summary.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import json
import mmap
import os
import random
import signal
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pyengine
from crash.acked_producer import make_body, read_body
from crash.audit import audit, audit_kept, check, still_kept
from crash.rounds import RETENTION
from faults.failing_calls import preload
from pyengine.cli.engine_status import engine_status
from pyengine.cli.torture import HangError, kill, processes_of, remove_memory, state_of, wait_for
from pyengine.engine.embedded import start_engine, stop_engine
from pyengine.engine_config import MODES
from pyengine.errors import EngineError
from pyengine.results import PutStatus
from waiting import scaled_timeout_s

SETTINGS = {
    "mapped_file_size_commit_log_bytes": 64 << 10,
    "mapped_file_size_consume_queue_bytes": 2000,
    "max_hash_slot_num": 100,
    "max_index_num": 400,
    "transient_store_pool_size": 3,
    "flush_interval_commit_log_ms": 20,
    "commit_interval_commit_log_ms": 10,
    "flush_interval_consume_queue_ms": 20,
    "flush_delay_offset_interval_ms": 20,
    "message_delay_level": "0s",
    "put_timeout_ms": 1000,
    "sync_flush_timeout_ms": 1000,
}
FOR_EVER = 1 << 40
SHORT = -1
TOPICS = ("disk-a", "disk-b")
LATE_TOPIC = "disk-late"
TIMEOUT_S = scaled_timeout_s(30.0)
MANY_SHARE = 0.2
TRAFFIC_S = 1.5     # so long a call is waited for that does not come (--traffic)
BEHIND = 5          # puts after the call has failed


class Plan(ctypes.Structure):
    """struct plan of failing_calls.c."""

    _fields_ = [("kind", ctypes.c_char * 32), ("call", ctypes.c_char * 32), ("first", ctypes.c_int64), ("last", ctypes.c_int64),
                ("came", ctypes.c_int64), ("failed", ctypes.c_int64), ("error", ctypes.c_int32)]

    @classmethod
    def make(cls, path: Path) -> Plan:
        path.write_bytes(bytes(ctypes.sizeof(cls)))
        with open(path, "r+b") as file:
            return cls.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(cls)))

    def arm(self, kind: str, call: str, first: int, last: int, error: int) -> None:
        self.first = 0
        self.kind, self.call, self.last, self.error = kind.encode(), call.encode(), last, error
        self.came = self.failed = 0
        self.first = first

    def disarm(self) -> None:
        self.first = 0


class Traffic:
    """One producer and one reader of the engine; both come back after whatever happens to them."""

    def __init__(self, root: Path, rng: random.Random, late_share: float = 0.1) -> None:
        self.root = root
        self.late_share = late_share
        self.rng = rng
        self.producer: pyengine.Producer | None = None
        self.sequence = 0
        self.acked: list[dict] = []
        self.late: set[int] = set()
        self.last = ""

    def put(self) -> bool:
        """One put of any size, now and then a delayed one or many at once; whether it was acknowledged. `last` tells the rest."""
        if self.rng.random() < MANY_SHARE:
            return self.put_many()
        self.sequence += 1
        body = make_body("d", self.sequence, self.rng.randbytes(self.rng.randrange(1500)))
        late = self.rng.random() < self.late_share
        topic, queue_id = LATE_TOPIC if late else self.rng.choice(TOPICS), self.rng.randrange(2)
        try:
            if self.producer is None:
                self.producer = pyengine.connect(self.root, timeout_s=2.0, refusals="return")
            result = self.producer.put(topic, body, queue_id=queue_id, keys=f"k{self.sequence}",
                                        **({"delay_level": 1} if late else {}))
        except EngineError as error:
            self.last = f"{type(error).__name__}: {error}"
            self.close()
            return False
        self.last = f"{result.status.name}: {result.reason}"
        if result.status is PutStatus.PUT_OK and late:
            self.late.add(self.sequence)
        elif result.status is PutStatus.PUT_OK:
            self.acked.append({"topic": topic, "queue_id": queue_id, "queue_offset": result.queue_offset,
                               "physical_offset": result.physical_offset, "body_sha256": sha256(body).hexdigest()})
        return result.status is PutStatus.PUT_OK

    def put_many(self) -> bool:
        """As many bytes as a writer gathers in async mode, or fewer."""
        bodies = []
        for _ in range(self.rng.randrange(2, 45)):
            self.sequence += 1
            bodies.append(make_body("d", self.sequence, self.rng.randbytes(self.rng.randrange(1500))))
        topic, queue_id = self.rng.choice(TOPICS), self.rng.randrange(2)
        try:
            if self.producer is None:
                self.producer = pyengine.connect(self.root, timeout_s=2.0, refusals="return")
            result = self.producer.put_many(topic, bodies, queue_id=queue_id)
        except EngineError as error:
            self.last = f"{type(error).__name__}: {error}"
            self.close()
            return False
        self.last = f"{result.status.name}: {result.reason}"
        if result.status is PutStatus.PUT_OK:
            offsets = [result.first_physical_offset] + [None] * (len(bodies) - 1)
            self.acked += [{"topic": topic, "queue_id": queue_id, "queue_offset": result.first_queue_offset + number,
                            "physical_offset": offset, "begins_at": offsets[0], "body_sha256": sha256(body).hexdigest()}
                           for number, (body, offset) in enumerate(zip(bodies, offsets, strict=True))]
        return result.status is PutStatus.PUT_OK

    def read(self) -> None:
        """Reads some messages of each queue as a consumer would."""
        with pyengine.open_store(self.root) as reader:
            for topic, queue_ids in reader.topics().items():
                for queue_id in queue_ids:
                    low, high = reader.queue_range(topic, queue_id)
                    reader.get_message(topic, queue_id, self.rng.randint(low, max(low, high)), max_messages=8)

    def close(self) -> None:
        producer, self.producer = self.producer, None
        if producer is not None:
            producer.close()


class Rig:
    """One store, one mode."""

    def __init__(self, folder: Path, mode: str, cleaning: bool, plan: Plan, rng: random.Random, traffic_s: float) -> None:
        self.folder = folder
        self.root = folder / "store"
        self.plan = plan
        self.mode = mode
        self.cleaning = cleaning
        self.traffic_s = traffic_s
        self.settings = SETTINGS | MODES[mode] | (RETENTION if cleaning else {}) | {"shm_directory": str(folder / "shm")}
        self.traffic = Traffic(self.root, rng)
        self.supervisor = 0
        self.restarts = 0
        self.bad: list[str] = []

    # -- the engine

    def start(self) -> None:
        self.supervisor = int(start_engine(self.root, self.settings, timeout_s=60)["pid"])

    def status(self) -> dict:
        return engine_status(self.root, {})

    def worker(self, kind: str) -> dict:
        return next((worker for worker in self.status()["workers"] if worker["kind"] == kind), {"pid": 0})

    def is_frozen(self) -> bool:
        return self.status()["read_only"]

    def is_up(self) -> bool:
        return state_of(self.supervisor) not in ("", "Z") and all(one["state"] == "ready" for one in self.status()["workers"])

    def end(self) -> None:
        """Kill what is left, whether it has got as far as its status or not; the supervisor first, it starts others."""
        self.traffic.close()
        for module in (b"pyengine.workers.supervisor", b"pyengine.workers."):
            for pid in processes_of(self.root, module):
                kill(pid)
        remove_memory(self.root)

    # -- one failure

    def fail(self, kind: str, call: str, name: str, how: str, n: int) -> dict:
        """The n-th call fails; what came of it."""
        self.bad = []
        traffic, plan = self.traffic, self.plan
        error = SHORT if name == "SHORT" else getattr(errno, name)
        if how == "start":
            self.stop()
        plan.arm(kind, call, n, FOR_EVER if how == "lasting" else n, error)
        if how in ("start", "stop"):
            said = self.start_or_stop(how)
            row = {"kind": kind, "call": call, "errno": name, "how": how, "n": n, "came": plan.failed > 0, "calls": plan.came,
                   "failed": plan.failed, "said": said, "bad": self.bad}
            plan.disarm()
            if not self.is_up():
                self.end()
                self.start()
            if self.is_frozen():
                self.look_at_frozen(self.status()["reason"])
            else:
                self.look_at_living()
            if row["came"]:
                self.judge()
            return row
        if how == "killed":
            os.kill(self.worker(kind)["pid"] or self.supervisor, signal.SIGKILL)
        until_s = time.monotonic() + self.traffic_s
        while not plan.failed and time.monotonic() < until_s:
            self.work()
        reason = ""
        if plan.failed:
            until_s = time.monotonic() + TIMEOUT_S
            for _ in range(BEHIND if how == "once" else 1):
                self.work()
            while how == "lasting" and not reason and time.monotonic() < until_s:
                self.work()
                reason = self.status()["reason"]
            if how == "lasting" and not reason:
                self.bad.append("status gave no reason while it failed")
        failed, came = plan.failed, plan.came
        plan.disarm()
        frozen = failed > 0 and self.is_frozen()
        if frozen:
            reason = self.status()["reason"]
            self.look_at_frozen(reason)
        elif failed:
            self.look_at_living()
        return {"kind": kind, "call": call, "errno": name, "how": how, "n": n, "came": failed > 0, "calls": came, "failed": failed,
                "read_only": frozen, "reason": reason, "last": traffic.last, "bad": self.bad}

    def start_or_stop(self, how: str) -> str:
        """Return the error of the command; "" if it succeeded."""
        try:
            if how == "start":
                self.start()
            else:
                self.stop()
        except EngineError as error:
            if not str(error):
                self.bad.append(f"a {how} that failed said nothing")
            return str(error)
        return ""

    def stop(self) -> None:
        self.traffic.close()
        stop_engine(self.root, timeout_s=60)

    def begin_anew(self) -> None:
        """After a case that went wrong: the others are worth a try."""
        self.end()
        self.restarts += 1
        self.start()

    def work(self) -> None:
        self.traffic.put()
        self.traffic.read()

    def look_at_living(self) -> None:
        """It must come back by itself, with everything."""
        try:
            wait_for("a put is acknowledged again", self.traffic.put, TIMEOUT_S)
            wait_for("all workers are up", self.is_up, TIMEOUT_S)
            wait_for("all is flushed, dispatched and noted", self.is_noted, TIMEOUT_S)
            wait_for("status gives no reason any more", lambda: not self.status()["reason"], TIMEOUT_S)
            self.traffic.read()
        except HangError as error:
            self.bad.append(f"{error}; last: {self.traffic.last}; status: {self.status()['reason']!r}, workers "
                            f"{[(one['kind'], one['state'], one['restarts']) for one in self.status()['workers']]}")

    def is_noted(self) -> bool:
        status = self.status()
        positions = status["positions"]
        return positions["wrote"] == positions["committed"] == positions["flushed"] == positions["reput_from"]

    def look_at_frozen(self, reason: str) -> None:
        """It says why, refuses, can be read; the next start has everything."""
        if not reason:
            self.bad.append("the store is read-only and gives no reason")
        self.look_at_refusal()
        self.traffic.read()
        with contextlib.suppress(EngineError):  # it says that the next start recovers
            self.stop()
        self.restarts += 1
        self.start()
        if self.is_frozen():
            self.bad.append(f"after a new start the store is still read-only: {self.status()['reason']}")
            return
        self.judge()

    def look_at_refusal(self) -> None:
        if self.traffic.put():
            self.bad.append("a put was acknowledged by a store that is read-only")
        elif "SERVICE_NOT_AVAILABLE" not in self.traffic.last:
            self.bad.append(f"a put on the read-only store ended with {self.traffic.last}")

    def judge(self) -> None:
        """What was acknowledged is there, nothing is torn, doubled or out of order, late messages were delivered."""
        try:
            wait_for("all is flushed and dispatched", self.is_noted, TIMEOUT_S)
            wait_for("late messages are delivered", self.is_delivered, TIMEOUT_S)
        except HangError as error:
            self.bad.append(str(error))
        rows = self.traffic.acked
        if self.mode != "sync":
            end = self.status()["positions"]["wrote"]
            rows = [row for row in rows if row.get("begins_at", row["physical_offset"]) < end]
        found = audit_kept(self.root, rows, topics=TOPICS)[0] if self.cleaning else audit(self.root, rows, topics=TOPICS)
        self.bad += found.failures
        if not self.cleaning and self.mode == "sync" and (missing := self.traffic.late - self.delivered()):
            self.bad.append(f"LOST: delayed messages {sorted(missing)[:10]} were acknowledged and never delivered")

    def is_delivered(self) -> bool:
        return all(level["pending"] == 0 for level in self.status().get("schedule_message_offset", {}).values())

    def delivered(self) -> set[int]:
        """Numbers of the delayed messages that reached their topic."""
        found = set()
        with pyengine.open_store(self.root) as reader:
            for queue_id in reader.topics().get(LATE_TOPIC, []):
                at, end = reader.queue_range(LATE_TOPIC, queue_id)
                while at < end:
                    messages = reader.get_message(LATE_TOPIC, queue_id, at, max_messages=32).messages
                    found |= {read_body(message.body)[1] for message in messages}
                    at += len(messages) or 1
        return found

    def finish(self) -> dict:
        """Judge, stop in order, then the whole check."""
        self.bad = []
        self.traffic.close()
        self.judge()
        stop_engine(self.root, timeout_s=60)
        rows = still_kept(self.root, self.traffic.acked) if self.cleaning else self.traffic.acked
        if self.mode == "sync" or not self.restarts:
            self.bad += check(self.root, rows, self.folder)
        return {"acknowledged": len(self.traffic.acked), "kept": len(rows), "late": len(self.traffic.late),
                "restarts": self.restarts, "bad": self.bad}


def run(shim: Path, folder: Path, mode: str, cases: list[list[str]], limit: int, seed: str, traffic: float,
        make: Callable[..., Rig] = Rig) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what it started ends with it
    plan = Plan.make(folder / "plan")
    (folder / "shm").mkdir()
    os.environ |= preload(shim)
    os.environ |= {"PYENGINE_FAILING_PLAN": str(folder / "plan"),
                   "PYENGINE_FAILING_FOLDERS": f"{folder / 'store'}:{folder / 'slave'}:{folder / 'shm'}"}
    rig = make(folder, mode, any(case[0] == "cleaner" for case in cases), plan, random.Random(seed), traffic)
    try:
        rig.start()
        for case in cases:
            for n in range(1, 2 if case[3] == "lasting" else limit + 1):
                row = rig.fail(*case, n)
                print(json.dumps({"mode": mode} | row), flush=True)
                if not row["came"] or row["bad"]:
                    break
            if not rig.is_up():
                rig.begin_anew()
        print(json.dumps({"mode": mode, "summary": rig.finish()}), flush=True)
    finally:
        rig.end()


def options(doc: str) -> argparse.ArgumentParser:
    """Return the options of a rig."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind in (("shim", Path), ("folder", Path), ("mode", str), ("cases", json.loads), ("limit", int), ("seed", str)):
        parser.add_argument(name, type=kind)
    parser.add_argument("--traffic", type=float, default=TRAFFIC_S, metavar="S")
    return parser


if __name__ == "__main__":
    run(**vars(options(__doc__).parse_args()))
