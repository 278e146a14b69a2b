"""Create files, write into existing ones and remove them: durable when a function returns, with this project's errors.

A file's length never changes. A large file loses its name first, then its blocks, piece by piece: a reader may have it mapped, and a
truncation would kill that reader by SIGBUS. It sees zeros instead, so a reader that copies from a mapping checks afterwards that the file
still has its name (MESSAGE_WAS_REMOVING). Files are deleted oldest first, and the folder is synced after each name, so that a power cut
never leaves a gap between files.

New files appear complete or not at all (docs/promises.md, 3), since RocketMQ refuses a store with a segment of another length. They are
linked after their sync (O_TMPFILE) or, if the file system refuses that, renamed from `.<directory>.new`, which RocketMQ ignores;
`sweep_unfinished` removes what a crash left there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import io
import mmap
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pyengine.errors import ConfigError, DiskError, FlushError, InvariantError, disk_error, disk_errors, flush_error
from pyengine.formats.paths import Root, log_folders
from pyengine.formats.small_file import closed_on_error, opened, read_small_file
from pyengine.native.failpoints import failpoint
from pyengine.native.flush import allocate as allocate_blocks
from pyengine.native.flush import check_written, punch, start_writing, sync_file_system, write_in_place
from pyengine.storage.file_system import require_held, sync_open_folder

if TYPE_CHECKING:
    from concurrent.futures import Future

    from typing_extensions import Buffer

Allocation = Literal["full", "none"] | int

FILE_MODE, LOCK_MODE = 0o644, 0o600
FOLDER_MODE = 0o755
MANY_FILES = 32  # from this number on one sync of the file system costs less than a sync of each file
FREE_STEP_BYTES = 64 << 20
FREE_PAUSE_S_MIN = 0.005
FREE_PAUSE_FACTOR = 4  # the pause after a step is this many times as long as the step, so that others can use the disk
REWRITE_BYTES = 16 << 20  # per step, each of which is synced
DIRECT_BYTES, _DIRECT_BUFFERS = 4 << 20, 3
_BLOCK_BYTES = 4096  # direct writes start at, and have a length of, a multiple of this
_GIVEN_WITHIN_S = 0.1  # root gives a new file to the owner of its folder
_PLACE = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# The errors of open(O_TMPFILE) if the kernel or the file system does not support it.
_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL})


def create_file(folder: Path | str, name: str, size_bytes: int, *, allocate: Allocation = "full") -> int:
    """Create `folder/name` with `size_bytes` zeros, durable, and return a read-write descriptor.

    `allocate` is how much of it gets blocks now: "full", "none", or that many
    bytes from the start. Missing directories are created and synced too. Raises
    DiskFullError (no file is left), DiskError with errno EEXIST when the name
    exists (that file is not changed), FlushError when a sync failed.
    """
    folder = Path(folder)
    if size_bytes < 0 or "/" in name or name in ("", ".", ".."):
        raise InvariantError(f"create_file({folder}, {name!r}, {size_bytes})")
    require_held(folder)
    make_folders(folder)
    try:
        return _create_unnamed(folder, name, size_bytes, allocate)
    except _TmpfileRefusedError:
        return _create_in_sibling(folder, name, size_bytes, allocate)


def create_files(paths: Sequence[str], size_bytes: int, *, allocate: Allocation) -> list[int] | None:
    """Create many files as create_file does, with two syncs of their file system for all of them instead of some for each.

    Missing directories are created. Each file is complete when it has its name, and all are durable at the end; returns a
    read-write descriptor of each. None if this cannot be done: then some of the files may exist, each complete, with a name
    that may not be durable.
    """
    made: list[int] = []
    require_held(paths[0])
    try:
        for path in paths:
            folder = os.path.dirname(path)
            make_folders(folder, is_synced=False)
            made.append(os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, FILE_MODE))
            _size_and_allocate(made[-1], size_bytes, allocate)
        failpoint("new_files_unnamed")
        if sync_file_system(os.path.dirname(paths[0])):
            failpoint("new_files_synced")
            for path, descriptor in zip(paths, made, strict=True):
                check_written(descriptor, path)
                with opened(os.open(os.path.dirname(path), _PLACE)) as folder_fd:
                    _give_to_owner(descriptor, folder_fd)
                    os.link(f"/proc/self/fd/{descriptor}", os.path.basename(path), dst_dir_fd=folder_fd, follow_symlinks=True)
                failpoint("new_files_linked")
            if sync_file_system(os.path.dirname(paths[0])):
                done, made = made, []
                return done
    except (OSError, DiskError):
        pass
    finally:
        for descriptor in made:
            os.close(descriptor)
    return None


Content = bytes | Callable[[os.stat_result], bytes]  # of a file, or a function that makes it from the new file's status


def write_config(path: Path | str, content: Content, *, keep_backup: bool = True, mode: int = FILE_MODE,
                 owner: os.stat_result | None = None) -> None:
    """Replace `path` by `content`, atomically and durably; the old content is kept as `path.bak`.

    Once `path` exists it exists at every moment (RocketMQ's own way has a gap). With a stricter `mode` no file with more
    rights ever has the content. A new file of root belongs to the owner of `owner`, else of the old file, else of the folder.
    Raises DiskFullError, DiskError or FlushError; the old file is still in place then.
    """
    path = Path(path)
    require_held(path)
    make_folders(path.parent)
    try:
        with contextlib.suppress(FileNotFoundError):
            owner = owner or os.lstat(path)
        try:
            _replace(path, content, keep_backup, mode, owner)
        except FileNotFoundError:  # an engine that starts has swept the temporary file away (sweep_unfinished)
            _replace(path, content, keep_backup, mode, owner)
    except OSError as error:
        raise disk_error(error, "write", path) from error
    sync_folder(path.parent)
    failpoint("config_durable")


def _replace(path: Path, content: Content, keep_backup: bool, mode: int, owner: os.stat_result | None) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        with opened(open_new(temporary, mode, owner=owner)) as descriptor:
            failpoint("config_opened")
            pwrite_all(descriptor, content(os.fstat(descriptor)) if callable(content) else content, 0, path)
            failpoint("config_written")
            sync_descriptor(descriptor, path, may_repeat=True)
            failpoint("config_synced")
        if keep_backup:
            _link_backup(path)
        os.rename(temporary, path)
        failpoint("config_renamed")
    finally:
        with contextlib.suppress(OSError):  # it exists only after a failure
            os.unlink(temporary)


def open_new(path: str | os.PathLike[str], mode: int = FILE_MODE, folder: int | None = None, owner: os.stat_result | None = None) -> int:
    """Create a file and open it for writing; what has that name is removed, never written to or followed. OSError.

    `folder` is an open folder that a relative path begins in; None: the current one.

    So a file of another user that has a second name there, by a hard link or a symbolic one, is not changed.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    create = functools.partial(open_given, owner=owner) if folder is None else functools.partial(os.open, dir_fd=folder)
    try:
        return create(path, flags, mode)
    except FileExistsError:  # from a crash
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path, dir_fd=folder)
        return create(path, flags, mode)


