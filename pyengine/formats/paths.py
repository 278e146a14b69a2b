"""The store's directory: names of segments, paths of all files, and the folders of the log (section 1).

A segment's name is the offset of its first byte in the whole log (or queue), in 20 digits: 1 GiB segments are called
00000000000000000000, 00000000001073741824, ...

The log is in one folder or several. RocketMQ's storePathCommitLog lists the folders, separated by `,`, in which new
segments are created in turn; readOnlyCommitLogStorePaths lists folders that hold segments of the log but get no new ones.
Without these settings the log is in STORE/commitlog. The store's config/engine.toml holds both settings; a process with
other values (--set, environment) calls `set_log_folders`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from pyengine.errors import FormatError, shown
from pyengine.formats.constants import INDEX_NAME_DIGITS, SEGMENT_NAME_DIGITS
from pyengine.formats.small_file import path_stamp, read_small_file

Root = str | os.PathLike[str]  # of a store
PATH_SEPARATOR = ","
LOCK_NAME = "lock"
_STORE_PATH, _READ_ONLY = "storepathcommitlog", "readonlycommitlogstorepaths"


@dataclass(frozen=True, slots=True)
class LogFolders:
    """The folders of a log: one or more `writable`, in the given order, and the `read_only` ones, which get no new segments."""

    writable: tuple[Path, ...]
    read_only: tuple[Path, ...] = ()

    @property
    def all(self) -> tuple[Path, ...]:
        """Return every folder once, the first writable one first."""
        return tuple(dict.fromkeys((*self.writable, *self.read_only)))

    def segment(self, name: str) -> Path:
        """Return the path of that segment: where it exists, otherwise in the first folder."""
        folders = self.all
        if len(folders) > 1:
            for folder in folders:
                if (folder / name).exists():
                    return folder / name
        return folders[0] / name

    def folder_for(self, start_offset: int, size_bytes: int, unusable: Collection[Path] = ()) -> Path:
        """Return the folder of a new segment: round robin by its number (MultiPathMappedFileQueue.tryCreateMappedFile).

        Those that are `unusable` (full, or not writable) are skipped unless all are.
        """
        allowed = [folder for folder in self.writable if folder not in self.read_only]
        open_ones = [folder for folder in allowed if folder not in unusable] or allowed or list(self.writable)
        by_name = sorted(open_ones, key=lambda folder: shown(str(folder)))
        return by_name[start_offset // size_bytes % len(by_name)]


_given: dict[str, LogFolders] = {}
_read: dict[str, tuple[int, LogFolders]] = {}


def folders_of(root: Root, store_path: str, read_only: str) -> LogFolders:
    """Return the folders that the two settings name, relative to the store; an empty text names none.

    One that has several names (relative and absolute, by a link, mounted twice) has its first: its segments would count twice.
    """
    named = [[Path(root) / piece.strip() for piece in text.split(PATH_SEPARATOR) if piece.strip()] for text in (store_path, read_only)]
    named[0] = named[0] or [Path(root) / "commitlog"]
    if sum(map(len, named)) > 1:
        first: dict[object, Path] = {}
        named = [[first.setdefault(_identity(folder), folder) for folder in folders] for folders in named]
    writable, others = (tuple(dict.fromkeys(folders)) for folders in named)
    return LogFolders(writable, others)


def _identity(folder: Path) -> object:
    real = os.path.realpath(folder)
    with contextlib.suppress(OSError):
        found = os.stat(real)
        return found.st_dev, found.st_ino
    return real  # it is not there yet


def set_log_folders(root: Root, store_path: str, read_only: str) -> None:
    """Set the log folders of the store at `root` for this process, in place of those in its engine.toml."""
    use_log_folders(root, folders_of(root, store_path, read_only))


def use_log_folders(root: Root, folders: LogFolders | None) -> None:
    """Use these log folders for the store at `root` in this process; None: those of its settings."""
    _given.pop(os.path.abspath(root), None)
    if folders is not None:
        _given[os.path.abspath(root)] = folders


def log_folders(root: Root) -> LogFolders:
    """Return the log folders of the store at `root`."""
    return _given.get(os.path.abspath(root)) or recorded_log_folders(root)


def recorded_log_folders(root: Root) -> LogFolders:
    """Return the log folders that the store's engine.toml names, whatever this process was given."""
    key = os.path.abspath(root)
    path = os.path.join(root, "config", "engine.toml")
    stamp, known = path_stamp(path), _read.get(key)
    if not stamp:
        return folders_of(root, "", "")
    if known is None or known[0] != stamp:
        content = b""
        with contextlib.suppress(OSError):
            content = read_small_file(path)
        known = _read[key] = stamp, folders_of(root, *_log_settings(content))
    return known[1]


