"""The store's directory: 20-digit segments, the tree around them, and the folders of the log (section 1).

A segment's name is the whole-log (or whole-queue) offset of its first byte, so
1 GiB segments are called 00000000000000000000, 00000000001073741824, ...

The log lies in one folder or several. RocketMQ's storePathCommitLog names folders that new segments are
spread over, separated by `,`; readOnlyCommitLogStorePaths names folders whose segments belong to the log
too, but that get no new one. A store without either has STORE/commitlog. The store records both in its
config/engine.toml; a process that was told otherwise (--set, environment) says so with `tell_log_folders`.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from pyengine.formats.constants import INDEX_NAME_DIGITS, SEGMENT_NAME_DIGITS
from pyengine.formats.small_file import read_small_file

Root = str | os.PathLike[str]  # of a store
PATH_SEPARATOR = ","
LOCK_NAME = "lock"
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


def split_folders(root: Root, text: str) -> tuple[Path, ...]:
    """The folders of a setting; relative ones lie in the store."""
    return tuple(Path(root) / piece.strip() for piece in text.split(PATH_SEPARATOR) if piece.strip())


def made_of(root: Root, store_path: str, read_only: str) -> LogFolders:
    """The folders that the two settings name; an empty text means none."""
    writable = split_folders(root, store_path) or (Path(root) / "commitlog",)
    return LogFolders(writable, split_folders(root, read_only))


def tell_log_folders(root: Root, store_path: str, read_only: str) -> None:
    """For this process, the log of the store at `root` lies there, whatever its engine.toml says."""
    _told[os.path.abspath(root)] = made_of(root, store_path, read_only)


def log_folders(root: Root) -> LogFolders:
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
    """The two settings in an engine.toml; read_file in storage/config.py says what is wrong with the file."""
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


QUEUE_ID_MAX = 2**31 - 1
SEGMENT_START_MAX = (1 << 63) - (1 << 32)


def segment_name(start_offset: int) -> str:
    """20 digits; ValueError for a negative offset."""
    if start_offset < 0:
        raise ValueError(f"a segment cannot start at {start_offset}")
    return f"{start_offset:0{SEGMENT_NAME_DIGITS}d}"


def parse_segment_name(name: str) -> int | None:
    """The start offset, or None when the name is not 20 decimal digits, or its file would end beyond any offset (63 bits)."""
    if len(name) == SEGMENT_NAME_DIGITS and name.isascii() and name.isdigit() and int(name) <= SEGMENT_START_MAX:
        return int(name)
    return None


def is_queue_id_name(name: str) -> bool:
    """True for the name of a queue's folder: its number, without leading zeros; a record has 4 signed bytes for it."""
    return (name.isascii() and name.isdigit() and len(name) <= 10 and (name == "0" or name[0] != "0")
            and int(name) <= QUEUE_ID_MAX)


def is_index_name(name: str) -> bool:
    """True for yyyyMMddHHmmssSSS, the name of an index file."""
    return len(name) == INDEX_NAME_DIGITS and name.isascii() and name.isdigit()


def segment_start(offset: int, size_bytes: int) -> int:
    """The start of the segment that holds `offset`."""
    return offset - offset % size_bytes


@dataclass(frozen=True, slots=True)
class StorePaths:
    """Every path of a store. Nothing is made; only the log's folders are looked up (formats/paths.py)."""

    root: Path

    def __init__(self, root: Root) -> None:
        object.__setattr__(self, "root", Path(root))

    @property
    def commit_log(self) -> Path:
        """The log's folder; the first of them when it has several."""
        return log_folders(self.root).writable[0]

    @property
    def commit_log_folders(self) -> LogFolders:
        return log_folders(self.root)

    @property
    def consume_queue(self) -> Path:
        return self.root / "consumequeue"

    @property
    def consume_queue_ext(self) -> Path:
        return self.root / "consumequeue_ext"

    @property
    def index(self) -> Path:
        return self.root / "index"

    @property
    def config(self) -> Path:
        return self.root / "config"

    @property
    def checkpoint(self) -> Path:
        return self.root / "checkpoint"

    @property
    def abort(self) -> Path:
        return self.root / "abort"

    @property
    def restoring(self) -> Path:
        """Where `pyengine restore` makes the store, before it is one."""
        return self.root / ".restoring"

    @property
    def lock(self) -> Path:
        return self.root / LOCK_NAME

    @property
    def quarantine(self) -> Path:
        return self.root / "quarantine"

    def queue_folder(self, topic: str, queue_id: int) -> Path:
        return self.consume_queue / topic / str(queue_id)

    def queue_ext_folder(self, topic: str, queue_id: int) -> Path:
        return self.consume_queue_ext / topic / str(queue_id)

    def commit_log_segment(self, start_offset: int) -> Path:
        """The segment's file: where it is, or, if it is nowhere, in the first folder."""
        return log_folders(self.root).segment(segment_name(start_offset))