def open_given(path: str | os.PathLike[str], flags: int, mode: int = FILE_MODE, owner: os.stat_result | None = None) -> int:
    """Open a file, with O_CREAT in `flags`; what root creates by that belongs to the owner of `owner`, else of its folder. OSError.

    So whatever root does with a store, the store's user can use its files afterwards, and so it is with the folders of make_folders().
    Only a file that this call creates is given away, in the folder that it is in: a link to another place is none.
    """
    if os.geteuid() == 0:
        folder, name = os.path.split(path)
        with contextlib.suppress(FileExistsError), opened(os.open(folder or ".", _PLACE)) as folder_fd:
            descriptor = os.open(name, flags | os.O_EXCL, mode, dir_fd=folder_fd)
            _give_to_owner(descriptor, folder_fd, owner)
            return descriptor
    return os.open(path, flags, mode)


def _give_to_owner(descriptor: int, folder_fd: int, owner: os.stat_result | None = None) -> None:
    """If root has just made this file or folder in an open folder, give it to the owner of `owner`, else of the folder."""
    if os.geteuid() == 0 and (owner := owner or os.fstat(folder_fd)).st_uid:
        with contextlib.suppress(OSError):  # in a container without that right, or on a file system without users
            os.fchown(descriptor, owner.st_uid, owner.st_gid)


