"""What one reader has read: the gets of StoreStatsService, counted where they happen.

Readers map the store read-only and tell the engine nothing, so these are the figures of
one reader in one process; nobody adds them up. What a consumer group has read shows in
its stored offsets.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from pyengine.results import GetResult, GetStatus


@dataclass(frozen=True, slots=True)
class GetFigures:
    """Totals since the reader was opened; StoreStatsService's names in comments."""

    found: int = 0                 # getMessageTimesTotalFound
    missed: int = 0                # getMessageTimesTotalMiss
    transferred_messages: int = 0  # getMessageTransferedMsgCount
    transferred_bytes: int = 0
    entire_time_max_ms: float = 0.0  # getMessageEntireTimeMax


class GetStatistics:
    """The counters of one reader. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._figures = GetFigures()

    def count(self, result: GetResult, took_ns: int) -> None:
        """One get_message and its answer."""
        found = result.status is GetStatus.FOUND
        size_bytes = sum(message.size_bytes for message in result.messages)
        with self._lock:
            was = self._figures
            self._figures = GetFigures(
                was.found + found, was.missed + (not found), was.transferred_messages + len(result.messages),
                was.transferred_bytes + size_bytes, max(was.entire_time_max_ms, took_ns / 1e6))

    @property
    def figures(self) -> GetFigures:
        """All of them at one moment."""
        return self._figures
