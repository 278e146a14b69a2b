"""The ownership of a store: OFD locks on the bytes of `STORE/lock` (ARCHITECTURE.md, "Who owns a store").

| byte | lock | held by |
|---|---|---|
| 0 | shared | every process of the engine |
| 0 | exclusive | the owner while it recovers the store; RocketMQ while it runs (a POSIX record lock) |
| 16 + k | exclusive | the only living worker of kind k (k = 0: the supervisor); shared, if the disk became read-only before it started |

Each of them also has a shared lock on each folder of the log, on a byte whose number the store's folder decides: a lock on another byte
is that of another store, a copy whose settings name the original's folder.

The file has RocketMQ's four letters; pyengine writes them only if they are missing, so the modification time tells whether
RocketMQ has started on the store since.

The file `config/sharing.lock` has the locks of an engine that processes share (Engine(shared=True)):

| byte | lock | held by |
|---|---|---|
| 0 | shared | each process that uses the engine, and the children that it forked |
| 0 | exclusive | the supervisor, once no process uses the engine: it stops, and a newcomer waits for the next engine |
| 1 | exclusive | the process that starts the engine |
| 2 | exclusive | a supervisor that stops with the last process |

Only the store's user can open it: a lock of another user would keep the engine running.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pyengine.arguments import INT64_MAX, Closing
from pyengine.errors import DiskError, NotAStoreError, StoreBusyError, command, disk_error
from pyengine.formats.paths import log_folders
from pyengine.formats.small_file import open_regular, opened
from pyengine.ipc.shared_objects import CONTROL, KIND_NAMES, SharedFolder, removed_names
from pyengine.native import control as native
from pyengine.storage.durable_writes import open_given, open_shared_file
from pyengine.storage.file_system import refuse_shared
from pyengine.storage.later_format import require_known_format
from pyengine.storage.ofd_lock import EXCLUSIVE, OFD_PID, SHARED, UNLOCKED, find_lock, is_at, locks_on, try_lock, wait_lock

LOCK_CONTENT = b"lock"
OWNER_BYTE = 0
KIND_BYTE = 16
SHARING_NAME = "sharing.lock"
USERS_BYTE, STARTER_BYTE, WATCHED_BYTE = 0, 1, 2
WORKER_CHECKS_MAX = 25
POLL_INTERVAL_S = 0.02
# The file does not exist, cannot be locked, or is another user's.
_NO_LOCK_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO, errno.EACCES, errno.EPERM)


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of byte 0. `pid` is 0 if the kernel does not report it (for an OFD lock, or a process of another container)."""

    kind: Literal["none", "engine", "owner", "foreign"]  # engine, owner: a shared, an exclusive OFD lock; foreign: RocketMQ's
    pid: int = 0

    @property
    def description(self) -> str:
        """The foreign holder for a message: a noun with its pid."""
        pid = f"pid {self.pid}" if self.pid else "its pid is not visible here: it runs in another container"
        return f"another program ({pid}), probably a RocketMQ broker"