def _log_settings(raw: bytes) -> tuple[str, str]:
    """Return the two settings in the bytes of an engine.toml; "" for wrong ones, which read_file in storage/config.py reports."""
    try:
        if b"path" not in raw.lower() and b"\\" not in raw:  # a key may have escapes
            return "", ""
        import tomllib

        found = {_folded(key): value for key, value in tomllib.loads(raw.decode()).items()}
    except (ValueError, RecursionError):
        return "", ""
    return str(found.get(_STORE_PATH, "")), str(found.get(_READ_ONLY, ""))


def _folded(key: str) -> str:
    return key.replace("_", "").replace("-", "").replace(".", "").lower()


def without_log_folders(settings: bytes) -> bytes:
    """Return an engine.toml without the two settings, for a new store made of another one but with a log of its own.

    FormatError if a setting remains because it is written in a form that the line does not show.
    """
    lines = settings.splitlines(keepends=True)
    ours = (_STORE_PATH, _READ_ONLY)
    left = b"".join(line for line in lines
                    if _folded(line.partition(b"=")[0].decode("utf-8", "replace").strip(" \t'\"")) not in ours)
    if any(_log_settings(left)):
        raise FormatError("they say in an unusual form where the log is: store_path_commit_log or read_only_commit_log_store_paths")
    return left


QUEUE_ID_MAX = 2**31 - 1
SEGMENT_START_MAX = (1 << 63) - (1 << 32)


def segment_name(start_offset: int) -> str:
    """Return the segment's name, 20 digits; ValueError for a negative offset."""
    if start_offset < 0:
        raise ValueError(f"a segment cannot start at {start_offset}")
    return f"{start_offset:0{SEGMENT_NAME_DIGITS}d}"


def parse_segment_name(name: str) -> int | None:
    """Return the start offset, or None if the name is not 20 decimal digits or the segment would exceed 63-bit offsets."""
    if len(name) == SEGMENT_NAME_DIGITS and name.isascii() and name.isdigit() and int(name) <= SEGMENT_START_MAX:
        return int(name)
    return None


def is_queue_id_name(name: str) -> bool:
    """Return whether a folder can have this name as a queue's: a number below 2^31 without leading zeros."""
    return (name.isascii() and name.isdigit() and len(name) <= 10 and (name == "0" or name[0] != "0")
            and int(name) <= QUEUE_ID_MAX)


def is_index_name(name: str) -> bool:
    """Return whether this is the name of an index file, yyyyMMddHHmmssSSS."""
    return len(name) == INDEX_NAME_DIGITS and name.isascii() and name.isdigit()


def segment_start(offset: int, size_bytes: int) -> int:
    """Return the start of the segment that holds `offset`."""
    return offset - offset % size_bytes


class _Below:
    """A path of this name in the store."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, store: StorePaths, _: type[StorePaths]) -> Path:
        return store.root / self._name


@dataclass(frozen=True, slots=True)
class StorePaths:
    """Computes every path of a store; it reads only the settings of the log's folders, and creates nothing."""

    root: Path

    def __init__(self, root: Root) -> None:
        object.__setattr__(self, "root", Path(root))

    @property
    def commit_log(self) -> Path:
        """The log's folder, the first one if it has several."""
        return log_folders(self.root).writable[0]

    @property
    def commit_log_folders(self) -> LogFolders:
        return log_folders(self.root)

    consume_queue = _Below("consumequeue")
    consume_queue_ext = _Below("consumequeue_ext")
    index = _Below("index")
    config = _Below("config")
    checkpoint = _Below("checkpoint")
    abort = _Below("abort")
    restoring = _Below(".restoring")  # where `pyengine restore` builds the store before it moves it into place
    lock = _Below(LOCK_NAME)
    quarantine = _Below("quarantine")

    def queue_folder(self, topic: str, queue_id: int) -> Path:
        return self.consume_queue / topic / str(queue_id)

    def queue_ext_folder(self, topic: str, queue_id: int) -> Path:
        return self.consume_queue_ext / topic / str(queue_id)

    def commit_log_segment(self, start_offset: int) -> Path:
        """Return the segment's path: where it exists, otherwise in the first folder."""
        return log_folders(self.root).segment(segment_name(start_offset))