def make_folders(folder: Path | str, *, is_synced: bool = True, is_given: bool = True) -> None:
    """Create `folder` and its missing parents, and sync the directory that contains each new one, unless the caller does.

    `is_given`: not for a folder that is not in a store yet; one of root stays root's.
    """
    folder = Path(folder)
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        if folder.parent == folder:
            break
        folder = folder.parent
    if missing:
        require_held(folder)
    for made in reversed(missing):
        try:
            with opened(os.open(made.parent, _PLACE)) as parent:
                os.mkdir(made.name, FOLDER_MODE, dir_fd=parent)
                if is_given and os.geteuid() == 0:
                    with opened(os.open(made.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)) as new:
                        if not os.listdir(new):  # else another one is in its place now
                            _give_to_owner(new, parent)
            failpoint("folder_made")
        except FileExistsError:
            if not made.is_dir():
                raise DiskError(f"{made} is not a directory", errno=errno.ENOTDIR, path=str(made)) from None
        except OSError as error:
            raise disk_error(error, "make directory", made) from error
        if is_synced:
            sync_folder(made.parent)


def make_log_folder(root: str | os.PathLike[str], folder: Path) -> None:
    """Create a folder of the log of the store at `root`, which may be elsewhere, as make_folders does; one of root's store stays root's.

    ConfigError, as root, if the store's user could not write there.
    """
    owner = os.stat(root).st_uid
    make_folders(folder, is_given=bool(owner))
    status = os.stat(folder)
    if os.geteuid() == 0 and status.st_uid != owner and not status.st_mode & 0o022:
        raise ConfigError(f"{folder} belongs to user {status.st_uid}, and the store to user {owner}, who could not write there: "
                          f"`chown {owner} {folder}`, then try again")


def open_shared_file(path: Path) -> int:
    """Open a file that processes of the store's user and root lock, read-write; create it and its folder if necessary. DiskError.

    It belongs to the owner of its folder, also if root opens it first, so that the engine's user can open it; others cannot, because
    to read a file is enough to lock it. A link is refused, and as root a hard link to a file of another user.
    """
    make_folders(path.parent)
    until_s = time.monotonic() + _GIVEN_WITHIN_S
    with disk_errors("open", path):
        while True:
            try:
                descriptor = open_given(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, LOCK_MODE)
                break
            except PermissionError:  # root may have just created it
                if time.monotonic() >= until_s:
                    raise
                time.sleep(_GIVEN_WITHIN_S / 10)
        with closed_on_error(descriptor):
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise DiskError(f"{path} is not a regular file: remove it", path=str(path))
            if os.geteuid() == 0 and status.st_nlink > 1 and status.st_uid != os.stat(path.parent).st_uid:
                raise DiskError(f"{path} is a hard link to a file of the user {status.st_uid}: remove it", path=str(path))
            if stat.S_IMODE(status.st_mode) & ~LOCK_MODE:  # of an older version
                with contextlib.suppress(PermissionError):
                    os.fchmod(descriptor, LOCK_MODE)
    return descriptor


def mend_lock_modes(root: Root) -> None:
    """Let no other user open the lock files of the store: an older version created them readable for all."""
    config = Path(root) / "config"
    for path in [*config.glob("*.lock"), *config.glob("consumers/*")]:
        with (contextlib.suppress(OSError),
              opened(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)) as descriptor):
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and stat.S_IMODE(status.st_mode) & ~LOCK_MODE:
                os.fchmod(descriptor, LOCK_MODE)