class StoreLock(Closing):
    """This process's locks on one store; close() or the end of the process releases all of them."""

    def __init__(self, root: str | os.PathLike[str], *, create: bool = False) -> None:
        """Open the file `lock`, which `create` creates if necessary (the directory must exist).

        NotAStoreError if it does not exist. UsageError, before it creates a file, if another host may have the directory mounted.
        """
        if create:
            refuse_shared(root)
        self.path = Path(root) / "lock"
        self._log_folders: dict[Path, int] = {}
        self._kind_lock = EXCLUSIVE
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            self._descriptor = open_given(self.path, flags | os.O_CREAT) if create else os.open(self.path, flags)
        except (FileNotFoundError, NotADirectoryError):
            raise NotAStoreError(f"{root} is not a store that was ever started: it has no file `lock`") from None
        except OSError as error:
            if create or error.errno != errno.EROFS:
                raise disk_error(error, "open", self.path) from error
            self._descriptor, self._kind_lock = open_regular(self.path), SHARED  # which allows no exclusive locks
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            self.close()
            raise DiskError(f"cannot use {self.path}: it is not a regular file", path=str(self.path))

    def own(self) -> bool:
        """Become the store's only owner (supervisor, `recover`), or raise StoreBusyError.

        True: no other process can change the store until share(): recover it. False: workers
        without a supervisor live, and this process now shares the store with them: adopt them, without recovery.
        StoreRefusedError for a store that this engine must not write to (storage/later_format.py).
        """
        require_known_format(self.path.parent)
        self.hold_log()
        if not self._set(KIND_BYTE, EXCLUSIVE):
            root = self.path.parent
            raise StoreBusyError(f"{root} is in use by another engine or repair: {how_to_use(root)}")
        if self._set(OWNER_BYTE, EXCLUSIVE):
            self._write_content()
            return True
        if self._set(OWNER_BYTE, SHARED):
            found = self._wait_for_workers()
            if found is not None:
                return found
            self._set(OWNER_BYTE, UNLOCKED)
            self._set(KIND_BYTE, UNLOCKED)
            raise StoreBusyError(f"a process that is not a worker holds a lock on {self.path}, which any process that may read it can do: "
                                 f"`fuser {self.path}` names the process, as root")
        self._set(KIND_BYTE, UNLOCKED)
        _require_no_broker(self.path.parent, _holder(self._descriptor))
        raise StoreBusyError(f"{self.path.parent} is being opened or recovered by another process: wait for it or stop it first")

    def _wait_for_workers(self) -> bool | None:
        """Find out which process shares byte 0, as own() returns it: a worker locks the byte of its kind a moment later.

        True when that process has ended meanwhile; None when it is not a worker.
        """
        for _ in range(WORKER_CHECKS_MAX):
            if any(self.kind_taken(kind) for kind in range(1, len(KIND_NAMES))):
                return False
            if self._set(OWNER_BYTE, EXCLUSIVE):
                self._write_content()
                return True
            time.sleep(POLL_INTERVAL_S)
        return None

    def share(self) -> bool:
        """Hold byte 0 shared, as a process of the engine; this also downgrades own()'s lock, without a gap.

        False while an owner recovers the store or RocketMQ runs on it.
        """
        return self._set(OWNER_BYTE, SHARED)

    def hold_log(self) -> None:
        """Lock the folders of the log that exist now; StoreBusyError if an engine or a repair of another store has one."""
        status = os.stat(self.path.parent)  # not of `lock`, which may be removed beside the engine
        byte = 1 + (status.st_dev << 40 ^ status.st_ino) % (INT64_MAX - 1)
        for folder in log_folders(self.path.parent).all:
            with contextlib.suppress(OSError, DiskError):  # it does not exist, or the file system has no such locks
                if folder not in self._log_folders:
                    self._log_folders[folder] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                    try_lock(self._log_folders[folder], byte, folder, SHARED)
                if any(find_lock(self._log_folders[folder], *others) for others in ((0, byte), (byte + 1, 0))):
                    raise StoreBusyError(f"{folder} has the log of another store, which is in use: give this one a copy of that folder, "
                                         f"with --set store_path_commit_log=COPY (`fuser {folder}` names the processes that use it)")

    def take_kind(self, kind: int) -> None:
        """Lock the byte of this kind, as its only living worker, or raise StoreBusyError."""
        if not self._set(KIND_BYTE + kind, self._kind_lock) or self.kind_taken(kind):
            raise StoreBusyError(f"{self.path.parent} has a living worker of this kind already")

    def kind_taken(self, kind: int) -> bool:
        """Whether another process holds the kind's byte."""
        return find_lock(self._descriptor, KIND_BYTE + kind) is not None

    def close(self) -> None:
        """Release all locks."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        while self._log_folders:
            os.close(self._log_folders.popitem()[1])

    def _set(self, byte: int, how: int) -> bool:
        return try_lock(self._descriptor, byte, self.path, how)

    def _write_content(self) -> None:
        if os.pread(self._descriptor, 16, 0) != LOCK_CONTENT:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, LOCK_CONTENT, 0)
            os.fsync(self._descriptor)


class SharingLock:
    """This process's locks on `config/sharing.lock`, as a user of an engine that processes share, or as its supervisor."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._path = Path(root) / "config" / SHARING_NAME
        self._descriptor = -1

    def enter(self) -> bool:
        """Use the engine from now on; False while one stops because its last user has left. DiskError if the file cannot be used."""
        return self._lock(lambda descriptor: try_lock(descriptor, USERS_BYTE, self._path, SHARED))

    def leave(self) -> None:
        """Use the engine no more. While a forked child has a copy of the descriptor, the lock stays: that child uses the engine."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def has_users(self) -> bool:
        """Whether another process than the supervisor, or another object of this process, uses the engine."""
        return self._find(USERS_BYTE) == SHARED

    @property
    def is_watched(self) -> bool:
        """Whether the engine's supervisor stops it with its last user."""
        return self._find(WATCHED_BYTE) == EXCLUSIVE

    @contextlib.contextmanager
    def starting(self) -> Iterator[bool]:
        """Be the only process that starts the engine inside the block; False if another one is."""
        with opened(open_shared_file(self._path)) as descriptor:  # of its own: the processes that were forked share the other one
            yield try_lock(descriptor, STARTER_BYTE, self._path)

    def watch(self) -> None:
        """Note that this process is the supervisor and stops the engine with its last user."""
        self._lock(lambda descriptor: try_lock(descriptor, WATCHED_BYTE, self._path))

    def wait_until_unused(self) -> None:
        """Block until no process uses the engine; until close() or the end of this process none can. For a thread."""
        while True:
            wait_lock(self._descriptor, USERS_BYTE, self._path)
            if is_at(self._descriptor, self._path):
                return
            self.leave()  # the file was removed: processes that came later use another one
            self.watch()

    def _lock(self, lock: Callable[[int], bool]) -> bool:
        while True:
            descriptor = open_shared_file(self._path)
            locked = False
            try:
                locked = lock(descriptor)
                if not locked:
                    return False
                if is_at(descriptor, self._path):
                    self._descriptor = descriptor
                    return True
                locked = False
            finally:
                if not locked:
                    os.close(descriptor)

    def _find(self, byte: int) -> int:
        """Return the kind of lock that another open() of the file has on a byte, UNLOCKED if it has none."""
        try:
            descriptor = open_regular(self._path)
        except OSError:
            return UNLOCKED
        with opened(descriptor):
            found = find_lock(descriptor, byte)
            return found.kind if found else UNLOCKED


