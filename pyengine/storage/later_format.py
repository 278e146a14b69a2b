"""Detect, by its files, a store with features that only RocketMQ 5 has, so that no process writes to it.

    consume queues, or a table of config/, in RocksDB   a folder with CURRENT, which names a MANIFEST
    timer wheel                                         messages that wait in `timerwheel`, or for it
    compaction                                          files in compaction/
    tiered storage                                      config/tieredStoreMetadata.json
    queues of batches                                   files in batchconsumequeue/
    records with a topic of more than 127 bytes         another magic number, at which a walk stops

The log itself has the format of 4.9 and can be read and salvaged. If an engine appended to it, these files would no
longer match the log: messages would never be delivered, or would be delivered twice.
"""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path
from typing import NamedTuple

from pyengine.errors import StoreBusyError, StoreRefusedError, command
from pyengine.formats.constants import CQ_ENTRY_BYTES, Readable
from pyengine.formats.paths import StorePaths, parse_segment_name, segment_name
from pyengine.formats.small_file import open_regular, read_small_file
from pyengine.storage.read_level import StoreUse, store_use

MESSAGE_MAGIC_V2 = 0xDAA320AB
TIMER_TOPIC = "rmq_sys_wheel_timer"
LEFT_BY_SALVAGE = frozenset({"tieredStoreMetadata.json", "timercheck", "timermetrics"})  # in config/: useless without the other files
_MANIFEST = b"MANIFEST-"
_SLOT = struct.Struct(">qqqii")  # time in units of the precision, first and last position, number, unused
_SLOT_UNIT_MS = 1000             # the longest precision: a slot counts as passed only if it is passed at every precision
_CHECK = struct.Struct(">qqq")   # TimerCheckpoint: last time that was read, timer log synced, next offset of the timer's queue
_SEARCHED_MAX = 1000             # most folders that are searched for databases


class LaterFeature(NamedTuple):
    """One feature of a later version: its path relative to the root, and a clause about it."""

    path: str
    what: str

    @property
    def sentence(self) -> str:
        return f"{self.path}: {self.what}"


def find_later_features(root: str | os.PathLike[str]) -> list[LaterFeature]:
    """Return the features of RocketMQ 5 in the store at `root`; empty for a store of 4.9 or of this engine.

    The contents of files never make it raise an error.
    """
    paths = StorePaths(root)
    found = []
    for folder in _rocksdb_folders(paths):
        what = "its consume queues are" if folder == paths.consume_queue else "it is"
        found.append(LaterFeature(str(folder.relative_to(paths.root)), f"{what} a RocksDB database, which only RocketMQ 5 reads"))
    pending = _pending_timers(paths)
    if pending:
        found.append(LaterFeature("timerwheel", f"{pending} delayed messages wait there, which only RocketMQ 5 delivers"))
    if _holds_files(paths.root / "compaction"):
        found.append(LaterFeature("compaction", "topics are compacted, which only RocketMQ 5 does and reads"))
    if (paths.config / "tieredStoreMetadata.json").is_file():
        found.append(LaterFeature("config/tieredStoreMetadata.json",
                                  "a part of its messages is in tiered storage, which only RocketMQ 5 reads"))
    if _holds_files(paths.root / "batchconsumequeue"):
        found.append(LaterFeature("batchconsumequeue", "it has queues of batches, which only RocketMQ 5 reads"))
    return found


def require_known_format(root: str | os.PathLike[str]) -> None:
    """Raise StoreRefusedError for a store with features of RocketMQ 5, and for one whose restore has not finished.

    Call it before the first write to the store.
    """
    if StorePaths(root).restoring.exists():
        raise StoreRefusedError(f"a restore into {root} has not finished: run the same {command('restore', 'DEST', root)} again, or "
                                "delete the directory")
    found = find_later_features(root)
    if found:
        raise StoreRefusedError(
            f"{root} is a store of RocketMQ 5, and nothing is written into it. " + "; ".join(one.sentence for one in found)
            + ". Its log can be read (`pyengine inspect`, `check`, `export`), and `pyengine salvage STORE DEST` makes a store of "
            "the messages in it")


def require_writable(root: str | os.PathLike[str], whose: str) -> None:
    """Raise StoreBusyError, which says `whose` the file is, while another program has the store open, or as require_known_format().

    Call it before a write to a store that may have an engine, which has looked at the format itself.
    """
    use = store_use(root)
    if use is StoreUse.OTHER:
        raise StoreBusyError(f"{root} is {whose}")
    if use is StoreUse.CLOSED:
        require_known_format(root)


def refuse_later_record(view: Readable, at: int, offset: int) -> None:
    """Raise StoreRefusedError if the bytes at `at`, where a walk stopped, are a record of RocketMQ 5."""
    if len(view) >= at + 8 and int.from_bytes(view[at + 4 : at + 8], "big") == MESSAGE_MAGIC_V2:
        raise StoreRefusedError(f"the record at {offset} is one of RocketMQ 5 (a topic of more than 127 bytes), which is not read "
                                "here: nothing was changed; keep the store with RocketMQ 5")


def queues_are_elsewhere(root: str | os.PathLike[str]) -> bool:
    """Whether the consume queues are in RocksDB."""
    return _is_rocksdb(StorePaths(root).consume_queue)


def _rocksdb_folders(paths: StorePaths) -> list[Path]:
    """Return the databases in the root, up to two folders deep; below the folders of queues and log it does not search."""
    flat = {paths.consume_queue, paths.consume_queue_ext, paths.index, paths.quarantine, *paths.commit_log_folders.all}
    folders = _folders(paths.root)
    folders += [inner for folder in folders if folder not in flat for inner in _folders(folder)]
    return [folder for folder in folders[:_SEARCHED_MAX] if _is_rocksdb(folder)]


def _is_rocksdb(folder: Path) -> bool:
    try:
        with open(open_regular(folder / "CURRENT"), "rb") as file:
            return file.read(len(_MANIFEST)) == _MANIFEST
    except OSError:
        return False


def _pending_timers(paths: StorePaths) -> int:
    """Count the messages in slots of the wheel after its last read time, and in its queue after its next offset."""
    try:
        wheel = read_small_file(paths.root / "timerwheel")
    except OSError:
        return 0
    read_ms, taken = 0, 0
    with contextlib.suppress(OSError, struct.error):
        read_ms, _, taken = _CHECK.unpack(read_small_file(paths.config / "timercheck")[: _CHECK.size])
    whole = len(wheel) - len(wheel) % _SLOT.size
    waiting: int = sum(number for time, _, _, number, _ in _SLOT.iter_unpack(memoryview(wheel)[:whole])
                  if number > 0 and time * _SLOT_UNIT_MS >= read_ms)
    return waiting + max(0, _queue_end(paths.queue_folder(TIMER_TOPIC, 0)) - taken)


def _queue_end(folder: Path) -> int:
    """Return the offset after the last entry of a queue, from its last file; 0 without entries."""
    with contextlib.suppress(OSError):
        last = max((start for start in map(parse_segment_name, os.listdir(folder)) if start is not None), default=None)
        if last is not None:
            content = read_small_file(folder / segment_name(last)).rstrip(b"\0")
            return last // CQ_ENTRY_BYTES - -len(content) // CQ_ENTRY_BYTES
    return 0


def _holds_files(folder: Path) -> bool:
    return any(names for _, _, names in os.walk(folder))


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir())
    except OSError:
        return []