def sync_folder(folder: Path | str) -> None:
    """Make the names in `folder` durable, or raise FlushError (DiskFullError if the disk is full)."""
    with opened(open_file(folder, os.O_RDONLY | os.O_DIRECTORY)) as descriptor:
        try:
            sync_open_folder(descriptor)
        except OSError as error:
            raise _sync_error(error, folder) from error


def sweep_unfinished(root: Root) -> list[Path]:
    """Remove the files that an interrupted create_file or write_config left below `root`; return their paths.

    For the store's owner only, before any worker runs.
    """
    removed: list[Path] = []
    root = Path(root)
    mend_lock_modes(root)
    for sibling in [*map(sibling_of, (*log_folders(root).all, root / "index")), *root.glob("consumequeue*/*/.*.new")]:
        if not sibling.is_dir() or sibling.is_symlink():
            continue
        for file in sorted(sibling.iterdir()):
            file.unlink()
            removed.append(file)
        sibling.rmdir()
        sync_folder(sibling.parent)
    config = root / "config"
    for temporary in [*sorted(config.glob("*.tmp")), *sorted(config.glob("log-holds/*.tmp")),
                      *sorted(config.glob("consumers/acks/*.tmp")), *root.glob("checkpoint.tmp")]:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # a program beside the engine writes the file, and renames it now
            temporary.unlink()
            removed.append(temporary)
    return removed


class _TmpfileRefusedError(Exception):
    """The file system or the kernel does not support O_TMPFILE; use the sibling directory."""


def _create_unnamed(folder: Path, name: str, size_bytes: int, allocate: Allocation) -> int:
    with opened(open_file(folder, os.O_RDONLY | os.O_DIRECTORY)) as folder_fd:
        try:
            descriptor = os.open(folder, os.O_RDWR | os.O_TMPFILE, FILE_MODE)
        except OSError as error:
            if error.errno in _NO_TMPFILE:
                raise _TmpfileRefusedError from error
            raise disk_error(error, "create", folder / name) from error
        with closed_on_error(descriptor):
            _give_to_owner(descriptor, folder_fd)
            failpoint("new_file_unnamed")
            _give_length(descriptor, size_bytes, allocate, folder / name)
            try:
                os.link(f"/proc/self/fd/{descriptor}", name, dst_dir_fd=folder_fd, follow_symlinks=True)
            except OSError as error:
                if error.errno == errno.ENOENT:  # /proc is missing
                    raise _TmpfileRefusedError from error
                raise disk_error(error, "create", folder / name) from error
            failpoint("new_file_linked")
            _sync_or_unlink(folder, folder / name)
        return descriptor


def sibling_of(folder: Path) -> Path:
    """Return the sibling directory in which files of `folder` are created; a start removes what is left in it."""
    return folder.with_name(f".{folder.name}.new")


