"""Cleaning a store that nobody has open: the same rules and steps as the cleaner's, in this process.

The caller holds the store's lock exclusively, and the store was stopped in order, so its
files say where the log ends and everything below that is durable and dispatched.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from pyengine._native import ffi
from pyengine.config import EngineConfig
from pyengine.formats.paths import StorePaths
from pyengine.native import cleaning as native_cleaning
from pyengine.native import control as native
from pyengine.services.retention.clean_commit_log import CleanCommitLogService
from pyengine.services.retention.clean_consume_queue import CleanConsumeQueueService
from pyengine.services.retention.clean_rules import CleanRules, Request, decide
from pyengine.services.retention.cleaning_clock import CleaningClock
from pyengine.storage.disk_use import measure
from pyengine.storage.log_files import measure_log


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What a clean-up deleted, and where the log begins since."""

    segments: int
    bytes: int
    queue_files: int
    index_files: int
    min_offset: int


def clean_stopped(root: str | os.PathLike[str], config: EngineConfig, log_end: int, request: Request,
                  progress: Callable[[int, int | None], None] = lambda done, total: None,
                  clock: CleaningClock | None = None) -> Cleaned:
    """Do what was asked by hand, all of it. Raises DiskError; then the rest is for the next time."""
    clock = clock or CleaningClock()
    paths = StorePaths(root)
    control, cleaning = ffi.new("struct ms_control *"), native_cleaning.private()
    for position in (control.wrote, control.committed, control.flushed, control.reput_from):
        native.store_position(position, log_end)
    for slot in control.slots:
        slot.wrote = log_end
    native.store(control.workers[native.CHECKPOINTER], "position", log_end)
    rules = CleanRules.of(config)
    log = CleanCommitLogService(control, config.mapped_file_size_commit_log_bytes, cleaning, root, config, clock,
                                lambda text: None)
    queues = CleanConsumeQueueService(cleaning, root, config)
    for pause_s in log.steps(lambda: decide(rules, [measure_log(root), measure(paths.consume_queue)], clock.hour(), request)):
        progress(native.load(cleaning, "removed_bytes"), None)
        time.sleep(pause_s)
    for pause_s in queues.steps(log.publish_min()):
        time.sleep(pause_s)
    return Cleaned(native.load(cleaning, "removed_segments"), native.load(cleaning, "removed_bytes"),
                   native.load(cleaning, "removed_queue_files"), native.load(cleaning, "removed_index_files"),
                   native.load_position(control.min_offset))
