"""Names for finished files, in one step and never over an existing file (csrc/new_file.cdef.h)."""

from __future__ import annotations

import os

from pyengine._native import lib


def link_unnamed(fd: int, folder_fd: int, name: str) -> None:
    """Give the O_TMPFILE file `fd` its name in `folder_fd`, or raise OSError (FileExistsError: taken)."""
    _check(lib.ms_new_file_link(fd, folder_fd, os.fsencode(name)), name)


def rename_exclusive(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Move `source` to `target`, or raise OSError: FileExistsError if taken, EINVAL if the file system cannot say."""
    _check(lib.ms_new_file_rename(os.fsencode(source), os.fsencode(target)), os.fspath(target))


def _check(result: int, path: str) -> None:
    if result < 0:
        raise OSError(-result, os.strerror(-result), path)