def _create_in_sibling(folder: Path, name: str, size_bytes: int, allocate: Allocation) -> int:
    sibling = sibling_of(folder)
    make_folders(sibling)
    unfinished = sibling / name
    target = folder / name
    descriptor = -1
    try:
        try:
            with contextlib.suppress(FileNotFoundError):
                unfinished.unlink()
            descriptor = open_given(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            _give_length(descriptor, size_bytes, allocate, target)
            failpoint("sibling_file_made")
            with contextlib.suppress(FileNotFoundError):  # one process creates files in a directory: none can appear before the rename
                os.lstat(target)
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
            os.rename(unfinished, target)
        except OSError as error:
            raise disk_error(error, "create", target) from error
        failpoint("sibling_file_renamed")
        _sync_or_unlink(folder, target)
        return descriptor
    except BaseException:
        if descriptor >= 0:
            os.close(descriptor)
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    finally:
        with contextlib.suppress(OSError):  # another file may be under construction there
            sibling.rmdir()


def _give_length(descriptor: int, size_bytes: int, allocate: Allocation, path: Path) -> None:
    with disk_errors("create", path, f" (with {size_bytes:,} bytes)"):
        _size_and_allocate(descriptor, size_bytes, allocate)
    sync_descriptor(descriptor, path, may_repeat=True)
    failpoint("new_file_synced")


def _size_and_allocate(descriptor: int, size_bytes: int, allocate: Allocation) -> None:
    write_in_place(descriptor)
    os.ftruncate(descriptor, size_bytes)
    failpoint("new_file_sized")
    blocks_bytes = size_bytes if allocate == "full" else 0 if allocate == "none" else min(allocate, size_bytes)
    if blocks_bytes:
        os.posix_fallocate(descriptor, 0, blocks_bytes)
        failpoint("new_file_allocated")


def _sync_or_unlink(folder: Path, path: Path) -> None:
    try:
        sync_folder(folder)
    except DiskError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    failpoint("new_file_durable")


def _link_backup(path: Path) -> None:
    """Give the current content the second name `path.bak`, by a hard link: no bytes are copied that could be torn."""
    spare = path.with_name(path.name + ".bak.tmp")
    with contextlib.suppress(FileNotFoundError):
        spare.unlink()
    try:
        os.link(path, spare)
    except FileNotFoundError:
        return
    except OSError:  # the file system has no hard links
        content = read_small_file(path)
        with open(open_new(spare), "wb", buffering=0) as copied:
            pwrite_all(copied.fileno(), content, 0, spare)
            sync_descriptor(copied.fileno(), spare, may_repeat=True)
    failpoint("config_backup_linked")
    os.rename(spare, path.with_name(path.name + ".bak"))
    failpoint("config_backup_renamed")
    with contextlib.suppress(FileNotFoundError):  # rename() does nothing when both names are the same file
        spare.unlink()


def write_at(path: Path, content: bytes | memoryview, position: int) -> None:
    """Write bytes at a position of a file, whose blocks are allocated first, durably. Raises DiskFullError, DiskError or FlushError."""
    with opened(open_file(path, os.O_RDWR)) as descriptor:
        allocate_blocks(descriptor, position, len(content), str(path))
        pwrite_all(descriptor, content, position, path)
        failpoint("bytes_written")
        sync_descriptor(descriptor, path)
        failpoint("bytes_durable")


def rewrite(path: Path, start: int, end: int) -> None:
    """Rewrite the bytes [start, end) of a file in place and sync it, so that they are on the disk when this returns.

    It is for bytes whose sync may have failed: their pages are marked clean, so that another sync would skip them. After the rewrite
    through the page cache it writes whole blocks directly too: otherwise ext4 leaves the extent marked as unwritten, which reads as
    zeros after a reboot. A direct write drops the pages first, so it comes after the sync, with the bytes that were read before: on a
    disk that still fails the pages are the only copy. The file's modification time is kept: segments are found and deleted by it.
    """
    with opened(open_file(path, os.O_RDWR)) as descriptor:
        status = os.fstat(descriptor)
        times_ns = status.st_atime_ns, status.st_mtime_ns
        at, end = start - start % _BLOCK_BYTES, min(end + -end % _BLOCK_BYTES, status.st_size)
        buffer = memoryview(mmap.mmap(-1, REWRITE_BYTES))  # aligned, as direct writes require; not closed: an error's traceback has views
        for place in range(at, end, REWRITE_BYTES):
            piece = buffer[: min(REWRITE_BYTES, end - place)]
            _read_piece(descriptor, piece, place, path)
            pwrite_all(descriptor, piece, place, path)
            os.utime(descriptor, ns=times_ns)  # at once, since a kill may follow
            sync_descriptor(descriptor, path)
            failpoint("bytes_rewritten")
            _write_directly(descriptor, piece[: len(piece) - len(piece) % _BLOCK_BYTES], place, path)
            os.utime(descriptor, ns=times_ns)
        sync_descriptor(descriptor, path)


def _write_directly(descriptor: int, blocks: memoryview, place: int, path: Path) -> None:
    """Write whole blocks without the page cache if the file system supports that; if it fails, put them back into the cache."""
    try:
        direct = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:  # tmpfs and others have no direct writes
        return
    with opened(direct):
        try:
            done = os.pwrite(direct, blocks, place)
        except OSError as error:
            pwrite_all(descriptor, blocks, place, path)  # the direct write has dropped the pages
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):  # the device's blocks are larger than _BLOCK_BYTES
                return
            raise FlushError(f"cannot write {path}: {error.strerror}", errno=error.errno or 0, path=str(path)) from error
        if done != len(blocks):
            pwrite_all(descriptor, blocks, place, path)
            raise FlushError(f"cannot write {path}: {done} of {len(blocks)} bytes were written", path=str(path))


