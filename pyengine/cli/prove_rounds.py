"""The torture of `pyengine prove`: kill -9 under load, again and again, then look for every acknowledged message.

One store for each flush mode. Two producers put and keep a list of what was answered PUT_OK.
Each round kills something at a random moment: a worker, the supervisor, or every process of
the engine at once, after which it is started again and recovers. At the end the engine is
stopped in order, and the whole store is checked against the list.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pyengine.engine.embedded import connect, start_engine, stop_engine
from pyengine.errors import EngineError
from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.heartbeat import is_alive
from pyengine.ipc.shared_objects import KIND_NAMES, find_folder
from pyengine.ipc.store_lock import living_kinds
from pyengine.native import control as native

MODES = {
    "async": {},
    "pool": {"transient_store_pool_enable": "true", "transient_store_pool_size": "3"},
    "sync": {"flush_disk_type": "SYNC_FLUSH"},
}
SIZES = {"mapped_file_size_commit_log_bytes": 4 << 20, "mapped_file_size_consume_queue_bytes": 60_000,
         "max_hash_slot_num": 10_000, "max_index_num": 40_000,
         "disk_max_used_space_ratio": 95, "clean_file_forcibly_enable": "false"}  # nothing is deleted on a disk that is rather full
PRODUCERS = 2
QUEUES = 4
BODY_BYTES_MAX = 4000
MOMENT_S_MAX = 0.2       # from "acknowledgements move" to the kill
HANG_S = 60.0            # no acknowledgement for so long is a failure
LOG_BYTES_MAX = 1 << 30  # of one mode's store: then its turn is over
POLL_INTERVAL_S = 0.01
EVERYTHING = "everything"


@dataclass
class ModeProof:
    """What became of one mode; `failures` empty means that everything held."""

    mode: str
    kills: Counter[str] = field(default_factory=Counter)
    acknowledged: int = 0
    checked: int = 0
    lost: int = 0
    recoveries: int = 0
    recovery_s_max: float = 0.0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


def prove_mode(folder: Path, mode: str, seconds: float, seed: int, advance: Callable[[ModeProof], None],
               settings: Mapping[str, str]) -> ModeProof:
    """Torture a new store in `folder` for so long, at least one round; the engine is gone afterwards, the store stays."""
    return _Torture(folder, mode, seed, advance, settings).run(seconds)


class _Torture:
    def __init__(self, folder: Path, mode: str, seed: int, advance: Callable[[ModeProof], None],
                 settings: Mapping[str, str]) -> None:
        self.store = folder / mode
        self.acked = folder / f"{mode}.acked"
        self.proof = ModeProof(mode)
        self.settings = SIZES | MODES[mode] | dict(settings)
        self.rng = random.Random(f"{seed}/{mode}")
        self.advance = advance
        self.ending = threading.Event()
        self.lock = threading.Lock()
        self.end_offset = 0

    def run(self, seconds: float) -> ModeProof:
        began_s = time.monotonic()
        try:
            start_engine(self.store, self.settings)
            with open(self.acked, "w") as self.list:
                threads = [threading.Thread(target=self._produce, args=(number,), daemon=True) for number in range(PRODUCERS)]
                for thread in threads:
                    thread.start()
                try:
                    self._rounds(began_s + seconds)
                finally:
                    self.ending.set()
                    for thread in threads:
                        thread.join(HANG_S)
            stop_engine(self.store, HANG_S)
            self._look_over()
        except EngineError as error:
            self.proof.failures.append(f"{type(error).__name__}: {error}")
        finally:
            self._end_engine()
            self.proof.seconds = round(time.monotonic() - began_s, 1)
        return self.proof

    def _rounds(self, until_s: float) -> None:
        while True:
            self._wait_for_acknowledgements()
            time.sleep(self.rng.uniform(0, MOMENT_S_MAX))
            self._strike()
            self._wait_for_acknowledgements()
            self.advance(self.proof)
            if time.monotonic() >= until_s or self.end_offset > LOG_BYTES_MAX:
                return

    # ---- producers --------------------------------------------------------------

    def _produce(self, number: int) -> None:
        """Put until the end; note each PUT_OK. Refusals and unknown outcomes promise nothing."""
        rng = random.Random(f"{self.rng.random()}/{number}")
        while not self.ending.is_set():
            try:
                with connect(self.store, timeout_s=HANG_S) as producer:
                    while not self.ending.is_set():
                        body = rng.randbytes(rng.randrange(BODY_BYTES_MAX))
                        self._note(producer.put("prove", body, queue_id=rng.randrange(QUEUES), timeout_s=HANG_S / 4), body)
            except EngineError:
                self.ending.wait(POLL_INTERVAL_S)  # between two engines

    def _note(self, result, body: bytes) -> None:
        if not result.ok:
            self.ending.wait(POLL_INTERVAL_S)
            return
        row = {"topic": result.topic, "queue_id": result.queue_id, "queue_offset": result.queue_offset,
               "physical_offset": result.physical_offset, "body_sha256": hashlib.sha256(body).hexdigest()}
        with self.lock:
            self.list.write(json.dumps(row) + "\n")
            self.proof.acknowledged += 1
            self.end_offset = max(self.end_offset, result.physical_offset)

    def _wait_for_acknowledgements(self) -> None:
        before = self.proof.acknowledged
        self._wait_until(lambda: self.proof.acknowledged > before, f"something is acknowledged after {dict(self.proof.kills)}")

    # ---- kills ------------------------------------------------------------------

    def _strike(self) -> None:
        pids = self._pids()
        victim = self.rng.choice([*sorted(pids), EVERYTHING, EVERYTHING])
        self.proof.kills[victim] += 1
        if victim == EVERYTHING:
            self._kill_everything()
            began_s = time.monotonic()
            start_engine(self.store, self.settings)
            self.proof.recoveries += 1
            self.proof.recovery_s_max = round(max(self.proof.recovery_s_max, time.monotonic() - began_s), 3)
        else:
            _kill(pids[victim])
            if victim == "supervisor":
                self._wait_until(lambda: native.SUPERVISOR not in living_kinds(self.store), "the supervisor dies")
                start_engine(self.store, self.settings)

    def _kill_everything(self) -> None:
        pids = self._pids()
        _kill(pids.pop("supervisor", 0))  # first: it would start the others again
        for pid in pids.values():
            _kill(pid)

        def all_dead() -> bool:
            for pid in self._pids().values():  # a worker that was just being started
                _kill(pid)
            return not living_kinds(self.store)

        self._wait_until(all_dead, "all processes die")

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + HANG_S
        while not condition():
            if time.monotonic() > deadline_s:
                raise EngineError(f"{self.store}: waited {HANG_S:g} s in vain until {what}")
            time.sleep(POLL_INTERVAL_S)

    def _pids(self) -> dict[str, int]:
        """Process of each kind that lives now."""
        with EngineMemory.attach(find_folder(self.store), writable=False) as memory:
            lines = {kind: memory.control.workers[kind] for kind in living_kinds(self.store)}
            pids = {KIND_NAMES[kind]: (native.load(line, "pid"), native.load(line, "start_time_ms")) for kind, line in lines.items()}
        return {name: pid for name, (pid, start_ms) in pids.items() if is_alive(pid, start_ms)}

    def _end_engine(self) -> None:
        if not self.store.exists() or not living_kinds(self.store):
            return
        try:
            stop_engine(self.store, HANG_S)
        except EngineError:
            self._kill_everything()

    # ---- the end ----------------------------------------------------------------

    def _look_over(self) -> None:
        from pyengine.storage.check.check import check
        from pyengine.storage.check.report import Severity
        from pyengine.storage.config import load_config

        report = check(self.store, load_config(self.store).geometry, acked=self.acked)
        self.proof.checked, self.proof.lost = report.acked, report.acked_missing
        if report.exit_code or report.acked != self.proof.acknowledged:
            errors = [finding.text for finding in report.findings if finding.severity is Severity.ERROR][:5]
            self.proof.failures.append(f"check ended with {int(report.exit_code)} after {report.acked} of "
                                       f"{self.proof.acknowledged} acknowledged messages: " + " ".join(errors))


def _kill(pid: int) -> None:
    if pid > 0:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
