"""The engine's shared memory: one folder of mapped files per store, and its named semaphores.

`<shm_directory>/pyengine-<id>/` (id: EngineId.short), mode 0700, holds

| file | what | written by |
|---|---|---|
| `control` | the control block | workers |
| `store-stats` | counters and latency buckets | each part one worker |
| `topic-stats` | messages and bytes by topic | reputter |
| `settings` | the run settings (ipc/control_block.py) | supervisor, before `control` is published |
| `blocked-reasons` | the blocked reason of each worker | each worker its line |
| `queues-<generation>` | next queue offsets | supervisor at start, then the writer |
| `name-servers` | with which name servers the gateway's broker is registered, as JSON; absent without any | gateway |
| `recorder` | the stalls of each worker; a new engine of the same boot takes it over | each worker its ring |
| `cleaning` | locks on it hold segments; disk use, requests to clean | cleaner, `pyengine clean` |
| `replication` | links to slaves or to the master | replicator |
| `pool-<i>` | one buffer of the pool | writer |
| `session-<epoch>-<slot>-<generation>` | one producer's ring | that producer and the writer |
| `side-<epoch>-<slot>-<generation>-<sequence>` | one entry too big for the ring | that producer |
| `socket` | where sessions are opened | supervisor |
| `gateway.sock` | where the gateway takes connections of the gRPC worker | gateway |

Next to the folder is `pyengine-<id>.spark-sink`, an empty file on whose bytes tasks of Spark's sink hold locks. It is removed
with the folder or, if a task holds a lock then, when that task ends.

Objects are created with O_EXCL and all of their pages are allocated (a store to a hole is SIGBUS on a
full tmpfs); attaching never uses O_CREAT. Each kind of worker but the writer also has a named
semaphore, `/pyengine-<id>-<kind>`, on which its latch sleeps; the writer sleeps on its flag. After
recovery all objects only cache the store's files: they may be removed when no process of the store
lives. The names of objects that a producer creates or opens have the epoch, since each engine counts slots and generations from
the start again, and a producer may live longer than its engine.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pyengine.arguments import Closing
from pyengine.errors import DiskError, DiskFullError, EngineError, EngineUnavailableError, command, disk_error, passing
from pyengine.native.failpoints import failpoint
from pyengine.storage.durable_file import DurableRecord
from pyengine.storage.engine_id import EngineId, read_engine_id
from pyengine.storage.file_system import free_bytes
from pyengine.storage.ofd_lock import remove_unlocked

Handle = TypeVar("Handle")

CONTROL = "control"
STORE_STATS = "store-stats"
TOPIC_STATS = "topic-stats"
BLOCKED_REASONS = "blocked-reasons"
SETTINGS = "settings"
CLEANING = "cleaning"
REPLICATION = "replication"
NAME_SERVERS = "name-servers"  # not in LASTING: without it only `status` and the metrics have no data
POPS = "pops"  # likewise, for `groups` too
RECORDER = "recorder"  # not in LASTING: without its name only `pyengine why` has no data
SOCKET = "socket"
GATEWAY_SOCKET = "gateway.sock"  # for workers whose clients speak another protocol than the gateway's
SESSION_PREFIX = "session-"
LASTING = (CONTROL, STORE_STATS, TOPIC_STATS, SETTINGS, BLOCKED_REASONS, CLEANING, REPLICATION)  # exist in each engine from start to end
SEMAPHORE_FOLDER = "/dev/shm"  # where the C library keeps named semaphores
DEFAULT_SHM_DIRECTORY = "/dev/shm"

# The names of the worker kinds, by their number in shared memory (MS_WORKER_KINDS in csrc/control.cdef.h).
KIND_NAMES = ("supervisor", "writer", "committer", "flusher", "reputter", "allocator", "checkpointer",
              "cleaner", "scheduler", "replicator", "gateway", "grpc")


# Those with a named semaphore. The writer has none: producers wake it, and must not be able to write what it waits on.
SEMAPHORE_KINDS = tuple(kind for kind, name in enumerate(KIND_NAMES) if name != "writer")


def queues_name(generation: int) -> str:
    return f"queues-{generation}"


def pool_name(number: int) -> str:
    return f"pool-{number}"


def session_name(epoch: int, slot: int, generation: int) -> str:
    return f"{SESSION_PREFIX}{epoch}-{slot}-{generation}"


def side_name(epoch: int, slot: int, generation: int, sequence: int) -> str:
    return f"side-{epoch}-{slot}-{generation}-{sequence}"


def semaphore_name(engine_short_id: str, kind: int) -> str:
    """Return the name of the semaphore of one kind of worker."""
    return f"/pyengine-{engine_short_id}-{KIND_NAMES[kind]}"


class SharedObject(Closing):
    """One mapped file. `memory` is its mmap; `descriptor` stays open until close(), or is closed if the mapping fails."""

    def __init__(self, name: str, descriptor: int, *, writable: bool) -> None:
        self.name = name
        self.descriptor = descriptor
        self.writable = writable
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            self.size_bytes = os.fstat(descriptor).st_size
            if self.size_bytes == 0:
                raise EngineUnavailableError(f"the shared object {name} is empty: the process that made it died; start the engine again")
            self.memory = mmap.mmap(descriptor, self.size_bytes, mmap.MAP_SHARED, protection)
        except BaseException:
            os.close(descriptor)
            raise

    def close(self) -> None:
        """Unmap and close. Pointers made from `memory` must not be used afterwards."""
        with contextlib.suppress(BufferError):  # a view of it still exists: it is unmapped with that view
            self.memory.close()
        self.close_descriptor()

    def close_descriptor(self) -> None:
        """Close the descriptor, and keep the mapping, which has a descriptor of its own."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class SharedFolder:
    """The folder of one store's shared objects."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @classmethod
    def of(cls, engine_id: EngineId, shm_directory: str | os.PathLike[str] = DEFAULT_SHM_DIRECTORY) -> SharedFolder:
        """Return the folder for the objects of this store, whether or not it exists."""
        return cls(Path(shm_directory) / f"pyengine-{engine_id.short}")

    @property
    def short_id(self) -> str:
        return self.path.name.removeprefix("pyengine-")

    @property
    def sink_locks_path(self) -> Path:
        """The file that tasks of Spark's sink lock; not in the folder, since a lock outlives the engine."""
        return self.path.with_name(f"{self.path.name}.spark-sink")

    @property
    def socket_path(self) -> Path:
        return self.path / SOCKET

    def make(self) -> None:
        """Create the folder, or accept an existing one that only this user can use."""
        try:
            os.mkdir(self.path, 0o700)
        except FileExistsError:
            pass
        except OSError as error:
            advice = f"{SEMAPHORE_FOLDER} must be" if str(self.path.parent) == SEMAPHORE_FOLDER else "set shm_directory to"
            raise disk_error(error, "make", self.path, f": {advice} a tmpfs you may write") from error
        self._check_ours()

    def _check_ours(self) -> None:
        status = os.lstat(self.path)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise EngineUnavailableError(
                f"{self.path} belongs to another user (uid {status.st_uid}) or is open to others: "
                "run as that user, remove it, or set shm_directory")

    def create(self, name: str, size_bytes: int) -> SharedObject:
        """Create an object of zeros with all of its pages; DiskFullError when there is no room."""
        path, descriptor = self.path / name, -1
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            failpoint("shared_object_named")
            try:
                os.posix_fallocate(descriptor, 0, size_bytes)
                failpoint("shared_object_allocated")
            except BaseException:
                os.close(descriptor)
                raise
            return SharedObject(name, descriptor, writable=True)
        except OSError as error:
            if descriptor >= 0:
                os.unlink(path)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                free = free_bytes(self.path)
                raise DiskFullError(
                    f"no room in {self.path.parent} for {name} of {size_bytes:,} bytes ({free:,} free"
                    f"{', but no inode' * (free > size_bytes)}): free some, set shm_directory, or use smaller rings and a smaller pool",
                    errno=error.errno, path=str(path)) from error
            if descriptor < 0:  # no descriptor is free, or the folder was removed
                raise
            raise disk_error(error, "make", path) from error

    def put(self, name: str, content: bytes | mmap.mmap) -> None:
        """Put an object with this content in the place of the one of that name: others read the old content or the new one.

        Only one process may put a name. A crash may leave another file, NAME.new, which the next call removes.
        """
        new = f"{name}.new"
        self.unlink(new)
        with self.create(new, len(content)) as shared:
            shared.memory[:] = content
        failpoint("object_copied")
        os.rename(self.path / new, self.path / name)

    def attach(self, name: str, *, writable: bool = True) -> SharedObject:
        """Map an existing object, read-only unless `writable`.

        EngineUnavailableError when it does not exist, another EngineError when the system refuses it (no descriptor, no memory).
        """
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        strange = f"{self.path / name} is not a shared object: start the engine again"
        try:
            descriptor = os.open(self.path / name, flags)
        except (FileNotFoundError, NotADirectoryError):
            raise EngineUnavailableError(f"no engine is running here: {self.path / name} does not exist") from None
        except PermissionError:
            raise EngineUnavailableError(f"the engine runs as another user: no permission for {self.path / name}") from None
        except OSError as error:
            if error.errno in (errno.EISDIR, errno.ELOOP, errno.ENXIO):
                raise EngineUnavailableError(strange) from None
            raise self._refused(name, error) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # for example a FIFO
            os.close(descriptor)
            raise EngineUnavailableError(strange)
        try:
            return SharedObject(name, descriptor, writable=writable)
        except OSError as error:
            raise self._refused(name, error) from error

    def open_checked(self, name: str, view: Callable[[mmap.mmap], Handle], check: Callable[[Handle, int], None], *,
                     writable: bool = True) -> tuple[SharedObject, Handle]:
        """Map an existing object whose layout is right; return it and its struct, both by functions of pyengine.native.

        Raises what attach() raises, and EngineUnavailableError if the object is incomplete or has another layout.
        """
        shared = self.attach(name, writable=writable)
        try:
            struct = view(shared.memory)
            check(struct, shared.size_bytes)
        except EngineUnavailableError:
            shared.close()
            raise
        return shared, struct

    def _refused(self, name: str, error: OSError) -> EngineError:
        """Make an error that is not a DiskError: for a DiskError a worker would freeze the store."""
        return EngineError(f"cannot map {self.path / name}: {error.strerror}: raise this process's limit (ulimit -n, ulimit -v), or end "
                           "what uses it up")

    def unlink(self, name: str) -> bool:
        """Remove the name; processes that have mapped the object keep it. False when there was none."""
        removed = remove_object(self.path / name)
        if removed:
            failpoint("shared_object_gone")
        return removed

    def is_named(self, shared: SharedObject) -> bool:
        """Whether the object still has its name, so that attach() would open the same one."""
        try:
            return os.path.samestat(os.fstat(shared.descriptor), os.stat(self.path / shared.name))
        except OSError:
            return False

    def restore_name(self, shared: SharedObject) -> None:
        """Copy an object whose name was removed to a new one of that name: an unlinked file cannot get its name back.

        No other process may write to the object any more. After a crash the copy is complete or does not have the name.
        """
        if not self.is_named(shared):
            self.put(shared.name, shared.memory)

    def names(self) -> list[str]:
        """Return the names of the existing objects, sorted."""
        try:
            return sorted(os.listdir(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def sweep(self) -> list[str]:
        """Remove all objects, all semaphores, the folder and the locks of Spark's sink.

        Call it only when no process of the store is alive. Returns the removed names.
        """
        removed = [name for name in self.names() if self.unlink(name)]
        unlink_semaphores(self.short_id)
        with contextlib.suppress(OSError):
            os.rmdir(self.path)
        remove_unlocked(self.sink_locks_path)
        return removed


def remove_object(path: Path) -> bool:
    """Remove the file, or the folder (which no engine creates), with that path; False when there is none."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    except IsADirectoryError:
        import shutil  # imported here, since workers do not need it

        shutil.rmtree(path, ignore_errors=True)
    return True


def create_semaphores(engine_short_id: str) -> None:
    """Create the workers' semaphores, mode 0600; the old ones must have been removed."""
    import posix_ipc

    for kind in SEMAPHORE_KINDS:
        name = semaphore_name(engine_short_id, kind)
        try:
            posix_ipc.Semaphore(name, posix_ipc.O_CREX, mode=0o600, initial_value=0).close()
        except (posix_ipc.Error, OSError) as error:  # ExistentialError also if there is no such folder
            raise _semaphore_refused(name, "made", error) from None
        failpoint("semaphore_made")


def unlink_semaphores(engine_short_id: str) -> None:
    """Remove the names of all semaphores; a process that has them open keeps them."""
    import posix_ipc

    for kind in range(len(KIND_NAMES)):
        name = semaphore_name(engine_short_id, kind)
        try:
            posix_ipc.unlink_semaphore(name)
        except posix_ipc.ExistentialError:
            pass
        except (posix_ipc.Error, OSError) as error:
            raise _semaphore_refused(name, "removed", error) from None


def missing_semaphores(engine_short_id: str) -> list[str]:
    """Return the names of semaphores that were removed; a process that has them open keeps them."""
    names = [semaphore_name(engine_short_id, kind) for kind in SEMAPHORE_KINDS]
    return [name for name in names if not os.path.exists(_semaphore_path(name))]


def _semaphore_path(name: str) -> str:
    return f"{SEMAPHORE_FOLDER}/sem.{name[1:]}"


def removed_names(names: list[str]) -> str:
    """Return the clause that these names were removed; a long list is shortened."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"names in shared memory were removed ({', '.join(names[:3])}{more})"


def _semaphore_refused(name: str, act: str, error: Exception) -> EngineUnavailableError:
    path = _semaphore_path(name)
    if os.path.exists(path) and not isinstance(error, OSError):
        return EngineUnavailableError(f"another user has made the named semaphore {name} ({path}): remove it as that user or as root")
    may_write = isinstance(error, OSError) and error.errno not in (errno.EROFS, errno.EACCES)
    advice = "" if may_write else ": it must be a tmpfs you may write, also with shm_directory"
    return EngineUnavailableError(f"the named semaphore {name} cannot be {act} in {SEMAPHORE_FOLDER}: "
                                  f"{getattr(error, 'strerror', None) or error}{advice}")


ENGINE_RUN: DurableRecord[str] = DurableRecord(
    "engine-run.json", lambda directory: {"shm_directory": directory}, lambda fields: str(fields["shm_directory"]), is_sealed=False)


def note_run(root: str | os.PathLike[str], shm_directory: str | os.PathLike[str]) -> None:
    """Note shm_directory, so that other processes find the shared objects."""
    with contextlib.suppress(DiskError):
        if ENGINE_RUN.read(root).record == str(shm_directory):
            return
    ENGINE_RUN.write(root, str(shm_directory))


def find_folder(root: str | os.PathLike[str], engine_id: EngineId | None = None) -> SharedFolder:
    """Return the folder of the engine that runs, or ran last, on this store; EngineUnavailableError if none ever did."""
    engine_id = engine_id or read_engine_id(root)
    if engine_id is None:
        start = command("start", root)
        how = f": start it with {start}" if os.path.isdir(root) else (
            f", which does not exist: it was moved or removed, or the path is wrong; {start} makes a new store")
        raise passing(EngineUnavailableError(f"no engine has ever run on {root}{how}"))
    directory = DEFAULT_SHM_DIRECTORY
    with contextlib.suppress(DiskError):
        directory = ENGINE_RUN.read(root).record or directory
    return SharedFolder.of(engine_id, directory)
