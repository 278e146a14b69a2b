"""CleanConsumeQueueService: queues, their extensions and the index follow the log.

Only when the log's beginning has moved since the last complete pass, and once at start,
for what a killed predecessor left. The minimum offset of a queue needs no correction
here: readers work it out from the entries and the log's beginning, at each look.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pyengine.config import EngineConfig
from pyengine.formats.paths import StorePaths
from pyengine.native import control as native
from pyengine.native.failpoint import failpoint
from pyengine.storage.expired_files import expired_ext_files, expired_index_files, expired_queue_files, queue_folders
from pyengine.storage.file_removal import give_back, unlink_durably

QUEUES_A_STEP = 64  # looked at without a pause in between


class CleanConsumeQueueService:
    """Deletes queue and index files whose messages are gone."""

    def __init__(self, cleaning, root: str | os.PathLike[str], config: EngineConfig) -> None:
        self._cleaning = cleaning
        self._paths = StorePaths(root)
        self._geometry = config.geometry
        self._pause_s = config.delete_consume_queue_files_interval_ms / 1000
        self._done_to = 0

    def steps(self, log_min: int) -> Iterator[float]:
        """One pass, if the log's beginning has moved; yields the seconds to pause."""
        if log_min <= self._done_to:
            return
        for number, (topic, queue_id, folder) in enumerate(queue_folders(self._paths)):
            expired = expired_queue_files(folder, self._geometry.mapped_file_size_consume_queue_bytes, log_min)
            for path in expired:
                yield from self._delete(path, "removed_queue_files")
            ext_folder = self._paths.queue_ext_folder(topic, queue_id)
            for path in expired_ext_files(folder, ext_folder, self._geometry.mapped_file_size_consume_queue_ext_bytes, log_min):
                expired.append(path)
                yield from self._delete(path, "removed_queue_files")
            if expired:
                yield self._pause_s
            elif number % QUEUES_A_STEP == 0:
                yield 0.0
        for path in expired_index_files(self._paths.index, log_min):
            yield from self._delete(path, "removed_index_files")
        self._done_to = log_min

    def _delete(self, path: Path, counter: str) -> Iterator[float]:
        descriptor = unlink_durably(path)
        failpoint("derived_file_removed")
        native.store(self._cleaning, counter, native.load(self._cleaning, counter) + 1)
        yield from give_back(descriptor)