@contextlib.contextmanager
def owning(root: str | os.PathLike[str]) -> Iterator[None]:
    """Own the stopped store at `root` inside the block; StoreBusyError if another process has it open."""
    with StoreLock(root, create=True) as lock:
        if not lock.own():
            raise StoreBusyError(f"{root} still has living workers, though no supervisor: {command('start', root)} takes them over, "
                                 f"{command('stop', root)} ends them")
        yield


def read_holder(root: str | os.PathLike[str]) -> Holder:
    """Return the holder of the store's byte 0, without opening the file for writing; "none" for a store that was never started.

    DiskError as living_kinds().
    """
    descriptor = open_lock(root)
    if descriptor < 0:
        return Holder("none")
    with opened(descriptor):
        return _holder(descriptor)


def how_to_use(root: str | os.PathLike[str]) -> str:
    """Return what to do instead of starting a second engine, for an error."""
    return ("any process uses a running engine by pyengine.connect() and pyengine.consume(), and pyengine.Engine(path, shared=True) starts "
            f"one only if none runs; {command('stop', root)} stops it")


def require_startable(root: str | os.PathLike[str]) -> None:
    """Raise StoreBusyError while another program than an engine has the store open, StoreRefusedError as own(). Creates no file."""
    _require_no_broker(root, read_holder(root))
    require_known_format(root)


def living_kinds(root: str | os.PathLike[str], kinds: int = len(KIND_NAMES)) -> list[int]:
    """Return the kinds of worker whose byte is locked: they are alive. DiskError if that is unknown (a failing disk, no descriptor)."""
    descriptor = open_lock(root)
    if descriptor < 0:
        return []
    try:
        return [kind for kind in range(kinds) if find_lock(descriptor, KIND_BYTE + kind) is not None]
    finally:
        os.close(descriptor)


