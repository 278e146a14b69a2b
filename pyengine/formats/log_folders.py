"""Where the segments of a commit log lie: one folder, or several (section 1).

RocketMQ's storePathCommitLog names folders that new segments are spread over, separated
by `,`; readOnlyCommitLogStorePaths names folders whose segments belong to the log, too, but
that get no new one. A store without either has STORE/commitlog. The store itself says so in
its config/engine.toml, where a start keeps what it was told; a process that was told otherwise
(--set, environment) says so with `tell_log_folders`.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from pyengine.formats.small_file import read_small_file

PATH_SEPARATOR = ","
_STORE_PATH, _READ_ONLY = "storepathcommitlog", "readonlycommitlogstorepaths"


@dataclass(frozen=True, slots=True)
class LogFolders:
    """`writable` in the order given, at least one; `read_only` get no new segments."""

    writable: tuple[Path, ...]
    read_only: tuple[Path, ...] = ()

    @property
    def all(self) -> tuple[Path, ...]:
        """Every folder once, the first writable one first."""
        return tuple(dict.fromkeys((*self.writable, *self.read_only)))

    def segment(self, name: str) -> Path:
        """The file of that name, where it is; in the first folder when it is nowhere."""
        folders = self.all
        if len(folders) > 1:
            for folder in folders:
                if (folder / name).exists():
                    return folder / name
        return folders[0] / name

    def folder_for(self, start_offset: int, size_bytes: int, full: Collection[Path] = ()) -> Path:
        """Where a new segment goes: round robin by its number (MultiPathMappedFileQueue.tryCreateMappedFile).

        Folders in `full` are passed over while there is another one.
        """
        allowed = [folder for folder in self.writable if folder not in self.read_only]
        open_ones = [folder for folder in allowed if folder not in full] or allowed or list(self.writable)
        by_name = sorted(open_ones, key=str)
        return by_name[start_offset // size_bytes % len(by_name)]


_told: dict[str, LogFolders] = {}
_read: dict[str, tuple[tuple[int, int, int], LogFolders]] = {}


def split_folders(root: str | os.PathLike[str], text: str) -> tuple[Path, ...]:
    """The folders of a setting; relative ones lie in the store."""
    return tuple(Path(root) / piece.strip() for piece in text.split(PATH_SEPARATOR) if piece.strip())


def made_of(root: str | os.PathLike[str], store_path: str, read_only: str) -> LogFolders:
    """The folders that the two settings name; an empty text stands for none."""
    writable = split_folders(root, store_path) or (Path(root) / "commitlog",)
    return LogFolders(writable, split_folders(root, read_only))


def tell_log_folders(root: str | os.PathLike[str], store_path: str, read_only: str) -> None:
    """For this process, the log of the store at `root` lies there, whatever its engine.toml says."""
    _told[os.path.abspath(root)] = made_of(root, store_path, read_only)


def log_folders(root: str | os.PathLike[str]) -> LogFolders:
    """Where the log of the store at `root` lies."""
    key = os.path.abspath(root)
    if key in _told:
        return _told[key]
    path = os.path.join(root, "config", "engine.toml")
    try:
        now = os.stat(path)
    except OSError:
        return made_of(root, "", "")
    version = now.st_mtime_ns, now.st_ino, now.st_size  # times are only as fine as the kernel's tick
    known = _read.get(key)
    if known is None or known[0] != version:
        known = _read[key] = version, made_of(root, *_settings(path))
    return known[1]


def _settings(path: str) -> tuple[str, str]:
    """The two settings in an engine.toml; what is wrong with the file is said by who reads all of it."""
    try:
        raw = read_small_file(path)
        if b"path" not in raw.lower():
            return "", ""
        import tomllib

        found = {_folded(key): value for key, value in tomllib.loads(raw.decode()).items()}
    except (OSError, ValueError, RecursionError):
        return "", ""
    return str(found.get(_STORE_PATH, "")), str(found.get(_READ_ONLY, ""))


def _folded(key: str) -> str:
    return key.replace("_", "").replace("-", "").replace(".", "").lower()


def without_log_folders(settings: bytes) -> bytes:
    """An engine.toml without the two settings: for a new store made of another one, whose log is its own."""
    lines = settings.splitlines(keepends=True)
    ours = (_STORE_PATH.encode(), _READ_ONLY.encode())
    return b"".join(line for line in lines
                    if _folded(line.partition(b"=")[0].decode("utf-8", "replace").strip(" \t'\"")).encode() not in ours)
