"""How many producers are attached, kept right by the kernel (SysV semaphore, SEM_UNDO).

The supervisor makes the semaphore (IPC_PRIVATE: no key to guess or to clash with) and
publishes its id in the control block. A producer joins once; when it closes, or is
killed at any instruction, the kernel takes its one back. `status` shows the number,
`stop` waits for it to fall, bounded; nothing is decided by it alone.
"""

from __future__ import annotations

import contextlib

from pyengine.native import attach_count as native

NONE = -1


def make() -> int:
    """A new count of 0; its id. NONE where the system has no SysV semaphores to give."""
    import sysv_ipc

    try:
        semaphore = sysv_ipc.Semaphore(sysv_ipc.IPC_PRIVATE, sysv_ipc.IPC_CREX, mode=0o600, initial_value=0)
    except (sysv_ipc.Error, OSError, ValueError, MemoryError):
        return NONE
    return semaphore.id


def remove(semaphore_id: int) -> None:
    """Remove the count; those that joined it notice nothing."""
    import sysv_ipc

    if semaphore_id != NONE:
        with contextlib.suppress(sysv_ipc.Error):
            sysv_ipc.remove_semaphore(semaphore_id)


def join(semaphore_id: int) -> bool:
    """Count this process in until leave() or its death. False where that is not possible (advisory)."""
    try:
        native.add(semaphore_id, 1)
    except OSError:
        return False
    return True


def leave(semaphore_id: int) -> None:
    """Count this process out; only after a join() that was True."""
    with contextlib.suppress(OSError):
        native.add(semaphore_id, -1)


def count(semaphore_id: int) -> int | None:
    """The number of living producers, None if there is no count (or it belongs to another user)."""
    try:
        return native.get(semaphore_id)
    except OSError:
        return None
