"""New files, writes into files that exist and their removal: durable when they return, with this project's errors.

Lengths never change. A large file is deleted in two steps: its name first, its blocks after that, a piece at a
time. A reader may have the file mapped. It is never shortened, which would kill that reader by SIGBUS: a hole
is punched instead, and the reader sees zeros there. A reader that copies from a mapping looks afterwards
whether the file still has its name (MESSAGE_WAS_REMOVING). Killed in between: the name is gone for good, and
the kernel frees the rest with the last descriptor and mapping. A folder is synced after each name, oldest
first, so that a power cut never leaves a gap between files.

New files appear complete or not at all (docs/promises.md, 3).

A segment directory may hold nothing but full-length files with proper names:
RocketMQ refuses the whole store otherwise. So a file is created without a name
(O_TMPFILE), given its length and its blocks, synced, and only then linked; the
directory is synced last. A crash at any moment leaves either nothing or the
finished file.

Where the file system refuses O_TMPFILE (or /proc is missing) the file is built
in a sibling of its directory, `.<directory>.new`, and renamed. A crash may leave
that sibling; `sweep_unfinished` removes it at start. RocketMQ skips it:
it lists only the directories it knows and, below a topic, only numeric names.

Config files are replaced by rename, with the previous content kept as `.bak`.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from pyengine.errors import DiskError, DiskFullError, FlushError, InvariantError, disk_error, disk_errors
from pyengine.formats.paths import Root, log_folders
from pyengine.formats.small_file import read_small_file
from pyengine.native.failpoint import failpoint
from pyengine.native.flush import (
    check_written,
    link_unnamed,
    punch,
    rename_exclusive,
    start_writing,
    sync_file_system,
    write_in_place,
)

Allocation = Literal["full", "none"] | int

FILE_MODE = 0o644
FOLDER_MODE = 0o755
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# What open(O_TMPFILE) answers where the kernel or the file system does not know it.
_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL})


def create_file(folder: Path | str, name: str, size_bytes: int, *, allocate: Allocation = "full") -> int:
    """Create `folder/name` with `size_bytes` zeros, durable, and return a read-write descriptor.

    `allocate` says how much of it gets real blocks now: "full", "none", or that many
    bytes from the start. Missing directories are made and synced too. Raises
    DiskFullError (nothing is left), DiskError with errno EEXIST when the name
    is taken (the file there is untouched), FlushError when a sync failed.
    """
    folder = Path(folder)
    if size_bytes < 0 or "/" in name or name in ("", ".", ".."):
        raise InvariantError(f"create_file({folder}, {name!r}, {size_bytes})")
    make_folders(folder)
    try:
        return _create_unnamed(folder, name, size_bytes, allocate)
    except _TmpfileRefusedError:
        return _create_in_sibling(folder, name, size_bytes, allocate)


def create_files(paths: Sequence[str], size_bytes: int, *, allocate: Allocation) -> list[int] | None:
    """Create many files as create_file does, with two syncs of their file system for all of them instead of some for each.

    Missing directories are made. Each file is complete once it has its name, and all are durable at the end: the answer is a
    read-write descriptor of each. None where this cannot be done: some or none are there then, each complete, its name perhaps
    not durable.
    """
    made: list[int] = []
    try:
        for path in paths:
            folder = os.path.dirname(path)
            with contextlib.suppress(FileExistsError):
                try:
                    os.mkdir(folder, FOLDER_MODE)
                except FileNotFoundError:
                    os.makedirs(folder, FOLDER_MODE)
            made.append(os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, FILE_MODE))
            _size_and_allocate(made[-1], size_bytes, allocate)
        failpoint("new_files_unnamed")
        if sync_file_system(os.path.dirname(paths[0])):
            failpoint("new_files_synced")
            for path, descriptor in zip(paths, made, strict=True):
                check_written(descriptor, path)
                link_unnamed(descriptor, path)
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


def write_config(path: Path | str, content: bytes, *, keep_backup: bool = True, mode: int = FILE_MODE) -> None:
    """Replace `path` by `content`, durable, whole or not at all; the old content stays as `path.bak`.

    `path` exists at every moment once it has existed (RocketMQ's own way has a gap). With another `mode` no byte of the
    content is ever in a file of more rights. Raises DiskFullError, DiskError or FlushError; the old file is then still in place.
    """
    path = Path(path)
    make_folders(path.parent)
    temporary = path.with_name(path.name + ".tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        try:
            if mode != FILE_MODE:
                os.fchmod(descriptor, mode)  # of one that a crash left, or another program
            failpoint("config_opened")
            _write_all(descriptor, content)
            failpoint("config_written")
            _sync_file(descriptor, path)
            failpoint("config_synced")
        finally:
            os.close(descriptor)
        if keep_backup:
            _keep_backup(path)
        os.rename(temporary, path)
        failpoint("config_renamed")
    except OSError as error:
        raise disk_error(error, "write", path) from error
    finally:
        with contextlib.suppress(OSError):  # still there only if something failed
            os.unlink(temporary)
    sync_folder(path.parent)
    failpoint("config_durable")


def make_folders(folder: Path | str) -> None:
    """Make `folder` and its missing parents, each one synced into the directory that holds it."""
    folder = Path(folder)
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        if folder.parent == folder:
            break
        folder = folder.parent
    for made in reversed(missing):
        try:
            os.mkdir(made, FOLDER_MODE)
            failpoint("folder_made")
        except FileExistsError:
            if not made.is_dir():
                raise DiskError(f"{made} is not a directory", errno=errno.ENOTDIR, path=str(made)) from None
        except OSError as error:
            raise disk_error(error, "make directory", made) from error
        sync_folder(made.parent)


def sync_folder(folder: Path | str) -> None:
    """Make the names in `folder` durable, or raise FlushError (DiskFullError where the disk is full)."""
    descriptor = _open_folder(Path(folder))
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno == errno.EINVAL:  # some network file systems: directories cannot be synced
            return
        if error.errno in _FULL:
            raise DiskFullError(f"no room to sync {folder}", errno=error.errno, path=str(folder)) from error
        raise FlushError(f"fsync of directory {folder} failed: {error.strerror}",
                         errno=error.errno or 0, path=str(folder)) from error
    finally:
        os.close(descriptor)


def sweep_unfinished(root: Root) -> list[Path]:
    """Remove what an interrupted create_file or write_config left below `root`; returns what was removed.

    For the store's owner only, before any worker runs.
    """
    removed: list[Path] = []
    root = Path(root)
    of_log = [sibling_of(folder) for folder in log_folders(root).all]
    for sibling in dict.fromkeys([*root.glob(".*.new"), *root.glob("consumequeue*/*/.*.new"), *of_log]):
        if not sibling.is_dir():
            continue
        for file in sorted(sibling.iterdir()):
            file.unlink()
            removed.append(file)
        sibling.rmdir()
        sync_folder(sibling.parent)
    config = root / "config"
    for temporary in [*sorted(config.glob("*.tmp")), *sorted(config.glob("log-holds/*.tmp")), *root.glob("checkpoint.tmp")]:
        temporary.unlink()
        removed.append(temporary)
    return removed


class _TmpfileRefusedError(Exception):
    """This file system or this system cannot do it; use the sibling directory."""


def _create_unnamed(folder: Path, name: str, size_bytes: int, allocate: Allocation) -> int:
    folder_fd = _open_folder(folder)
    try:
        try:
            descriptor = os.open(folder, os.O_RDWR | os.O_TMPFILE, FILE_MODE)
        except OSError as error:
            if error.errno in _NO_TMPFILE:
                raise _TmpfileRefusedError from error
            raise disk_error(error, "create", folder / name) from error
        try:
            failpoint("new_file_unnamed")
            _give_length(descriptor, size_bytes, allocate, folder / name)
            try:
                link_unnamed(descriptor, name, folder_fd)
            except OSError as error:
                if error.errno == errno.ENOENT:  # no /proc
                    raise _TmpfileRefusedError from error
                raise disk_error(error, "create", folder / name) from error
            failpoint("new_file_linked")
            _sync_or_unlink(folder, folder / name)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor
    finally:
        os.close(folder_fd)


def sibling_of(folder: Path) -> Path:
    """Where files of `folder` are in the making; what is there at a start is removed."""
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
            descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL, FILE_MODE)
            _give_length(descriptor, size_bytes, allocate, target)
            failpoint("sibling_file_made")
            _rename_new(unfinished, target)
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
        with contextlib.suppress(OSError):  # another file may be in the making there
            sibling.rmdir()


def _rename_new(unfinished: Path, target: Path) -> None:
    try:
        rename_exclusive(unfinished, target)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Each directory has one creating process, so look-then-rename has no rival.
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        os.rename(unfinished, target)


def _give_length(descriptor: int, size_bytes: int, allocate: Allocation, path: Path) -> None:
    with disk_errors("create", path, f" (with {size_bytes:,} bytes)"):
        _size_and_allocate(descriptor, size_bytes, allocate)
    _sync_file(descriptor, path)
    failpoint("new_file_synced")


def _size_and_allocate(descriptor: int, size_bytes: int, allocate: Allocation) -> None:
    write_in_place(descriptor)
    os.ftruncate(descriptor, size_bytes)
    failpoint("new_file_sized")
    blocks_bytes = size_bytes if allocate == "full" else 0 if allocate == "none" else min(allocate, size_bytes)
    if blocks_bytes:
        os.posix_fallocate(descriptor, 0, blocks_bytes)
        failpoint("new_file_allocated")


def _sync_file(descriptor: int, path: Path) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno in _FULL:
            raise disk_error(error, "sync", path) from error
        raise FlushError(f"fsync of {path} failed: {error.strerror}",
                         errno=error.errno or 0, path=str(path)) from error


def _sync_or_unlink(folder: Path, path: Path) -> None:
    try:
        sync_folder(folder)
    except DiskError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    failpoint("new_file_durable")


def _keep_backup(path: Path) -> None:
    """Leave the present content under `path.bak` too. A hard link, so nothing is copied or torn."""
    spare = path.with_name(path.name + ".bak.tmp")
    with contextlib.suppress(FileNotFoundError):
        spare.unlink()
    try:
        os.link(path, spare)
    except FileNotFoundError:
        return
    except OSError:  # no hard links here
        spare.write_bytes(read_small_file(path))
        with open(spare, "rb") as copied:
            _sync_file(copied.fileno(), spare)
    failpoint("config_backup_linked")
    os.rename(spare, path.with_name(path.name + ".bak"))
    failpoint("config_backup_renamed")
    with contextlib.suppress(FileNotFoundError):  # rename() does nothing when both already are one file
        spare.unlink()


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest):]


def _open_folder(folder: Path) -> int:
    with disk_errors("open directory", folder):
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)


MANY_FILES = 32  # to be synced: one sync of their file system costs less than one of each

_REWRITE_BYTES = 1 << 20  # at a time
_BLOCK_BYTES = 4096  # what a write past the page cache begins at and is a multiple of


def write_at(path: Path, content: bytes | memoryview, position: int) -> None:
    """Write bytes to their place in a file, durable. Raises DiskFullError, DiskError or FlushError."""
    descriptor = open_file(path, os.O_WRONLY)
    try:
        pwrite_all(descriptor, content, position, path)
        failpoint("bytes_written")
        sync_descriptor(descriptor, path)
        failpoint("bytes_durable")
    finally:
        os.close(descriptor)


def rewrite(path: Path, start: int, end: int) -> None:
    """Write the bytes [start, end) of a file over themselves and sync it, so that they are on the disk when this returns.

    For bytes that an earlier sync may have failed on: their pages count as clean, and a sync alone would leave
    them out. Then the same once more past the page cache: ext4 takes the blocks of a failed write for written ones,
    and puts there what is written again, but their extent stays marked unwritten, and after a reboot it reads as
    zeros. A write past the page cache drops the pages first, so it comes last: on a disk that still fails they are
    the only copy.
    The file's time stays, since segments and queue files are looked up and deleted by it.
    """
    descriptor = open_file(path, os.O_RDWR)
    try:
        status = os.fstat(descriptor)
        at, end = start - start % _BLOCK_BYTES, min(end + -end % _BLOCK_BYTES, status.st_size)
        pieces = [(place, min(_REWRITE_BYTES, end - place)) for place in range(at, end, _REWRITE_BYTES)]
        with mmap.mmap(-1, _REWRITE_BYTES) as memory, memoryview(memory) as buffer:  # aligned, as direct writes ask for
            for place, count in pieces:
                with buffer[:count] as piece:
                    _read_piece(descriptor, piece, place, path)
                    pwrite_all(descriptor, piece, place, path)
            sync_descriptor(descriptor, path)
            failpoint("bytes_rewritten")
            _write_directly(descriptor, pieces, buffer, path)
        os.utime(descriptor, ns=(status.st_atime_ns, status.st_mtime_ns))
        sync_descriptor(descriptor, path)
    finally:
        os.close(descriptor)


def _write_directly(descriptor: int, pieces: Sequence[tuple[int, int]], buffer: memoryview, path: Path) -> None:
    """Whole blocks past the page cache, where the file system can do that."""
    try:
        direct = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:  # tmpfs and others have no such writes
        return
    try:
        for place, count in pieces:
            count -= count % _BLOCK_BYTES
            if not count:
                continue
            with buffer[:count] as piece:
                _read_piece(descriptor, piece, place, path)
                try:
                    done = os.pwrite(direct, piece, place)
                except OSError as error:
                    pwrite_all(descriptor, piece, place, path)  # the pages are gone
                    if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):  # larger blocks than ours
                        return
                    raise FlushError(f"cannot write {path}: {error.strerror}", errno=error.errno or 0, path=str(path)) from error
                if done != count:
                    pwrite_all(descriptor, piece, place, path)
                    raise FlushError(f"cannot write {path}: {done} of {count} bytes were written", path=str(path))
    finally:
        os.close(direct)


def _read_piece(descriptor: int, piece: memoryview, place: int, path: Path) -> None:
    with disk_errors("read", path):
        count = os.preadv(descriptor, [piece], place)
    if count != len(piece):
        raise DiskError(f"cannot read {path}: it has {count} of {len(piece)} bytes at {place}", path=str(path))


def sync_file(path: Path, *, is_synced: bool = False) -> None:
    """fsync one file, or raise FlushError: final, never retried. `is_synced`: by a sync of its file system, only ask."""
    descriptor = open_file(path, os.O_RDONLY)
    try:
        if is_synced:
            check_written(descriptor, str(path))
        else:
            sync_descriptor(descriptor, path)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def start_writeback(paths: Sequence[Path]) -> Iterator[None]:
    """Inside the block the kernel begins to write what is dirty in these files, so that sync_file waits less later.

    Not a sync: nothing is durable by it, and an error of the disk is left for the sync to tell.
    Where no thread is to be had nothing begins early.
    """
    thread = threading.Thread(target=_start_writing, args=(paths,), name="begin-writing", daemon=True)
    is_begun = True
    try:
        thread.start()
    except RuntimeError:  # a limit on processes
        is_begun = False
    try:
        yield
    finally:
        if is_begun:
            thread.join()


def _start_writing(paths: Sequence[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                start_writing(descriptor)
            finally:
                os.close(descriptor)


def sync_descriptor(descriptor: int, path: Path) -> None:
    """fsync, or raise FlushError: final, never retried."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise FlushError(f"fsync of {path} failed: {error.strerror}", errno=error.errno or 0, path=str(path)) from error


def open_file(path: Path, flags: int) -> int:
    """A descriptor, or DiskError."""
    with disk_errors("open", path):
        return os.open(path, flags)


def pwrite_all(descriptor: int, content: bytes | memoryview, position: int, path: Path) -> None:
    """Write all of it, or raise DiskFullError or DiskError. Not synced."""
    rest = memoryview(content)
    with disk_errors("write", path):
        while rest:
            written = os.pwrite(descriptor, rest, position)
            position += written
            rest = rest[written:]


STEP_BYTES = 64 << 20
PAUSE_S_MIN = 0.005
SHARE = 4  # the pause after a step is this many times as long as the step: the disk is left to others


def unlink_durably(path: Path) -> int:
    """Take the file's name away, durable; a descriptor that keeps its blocks, -1 if it had to go at once.

    Raises DiskError, the file being untouched, where the folder cannot be written. A file
    that is not there is as good as deleted.
    """
    descriptor = -1
    with contextlib.suppress(OSError):  # no right or no descriptor free: then without pacing
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise disk_error(error, "delete", path) from error
    failpoint("removal_unlinked")
    try:
        sync_folder(path.parent)
    except DiskError:
        if descriptor >= 0:
            os.close(descriptor)
        raise
    failpoint("removal_durable")
    return descriptor


def give_back(descriptor: int, *, step_bytes: int = STEP_BYTES, clock: Callable[[], float] = time.monotonic) -> Iterator[float]:
    """Free the blocks of a nameless file step by step and close it; after each step the seconds to pause are yielded.

    Where the file system cannot punch holes everything goes with the descriptor.
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
                yield max(PAUSE_S_MIN, SHARE * (clock() - began_s))
    finally:
        if descriptor >= 0:
            os.close(descriptor)