def _read_piece(descriptor: int, piece: memoryview, place: int, path: Path) -> None:
    with disk_errors("read", path):
        count = os.preadv(descriptor, [piece], place)
    if count != len(piece):
        raise DiskError(f"cannot read {path}: it has {count} of {len(piece)} bytes at {place}", path=str(path))


def sync_file(path: Path, *, is_synced: bool = False) -> None:
    """fsync one file, or raise FlushError, which is never retried. `is_synced`: its file system was synced; only check for an error."""
    with opened(open_file(path, os.O_RDONLY)) as descriptor:
        if is_synced:
            check_written(descriptor, str(path))
        else:
            sync_descriptor(descriptor, path)


@contextlib.contextmanager
def start_writeback(paths: Sequence[Path]) -> Iterator[None]:
    """Inside the block let the kernel write the dirty pages of these files, if a thread can be started: a later sync_file is shorter."""

    def start() -> None:
        for path in paths:
            with contextlib.suppress(OSError), open(path, "rb") as file:
                start_writing(file.fileno())

    thread = threading.Thread(target=start, name="start-writeback", daemon=True)
    with contextlib.suppress(RuntimeError):  # the limit on processes is reached
        thread.start()
    try:
        yield
    finally:
        if thread.ident is not None:
            thread.join()


class DirectFile(io.RawIOBase):
    """A new file that a thread writes from begin to end, bypassing the page cache, while the caller produces the next bytes.

    The bytes after the last whole buffer go through the page cache; so do all bytes if the file system refuses direct writes. Nothing
    is durable before a sync. A later call raises an error of the disk, `close` at the latest.
    """

    _descriptor = -1  # not open

    def __init__(self, path: Path) -> None:
        """DiskError if the file cannot be created, the file system has no direct writes, or no thread can be started."""
        from concurrent.futures import ThreadPoolExecutor

        self._path = path
        with disk_errors("create", path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT | os.O_CLOEXEC, 0o666)
        self._thread = ThreadPoolExecutor(1, "direct-file")
        try:
            self._thread.submit(int)  # starts it
        except RuntimeError as error:  # the limit on processes is reached
            os.close(self._descriptor)
            self._descriptor = -1
            raise DiskError(f"cannot write {path} directly: {error}", path=str(path)) from error
        self._buffer, self._held, self._position = mmap.mmap(-1, DIRECT_BYTES), 0, 0  # aligned, as direct writes require
        self._begun: deque[tuple[mmap.mmap, Future[None]]] = deque()

    def writable(self) -> bool:
        return True

    def write(self, content: Buffer, /) -> int:
        rest = memoryview(content).cast("B")
        size_bytes = len(rest)
        while rest:
            piece = rest[: DIRECT_BYTES - self._held]
            self._buffer[self._held : self._held + len(piece)] = piece
            self._held += len(piece)
            rest = rest[len(piece) :]
            if self._held == DIRECT_BYTES:
                self._hand_over()
        return size_bytes

    def _hand_over(self) -> None:
        """Give the full buffer to the thread, and take a free one; wait for it if all are being written."""
        self._begun.append((self._buffer, self._thread.submit(self._write_piece, self._buffer, self._position)))
        self._position, self._held = self._position + DIRECT_BYTES, 0
        if len(self._begun) < _DIRECT_BUFFERS:
            self._buffer = mmap.mmap(-1, DIRECT_BYTES)
        else:
            self._buffer, written = self._begun.popleft()
            written.result()

    def _write_piece(self, buffer: mmap.mmap, position: int) -> None:
        try:
            pwrite_all(self._descriptor, memoryview(buffer), position, self._path)
        except DiskError as error:
            if error.errno != errno.EINVAL:  # some file systems refuse direct writes only now
                raise
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, 0)
            pwrite_all(self._descriptor, memoryview(buffer), position, self._path)

    def close(self) -> None:
        if self.closed or self._descriptor < 0:
            return
        try:
            while self._begun:
                self._begun.popleft()[1].result()
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, 0)
            pwrite_all(self._descriptor, memoryview(self._buffer)[: self._held], self._position, self._path)
        finally:
            self._thread.shutdown()
            os.close(self._descriptor)
            super().close()


