"""How far each delay level is delivered: `config/delayOffset.json` (ScheduleMessageService, docs/formats.md section 12).

`{"offsetTable": {level: next offset in queue level - 1 of SCHEDULE_TOPIC_XXXX}}`. RocketMQ
writes the levels unquoted, which is read; what is written is strict JSON, which RocketMQ
reads. One process writes it: the scheduler.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pyengine.errors import FormatError
from pyengine.formats.paths import StorePaths
from pyengine.formats.small_file import PARSE_ERRORS, decode_config, encode_config
from pyengine.storage.durable_file import ConfigFile

NAME = "delayOffset.json"
_INT64_MAX = (1 << 63) - 1


class DelayOffsets:
    """The file of one store. Holds nothing open between calls."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._file = ConfigFile(StorePaths(root).config / NAME, decode_delay_offsets)
        self.path = self._file.path

    def read(self) -> tuple[dict[int, int], str]:
        """(level -> next offset, sentence about a bad file); an empty table where there is none to be used."""
        table, said, _ = self._file.read()
        return table or {}, said

    def write(self, table: Mapping[int, int]) -> None:
        """Replace the file, durable; the old one stays as `.bak`. Raises DiskFullError, DiskError or FlushError."""
        self._file.write(encode_config({"offsetTable": dict(sorted(table.items()))}))


def decode_delay_offsets(text: str) -> dict[int, int]:
    """The table in the text of the file; FormatError for one of another shape."""
    document: Any = decode_config(text)
    try:
        table = {int(level): int(offset) for level, offset in document["offsetTable"].items()}
    except PARSE_ERRORS as error:
        raise FormatError(f"no table of delay offsets: {error!r}") from error
    if not all(level >= 1 and 0 <= offset <= _INT64_MAX for level, offset in table.items()):
        raise FormatError("a level below 1, or an offset that no queue has")
    return table
