"""The files that a rebuild replaces: moved to quarantine/rebuild-N/ before, and their times given to the new ones.

RocketMQ takes the first file of the queue that was modified at or after the asked time
(MappedFileQueue.getMappedFileByTime), and so do we. Files made by a rebuild are all of
today: every look-up would end in the first one. So each file gets the time at which its
last entry's message was stored; or keeps the time of the file that it replaces, when that
is no earlier than the message and no later than the next file's.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from pyengine.errors import disk_error
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.consume_queue import ENTRY, is_filler
from pyengine.formats.paths import StorePaths
from pyengine.storage.consume_queue import store_timestamp_ms
from pyengine.storage.mapped_file import MappedFileQueue, MappingCache
from pyengine.storage.message_store import MessageStore
from pyengine.storage.new_file import make_folders, sync_folder, write_config
from pyengine.storage.recovery.markers import RebuildMarker
from pyengine.storage.recovery.quarantine import sync_tree
from pyengine.storage.recovery.queues import QueueState, list_queues


def move_away(root: Path, marker: RebuildMarker) -> None:
    """Move every piece of `marker`, durable. May be done again: what was made since in a moved piece's place goes."""
    for piece in marker.pieces:
        _move(root, marker, piece)


def _move(root: Path, marker: RebuildMarker, piece: str) -> None:
    """Take `piece` away, durable. What is in its place although it was moved is half made, and goes."""
    source, target = root / piece, marker.moved_path(root, piece)
    if not source.exists():
        return
    is_topic = source.parent.parent == root
    if is_topic and target.exists():  # queue by queue: not all of them need have been moved
        for queue in list(source.iterdir()):
            _move(root, marker, f"{piece}/{queue.name}")
        source.rmdir()
    elif target.exists():
        shutil.rmtree(source)
    else:
        _write_note(root, marker)
        make_folders(target.parent)
        try:
            os.rename(source, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise disk_error(error, "move", source, f" (to {target})") from error
            _copy_away(source, target)
        sync_folder(target.parent)
    sync_folder(source.parent)


def _copy_away(source: Path, target: Path) -> None:
    """quarantine/ lies on another file system: the copy is complete and durable before it has its name."""
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source, part)
    sync_tree(part)
    os.rename(part, target)
    shutil.rmtree(source)


def _write_note(root: Path, marker: RebuildMarker) -> None:
    """What the folder in quarantine/ is; beside it, as for everything there."""
    folder = StorePaths(root).quarantine
    path = folder / f"{marker.folder}.json"
    make_folders(folder)
    note = {"from": list(marker.pieces), "reason": "replaced by a rebuild from the log",
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    if not path.exists():
        write_config(path, json.dumps(note, indent=2).encode() + b"\n", keep_backup=False)


# -- times -------------------------------------------------------------------------------

_NS_PER_MS = 1_000_000


def restore_queue_times(store: MessageStore, marker: RebuildMarker) -> int:
    """Give the files of all queues that `marker` names their times; how many files. May be done twice."""
    log = store.open_log(MappingCache(mappings_max=8))
    count = 0
    for queue in list_queues(store):
        replaced = _replaced_folder(store.root, marker, queue)
        if replaced is not None:
            for path, time_ns in _times(queue, replaced, log):
                os.utime(path, ns=(time_ns, time_ns))
                count += 1
    return count


def _replaced_folder(root: Path, marker: RebuildMarker, queue: QueueState) -> Path | None:
    """Where the files are that were this queue; None when it was not replaced."""
    folder = queue.folder.relative_to(root)
    for piece in (folder, *folder.parents):
        if str(piece) in marker.pieces:
            return marker.moved_path(root, str(folder))
    return None


def _times(queue: QueueState, replaced: Path, log: MappedFileQueue) -> Iterable[tuple[Path, int]]:
    """(file, modification time) from the newest to the oldest; files without a message keep theirs."""
    following_ns: int | None = None
    for file in reversed(queue.files):
        stored_ms = _last_store_time_ms(queue, file.path, file.start_offset, log)
        if stored_ms < 0:
            continue
        time_ns = stored_ms * _NS_PER_MS
        try:
            before_ns = os.stat(replaced / file.path.name).st_mtime_ns
        except OSError:
            before_ns = -1
        if before_ns >= time_ns and (following_ns is None or before_ns <= following_ns):
            time_ns = before_ns
        yield file.path, time_ns
        following_ns = time_ns


def _last_store_time_ms(queue: QueueState, path: Path, start: int, log: MappedFileQueue) -> int:
    last = min(queue.end - start, queue.size_bytes) - CQ_ENTRY_BYTES
    if last < 0:
        return -1
    with open(path, "rb") as file:
        file.seek(last)
        entry = ENTRY.unpack(file.read(CQ_ENTRY_BYTES))
    return -1 if is_filler(entry) else store_timestamp_ms(log, entry[0], entry[1])
