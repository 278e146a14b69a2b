"""The whole-store check of a store as it is now: stopped, or beside the engine that runs on it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pyengine.config import EngineConfig
from pyengine.errors import EngineUnavailableError, StoreBusyError
from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.live_reader import open_store
from pyengine.ipc.shared_objects import find_folder
from pyengine.ipc.store_lock import look
from pyengine.native import control as native
from pyengine.storage.check.check import check
from pyengine.storage.check.report import CheckProgress, CheckReport
from pyengine.storage.check.work import CheckWork

CHECK_TRIES = 20
HOLD_WAIT_S = 5.0
HOLD_STEP_S = 0.05


def check_now(root: Path, config: EngineConfig, acked: Path | None = None, progress: CheckProgress | None = None,
              work: CheckWork | None = None) -> CheckReport:
    """Check the store as it is; again when the engine's cleaner deletes a file that was just going to be looked at.

    As storage.check.check, and StoreBusyError: see `dispatched_end`.
    """
    given = {"acked": acked, "message_index_enable": config.message_index_enable,
             "enable_multi_dispatch": config.enable_multi_dispatch, "progress": progress, "work": work}
    limit = dispatched_end(root)
    if limit is None:
        return check(root, config.geometry, **given)
    with log_held(root) as first_offset:
        for _ in range(CHECK_TRIES):
            before = first_offset()
            with contextlib.suppress(FileNotFoundError):
                report = check(root, config.geometry, limit=dispatched_end(root), **given)
                if first_offset() == before:
                    return report
    raise StoreBusyError(f"files of {root} are being deleted faster than they can be checked: try again")


@contextlib.contextmanager
def log_held(root: Path) -> Iterator[Callable[[], int]]:
    """Keep the running engine from deleting any segment: it goes from the oldest on, so the oldest is held.

    Gives a function that tells where the log begins. A segment whose turn has come already
    cannot be held: it is waited for, within HOLD_WAIT_S.
    """
    with open_store(root) as store, contextlib.ExitStack() as stack:
        deadline_s = time.monotonic() + HOLD_WAIT_S
        while store.min_physical_offset >= 0 and not stack.enter_context(store.hold(store.min_physical_offset)):
            if time.monotonic() >= deadline_s:
                break
            time.sleep(HOLD_STEP_S)
        yield lambda: store.min_physical_offset


def dispatched_end(root: Path) -> int | None:
    """`reput_from` of the engine that runs on the store; None where nothing changes: no process has it open, or its
    engine is degraded and only reads. Then what lies beyond is to be judged too.

    StoreBusyError while it is being recovered or open in another program: what is
    half done there would look like damage.
    """
    holder = look(root)
    if holder.kind == "nobody":
        return None
    if holder.kind != "engine":
        who = holder.who if holder.kind == "foreign" else "its owner, which starts or recovers it"
        raise StoreBusyError(f"{root} is held by {who}: wait for it or stop it first")
    try:
        with EngineMemory.attach(find_folder(root), writable=False) as memory:
            if memory.state == native.STATE_DEGRADED:
                return None
            return native.load_position(memory.control.reput_from)
    except EngineUnavailableError as error:
        raise StoreBusyError(f"{root} has an engine whose counters cannot be read: {error}") from error
