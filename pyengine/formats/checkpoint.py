"""The checkpoint file: three store times in the first 24 of 4096 bytes (section 11)."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from pyengine.errors import FormatError
from pyengine.formats.constants import CHECKPOINT_BYTES, CHECKPOINT_MARGIN_MS, Readable

_TIMES = struct.Struct(">qqq")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Store times in ms: what is older is on the disk. Each may lag, none may be ahead."""

    physic_msg_timestamp_ms: int = 0
    logics_msg_timestamp_ms: int = 0
    index_msg_timestamp_ms: int = 0

    @property
    def min_timestamp_ms(self) -> int:
        """StoreCheckpoint.getMinTimestamp: 3 s before the older of log and queues, never below 0."""
        return max(0, min(self.physic_msg_timestamp_ms, self.logics_msg_timestamp_ms) - CHECKPOINT_MARGIN_MS)

    @property
    def min_timestamp_index_ms(self) -> int:
        """StoreCheckpoint.getMinTimestampIndex."""
        return min(self.min_timestamp_ms, self.index_msg_timestamp_ms)


def pack_checkpoint(checkpoint: Checkpoint) -> bytes:
    """4096 bytes."""
    return _TIMES.pack(
        checkpoint.physic_msg_timestamp_ms, checkpoint.logics_msg_timestamp_ms, checkpoint.index_msg_timestamp_ms
    ).ljust(CHECKPOINT_BYTES, b"\0")


def unpack_checkpoint(data: Readable) -> Checkpoint:
    """The three times; FormatError when the file is shorter than they are."""
    try:
        return Checkpoint(*_TIMES.unpack_from(data))
    except struct.error as error:
        raise FormatError(f"a checkpoint of {len(data)} bytes is too short") from error
