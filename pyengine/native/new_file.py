"""What new files need of their file system: names in one step, writes in place, its kind (csrc/new_file.cdef.h)."""

from __future__ import annotations

import os

from pyengine._native import lib


def link_unnamed(fd: int, folder_fd: int, name: str) -> None:
    """Give the O_TMPFILE file `fd` its name in `folder_fd`, or raise OSError (FileExistsError: taken)."""
    _check(lib.ms_new_file_link(fd, folder_fd, os.fsencode(name)), name)


def rename_exclusive(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Move `source` to `target`, or raise OSError: FileExistsError if taken, EINVAL if the file system cannot say."""
    _check(lib.ms_new_file_rename(os.fsencode(source), os.fsencode(target)), os.fspath(target))


def write_in_place(fd: int) -> None:
    """Have an empty file overwritten in place where its file system would copy on write; best effort."""
    lib.ms_new_file_in_place(fd)


def file_system(fd: int) -> int:
    """The magic number of the file system that `fd` lies on (statfs), or OSError."""
    found = lib.ms_new_file_system(fd)
    if found < 0:
        raise OSError(-found, os.strerror(-found))
    return found


def _check(result: int, path: str) -> None:
    if result < 0:
        raise OSError(-result, os.strerror(-result), path)
