"""The check for other projects' fault rigs: `check(folder, highest acknowledged)` returns None or the failures.

The folder is recovered in place, as the next start would do it, then read through its queues: offsets
0 to the highest acknowledged must be there, undamaged and in the order in which they were put.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rig_producer import TOPIC

import pyengine
from crash.audit import audit
from pyengine.errors import EngineError
from pyengine.storage.config import load_config
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.recover import recover
from pyengine.storage.recovery.report import RecoveryState


def check(folder: str, acked: int) -> str | None:
    root = Path(folder)
    if not any((root / "commitlog").glob("*")):
        return None if acked < 0 else f"acknowledged up to {acked}, but there is no commit log"
    try:
        report = recover(MessageStore(root, load_config(root, environ={}).geometry))
        failures = audit(root, []).failures if report.state is RecoveryState.RECOVERED else [report.sentence]
        if not failures and acked >= 0:
            with pyengine.open_store(root) as store:
                smallest, end = store.queue_range(TOPIC, 0)
            if smallest != 0 or end <= acked:
                failures.append(f"LOST: acknowledged up to {acked}, the queue holds {smallest} to {end - 1}")
    except EngineError as error:
        return f"{type(error).__name__}: {error}"
    return "; ".join(failures) or None


def check_live(folder: str, acked: int) -> str | None:
    """The same after kill -9: `pyengine recover` first drains the shared memory that remains."""
    done = subprocess.run([sys.executable, "-P", "-m", "pyengine", "recover", folder], capture_output=True, text=True,
                          timeout=120)
    if done.returncode not in (0, 2):
        return f"pyengine recover ended with {done.returncode}: {done.stderr}"
    return check(folder, acked)
