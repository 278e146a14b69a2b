"""Delay levels: their table, and the delivery time a queue entry holds instead of a tag hash (section 8.2)."""

from __future__ import annotations

from collections.abc import Mapping

from pyengine.errors import ConfigError

DEFAULT_MESSAGE_DELAY_LEVEL = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
UNKNOWN_LEVEL_DELAY_MS = 1000  # ScheduleMessageService.computeDeliverTimestamp
_UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def parse_delay_levels(text: str) -> dict[int, int]:
    """Level, counted from 1 -> delay in ms. ConfigError names the piece that is wrong."""
    levels: dict[int, int] = {}
    for level, piece in enumerate(text.split(" "), start=1):
        unit_ms = _UNIT_MS.get(piece[-1:])
        if unit_ms is None or not piece[:-1].isascii() or not piece[:-1].isdigit():
            raise ConfigError(f"message_delay_level: {piece!r} is no delay; write a number and s, m, h or d: 30s")
        levels[level] = int(piece[:-1]) * unit_ms
    return levels


def clamp_delay_level(level: int, levels: Mapping[int, int]) -> int:
    """A level above the table is the highest one."""
    return min(level, max(levels))


def deliver_timestamp_ms(level: int, store_timestamp_ms: int, levels: Mapping[int, int]) -> int:
    """When a delayed message is due: store time plus the level's delay, 1 s for a level that is unknown."""
    return store_timestamp_ms + levels.get(level, UNKNOWN_LEVEL_DELAY_MS)
