"""A file system of pyarrow's on which only ranges can be read, and that counts them: what a remote one is like."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, field
from typing import Any

from pyarrow.fs import FileSystemHandler, LocalFileSystem, PyFileSystem, SubTreeFileSystem
from pyarrow.lib import PythonFile


@dataclass
class Reads:
    """What was read: (file, offset, length)."""

    all: list[tuple[str, int, int]] = field(default_factory=list)

    def bytes_of(self, part: str) -> int:
        """Return the bytes read of files whose path contains `part`."""
        return sum(length for path, _, length in self.all if part in path)


READS = Reads()


class CountedFile(io.RawIOBase):
    """A file that tells what is read of it."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.file = open(path, "rb", buffering=0)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()

    def size(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def read(self, count: int = -1) -> bytes:
        assert count >= 0, "the whole file was asked for"
        at = self.file.tell()
        data = self.file.read(count)
        READS.all.append((self.path, at, len(data)))
        return data

    def close(self) -> None:
        self.file.close()
        super().close()


class RangedHandler(FileSystemHandler):
    """Lists and gives ranges; everything else is refused."""

    local = LocalFileSystem()

    def get_type_name(self) -> str:
        return "ranged"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths):
        return self.local.get_file_info(paths)

    def get_file_info_selector(self, selector):
        return self.local.get_file_info(selector)

    def open_input_file(self, path: str) -> PythonFile:
        return PythonFile(CountedFile(path), mode="r")

    def refuse(self, *_: Any) -> Any:
        raise AssertionError("only ranges may be read")

    open_input_stream = open_output_stream = open_append_stream = refuse
    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = move = copy_file = refuse


SUBTREE = ""


def subtree() -> SubTreeFileSystem:
    """SUBTREE as a file system: paths are those below it."""
    return SubTreeFileSystem(SUBTREE, LocalFileSystem())


def make() -> PyFileSystem:
    """For the option fileSystem: `spark.ranged:make`."""
    return PyFileSystem(RangedHandler())


def make_listing() -> object:
    """A file system of fsspec that lists a folder once, as s3fs, gcsfs and adlfs do."""
    from fsspec.implementations.local import LocalFileSystem

    class Listing(LocalFileSystem):
        protocol = "listing"

        def ls(self, path: str, detail: bool = False, **kwargs: Any) -> list:
            path = self._strip_protocol(path)
            if path not in self.dircache:
                self.dircache[path] = super().ls(path, detail=True, **kwargs)
            return self.dircache[path] if detail else [one["name"] for one in self.dircache[path]]

        def invalidate_cache(self, path: str | None = None) -> None:
            self.dircache.clear()

    return Listing()
