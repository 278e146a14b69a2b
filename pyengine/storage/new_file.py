"""New files appear complete or not at all (docs/promises.md, 3).

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
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pyengine.errors import DiskError, DiskFullError, FlushError, InvariantError, disk_error, disk_errors
from pyengine.formats.paths import Root, log_folders
from pyengine.formats.small_file import read_small_file
from pyengine.native.failpoint import failpoint
from pyengine.native.flush import check_written, link_unnamed, rename_exclusive, sync_file_system, write_in_place

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


def create_files(paths: Sequence[Path], size_bytes: int, *, allocate: Allocation) -> bool:
    """Create many files as create_file does, with two syncs of their file system for all of them instead of some for each.

    Missing directories are made. Each file is complete once it has its name, and all are durable at the end. False where
    this cannot be done: some or none are there then, each complete, its name perhaps not durable.
    """
    unnamed: list[int] = []
    try:
        for path in paths:
            path.parent.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
            unnamed.append(os.open(path.parent, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, FILE_MODE))
            _size_and_allocate(unnamed[-1], size_bytes, allocate)
        failpoint("new_files_unnamed")
        if not sync_file_system(paths[0].parent):
            return False
        failpoint("new_files_synced")
        for path, descriptor in zip(paths, unnamed, strict=True):
            check_written(descriptor, str(path))
            folder = _open_folder(path.parent)
            try:
                link_unnamed(descriptor, folder, path.name)
            finally:
                os.close(folder)
            failpoint("new_files_linked")
        return sync_file_system(paths[0].parent)
    except (OSError, DiskError):
        return False
    finally:
        for descriptor in unnamed:
            os.close(descriptor)


def write_config(path: Path | str, content: bytes, *, keep_backup: bool = True) -> None:
    """Replace `path` by `content`, durable, whole or not at all; the old content stays as `path.bak`.

    `path` exists at every moment once it has existed (RocketMQ's own way has a gap).
    Raises DiskFullError, DiskError or FlushError; the old file is then still in place.
    """
    path = Path(path)
    make_folders(path.parent)
    temporary = path.with_name(path.name + ".tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
        try:
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
                link_unnamed(descriptor, folder_fd, name)
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
