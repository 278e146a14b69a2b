"""The file `config/watermark`: below this physical offset our own engine has synced every byte.

Only our engine writes it (RocketMQ's stores have none), the checkpointer at most
once a second and at stop. It may lag behind what is durable and is never ahead of
it. Recovery and readers rely on it: nothing below it is ever cut (docs/promises.md, 1).

One line of JSON with a CRC over its other fields. A damaged file counts as absent,
and whoever reads it is told.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

from pyengine.errors import DiskError
from pyengine.formats.json_config import NOT_UNDERSTOOD
from pyengine.formats.paths import StorePaths
from pyengine.formats.small_file import read_small_file
from pyengine.storage.new_file import write_config

WATERMARK_NAME = "watermark"


@dataclass(frozen=True, slots=True)
class DurableWatermark:
    """Every byte of the log below `flushed` was synced by the engine `uuid` in its epoch `epoch`."""

    uuid: str
    epoch: int
    flushed: int


@dataclass(frozen=True, slots=True)
class WatermarkReading:
    """What the file says. `damage` is a sentence when there is a file that cannot be believed; then there is no watermark."""

    watermark: DurableWatermark | None
    damage: str = ""


def watermark_path(root: Path | str) -> Path:
    return StorePaths(root).config / WATERMARK_NAME


def write_watermark(root: Path | str, watermark: DurableWatermark) -> None:
    """Replace the file, whole or not at all, durable before this returns. `flushed` must be durable already."""
    write_config(watermark_path(root), _pack(watermark), keep_backup=False)


def read_watermark(root: Path | str) -> WatermarkReading:
    """The watermark, or none; never raises for what the file holds (DiskError when it cannot be read)."""
    path = watermark_path(root)
    try:
        content = read_small_file(path)
    except FileNotFoundError:
        return WatermarkReading(None)
    except OSError as error:
        raise DiskError(f"cannot read {path}: {error.strerror}", errno=error.errno or 0, path=str(path)) from error
    try:
        fields = json.loads(content)
        watermark = DurableWatermark(str(fields["uuid"]), int(fields["epoch"]), int(fields["flushed"]))
    except NOT_UNDERSTOOD:
        return WatermarkReading(None, f"{path} is not readable; it counts as absent")
    if content != _pack(watermark) or watermark.flushed < 0:
        return WatermarkReading(None, f"{path} does not match its checksum; it counts as absent")
    return WatermarkReading(watermark)


def _pack(watermark: DurableWatermark) -> bytes:
    fields = asdict(watermark)
    crc = zlib.crc32(json.dumps(fields, sort_keys=True).encode())
    return json.dumps(fields | {"crc": f"{crc:08x}"}).encode() + b"\n"
