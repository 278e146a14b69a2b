"""DefaultMessageStore.isSpaceFull, on its own: is there room, and can the folders be written?

A probe of its own beside the deletion (in a thread of the cleaner), since RocketMQ's is
blocked by a mass deletion just when it matters. Each second it asks the file systems of
log and queues, which writes nothing, and sets or clears two bits of `refuse_puts`: the
writer then answers SERVICE_NOT_AVAILABLE with a reason, and goes on by itself afterwards.
After a crash the bits stay as they are until the next cleaner's first look.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from pyengine.ipc.control_block import EngineMemory
from pyengine.native import cleaning as native_cleaning
from pyengine.native import control as native
from pyengine.services.retention.clean_rules import CleanRules, refusal
from pyengine.storage.disk_use import DiskUse

PROBE_INTERVAL_S = 1.0
_OURS = native.REFUSE_DISK_FULL | native.REFUSE_UNWRITABLE


class DiskSpaceProbe:
    """Looks, publishes what it saw, and refuses puts or takes them again."""

    def __init__(self, memory: EngineMemory, cleaning, rules: CleanRules, measure: Callable[[], Sequence[DiskUse]],
                 report: Callable[[str], None] = lambda text: None) -> None:
        """`cleaning`: its `struct ms_cleaning *`; `measure` gives the use of the log's and the queues' file system."""
        self._control = memory.control
        self._cleaning = cleaning
        self._rules = rules
        self._measure = measure
        self._report = report
        self._refusing = 0
        self._obstacles: list[str] = []

    def look(self) -> bool:
        """One look; whether puts are taken."""
        uses = self._measure()
        line = self._cleaning
        log, queues = uses[0], uses[-1]
        native.store(line, "usable_bytes", log.usable_bytes)
        native.store(line, "used_percent", log.used_percent)
        native.store(line, "queue_used_percent", queues.used_percent)
        bits, why = refusal(self._rules, uses)
        if bits:
            native_cleaning.set_reason(line, why)
        native.store(line, "refusing", bits)
        native.refuse_puts(self._control, bits)
        native.refuse_puts(self._control, _OURS & ~bits, on=False)
        if not bits:
            native_cleaning.set_reason(line, "")
        native.store(line, "probes", native.load(line, "probes") + 1)
        if bits != self._refusing:
            self._refusing = bits
            self._report(f"puts are refused: {why}" if bits else "there is room again: puts are taken")
        return not bits


class DiskSpaceWatch:
    """The probe in a thread of its own, looking each PROBE_INTERVAL_S."""

    def __init__(self, probe: DiskSpaceProbe, interval_s: float = PROBE_INTERVAL_S) -> None:
        self._probe = probe
        self._interval_s = interval_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go_round, name="disk space", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _go_round(self) -> None:
        while not self._over.is_set():
            self._probe.look()
            self._over.wait(self._interval_s)

    def close(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