def sync_descriptor(descriptor: int, path: Path, *, may_repeat: bool = False) -> None:
    """fsync, or raise FlushError, which is never retried. `may_repeat`: DiskFullError on a full disk; the caller then writes all again."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise (_sync_error(error, path) if may_repeat else flush_error(error, "fsync", path)) from error


def _sync_error(error: OSError, path: Path | str) -> DiskError:
    """Return the error of a sync that the caller may repeat on a full disk: DiskFullError for that, else FlushError."""
    return disk_error(error, "sync", path) if error.errno in _FULL else flush_error(error, "fsync", path)


def open_file(path: Path | str, flags: int) -> int:
    """Open a file and return its descriptor, or raise DiskError."""
    with disk_errors("open", path):
        return os.open(path, flags)


def pwrite_all(descriptor: int, content: bytes | memoryview, position: int, path: Path) -> None:
    """Write all bytes, or raise DiskFullError or DiskError. Not synced."""
    rest = memoryview(content)
    with disk_errors("write", path):
        while rest:
            written = os.pwrite(descriptor, rest, position)
            position += written
            rest = rest[written:]


def unlink_durably(path: Path) -> int:
    """Remove the file's name, durably; return a descriptor that keeps its blocks, -1 if the blocks were freed at once.

    Raises DiskError, with the file unchanged, if the folder cannot be written. A file
    that does not exist counts as deleted.
    """
    descriptor = -1
    with contextlib.suppress(OSError):  # no permission or no free descriptor: the blocks are freed at once
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with disk_errors("delete", path), contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        failpoint("removal_unlinked")
        sync_folder(path.parent)
    except DiskError:
        if descriptor >= 0:
            os.close(descriptor)
        raise
    failpoint("removal_durable")
    return descriptor


def free_end(path: Path, start: int) -> None:
    """Free the whole blocks from byte `start` on, all of which are zeros; nothing happens if the file system cannot."""
    with opened(open_file(path, os.O_RDWR)) as descriptor:
        first = start + -start % _BLOCK_BYTES
        if first < (size_bytes := os.fstat(descriptor).st_size):
            punch(descriptor, first, size_bytes - first)


def free_blocks(descriptor: int, *, step_bytes: int = FREE_STEP_BYTES, clock: Callable[[], float] = time.monotonic) -> Iterator[float]:
    """Free the blocks of a file without a name step by step and close it; after each step yield the seconds to pause.

    If the file system cannot punch holes, closing the descriptor frees all blocks.
    """
    try:
        if descriptor < 0:
            return
        size_bytes = os.fstat(descriptor).st_size
        for at in range(0, size_bytes, step_bytes):
            began_s = clock()
            code = punch(descriptor, at, step_bytes)
            if code in (errno.EOPNOTSUPP, errno.ENOSYS):
                return
            if code:
                raise DiskError(f"cannot free the blocks of a deleted file: {os.strerror(code)}", errno=code)
            failpoint("removal_step_done")
            if at + step_bytes < size_bytes:
                yield max(FREE_PAUSE_S_MIN, FREE_PAUSE_FACTOR * (clock() - began_s))
    finally:
        if descriptor >= 0:
            os.close(descriptor)
