"""A store on a file system of pyarrow's: listing, and reads of ranges. Nothing is mapped, and nothing written.

Where the option `fileSystem` stands at `auto`, a path of this host is mapped, and a URI (`s3://bucket/store`,
`hdfs://...`, `gs://...`) comes here. `arrow` reads a path of this host by ranges too; `module:name` names a pyarrow or
fsspec file system, or a function that makes one, that driver and tasks can import; the path is then one inside it.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyengine.errors import UsageError

if TYPE_CHECKING:
    from pyarrow import NativeFile
    from pyarrow.fs import FileSystem

AUTO, ARROW = "auto", "arrow"
LOG = "commitlog"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_NAMED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def scheme_of(path: str) -> str:
    """The scheme of a URI in small letters, "" for a path; of this host is what has none or `file`."""
    found = _SCHEME.match(path)
    return found[1].lower() if found else ""


def uri_of(path: str) -> str:
    """The URI as pyarrow knows it: Hadoop's two names for S3 are S3."""
    return re.sub("^s3[an]://", "s3://", path, flags=re.IGNORECASE)


def is_file_system(text: str) -> bool:
    """Whether it is a value of the option fileSystem."""
    return text in (AUTO, ARROW) or _NAMED.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class FileTree:
    """A folder of a file system; names are relative to it, with slashes."""

    system: FileSystem
    root: str

    def folders_and_sizes(self, folder: str) -> dict[str, int | None]:
        """What lies in the folder: a file's length by its name, None for folders. Empty when there is no such folder."""
        from pyarrow.fs import FileSelector, FileType

        found = self.system.get_file_info(FileSelector(self._path(folder), allow_not_found=True))
        return {info.base_name: info.size if info.type == FileType.File else None for info in found}

    def read(self, name: str) -> bytes | None:
        """A small file's bytes, None when there is none."""
        try:
            with self.system.open_input_file(self._path(name)) as file:
                return file.read_at(file.size(), 0)
        except FileNotFoundError:
            return None

    def open(self, name: str) -> NativeFile:
        """A file to read ranges of. FileNotFoundError when there is none."""
        return self.system.open_input_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}" if self.root and name else self.root or name


def open_tree(path: str, file_system: str) -> FileTree:
    """The store's folder. UsageError for a file system that cannot be had."""
    from pyarrow.fs import FileSystem, LocalFileSystem

    if file_system not in (AUTO, ARROW):
        return FileTree(_named(file_system), path.rstrip("/"))
    if not scheme_of(path):
        return FileTree(LocalFileSystem(), path)
    try:
        system, root = FileSystem.from_uri(uri_of(path))
    except (ValueError, NotImplementedError) as error:
        system, root = _by_fsspec(path, error)
    return FileTree(system, root.rstrip("/"))


def _named(text: str) -> FileSystem:
    module, _, name = text.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"option fileSystem = {text!r}: {error}") from error
    return _as_file_system(found() if callable(found) else found, text)


def _by_fsspec(path: str, refused: Exception) -> tuple[FileSystem, str]:
    """A scheme that pyarrow does not know, by fsspec if it is there."""
    try:
        from fsspec.core import url_to_fs

        system, root = url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise UsageError(f"{path}: pyarrow has no file system for it ({refused}), nor has fsspec ({error})") from error
    return _as_file_system(system, path), root


def _as_file_system(found: object, what: str) -> FileSystem:
    from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem

    if isinstance(found, FileSystem):
        return found
    if not hasattr(found, "cat_file"):
        raise UsageError(f"{what}: {type(found).__name__} is no file system of pyarrow or fsspec")
    return PyFileSystem(FSSpecHandler(found))
