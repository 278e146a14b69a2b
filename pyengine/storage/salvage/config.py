"""The config files of a salvage: copied, with the queue offsets in them moved along."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from pyengine.errors import FormatError
from pyengine.formats.constants import SCHEDULE_TOPIC
from pyengine.formats.paths import StorePaths, without_log_folders
from pyengine.formats.small_file import decode_config, encode_config, read_small_file
from pyengine.storage.later_format import LEFT_BY_SALVAGE
from pyengine.storage.new_file import write_config
from pyengine.storage.salvage.log import MovedQueue

# Of the engine that wrote the old store, or of an unfinished change to it.
_LEFT_BEHIND = LEFT_BY_SALVAGE | frozenset({"engine-id", "epoch", "watermark", "recovery", "recovered", "rebuild", "cut",
                                               "sync-failure"})
_LEFT_BEHIND_SUFFIXES = (".tmp", ".bak", ".damaged")

Queues = Mapping[tuple[str, int], MovedQueue]


def copy_config(root: Path, destination: Path, queues: Queues) -> list[str]:
    """Copy config/*; returns a sentence for each file that could not be read and was left out."""
    folder = StorePaths(root).config
    left_out = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not path.is_file() or path.name in _LEFT_BEHIND or path.suffix in _LEFT_BEHIND_SUFFIXES:
            continue
        content = read_small_file(path)
        if path.name == "engine.toml":
            content = without_log_folders(content)
        try:
            if path.name in _MOVERS:
                table = decode_config(content.decode("utf-8"))
                _MOVERS[path.name](table["offsetTable"], queues)
                content = encode_config(table).encode("utf-8")
        except (FormatError, UnicodeDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            left_out.append(f"config/{path.name} could not be read and was left out: {error}")
            continue
        write_config(StorePaths(destination).config / path.name, content, keep_backup=False)
    return left_out


def _move_consumer_offsets(table: dict, queues: Queues) -> None:
    """{"topic@group": {queue id: offset}}"""
    for name, offsets in table.items():
        topic = name.partition("@")[0]
        for queue_id, offset in offsets.items():
            offsets[queue_id] = _moved(queues, topic, int(queue_id), offset)


def _move_delay_offsets(table: dict, queues: Queues) -> None:
    """{level: offset}; level n waits in queue n - 1 of the schedule topic."""
    for level, offset in table.items():
        table[level] = _moved(queues, SCHEDULE_TOPIC, int(level) - 1, offset)


def _moved(queues: Queues, topic: str, queue_id: int, offset: int) -> int:
    queue = queues.get((topic, queue_id))
    return offset if queue is None else queue.moved(offset)


_MOVERS: dict[str, Callable[[dict, Queues], None]] = {
    "consumerOffset.json": _move_consumer_offsets,
    "delayOffset.json": _move_delay_offsets,
}