def open_lock(root: str | os.PathLike[str]) -> int:
    """Open the lock file to test locks; return the descriptor, -1 without one that this user may test. DiskError if unknown."""
    path = Path(root) / "lock"
    try:
        return open_regular(path)
    except OSError as error:
        if error.errno in _NO_LOCK_THERE:
            return -1
        raise disk_error(error, "open", path, ": it is unknown whether an engine runs") from error


def kind_holder(root: str | os.PathLike[str], kind: int) -> int | None:
    """Return the process that holds the byte of this kind, from /proc; None if there is none or this user may not read its entry.

    It reads the entries of all processes; call it when shared memory does not have the pid.
    """
    try:
        locks = locks_on(os.stat(Path(root) / "lock"))
    except OSError:
        return None
    return next((lock.pid for lock in locks if lock[1:3] == (KIND_BYTE + kind, 1)), None)


def name_processes(root: str | os.PathLike[str], kinds: Iterable[int]) -> str:
    """Name the living processes of these kinds, for a message: `writer (pid 4711), flusher (pid 4712)`."""
    holders = [(KIND_NAMES[kind], kind_holder(root, kind)) for kind in kinds]
    return ", ".join(f"{name} (pid {'unknown' if pid is None else pid})" for name, pid in holders)


def sentence_if_lost(root: str | os.PathLike[str], missing: list[str], living: Iterable[int]) -> str:
    """Return what happens, and what to do, if names are missing, so that no process can attach to an engine; "" if none is."""
    if not missing:
        return ""
    kinds = list(living)
    if native.SUPERVISOR in kinds:
        then = f"the engine stops in order and starts again by itself; if it does not: {command('stop', root)}, then start"
    else:
        then = f"its workers end in order by themselves, then {command('start', root)} recovers the store"
    return f"{removed_names(missing)}: {then}. Alive: {name_processes(root, kinds)}; kill -9 what does not end"


def sentence_if_unseen(root: str | os.PathLike[str], folder: SharedFolder, living: Iterable[int]) -> str:
    """Return the reason for which this process does not see the control block of a running engine; "" if it sees it."""
    if CONTROL in folder.names():
        return ""
    kinds, control = list(living), folder.path / CONTROL
    holders = [pid for kind in kinds if (pid := kind_holder(root, kind)) is not None]
    if not all(os.path.lexists(f"/proc/{pid}/root{control}") for pid in holders):
        return sentence_if_lost(root, [str(control)], kinds)
    return (f"its shared memory ({folder.path}) is not seen here: it runs in another container, or as another user; "
            "run this where it runs (docs/containers.md)")


def kill_workers(root: str | os.PathLike[str]) -> None:
    """Send SIGKILL to each process that holds a worker's byte; for when shared memory does not have the pids."""
    for kind in living_kinds(root):
        pid = kind_holder(root, kind) if kind else None
        if pid is not None and pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def lock_modified_ns(root: str | os.PathLike[str]) -> int:
    """Return the modification time of `lock`, 0 if it does not exist; it changes when RocketMQ starts on the store.

    DiskError if it is unknown: taken for another time, it would make recovery discard what only a pool has.
    """
    path = Path(root) / "lock"
    try:
        return os.stat(path).st_mtime_ns
    except OSError as error:
        if error.errno in _NO_LOCK_THERE:
            return 0
        raise disk_error(error, "read", path) from error


def _require_no_broker(root: str | os.PathLike[str], holder: Holder) -> None:
    if holder.kind == "foreign":
        raise StoreBusyError(f"{root} is open in {holder.description}: stop that first")


def _holder(descriptor: int) -> Holder:
    found = find_lock(descriptor, OWNER_BYTE)
    if found is None:
        return Holder("none")
    if found.pid != OFD_PID:
        return Holder("foreign", max(0, found.pid))
    return Holder("engine" if found.kind == SHARED else "owner")
